"""Inside a unit's forward ``parameters()`` yields gathered parameters; elsewhere it yields the registered ones.

Tested for the wrapper, flattened, unflattened and with original parameters, and for `fully_shard`.
"""

import copy
import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairshard.engine.tree import units_below
from fairshard.errors import ParameterShardedError
from fairshard.nn import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, register_forward_method
from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.kit import rank_device
from tests.on_ranks import in_full, on_ranks
from tests.reference import average_grads_, randn

DOORS = {
    "flat": FSDP,
    "apart": partial(FSDP, flatten_parameters=False),
    "orig": partial(FSDP, use_orig_params=True),
    "rows": fully_shard,
}
MORE = {
    "plain": ({}, {}),
    "bf16": (
        {"mixed_precision": True, "compute_dtype": torch.bfloat16},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
    ),
    "offload": ({"cpu_offload": True}, {"offload_policy": CPUOffloadPolicy()}),
    "kept": ({"reshard_after_forward": False}, {"reshard_after_forward": False}),
}
every_door = pytest.mark.parametrize("door", DOORS)


def sharding(door, more="plain"):
    """The wrapper or function of ``door``, with the arguments that ``MORE[more]`` has for it."""
    return partial(DOORS[door], **MORE[more][door == "rows"])


class Boom(Exception):
    pass


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
        self.seen, self.boom = [], False

    def look(self):
        found = {name: (param, param.detach().clone()) for name, param in self.named_parameters()}
        assert [param for param, _ in found.values()] == list(self.parameters())
        self.seen.append({name: value for name, (_, value) in found.items()})
        first = next(self.parameters())
        return first.dtype, first.device

    def forward(self, x):
        dtype, device = self.look()
        assert next(self.down.parameters()) is self.down.weight
        x = x.to(device, dtype)
        if self.boom:
            raise Boom
        return self.down(torch.tanh(self.up(x) + self.again(x))) * self.scale + self.none.sum()


def looking():
    return Looking().to(rank_device())


def inside(model):
    """The module inside a wrapper, or the module sharded in place."""
    return model.module if isinstance(model, FSDP) else model


def registered(model):
    return [(name, id(param)) for name, param in model.named_parameters()]


def is_listed(model):
    """Whether any unit still lists gathered tensors as parameters."""
    slots = [slot for _, unit in units_below(model) for flat in unit.flat_params for slot in flat.slots]
    return any(module._parameters[name] is slot.leaf for slot in slots for module, name in slot.owners)


def check_seen(seen, plain, dtype=torch.float32):
    """Check that ``seen``, from one call, has the names, shapes and values of ``plain``, in ``dtype``."""
    expected = dict(plain.named_parameters())
    assert list(seen) == list(expected)
    for name, value in seen.items():
        assert value.dtype == dtype
        assert value.device == expected[name].device
        assert torch.equal(value, expected[name].detach().to(dtype)), name


@on_ranks(in_full(1), 2)
@every_door
@pytest.mark.parametrize("more", MORE)
def test_a_forward_sees_whole_parameters(door, more):
    """A forward sees the plain module's names, order, device and values; outside, parameters stay as registered."""
    plain = looking()
    model = sharding(door, more)(copy.deepcopy(plain))
    dtype = torch.bfloat16 if more == "bf16" else torch.float32
    before = registered(model)
    for _ in range(2):
        out = model(randn(2, 3))
        assert registered(model) == before
        assert out.dtype == dtype
        out.sum().backward()
        assert registered(model) == before
        with torch.no_grad():
            model(randn(2, 3))
        assert registered(model) == before
        for seen in inside(model).seen:
            check_seen(seen, plain, dtype)
    assert len(inside(model).seen) == 4


@on_ranks(2)
@every_door
def test_what_follows_a_step(door):
    """The next forward sees the values that an optimizer wrote to the parameters it was built from."""
    plain = looking()
    model = sharding(door)(copy.deepcopy(plain))
    for net in (plain, model):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(randn(2, 3)).sum().backward()
        if net is plain:
            average_grads_(net.parameters())
        optimizer.step()
        net(randn(2, 3))
    check_seen(inside(model).seen[-1], plain)


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


