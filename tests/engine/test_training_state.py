"""Units report their training state, and can assert it."""

import pytest
import torch
from torch import nn

from fairshard.errors import FairshardError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn.data_parallel import TrainingState
from tests.models import mlp, wrap_each
from tests.on_ranks import on_ranks
from tests.reference import randn

pytestmark = pytest.mark.behaviour("training states")

IDLE, FORWARD = TrainingState.IDLE, TrainingState.FORWARD
BACKWARD_PRE, BACKWARD_POST = TrainingState.BACKWARD_PRE, TrainingState.BACKWARD_POST


def test_there_are_five_states_and_one_name_for_two():
    """The five states of FSDP, and fairscale's single name for both backward ones."""
    names = {"IDLE", "FORWARD", "BACKWARD_PRE", "BACKWARD_POST", "SUMMON_FULL_PARAMS"}
    assert names <= set(TrainingState.__members__)
    assert hasattr(TrainingState, "BACKWARD")


@on_ranks(1, 2)
def test_states_of_a_step():
    """A unit is IDLE, FORWARD while it computes, IDLE, BACKWARD_PRE while its gradients are computed, then IDLE."""
    wrapped = wrap_each(mlp(4, 9, 5))
    inner = wrapped[0]
    log = []

    def note(*_):
        log.append((inner.training_state, wrapped.training_state))

    inner.module.register_forward_hook(note)
    inner.module.register_full_backward_pre_hook(note)
    note()
    loss = wrapped(randn(2, 4).requires_grad_()).sum()
    note()
    loss.backward()
    note()
    assert [states[0] for states in log] == [IDLE, FORWARD, IDLE, BACKWARD_PRE, IDLE]
    assert log[1][1] is FORWARD
    assert log[2][1] is log[4][1] is IDLE


@on_ranks(1, 2)
def test_gradients_sent_is_backward_post():
    """A unit whose gradients are being sent is in BACKWARD_POST until the backward ends."""
    wrapped = wrap_each(mlp(4, 9, 5))
    seen = []
    wrapped[0].module.register_full_backward_hook(lambda *_: seen.append(wrapped[2].training_state))
    wrapped(randn(2, 4).requires_grad_()).sum().backward()
    assert seen == [BACKWARD_POST]
    wrapped[2].assert_state(IDLE)


@on_ranks(2)
def test_assert_state_takes_one_state_or_several():
    """It takes one state or several; its error is of the types both seeds raise and names the unit and both states."""
    wrapped = wrap_each(mlp(4, 9, 5))
    wrapped.assert_state(IDLE)
    wrapped.assert_state([FORWARD, IDLE])
    for kind in (AssertionError, ValueError, FairshardError):
        with pytest.raises(kind, match=r"FORWARD.*IDLE"):
            wrapped.assert_state(FORWARD)
    with pytest.raises(ValueError, match=r"FORWARD or BACKWARD_PRE.*IDLE"):
        wrapped.assert_state([FORWARD, BACKWARD_PRE])
    with pytest.raises(ValueError, match=r"`0`|Unit `0"):
        wrapped[0].assert_state(FORWARD)


@on_ranks(2)
def test_backward_means_both():
    """fairscale's ``BACKWARD`` is true in either backward state, and in no other."""
    wrapped = FSDP(nn.Linear(4, 5))
    seen = []

    def check(*_):
        wrapped.assert_state(TrainingState.BACKWARD)
        with pytest.raises(ValueError, match="IDLE"):
            wrapped.assert_state(IDLE)
        seen.append(True)

    wrapped.module.register_full_backward_hook(check)
    wrapped(randn(2, 4).requires_grad_()).sum().backward()
    assert seen == [True]
    with pytest.raises(ValueError, match="BACKWARD"):
        wrapped.assert_state(TrainingState.BACKWARD)


@on_ranks(2)
def test_training_state_in_eval():
    """A pass without grad goes from IDLE to FORWARD and back."""
    wrapped = FSDP(nn.Linear(4, 5))
    seen = []
    wrapped.module.register_forward_hook(lambda *_: seen.append(wrapped.training_state))
    with torch.no_grad():
        wrapped(randn(2, 4))
    assert seen == [FORWARD]
    wrapped.assert_state(IDLE)
