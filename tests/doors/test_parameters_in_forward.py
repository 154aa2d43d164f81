"""Inside a unit's forward ``parameters()`` yields gathered parameters; elsewhere it yields the registered ones."""

import copy
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairshard.engine.tree import units_below
from fairshard.errors import ParameterShardedError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import fully_shard, register_forward_method
from tests.kit import rank_device
from tests.kit.doors import DOORS, SETTINGS, every_door, inside, sharding
from tests.on_ranks import in_full, on_ranks
from tests.reference import average_grads_, randn

pytestmark = pytest.mark.behaviour("parameters in a forward")

with_names = pytest.mark.parametrize("door", [door for door in DOORS if door != "flat"])  # a flat unit registers none


class Boom(Exception):
    """Raised on purpose."""


class Looking(nn.Module):
    """Records what ``named_parameters()`` yields in each call; has tied, frozen, empty and uneven parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.Linear(3, 5)
        self.again = nn.Linear(3, 5, bias=False)
        self.again.weight = self.up.weight
        self.none = nn.Parameter(torch.zeros(0, 2))
        self.down = nn.Linear(5, 3)
        self.down.requires_grad_(False)
        self.scale = nn.Parameter(torch.full((1,), 1.5))
        self.seen, self.boom, self.unit = [], False, ()

    def look(self):
        found = {name: (param, param.detach().clone()) for name, param in self.named_parameters()}
        assert [param for param, _ in found.values()] == list(self.parameters())
        self.seen.append({name: value for name, (_, value) in found.items()})
        first = next(self.parameters())
        return first.dtype, first.device

    def forward(self, x):
        dtype, device = self.look()
        if self.unit and len(self.seen) == 1:  # calls itself through its unit, and looks again
            x = self.unit[0](x)
            self.look()
            return x
        assert next(self.down.parameters()) is self.down.weight
        x = x.to(device, dtype)
        if self.boom:
            raise Boom
        return self.down(torch.tanh(self.up(x) + self.again(x))) * self.scale + self.none.sum()


def looking():
    return Looking().to(rank_device())


class Unchanged:
    """Checks that parameters are registered as they were at first, and that no unit lists gathered tensors."""

    def __init__(self, model):
        self._model, self._before = model, self._registered(model)

    @staticmethod
    def _registered(model):
        return [(name, id(param)) for name, param in model.named_parameters()]

    def check(self):
        assert self._registered(self._model) == self._before
        slots = [slot for _, unit in units_below(self._model) for flat in unit.flat_params for slot in flat.slots]
        assert not any(module._parameters[name] is slot.leaf for slot in slots for module, name in slot.owners)


def check_seen(seen, plain, dtype=torch.float32):
    """Check that each of ``seen`` has the names, shapes, device and values of ``plain``, in ``dtype``."""
    expected = dict(plain.named_parameters())
    for values in seen:
        assert list(values) == list(expected)
        for name, value in values.items():
            assert value.device == expected[name].device
            assert value.dtype == dtype
            assert torch.equal(value, expected[name].detach().to(dtype)), name


@on_ranks(in_full(1), 2)
@every_door
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_forward_sees_whole_parameters(door, setting):
    """A forward sees the plain module's names, order, device and values; outside, parameters stay as registered.

    So does a registered method, called from outside.
    """
    plain = looking()
    model = sharding(door, setting)(copy.deepcopy(plain))
    register_forward_method(model, "look")
    dtype = torch.bfloat16 if setting == "bf16" else torch.float32
    unchanged = Unchanged(model)
    for _ in range(2):
        assert model.look() == (dtype, next(plain.parameters()).device)
        unchanged.check()
        out = model(randn(2, 3))
        assert out.dtype == dtype
        out.sum().backward()
        unchanged.check()
        with torch.no_grad():
            model(randn(2, 3))
        unchanged.check()
    assert len(inside(model).seen) == 6
    check_seen(inside(model).seen, plain, dtype)


class Outer(nn.Module):
    """Has parameters of its own beside a unit, and records what ``named_parameters()`` yields."""

    def __init__(self, inner):
        super().__init__()
        self.first = nn.Linear(3, 3, device=rank_device())
        self.inner = inner
        self.seen = []

    def forward(self, x):
        self.look()
        x = self.inner(self.first(x))
        self.look()
        return x

    def look(self):
        self.seen.append({name: (id(param), tuple(param.shape)) for name, param in self.named_parameters()})


@pytest.mark.pairs
@on_ranks(1, 2)
@every_door
def test_an_outer_forward_sees_its_own(door):
    """An outer forward sees its own parameters whole, and those of inner units as registered, before and after."""
    shard = sharding(door)
    inner = shard(looking())
    theirs = list(inner.parameters())
    model = shard(Outer(inner))
    for _ in range(2):
        model(randn(2, 3)).sum().backward()
    for seen in inside(model).seen:
        own = {name: shape for name, (_, shape) in seen.items() if not name.startswith("inner.")}
        assert own == {"first.weight": (3, 3), "first.bias": (3,)}
        found = [which for name, (which, _) in seen.items() if name.startswith("inner.")]
        assert found == [id(param) for param in theirs]


class Recomputed(nn.Module):
    """Runs its module under a checkpoint."""

    def __init__(self, module, use_reentrant=False):
        super().__init__()
        self.module, self.use_reentrant = module, use_reentrant

    def forward(self, x):
        return checkpoint(self.module, x, use_reentrant=self.use_reentrant)


@pytest.mark.pairs
@on_ranks(1, 2)
@every_door
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not_reentrant"])
@pytest.mark.parametrize("where", ["inside", "around"])
@pytest.mark.parametrize("setting", ["bf16", "kept"])
def test_a_recomputation_sees_the_same(door, use_reentrant, where, setting):
    """Checkpoints inside and around a unit see the same parameters in the backward as in the forward."""
    shard, looker = sharding(door, setting), looking()
    plain = copy.deepcopy(looker)
    model = Recomputed(shard(looker) if where == "around" else looker, use_reentrant)
    model = shard(nn.Sequential(nn.Linear(3, 3, device=rank_device()), model))
    unchanged = Unchanged(model)
    for _ in range(2):
        loss = model(randn(2, 3)).sum()
        unchanged.check()
        loss.backward()
        unchanged.check()
    assert len(looker.seen) == 4
    check_seen(looker.seen, plain, torch.bfloat16 if setting == "bf16" else torch.float32)


def await_end_of_task(model):
    """Wait until autograd's thread for the device has let go of the task of a backward that raised."""
    roots = [unit.root for _, unit in units_below(model) if unit.root is not None]
    while any(root.backward is not None and root.backward.task() is not None for root in roots):
        time.sleep(0.001)


