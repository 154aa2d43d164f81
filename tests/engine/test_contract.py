"""All ranks issue the same collectives in the same order, whatever each one's backward reaches.

Collectives are recorded where they are issued. So a test also fails if a different order on two ranks happens to work,
thanks to the tags of direct exchanges or to lucky timing.
"""

import contextlib
import random
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairshard.errors import FairshardError
from fairshard.nn import BackwardPrefetch, ShardingStrategy
from fairshard.nn.comm_hooks import DefaultState, reduce_scatter_hook
from tests.engine.issued import recording, without_exchange
from tests.engine.random_nets import CAPS_MB, DOORS, Cut, draw, hits_of, input_of, loss_of, shard
from tests.engine.test_conditional_nets import naming
from tests.kit import rank_device
from tests.on_ranks import in_full, on_ranks
from tests.reference import sgd

pytestmark = pytest.mark.behaviour("the contract of ranks")

NUM_STEPS = 3


def options_of(seed, hybrid):
    """One of `DOORS` and its options for ``seed``; the same on every rank."""
    pick = random.Random(repr(("options", seed)))
    door = DOORS[seed % len(DOORS)]
    is_in_place = door in ("fully_shard", "owned")
    options = {"bucket_cap_mb": CAPS_MB[seed // len(DOORS) % 3]}
    few = [2] if dist.get_world_size() == 4 and not hybrid else []
    options["reshard_after_forward"] = pick.choice([True, True, False, *few])
    if hybrid:
        mesh = dist.init_device_mesh(rank_device().type, (2, dist.get_world_size() // 2))
        options.update({"mesh": mesh} if is_in_place else {"device_mesh": mesh})
        if not is_in_place:
            options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
            options["reshard_after_forward"] = True
    if not is_in_place:
        options["backward_prefetch"] = pick.choice([*BackwardPrefetch, None])
        options["forward_prefetch"] = pick.choice([None, False])
    return door, options


def build(seed, checkpoints=False, hybrid=False):
    """The sharded net of ``seed``; some nets have a communication hook, or name the units to prefetch."""
    pick = random.Random(repr(("extras", seed)))
    door, options = options_of(seed, hybrid)
    net = draw(seed, checkpoints)
    net.has_cut = any(isinstance(stage, Cut) for stage in net.stages)
    net.is_reentrant = any(mode == "reentrant" for _, mode in net.runs)
    wrapped = shard(net, door, **options)
    if door == "wrapper" and not hybrid and pick.random() < 0.3:
        wrapped.register_comm_hook(DefaultState(), reduce_scatter_hook)
    if door in ("fully_shard", "owned") and pick.random() < 0.5:
        units = [module for module in wrapped.modules() if "_fairshard_unit" in vars(module)]
        for unit in units[1:]:
            unit.set_modules_to_backward_prefetch(pick.sample(units, min(2, len(units))))
            unit.set_modules_to_forward_prefetch(pick.sample(units, 1))
    return wrapped


def set_sync(model, reduces):
    for module in model.modules():
        if "_fairshard_unit" in vars(module):
            vars(module)["_fairshard_unit"].sync = reduces


def one_pass(model, key):
    loss_of(model, key)[0].backward()


def several_forwards(model, key):
    losses = [loss_of(model, (key, number)) for number in range(3)]
    sum(loss for loss, _ in losses).backward()


def forwards_and_backwards_in_turn(model, key):
    first, second = loss_of(model, (key, 0)), loss_of(model, (key, 1))
    second[0].backward()
    third = loss_of(model, (key, 2))
    first[0].backward()
    third[0].backward()


def two_losses(model, key):
    """Two backwards: the second goes again through the part of the graph that the first went through."""
    rank = dist.get_rank()
    outputs, _unused = model(input_of(key, rank), hits_of(model, key, rank))
    outputs[0].square().sum().backward(retain_graph=True)
    sum(output.sum() for output in outputs).backward()


def twice(model, key):
    loss, _unused = loss_of(model, key)
    loss.backward(retain_graph=True)
    loss.backward()


def grad_of_inputs(model, key):
    """`autograd.grad` with respect to the input, then a backward of another forward."""
    rank = dist.get_rank()
    if not (model.has_cut or model.is_reentrant):  # otherwise a rank may have no backward
        x = input_of(key, rank).requires_grad_()
        outputs, _unused = model(x, hits_of(model, key, rank))
        torch.autograd.grad(sum(output.square().sum() for output in outputs), x)
    one_pass(model, key)


def no_sync(model, key):
    set_sync(model, False)
    one_pass(model, (key, 0))
    one_pass(model, (key, 1))
    set_sync(model, True)
    one_pass(model, (key, 2))


def evals(model, key):
    loss = loss_of(model, key)
    with torch.no_grad():
        loss_of(model, (key, "eval"))
    loss[0].backward()
    with torch.no_grad():
        loss_of(model, (key, "eval again"))


def dropped_forwards(model, key):
    dropped = loss_of(model, (key, "dropped"))
    del dropped
    one_pass(model, key)


PASSES = {
    function.__name__: function
    for function in (
        one_pass, several_forwards, forwards_and_backwards_in_turn, two_losses, twice, grad_of_inputs, no_sync, evals,
        dropped_forwards,
    )
}  # fmt: skip


def train(model, passes, seed):
    optimizer = sgd(model)
    for step in range(NUM_STEPS):
        passes(model, (seed, step))
        optimizer.step()
        optimizer.zero_grad()


def attributes_through(wrapped):
    """Copy ``num_hits`` and similar attributes of the net to its wrapper."""
    net = getattr(wrapped, "module", wrapped)
    if net is not wrapped:
        for name in ("num_hits", "has_cut", "is_reentrant"):
            setattr(wrapped, name, getattr(net, name))
    return wrapped


def check(seeds, name, checkpoints=False, hybrid=False, exchange=True):
    """Train the nets of ``seeds`` with the passes ``name``; all ranks issue the same collectives."""
    warnings.simplefilter("ignore")
    with contextlib.nullcontext() if exchange else without_exchange():
        for seed in seeds:
            with naming(f"net {seed}, {name}"), recording() as issues:
                train(attributes_through(build(seed, checkpoints, hybrid)), PASSES[name], seed)
                issues.assert_same_on_all_ranks()


@pytest.mark.pairs
@on_ranks(2, 3)
@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("exchange", [True, False])
def test_all_ranks_issue_the_same(name, exchange):
    """Nets with all doors, bucket caps and prefetch options; each rank reaches other parts in each step."""
    first = 40 * list(PASSES).index(name)
    check(range(first, first + 3), name, exchange=exchange)


@on_ranks(2)
@pytest.mark.parametrize("name", [name for name in PASSES if name not in {"two_losses", "twice", "grad_of_inputs"}])
def test_all_ranks_issue_the_same_with_checkpoints(name):
    """Reentrant and other checkpoints over one or several stages recompute more than a rank reaches."""
    first = 1000 + 40 * list(PASSES).index(name)
    check(range(first, first + 4), name, checkpoints=True, exchange=False)


@on_ranks(4)
@pytest.mark.parametrize("name", ["one_pass", *map(in_full, ["several_forwards", "no_sync"])])
def test_ranks_of_each_group_issue_the_same(name):
    """With two groups of two, any two ranks issue the collectives that they share in the same order."""
    first = 2000 + 40 * list(PASSES).index(name)
    check(range(first, first + 3), name, hybrid=True)


@on_ranks(in_full(2), in_full(3), in_full(4), timeout=500.0)
@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("exchange", [True, False])
def test_all_ranks_issue_the_same_for_many_nets(name, exchange):
    """As `test_all_ranks_issue_the_same`, for thirty nets each."""
    check(range(3000, 3030), name, exchange=exchange)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.is_unit = self.first.is_unit = self.second.is_unit = True

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


@pytest.mark.pairs
@on_ranks(2, 3)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("exchange", [True, False])
def test_two_roots_in_one_graph(door, exchange):
    """Generator and discriminator: D's loss reaches only D; G's loss reaches both, through D's graph."""
    with contextlib.nullcontext() if exchange else without_exchange(), recording() as issues:
        torch.manual_seed(0)
        one, other = (shard(Generator().to(rank_device()), door) for _ in range(2))
        optimizers = [sgd(one), sgd(other)]
        for step in range(3):
            x = input_of(step, dist.get_rank())
            made = one(x)
            (other(made.detach()).square().sum() + other(x).sum()).backward()
            other(made).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        issues.assert_same_on_all_ranks()


@pytest.mark.pairs
@on_ranks(2, 3)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("exchange", [True, False])
def test_two_roots_of_which_a_loss_uses_one(door, exchange):
    """Both towers are called; each rank's loss uses the first, the second, or both."""
    with contextlib.nullcontext() if exchange else without_exchange(), recording() as issues:
        torch.manual_seed(0)
        towers = [shard(Generator().to(rank_device()), door) for _ in range(2)]
        optimizers = [sgd(tower) for tower in towers]
        for step in range(4):
            outputs = [tower(input_of(step, dist.get_rank())) for tower in towers]
            choice = (step + dist.get_rank()) % 3
            used = outputs if choice == 2 else [outputs[choice]]
            sum(output.square().sum() for output in used).backward()
            del outputs, used
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        issues.assert_same_on_all_ranks()


class Failing(nn.Module):
    """Three layers; a hook on the output of layer ``place`` raises."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.is_unit = True
        for layer in self.layers:
            layer.is_unit = True

    def forward(self, x, place):
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number == place:
                x.register_hook(self._fail)
        return x

    def _fail(self, grad):
        raise KeyError("on purpose")


@pytest.mark.pairs
@on_ranks(2, 3)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("place", [0, 1])  # not 2, the root's output: no collective would have started
@pytest.mark.parametrize("exchange", [True, False])
def test_an_exception_in_the_backward_of_one_rank(door, place, exchange):
    """The failed rank issues the remaining collectives at its next forward; the next backward raises on all ranks."""
    with contextlib.nullcontext() if exchange else without_exchange(), recording() as issues:
        torch.manual_seed(0)
        model = shard(Failing().to(rank_device()), door)
        x = input_of(0, dist.get_rank())
        model(x, None).sum().backward()
        fails = dist.get_rank() == 0
        with pytest.raises(KeyError) if fails else contextlib.nullcontext():
            model(x, place if fails else None).sum().backward()
        loss = model(x, None).sum()
        with pytest.raises(FairshardError):
            loss.backward()
        issues.assert_same_on_all_ranks()


class Segment(nn.Module):
    """A checkpoint around a layer of the outer unit and a call of an inner unit, and a head after it."""

    def __init__(self):
        super().__init__()
        self.outer, self.inner, self.head = (nn.Linear(3, 3) for _ in range(3))
        self.is_unit = self.inner.is_unit = self.head.is_unit = True

    def run(self, x, reaches_inner):
        x = torch.tanh(self.outer(x))
        called = torch.tanh(self.inner(x.detach()))
        return x.sin() + called if reaches_inner else x.sin()

    def forward(self, x, reaches_inner, uses):
        made = checkpoint(self.run, x, reaches_inner, use_reentrant=False)
        return self.head(made if uses else x)


@on_ranks(2, timeout=30.0)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("exchange", [in_full(True), False])
@pytest.mark.parametrize("case", ["one rank reaches the inner unit", "no rank does, and one recomputes"])
def test_a_checkpoint_of_which_a_rank_reaches_the_outer_layer_alone(door, exchange, case):
    """A rank that reaches only the outer layer still recomputes the inner unit, though no gradient reaches it."""
    with contextlib.nullcontext() if exchange else without_exchange(), recording() as issues:
        torch.manual_seed(0)
        model = shard(Segment().to(rank_device()), door)
        is_first = dist.get_rank() == 0
        for step in range(2):
            reaches_inner = is_first and case.startswith("one rank")
            uses = is_first or case.startswith("one rank")
            model(input_of(step, dist.get_rank()), reaches_inner, uses).sum().backward()
        issues.assert_same_on_all_ranks()


@on_ranks(2)
def test_zeroed_gradients_of_the_second_root_are_forgotten():
    """`zero_grad` drops what no_sync has accumulated in each of two models, not only in the first."""
    torch.manual_seed(0)
    one, other = (shard(Generator().to(rank_device()), "wrapper") for _ in range(2))
    x = input_of(0, dist.get_rank())
    other(one(x)).sum().backward()
    expected = [param.grad.clone() for param in (*one.parameters(), *other.parameters())]
    for model in (one, other):
        model.zero_grad()
    with one.no_sync(), other.no_sync():
        other(one(x)).sum().backward()
    for model in (one, other):
        model.zero_grad()
    other(one(x)).sum().backward()
    for param, grad in zip((*one.parameters(), *other.parameters()), expected, strict=True):
        assert torch.equal(param.grad, grad)
