"""Methods that control when units are gathered and freed, by hand or by setting; recovery after exceptions."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fairshard.engine.tree import units_below
from fairshard.errors import TrainingStateError
from fairshard.nn import UnshardHandle, fully_shard, share_comm_ctx
from fairshard.utils.collectives import counters, reset_counters
from tests.doors.fully_shard.beside import train_beside
from tests.kit import rank_device
from tests.models import mlp
from tests.on_ranks import in_full, on_ranks
from tests.reference import average_grads_, randn, sgd


def shard(model, **kwargs):
    """Shard every Linear as a unit, and the whole as another unit without parameters of its own."""
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


def num_gathers():
    """The number of all-gathers since the last call."""
    count = counters().get("all_gather", (0, 0))[0]
    reset_counters()
    return count


def gathered(model):
    return [fqn for fqn, unit in units_below(model) if unit.is_gathered and unit.flat_params]


def is_whole(module):
    return not isinstance(module.weight, DTensor)


@on_ranks(2, in_full(1), in_full(3))
def test_unshard_and_reshard():
    """Before or between forwards, ``unshard`` gathers once and parameters are whole until ``reshard``."""
    plain = mlp(4, 6, 4)
    model = shard(copy.deepcopy(plain))
    for _ in range(2):
        num_gathers()
        handle = model[0].unshard(async_op=True)
        assert isinstance(handle, UnshardHandle)
        for _ in range(2):
            handle.wait()
            assert torch.equal(model[0].weight, plain[0].weight)
        assert model[2].unshard() is None
        assert torch.equal(model[2].bias, plain[2].bias)
        model[2].unshard(async_op=True)
        assert gathered(model) == ["0", "2"]
        model[2].reshard()
        model[2].reshard()
        assert gathered(model) == ["0"]
        assert not is_whole(model[2])
        model[0].reshard()
        handle.wait()  # nothing left to wait for
        assert not is_whole(model[0])
        assert num_gathers() == (2 if torch.distributed.get_world_size() > 1 else 0)
        model(randn(2, 4)).sum().backward()
    model.zero_grad()
    train_beside(model, plain)


@on_ranks(2)
def test_several_in_flight():
    """All units may be gathered before the forward, in any order; the forward then gathers none."""
    plain = mlp(4, 6, 5, 4)
    model = shard(copy.deepcopy(plain))
    handles = []

    def ahead(model):
        handles[:] = [layer.unshard(async_op=True) for layer in reversed(model) if isinstance(layer, nn.Linear)]
        num_gathers()

    with torch.no_grad():
        model(randn(2, 4))
        ahead(model)
        model(randn(2, 4))
    assert num_gathers() == 0
    train_beside(model, plain, before=ahead)
    for handle in handles:
        handle.wait()
    assert gathered(model) == []


@on_ranks(2)
def test_a_module_without_parameters():
    """A module without parameters can be unsharded like any other, and gathers nothing."""
    model = fully_shard(nn.Sequential(fully_shard(nn.Tanh()), fully_shard(mlp(4, 4))))
    num_gathers()
    model[0].unshard(async_op=True).wait()
    model.unshard()
    assert num_gathers() == 0
    model(randn(2, 4)).sum().backward()
    model[0].reshard()


@on_ranks(2)
def test_weights_that_change_after_unshard():
    """The forward sees a step, or a write to the DTensors, made after ``unshard``."""
    plain = mlp(4, 6, 4)
    model = shard(copy.deepcopy(plain))
    weights = [dict(net.named_parameters())["0.weight"] for net in (model, plain)]
    for layer in (model[0], model[2]):
        layer.unshard(async_op=True)
    with torch.no_grad():
        for weight in weights:
            weight.mul_(2)
    assert torch.equal(model(randn(2, 4)), plain(randn(2, 4)))
    model[0].unshard(async_op=True)
    model.zero_grad()
    train_beside(model, plain, before=lambda net: net[0].unshard(async_op=True))


class Parent(nn.Module):
    """Gathers its children by hand, in its forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        handle = self.second.unshard(async_op=True) if hasattr(self.second, "unshard") else None
        x = self.first(x) * self.scale
        if handle is not None:
            handle.wait()
        return self.second(x)


@on_ranks(2)
def test_unshard_inside_the_parents_forward():
    """A child unsharded early in its parent's forward is gathered once."""
    plain = Parent().to(rank_device())
    model = copy.deepcopy(plain)
    for child in (model.first, model.second):
        fully_shard(child)
    fully_shard(model)
    model(randn(2, 4)).sum().backward()
    model.zero_grad()
    with torch.no_grad():
        num_gathers()
        model(randn(2, 4))
        assert num_gathers() == 3
    train_beside(model, plain)


@on_ranks(2)
def test_reshard_in_its_own_forward_is_refused():
    """``reshard`` inside the module's forward raises an error that names it, and the model keeps working."""
    model = shard(mlp(4, 6, 4))
    handle = model[0].register_forward_hook(lambda *_: model[0].reshard())
    for _ in range(2):
        with pytest.raises(TrainingStateError, match=r"`reshard` must not be called inside the forward.*`0`"):
            model(randn(2, 4))
        assert gathered(model) == []
    handle.remove()
    model(randn(2, 4)).sum().backward()