@pytest.mark.pairs
@on_ranks(1, 2)
@every_door
@pytest.mark.parametrize("setting", ["plain", "kept"])
@pytest.mark.parametrize("where", ["forward", "checkpoint inside", "checkpoint around"])
def test_after_an_exception(door, setting, where):
    """A forward or a recomputation that raises leaves the registered parameters in place, and the next pass works."""
    shard, looker = sharding(door, setting), looking()
    model = looker
    if where != "forward":
        model = Recomputed(shard(looker) if where == "checkpoint around" else looker)
    model = shard(model)
    unchanged = Unchanged(model)
    for _ in range(2):
        backward = None if where == "forward" else model(randn(2, 3)).sum().backward
        looker.boom = True
        with pytest.raises(Boom):
            model(randn(2, 3)) if backward is None else backward()
        await_end_of_task(model)
        unchanged.check()
        looker.boom = False
        model(randn(2, 3)).sum().backward()
        unchanged.check()


@pytest.mark.pairs
@on_ranks(1, 2)
@with_names
@pytest.mark.parametrize("setting", ["plain", "kept"])
def test_replaced_parameters_stay(door, setting):
    """A forward sees the tensor that ``functional_call`` puts in a parameter's place, unchanged.

    Between calls a submodule needs all of its parameters replaced.
    """
    plain = looking()
    model = sharding(door, setting)(copy.deepcopy(plain))
    name = f"{'module.' if isinstance(model, FSDP) else ''}scale"
    scale, weight = torch.full((1,), 7.0, device=rank_device()), torch.ones(5, 3, device=rank_device())
    unchanged = Unchanged(model)
    for _ in range(2):
        out = model(randn(2, 3))
        with pytest.raises(ParameterShardedError, match=r"`up\.bias` must be gathered"):
            torch.func.functional_call(inside(model).up, {"weight": weight}, (randn(2, 3),))
        both = {"weight": weight, "bias": plain.up.bias}
        found = torch.func.functional_call(inside(model).up, both, (randn(2, 3),))
        assert torch.equal(found, nn.functional.linear(randn(2, 3), weight, plain.up.bias))
        out.sum().backward()
        with torch.no_grad():
            torch.func.functional_call(model, {name: scale}, (randn(2, 3),))
        assert torch.equal(inside(model).seen.pop()["scale"], scale)
        unchanged.check()
        model(randn(2, 3)).sum().backward()
    check_seen(inside(model).seen, plain)


