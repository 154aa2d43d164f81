"""Methods that set when units are gathered and freed; recovery after exceptions; names of users."""

import pytest
import torch
from torch import nn

from fairshard.errors import TrainingStateError
from fairshard.nn import fully_shard, share_comm_ctx
from tests.kit import rank_device
from tests.kit.doors import gathered, num_gathers, shard
from tests.models import mlp
from tests.on_ranks import on_ranks
from tests.reference import randn, squares, train_both

pytestmark = pytest.mark.behaviour("control of units")


def linears(*widths):
    return shard(mlp(*widths), "fully_shard", "0", "2")


@on_ranks(2)
def test_reshard_after_backward():
    """Parameters kept after a backward serve the next forward, unless an optimizer steps first."""
    model = linears(4, 6, 4)
    model.set_reshard_after_backward(False)
    model(randn(2, 4)).sum().backward()
    assert gathered(model) == ["0", "2"]
    num_gathers()
    model.set_reshard_after_forward(False)
    model(randn(2, 4)).sum().backward()
    assert num_gathers() == 0
    model.zero_grad()
    train_both(mlp(4, 6, 4), model, squares)
    model.set_reshard_after_backward(True, recurse=False)
    model[0].set_reshard_after_backward(True)
    model(randn(2, 4)).sum().backward()
    assert gathered(model) == ["2"]


@on_ranks(2)
def test_unshard_in_backward():
    """An embedding, whose gradient needs no weights, trains correctly when gathered in the forward only."""

    def build():
        torch.manual_seed(1)
        return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4)).to(rank_device())

    model = shard(build(), "fully_shard", "0", "1")
    model[0].set_unshard_in_backward(False)
    tokens = torch.arange(5, device=rank_device()) + torch.distributed.get_rank()
    model(tokens).square().sum().backward()
    model.zero_grad()
    num_gathers()
    train_both(build(), model, lambda net, key: net(tokens).square().sum())
    assert num_gathers() == 3 * 3


@on_ranks(1)
def test_arguments():
    """Flags must be bools, and modules must be FSDPModules."""
    model = linears(4, 6, 4)
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


class Stop(BaseException):
    """Not an Exception, like KeyboardInterrupt."""


@on_ranks(2)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, Stop])
def test_exceptions(error):
    """After an exception in a forward or a backward the next pass works, with or without `reset_iter_state`."""
    model, armed = linears(4, 6, 4), []

    def strike(*_):
        if armed:
            armed.clear()
            raise error("struck")

    def strike_in_backward():
        loss = model(randn(2, 4)).sum()
        armed.append(1)
        loss.backward()

    def strike_in_forward():
        armed.append(1)
        model(randn(2, 4))

    model[2].register_forward_pre_hook(strike)
    model[0].register_full_backward_hook(strike)
    for resets in (False, True):
        for struck in (strike_in_forward, strike_in_backward):
            with pytest.raises(error, match="struck"):
                struck()
            if resets:
                model.reset_iter_state()
                assert gathered(model) == []
            model.zero_grad()
            model(randn(2, 4)).sum().backward()
            model.zero_grad()
    train_both(mlp(4, 6, 4), model, squares)


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