@on_ranks(1, 2)
@every_door
@pytest.mark.parametrize("more", ["plain", "kept"])
def test_after_an_exception(door, more):
    """A forward that raises leaves the registered parameters in place, and the next one works."""
    model = sharding(door, more)(looking())
    before = registered(model)
    for _ in range(2):
        inside(model).boom = True
        with pytest.raises(Boom):
            model(randn(2, 3))
        assert registered(model) == before
        assert not is_listed(model)
        inside(model).boom = False
        model(randn(2, 3)).sum().backward()
        assert registered(model) == before


@on_ranks(1, 2)
@every_door
def test_registered_methods(door):
    """A registered forward method sees what a forward sees, called from outside or from the forward."""
    plain = looking()
    model = sharding(door)(copy.deepcopy(plain))
    register_forward_method(model, "look")
    before = registered(model)
    for _ in range(2):
        assert model.look() == (torch.float32, next(plain.parameters()).device)
        assert registered(model) == before
        model(randn(2, 3)).sum().backward()
    for seen in inside(model).seen:
        check_seen(seen, plain)


class Recomputed(nn.Module):
    """Runs its module under a checkpoint."""

    def __init__(self, module, use_reentrant):
        super().__init__()
        self.module, self.use_reentrant = module, use_reentrant

    def forward(self, x):
        return checkpoint(self.module, x, use_reentrant=self.use_reentrant)


@pytest.mark.pairs
@on_ranks(1, 2)
@every_door
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not_reentrant"])
@pytest.mark.parametrize("where", ["inside", "around"])
@pytest.mark.parametrize("more", ["bf16", "kept"])
def test_a_recomputation_sees_the_same(door, use_reentrant, where, more):
    """Checkpoints inside and around a unit see the same parameters in the backward as in the forward."""
    shard = sharding(door, more)
    looker = looking()
    plain = copy.deepcopy(looker)
    model = Recomputed(shard(looker) if where == "around" else looker, use_reentrant)
    model = shard(nn.Sequential(nn.Linear(3, 3, device=rank_device()), model))
    before = registered(model)
    for _ in range(2):
        loss = model(randn(2, 3)).sum()
        assert registered(model) == before
        loss.backward()
        assert registered(model) == before
        assert not is_listed(model)
    assert len(looker.seen) == 4
    for seen in looker.seen:
        check_seen(seen, plain, torch.bfloat16 if more == "bf16" else torch.float32)


def await_end_of_task(model):
    """Wait until autograd's thread for the device has let go of the task of a backward that raised."""
    roots = [unit.root for _, unit in units_below(model) if unit.root is not None]
    while any(root.backward is not None and root.backward.task() is not None for root in roots):
        time.sleep(0.001)


@on_ranks(1, 2)
@every_door
@pytest.mark.parametrize("where", ["inside", "around"])
def test_after_an_exception_in_a_recomputation(door, where):
    """A backward that raises in a recomputation leaves the registered parameters in place."""
    shard = sharding(door)
    looker = looking()
    model = shard(Recomputed(shard(looker) if where == "around" else looker, use_reentrant=False))
    before = registered(model)
    for _ in range(2):
        loss = model(randn(2, 3)).sum()
        looker.boom = True
        with pytest.raises(Boom):
            loss.backward()
        await_end_of_task(model)
        assert registered(model) == before
        assert not is_listed(model)
        looker.boom = False
        model(randn(2, 3)).sum().backward()
        assert registered(model) == before


@on_ranks(1, 2)
@pytest.mark.parametrize("door", [door for door in DOORS if door != "flat"])  # a flat unit registers none to replace
def test_replaced_parameters_stay(door):
    """A forward sees the tensor that ``functional_call`` puts in a parameter's place, unchanged."""
    plain = looking()
    model = sharding(door)(copy.deepcopy(plain))
    prefix = "module." if isinstance(model, FSDP) else ""
    replaced = {f"{prefix}scale": torch.full((1,), 7.0, device=rank_device())}
    before = registered(model)
    for _ in range(2):
        with torch.no_grad():
            torch.func.functional_call(model, replaced, (randn(2, 3),))
            assert torch.equal(inside(model).seen[-1]["scale"], replaced[f"{prefix}scale"])
            assert registered(model) == before
            model(randn(2, 3))
        check_seen(inside(model).seen[-1], plain)


