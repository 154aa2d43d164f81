"""An exception in a pass reaches the user, and the next step is clean, on all ranks or on one that retries."""

import copy
import gc

import pytest
import torch
from torch import nn

from fairshard.engine.root import roots
from fairshard.engine.tree import units_below
from fairshard.errors import PartialGradientError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn.data_parallel import TrainingState
from fairshard.utils.testing import rank_device
from tests.engine.random_nets import shard
from tests.models import mlp
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, assert_same_step, average_grads_, randn, sgd


class Fault(nn.Module):
    """Raises in forward, in backward, or not at all, as ``when`` says."""

    def __init__(self):
        super().__init__()
        self.when = None

    def forward(self, x):
        if self.when == "forward":
            raise KeyError("in forward")
        if self.when == "backward":
            x = x.clone() if x.requires_grad else x.requires_grad_()
            x.register_hook(self._raise)
        return x

    def _raise(self, grad):
        raise KeyError("in backward")


def faulty(position):
    """Three Linears and a `Fault` before, between or after them."""
    layers = list(mlp(4, 9, 7, 5))
    layers.insert(2 * position, Fault())
    return nn.Sequential(*layers).to(rank_device())


def wrap_layers(model, **kwargs):
    for index, layer in enumerate(model):
        if isinstance(layer, (nn.Linear, Fault)):
            model[index] = FSDP(layer, **kwargs)
    return FSDP(model, **kwargs)


def fault_of(model):
    return next(module for module in model.modules() if isinstance(module, Fault))


def loss_of(model, key):
    return model(randn(3, 4, key=key)).square().sum()


@pytest.mark.pairs
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("wrap", [FSDP, wrap_layers], ids=["one", "each"])
@pytest.mark.parametrize("reshard", [True, False])
def test_the_step_after_an_exception_is_clean(when, position, wrap, reshard):
    """The exception arrives unchanged; the next steps give the same results as without it."""
    plain = faulty(position)
    wrapped = wrap(copy.deepcopy(plain), reshard_after_forward=reshard)
    of_plain, of_wrapped = sgd(plain), sgd(wrapped)
    for step in range(4):
        if step % 2:
            fault_of(wrapped).when = when
            with pytest.raises(KeyError, match=f"in {when}"):
                loss_of(wrapped, (step, "bad")).backward()
            fault_of(wrapped).when = None
        of_wrapped.zero_grad()
        expected, actual = loss_of(plain, step), loss_of(wrapped, step)
        assert torch.equal(actual, expected)
        expected.backward()
        actual.backward()
        average_grads_(plain.parameters())
        of_plain.step()
        of_wrapped.step()
        of_plain.zero_grad()
    assert_same_state(wrapped.state_dict(), plain.state_dict())


@on_ranks(2)
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_everything_is_idle_and_resharded_by_the_next_pass(when):
    """After an exception and one clean pass every unit is idle and nothing is gathered."""
    wrapped = wrap_layers(faulty(1))
    fault_of(wrapped).when = when
    with pytest.raises(KeyError):
        loss_of(wrapped, 0).backward()
    fault_of(wrapped).when = None
    loss_of(wrapped, 1).backward()
    for _, unit in units_below(wrapped):
        assert unit.state is TrainingState.IDLE
        assert not unit.is_gathered


@on_ranks(2)
def test_after_a_failed_forward_everything_is_idle_at_once():
    """A forward that raised leaves no unit in FORWARD: a state dict can be taken immediately."""
    wrapped = wrap_layers(faulty(1))
    fault_of(wrapped).when = "forward"
    with pytest.raises(KeyError):
        wrapped(randn(3, 4))
    for _, unit in units_below(wrapped):
        assert unit.state is TrainingState.IDLE
        assert not unit.is_gathered
    assert list(wrapped.state_dict()) == list(faulty(1).state_dict())