@on_ranks(2)
def test_reshard_after_forward():
    """With ``recurse`` the value applies to all units below, else to this one, and overrides the root's default."""
    for value in (True, False):
        for recurse in (True, False):
            model = mlp(4, 6, 4)
            fully_shard(model[0])
            fully_shard(model)  # has the second Linear, and keeps it by default
            model(randn(2, 4)).sum().backward()
            model.set_reshard_after_forward(value, recurse=recurse)
            kept = [] if value else ["", "0"] if recurse else [""]
            num_gathers()
            loss = model(randn(2, 4)).sum()
            assert gathered(model) == kept
            loss.backward()
            assert num_gathers() == 2 + 2 - len(kept)
            loss = model(randn(2, 4)).sum()
            for part in (model, model[0]):
                part.reshard()  # by hand: all are gathered again
            num_gathers()
            loss.backward()
            assert num_gathers() == 2
            assert gathered(model) == []


@on_ranks(2)
def test_reshard_after_backward():
    """Parameters kept after a backward serve the next forward, unless an optimizer steps first."""
    plain = mlp(4, 6, 4)
    model = shard(copy.deepcopy(plain))
    model.set_reshard_after_backward(False)
    model(randn(2, 4)).sum().backward()
    assert gathered(model) == ["0", "2"]
    num_gathers()
    model.set_reshard_after_forward(False)
    model(randn(2, 4)).sum().backward()
    assert num_gathers() == 0
    model.zero_grad()
    train_beside(model, plain)
    model.set_reshard_after_backward(True, recurse=False)
    model[0].set_reshard_after_backward(True)
    model(randn(2, 4)).sum().backward()
    assert gathered(model) == ["2"]


@on_ranks(2)
def test_unshard_in_backward():
    """An embedding, whose gradient needs no weights, trains correctly when gathered in the forward only."""
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4)).to(rank_device())
    model = copy.deepcopy(plain)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model[0].set_unshard_in_backward(False)
    tokens = torch.arange(5, device=rank_device()) + torch.distributed.get_rank()
    optimizers = [sgd(model), sgd(plain)]
    for _ in range(3):
        num_gathers()
        for net in (model, plain):
            net(tokens).square().sum().backward()
        assert num_gathers() == 3
        average_grads_(plain.parameters())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in model.named_parameters():
        assert torch.equal(value.full_tensor(), plain.get_parameter(name)), name


@on_ranks(1)
def test_arguments():
    """Flags must be bools, and modules must be FSDPModules."""
    model = shard(mlp(4, 6, 4))
    flags = ("reshard_after_forward", "reshard_after_backward", "unshard_in_backward")
    for name in (*flags, "is_last_backward", "requires_gradient_sync", "forward_prefetch"):
        for value in (1, None, "yes"):
            with pytest.raises(ValueError, match="must be True or False"):
                getattr(model, f"set_{name}")(value)
    for method in (model.set_modules_to_forward_prefetch, model.set_modules_to_backward_prefetch, share_comm_ctx):
        for modules in ([model[1]], [model[0], "2"], model[0], None):
            with pytest.raises(ValueError, match="must be a list of FSDPModule"):
                method(modules)
    share_comm_ctx([model, model[0]])
    share_comm_ctx([])
    model(randn(2, 4))
    with pytest.raises(TrainingStateError, match=r"outermost.*`0`"):
        model[0].reset_iter_state()


def run(model, armed):
    """Run a pass that raises in its forward if ``armed`` is not empty, otherwise in its backward."""
    loss = model(randn(2, 4)).sum()
    armed.append(1)
    loss.backward()


class Stop(BaseException):
    """Not an Exception, like KeyboardInterrupt."""


@on_ranks(2)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, Stop])
def test_exceptions(error):
    """After an exception in a forward or a backward the next pass works, with or without `reset_iter_state`."""
    plain = mlp(4, 6, 4)
    model = shard(copy.deepcopy(plain))
    armed = []

    def strike(*_):
        if armed:
            armed.clear()
            raise error("struck")

    model[2].register_forward_pre_hook(strike)
    model[0].register_full_backward_hook(strike)
    for resets in (False, True):
        for in_backward in (False, True):
            if not in_backward:
                armed.append(1)
            with pytest.raises(error, match="struck"):
                run(model, armed)
            if resets:
                model.reset_iter_state()
                assert gathered(model) == []
            model.zero_grad()
            model(randn(2, 4)).sum().backward()
            model.zero_grad()
    train_beside(model, plain)


class Colliding(nn.Linear):
    """Has attribute names that an engine is likely to use."""

    def __init__(self):
        super().__init__(4, 4)
        self._unit = self._state = self._original = self._members = 2.0
        self.mesh = self.unit = self.root = 3.0

    def _run(self, x):
        return self(x) * self._unit * self.mesh

    def _root(self):
        return 5.0

    def _units(self):
        return 7.0


@on_ranks(1)
def test_names_of_users():
    """Private names in a user's class keep their meaning."""
    model = fully_shard(Colliding())
    x = randn(2, 4)
    assert torch.equal(model._run(x), model(x) * 2.0 * 3.0)
    assert (model._root(), model._units(), model._original, model._state) == (5.0, 7.0, 2.0, 2.0)
    own = {name for base in type(model).__mro__[1:2] for name in vars(base) if name.startswith("_")}
    assert not {name for name in own if not name.startswith(("__", "_fairshard", "_apply"))}