class Mixing(nn.Module):
    """Calls a layer with parameters computed from the layer's own, then with its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        doubled = {name: 2 * param for name, param in self.layer.named_parameters()}
        return torch.func.functional_call(self.layer, doubled, (x,)) + self.layer(x).square()


@pytest.mark.pairs
@on_ranks(1, 2)
@every_door
@pytest.mark.parametrize("recomputes", [False, True])
def test_functional_call_inside_a_forward(door, recomputes):
    """The layer computes with what ``functional_call`` gives it, and its own parameters get their gradients."""
    plain = Mixing().to(rank_device())
    model = sharding(door)(copy.deepcopy(plain))
    unchanged = Unchanged(model)
    for _ in range(2):
        for net in (plain, model):
            x = randn(2, 3).requires_grad_()
            out = checkpoint(net, x, use_reentrant=False) if recomputes else net(x)
            assert torch.equal(out, plain(x))
            out.sum().backward()
        average_grads_(plain.parameters())
        unchanged.check()
    with FSDP.summon_full_params(model, with_grads=True):
        for mine, its in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(its.grad, mine.grad)


@on_ranks(2)
@every_door
def test_a_unit_that_calls_itself(door):
    """After an inner call of the same unit, the outer call still sees whole parameters."""
    looker = looking()
    plain = copy.deepcopy(looker)
    model = sharding(door, "kept")(looker)
    looker.unit = (model,)
    unchanged = Unchanged(model)
    model(randn(2, 3))
    unchanged.check()
    assert len(looker.seen) == 3
    check_seen(looker.seen, plain)


@on_ranks(2)
def test_modules_that_are_one_unit():
    """Each of several modules that `fully_shard` made into one unit sees its own parameters whole."""
    first, second = looking(), looking()
    plain = copy.deepcopy(first)
    fully_shard([first, second])
    model = fully_shard(nn.Sequential(first, second))
    unchanged = Unchanged(model)
    for _ in range(2):
        model(randn(2, 3)).sum().backward()
        unchanged.check()
    check_seen([*first.seen, *second.seen], plain)


class Asking(nn.Module):
    """Asks the model around it for its parameters."""

    def __init__(self):
        super().__init__()
        self.looker, self.around, self.found = looking(), (), []

    def forward(self, x):
        self.found.append([param.numel() for param in self.around[0].parameters()])
        return self.looker(x)


@on_ranks(2)
@every_door
def test_the_wrapper_lists_each_parameter_once(door):
    """Inside the forward the outermost module lists gathered parameters only, without their shards."""
    asking = Asking()
    model = sharding(door)(asking)
    asking.around = (model,)
    model(randn(2, 3)).sum().backward()
    assert asking.found == [[param.numel() for param in looking().parameters()]]