@on_ranks(1, 2)
@pytest.mark.parametrize("door", [door for door in DOORS if door != "flat"])
def test_replaced_parameters_of_a_gathered_unit(door):
    """The same holds while a unit stays gathered; between calls a submodule needs all of its parameters replaced."""
    plain = looking()
    model = sharding(door, "kept")(copy.deepcopy(plain))
    prefix = "module." if isinstance(model, FSDP) else ""
    scale, weight = torch.full((1,), 7.0, device=rank_device()), torch.ones(5, 3, device=rank_device())
    for _ in range(2):
        out = model(randn(2, 3))
        with pytest.raises(ParameterShardedError, match=r"`up\.bias` must be gathered"):
            torch.func.functional_call(inside(model).up, {"weight": weight}, (randn(2, 3),))
        both = {"weight": weight, "bias": plain.up.bias}
        found = torch.func.functional_call(inside(model).up, both, (randn(2, 3),))
        assert torch.equal(found, nn.functional.linear(randn(2, 3), weight, plain.up.bias))
        out.sum().backward()
        model(randn(2, 3))
        with torch.no_grad():
            torch.func.functional_call(model, {f"{prefix}scale": scale}, (randn(2, 3),))
        assert torch.equal(inside(model).seen[-1]["scale"], scale)
        model(randn(2, 3)).sum().backward()
        check_seen(inside(model).seen[-1], plain)


class Mixing(nn.Module):
    """Calls a layer with parameters computed from the layer's own, then with its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        doubled = {name: 2 * param for name, param in self.layer.named_parameters()}
        return torch.func.functional_call(self.layer, doubled, (x,)) + self.layer(x).square()


@on_ranks(1, 2)
@every_door
@pytest.mark.parametrize("recomputes", [False, True])
def test_functional_call_inside_a_forward(door, recomputes):
    """The layer computes with what ``functional_call`` gives it, and its own parameters get their gradients."""
    plain = Mixing().to(rank_device())
    model = sharding(door)(copy.deepcopy(plain))
    before = registered(model)
    for _ in range(2):
        for net in (plain, model):
            x = randn(2, 3).requires_grad_()
            out = checkpoint(net, x, use_reentrant=False) if recomputes else net(x)
            assert torch.equal(out, plain(x))
            out.sum().backward()
        average_grads_(plain.parameters())
        assert registered(model) == before
    with FSDP.summon_full_params(model, with_grads=True):
        for mine, its in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(its.grad, mine.grad)


class Looping(Looking):
    """Calls itself through its unit, and looks before and after."""

    unit = ()

    def forward(self, x):
        if self.unit and len(self.seen) % 3 == 0:
            self.look()
            x = self.unit[0](x)
            self.look()
            return x
        return super().forward(x)


@on_ranks(2)
@every_door
def test_a_unit_that_calls_itself(door):
    """After an inner call of the same unit, the outer call still sees whole parameters."""
    looker = Looping().to(rank_device())
    plain = copy.deepcopy(looker)
    model = sharding(door, "kept")(looker)
    looker.unit = (model,)
    before = registered(model)
    model(randn(2, 3))
    assert registered(model) == before
    assert len(looker.seen) == 3
    for seen in looker.seen:
        check_seen(seen, plain)


@on_ranks(2)
def test_modules_that_are_one_unit():
    """Each of several modules that `fully_shard` made into one unit sees its own parameters whole."""
    first, second = looking(), looking()
    plain = copy.deepcopy(first)
    fully_shard([first, second])
    model = fully_shard(nn.Sequential(first, second))
    before = registered(model)
    for _ in range(2):
        model(randn(2, 3)).sum().backward()
        assert registered(model) == before
    for module in (first, second):
        for seen in module.seen:
            check_seen(seen, plain)


@on_ranks(2)
@every_door
def test_the_wrapper_lists_each_parameter_once(door):
    """Inside the forward the outermost module lists gathered parameters only, without their shards."""
    looker = looking()
    plain = copy.deepcopy(looker)
    found = []

    class Asking(nn.Module):
        def __init__(self):
            super().__init__()
            self.looker = looker

        def forward(self, x):
            found.append([param.numel() for param in model.parameters()])
            return self.looker(x)

    model = sharding(door)(Asking())
    model(randn(2, 3)).sum().backward()
    assert found == [[param.numel() for param in plain.parameters()]]