@on_ranks(2)
def test_what_no_sync_accumulated_survives_a_failed_pass():
    """An exception drops the gradients of its own pass, not those of earlier ones."""
    plain = faulty(1)
    wrapped = wrap_layers(copy.deepcopy(plain))
    with wrapped.no_sync():
        loss_of(wrapped, 0).backward()
        fault_of(wrapped).when = "forward"
        with pytest.raises(KeyError):
            loss_of(wrapped, 1)
        fault_of(wrapped).when = None
    loss_of(wrapped, 2).backward()
    for key in (0, 2):
        loss_of(plain, key).backward()
    assert_same_step(plain, wrapped)


@on_ranks(2)
def test_no_optimizer_steps_a_part_of_a_gradient():
    """A backward that raised has consumed what `no_sync` accumulated in one unit: a step raises until `zero_grad`."""
    wrapped = wrap_layers(faulty(1), bucket_cap_mb=0)
    optimizer = sgd(wrapped)
    with wrapped.no_sync():
        loss_of(wrapped, 0).backward()
    fault_of(wrapped).when = "backward"  # the last layer is sent before it raises
    with pytest.raises(KeyError):
        loss_of(wrapped, 1).backward()
    fault_of(wrapped).when = None
    before = wrapped.state_dict()
    loss_of(wrapped, 2).backward()
    with pytest.raises(PartialGradientError, match="zero_grad"):
        optimizer.step()
    for name, value in wrapped.state_dict().items():
        assert torch.equal(value, before[name]), name
    optimizer.zero_grad()
    loss_of(wrapped, 3).backward()
    optimizer.step()
    assert not torch.equal(wrapped.state_dict()["0.weight"], before["0.weight"])


@on_ranks(2, 3)
@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
@pytest.mark.parametrize("comes_after", ["nothing", "a backward"])
def test_a_skipped_batch_leaves_no_mixture_of_gradients(door, comes_after):
    """The second batch raised after some of its sums were added: the step raises, even on a rank without rows."""
    model = faulty(1)
    model[-1] = nn.Linear(model[-1].in_features, 1, device=rank_device())  # the last ranks hold no part of it
    for layer in model.modules():
        layer.is_unit = isinstance(layer, nn.Linear) or layer is model
    wrapped = shard(model, door, bucket_cap_mb=0)
    optimizer = sgd(wrapped)
    loss_of(wrapped, 0).backward()
    fault_of(wrapped).when = "backward"
    with pytest.raises(KeyError):
        loss_of(wrapped, 1).backward()
    fault_of(wrapped).when = None
    if comes_after == "a backward":
        loss_of(wrapped, 2).backward()
    with pytest.raises(PartialGradientError, match="zero_grad"):
        optimizer.step()
    optimizer.zero_grad()
    loss_of(wrapped, 3).backward()
    optimizer.step()


@on_ranks(2)
def test_keyboard_interrupt_is_not_swallowed():
    """Ctrl-C inside a forward reaches the user, and leaves a model that still works."""
    layer = nn.Linear(4, 5)
    wrapped = FSDP(nn.Sequential(layer))

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = layer.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        wrapped(randn(3, 4))
    handle.remove()
    wrapped(randn(3, 4)).sum().backward()
    assert wrapped.params[0].grad is not None


@on_ranks(2)
def test_wrong_arguments_are_the_modules_own_error():
    """A call with wrong arguments raises what the module raises, and the next call works."""
    wrapped = FSDP(nn.Linear(4, 5))
    with pytest.raises(TypeError):
        wrapped()
    with pytest.raises(RuntimeError):
        wrapped(randn(3, 7))
    assert wrapped(randn(3, 4)).shape == (3, 5)


@on_ranks(2)
def test_a_dropped_model_is_cleaned_up_on_all_ranks():
    """If one rank drops a model whose backward has raised, the step of another model does not wait for that rank."""
    model = FSDP(nn.Sequential(*[FSDP(layer) for layer in (nn.Linear(4, 4), Fault(), nn.Linear(4, 4))]))
    model.module[1].module.when = "backward"
    with pytest.raises(KeyError, match="in backward"):
        model(randn(2, 4)).sum().backward()
    if torch.distributed.get_rank() == 0:
        del model
        gc.collect()
    other = FSDP(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other(randn(2, 4)).sum().backward()
    optimizer.step()
    assert not any(root.in_backward for root in roots)
