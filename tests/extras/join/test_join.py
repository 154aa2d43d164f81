"""Ranks may run out of batches at different times: passes without a backward, and errors on all ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.engine.tree import units_below
from fairshard.errors import FairshardError, NotRootError, TrainingStateError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import ShardingStrategy
from tests.models import mlp, tiny, tiny_batch, tiny_loss, wrap_each, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, average_grads_, randn, sgd


def num_batches(first):
    """``first`` for rank 0, two less for rank 1, four less for rank 2; never below 0."""
    return max(first - 2 * dist.get_rank(), 0)


def train_step(model, optimizer, step):
    *inputs, targets = tiny_batch(dist.get_rank(), step)
    tiny_loss(model(*inputs), targets).backward()
    if not isinstance(model, FSDP):
        average_grads_(model.parameters())
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(1, 2, 3)
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"reshard_after_forward": False}, {"cpu_offload": True}, {"flatten_parameters": False}],
    ids=str,
)
def test_validation_with_different_numbers_of_batches(kwargs):
    """Outputs are those of the plain model, also if a rank has no batches; training continues in between."""
    plain, wrapped = tiny(), wrap_tiny(tiny(), **kwargs)
    of_plain, of_wrapped = sgd(plain), sgd(wrapped)
    for step, first in enumerate([2, 5, 0]):
        with wrapped.join(), torch.no_grad():
            for index in range(num_batches(first)):
                *inputs, _ = tiny_batch(dist.get_rank(), "validation", index)
                assert torch.equal(wrapped(*inputs), plain(*inputs))
        assert not any(unit.is_gathered for _, unit in units_below(wrapped))
        train_step(plain, of_plain, step)
        train_step(wrapped, of_wrapped, step)
    rtol = 0.0 if dist.get_world_size() < 3 else 1e-5
    assert_same_state(wrapped.state_dict(), plain.state_dict(), rtol=rtol, atol=rtol)


@on_ranks(2, 3)
def test_units_in_another_order_in_every_pass():
    """A rank that is done gathers the units that the others call, not those of its last pass."""

    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(mlp(4, 4, seed=seed) for seed in range(3))

        def forward(self, x, order):
            for index in order:
                x = self.layers[index](x)
            return x

    plain = Either()
    wrapped = copy.deepcopy(plain)
    for index in range(3):
        wrapped.layers[index] = FSDP(wrapped.layers[index])
    wrapped = FSDP(wrapped)
    orders = [(0, 1, 2), (2, 0), (1,), (1, 1, 0), (2, 1, 0), (0, 2)]
    for _ in range(2):
        with wrapped.join(), torch.no_grad():
            for order in orders[: num_batches(6)]:
                x = randn(2, 4, key=order)
                assert torch.equal(wrapped(x, order), plain(x, order))


@on_ranks(2, 3)
@pytest.mark.parametrize("with_grad", [True, False])
def test_early_termination_throws_where_asked(with_grad):
    """With ``throw_on_early_termination`` every rank raises at the first pass that a rank has no batch for."""
    model = wrap_each(mlp(4, 9, 5))
    num_passes = 0

    def run():
        nonlocal num_passes
        with model.join(throw_on_early_termination=True), torch.set_grad_enabled(with_grad):
            for _ in range(2 + dist.get_rank()):
                model(randn(2, 4))
                num_passes += 1

    with pytest.raises(FairshardError, match="throw_on_early_termination"):
        run()
    assert num_passes == 2
    assert model(randn(2, 4)).shape == (2, 5)


@on_ranks(2, 3)
@pytest.mark.parametrize("what", ["state_dict", "summon_full_params"])
def test_what_needs_all_ranks_is_refused(what):
    """Once a rank is done, collective methods raise on every rank instead of waiting for it."""
    model = wrap_each(mlp(4, 9, 5))
    calls = {
        "state_dict": model.state_dict,
        "summon_full_params": lambda: model.summon_full_params().__enter__(),
    }
    call = calls[what] if dist.get_rank() else lambda: None
    with pytest.raises(FairshardError, match="run out of batches"), model.join():
        call()
    model(randn(2, 4)).sum().backward()
    assert len(model.state_dict()) == 4


@on_ranks(2, 3)
@pytest.mark.parametrize("raises_on", ["one rank", "all but one"])
def test_an_exception_reaches_all_ranks(raises_on):
    """If a rank raises in the block, the others raise at their next pass, or where they wait."""
    model = wrap_each(mlp(4, 9, 5))
    is_bad = (dist.get_rank() == 0) == (raises_on == "one rank")

    def run():
        with model.join(), torch.no_grad():
            for index in range(2):
                model(randn(2, 4))
                if index and is_bad:
                    raise KeyError("batch")

    with pytest.raises((KeyError, FairshardError)) as raised:
        run()
    assert isinstance(raised.value, KeyError) is is_bad
    assert model(randn(2, 4)).shape == (2, 5)


@on_ranks(2)
def test_where_it_cannot_be_used():
    """Inner wrappers, replicas, and a second block inside the first are refused; ``enable=False`` does nothing."""
    model = wrap_each(mlp(4, 9, 5))
    with pytest.raises(NotRootError), model[0].join():
        pass
    with pytest.raises(TrainingStateError), model.join():
        with model.join():
            pass
    whole = FSDP(mlp(4, 5), sharding_strategy=ShardingStrategy.NO_SHARD)
    with pytest.raises(ValueError, match="one process group"), whole.join():
        pass
    with model.join(enable=False), whole.join(enable=False):
        model(randn(2, 4)).sum().backward()
