"""Units that return their own parameters or views of them; accumulated gradients after an exception."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fairshard.errors import PartialGradientError, PendingGradientError
from tests.engine.random_nets import DOORS, shard
from tests.kit import rank_device
from tests.kit.doors import whole
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state, average_grads_, randn, sgd, squares, train_both

pytestmark = pytest.mark.behaviour("outputs that are parameters")

# Sums over ranks in another order, in fp32.
train_states = functools.partial(train_both, rtol=2e-6, atol=2e-6)


class Scaled(nn.Module):
    """As in CLIP: returns features, and the parameter that multiplies them outside."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.logit_scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x):
        return self.layer(x), self.logit_scale


class Clip(nn.Module):
    """Multiplies what the inner unit returns, and returns its parameter again."""

    def __init__(self):
        super().__init__()
        self.inner = Scaled()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        features, scale = self.inner(x)
        return self.head(features) * scale.exp(), scale


class Viewing(nn.Module):
    """Returns some rows of its weight, like learned position embeddings."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).view(6, 2))

    def forward(self, n):
        return self.weight[:n]


class Positions(nn.Module):
    """Adds the output of `Viewing`, a unit."""

    def __init__(self):
        super().__init__()
        self.table = Viewing()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x) + self.table(x.size(0))


class TwoLayers(nn.Module):
    """Uses its detached weight before the weight itself."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) + 0.1)

    def forward(self, x):
        y = F.linear(x, self.weight.detach())
        return F.linear(torch.tanh(y), self.weight)


def unit(module, *names):
    """Mark ``module`` and its children called ``names`` as units."""
    module.is_unit = True
    for name in names:
        getattr(module, name).is_unit = True
    return module.to(rank_device())


def num_hooks(model):
    """Hooks on all leaves of the units of ``model``."""
    leaves = [slot.leaf for part in _units(model) for fp in part.flat_params for slot in fp.slots]
    return sum(len(leaf._backward_hooks or ()) + len(leaf._post_accumulate_grad_hooks or ()) for leaf in leaves)


def _units(model):
    return [vars(module)["_fairshard_unit"] for module in model.modules() if "_fairshard_unit" in vars(module)]


def loss_of_clip(model, key):
    outputs, scale = model(randn(3, 4, key=key))
    return outputs.square().sum() + scale.sum()


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("door", DOORS)
def test_a_unit_that_returns_its_own_parameter_trains(door):
    """CLIP's logit_scale, used in the outer unit and in the loss, trains as on the plain model."""
    torch.manual_seed(0)
    plain = unit(Clip(), "inner")
    train_states(plain, shard(copy.deepcopy(plain), door), loss_of_clip)


@on_ranks(2)
@pytest.mark.parametrize("door", DOORS)
def test_hooks_on_a_returned_parameter_do_not_pile_up(door):
    """A leaf outlives its graphs: it has as many hooks after five steps as after one, evaluations included."""
    torch.manual_seed(0)
    wrapped = shard(unit(Clip(), "inner"), door)
    loss_of_clip(wrapped, 0).backward()
    before = num_hooks(wrapped)
    for step in range(5):
        loss_of_clip(wrapped, step)  # a forward without a backward
        with torch.no_grad():
            loss_of_clip(wrapped, step)
        loss_of_clip(wrapped, step).backward()
    assert num_hooks(wrapped) == before


@on_ranks(in_full(1), 2, in_full(3))
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("with_grad", [True, False])
def test_a_returned_view_has_its_values_after_the_unit_was_freed(door, with_grad):
    """Rows of a weight read after the call are those of the weight, not of freed memory."""
    wrapped = shard(unit(nn.Sequential(Viewing()), "0"), door)
    with torch.set_grad_enabled(with_grad):
        rows = getattr(wrapped, "module", wrapped)[0](4)
        others = [torch.full((6, 2), 7.0) for _ in range(8)]  # reuse freed memory
    assert torch.equal(rows, torch.arange(8.0).view(4, 2))
    assert all(torch.equal(other, torch.full((6, 2), 7.0)) for other in others)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("door", DOORS)
def test_a_unit_that_returns_a_view_of_its_weight_trains(door):
    """The gradient of the rows that were returned reaches the weight; the other rows get zeros."""
    torch.manual_seed(0)
    plain = unit(Positions(), "table")
    train_states(
        plain, shard(copy.deepcopy(plain), door), lambda model, key: model(randn(4, 2, key=key)).square().sum()
    )


@pytest.mark.pairs
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("input_has_grad", [False, True])
def test_a_detached_weight_before_the_weight_itself(door, input_has_grad):
    """Uses of ``weight.detach()`` add nothing to the gradient, and the unit is not freed too early."""
    plain = unit(nn.Sequential(TwoLayers(), TwoLayers(), nn.Linear(4, 2)), "0", "1")

    def loss_of(model, key):
        return model(randn(3, 4, key=key).requires_grad_(input_has_grad)).square().sum()

    train_states(plain, shard(copy.deepcopy(plain), door), loss_of)


class Faulty(nn.Module):
    """Two layers; the backward of the first raises while ``fails``."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.fails = False

    def forward(self, x):
        y = torch.tanh(self.first(x))
        if self.fails:
            y.register_hook(self._fail)
        return self.second(y)

    def _fail(self, grad):
        raise KeyError("on purpose")


@pytest.mark.pairs
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("names", [(), ("first", "second")], ids=["one unit", "each"])
def test_an_exception_after_no_sync_never_leaves_a_part(door, names):
    """The next step uses all that was accumulated, or raises; after ``zero_grad`` training continues normally."""
    torch.manual_seed(0)
    plain = unit(Faulty(), *names)
    wrapped = shard(copy.deepcopy(plain), door)
    fault = next(module for module in wrapped.modules() if isinstance(module, Faulty))
    optimizer = sgd(wrapped, momentum=0.0)

    _set_sync(wrapped, False)
    squares(wrapped, 0).backward()
    _set_sync(wrapped, True)
    fault.fails = True
    with pytest.raises(KeyError, match="on purpose"):
        squares(wrapped, 1).backward()
    fault.fails = False
    raised = False
    try:
        optimizer.step()
    except PendingGradientError:  # no reduced gradient yet
        pass
    except PartialGradientError:
        raised = True
    if not raised:
        squares(wrapped, 2).backward()
        try:
            optimizer.step()
        except PartialGradientError:
            raised = True
    if not raised:
        for key in (0, 2):
            squares(plain, key).backward()
        average_grads_(plain.parameters())
        sgd(plain, momentum=0.0).step()
        assert_same_state(whole(wrapped), plain.state_dict(), 2e-6, 2e-6)
    optimizer.zero_grad()
    plain.load_state_dict(whole(wrapped))
    plain.zero_grad()
    train_states(plain, wrapped, lambda model, key: squares(model, ("after", key)))


def _set_sync(model, reduces):
    for part in _units(model):
        part.sync = reduces
