"""Weights and flags of inner units that the outermost forward changes before it calls them."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairshard.errors import BackwardOrderError, FairshardError, ParameterShardedError, ShardChangedError
from fairshard.nn import CPUOffload, MixedPrecision, MixedPrecisionPolicy, fully_shard
from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.engine.random_nets import DOORS, shard
from tests.kit import rank_device
from tests.on_ranks import in_full, on_ranks
from tests.reference import average_grads_, randn

pytestmark = pytest.mark.behaviour("changes in a forward")


class Net(nn.Module):
    """Two units inside a third, which calls ``inner`` as ``way`` says."""

    is_unit = True

    def __init__(self, way):
        super().__init__()
        self.first, self.inner = nn.Linear(3, 4), nn.Linear(4, 4)
        self.first.is_unit = self.inner.is_unit = True
        self.way = way

    def forward(self, x):
        return self.way(self, self.first(x))


def adversarial(net, x):
    """A generator's loss through a discriminator that is frozen meanwhile, and the discriminator's own."""
    net.inner.requires_grad_(False)
    generator = net.inner(x).sum()
    net.inner.requires_grad_(True)
    return net.inner(x.detach()).square().sum() - generator


def thawing(net, x):
    net.inner.requires_grad_(True)
    return net.inner(x).sum()


def freezing(net, x):
    net.inner.requires_grad_(False)
    return net.inner(x).sum()


@torch.no_grad()
def clamp(net):
    for param in net.inner.parameters():
        param.clamp_(-0.01, 0.01)


def clamping(net, x):
    clamp(net)
    return net.inner(x).square().sum()


def steps(net, averages=False, num_steps=4):
    """Train ``net``; returns the losses."""
    losses = []
    for step in range(num_steps):
        if net.way is thawing:
            net.inner.requires_grad_(False)
        loss = net(randn(2, 3, key=step))
        loss.backward()
        if averages:
            average_grads_(net.parameters(), keeps_none=True)
        torch.optim.SGD([param for param in net.parameters() if param.grad is not None], lr=0.1).step()
        net.zero_grad()
        if net.way is freezing:
            net.inner.requires_grad_(True)
        losses.append(loss.item())
    return losses


TORN = "on a device the gather ahead may read during the write; what it has read is discarded"


@pytest.mark.pairs
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("way", [adversarial, thawing, freezing], ids=lambda way: way.__name__)
@pytest.mark.parametrize("reshard", [True, False])
def test_flags_count_as_they_are_when_a_unit_is_called(door, way, reshard):
    """Although they may change between two calls of a forward; the losses are those of the plain module."""
    compare(door, way, reshard)


@pytest.mark.cpu_only(TORN)
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("door", DOORS)
def test_weights_count_as_they_are_when_a_unit_is_called(door):
    """Although it is gathered ahead; the losses are those of the plain module."""
    compare(door, clamping, reshard=True)


def compare(door, way, reshard):
    torch.manual_seed(0)
    plain = Net(way).to(rank_device())
    torch.manual_seed(0)
    net = shard(Net(way), door, reshard_after_forward=reshard)
    torch.testing.assert_close(steps(net), steps(plain, averages=True), rtol=1e-5, atol=1e-6)


def filling(net, x):
    """As a momentum encoder: ``inner`` is written before each of its two calls."""
    net.seen = []
    for number in (net.number, -net.number):
        with torch.no_grad():
            for param in net.inner.parameters():
                param.fill_(float(number))
            net.seen.append(net.inner(torch.zeros_like(x)).mean().item())
    net.number += 1
    return x.square().sum()


WAYS = {
    "wrapper": lambda net, reshard: wrapped(net, reshard_after_forward=reshard),
    "bf16": lambda net, reshard: wrapped(
        net, reshard_after_forward=reshard, mixed_precision=MixedPrecision(torch.bfloat16, torch.float32)
    ),
    "offload, bf16": lambda net, reshard: wrapped(
        net,
        reshard_after_forward=reshard,
        cpu_offload=CPUOffload(True),
        mixed_precision=MixedPrecision(torch.bfloat16, torch.float32),
    ),
    # Shards lie in host memory, with a copy on the device, which is made once a pass.
    "copied": lambda net, reshard: wrapped(net, reshard_after_forward=reshard, move_grads_to_cpu=True),
    "original parameters": lambda net, reshard: wrapped(net, reshard_after_forward=reshard, use_orig_params=True),
    "not ahead": lambda net, reshard: wrapped(net, reshard_after_forward=reshard, forward_prefetch=False),
    "fully_shard": lambda net, reshard: placed(net, reshard_after_forward=reshard),
    "fully_shard, bf16": lambda net, reshard: placed(
        net, reshard_after_forward=reshard, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    ),
}


def wrapped(net, **options):
    net.first, net.inner = FSDP(net.first, **options), FSDP(net.inner, **options)
    return FSDP(net, **options)


def placed(net, **options):
    for module in (net.first, net.inner, net):
        fully_shard(module, **options)
    return net


@pytest.mark.cpu_only(TORN)
@on_ranks(in_full(1), 2, in_full(3))
@pytest.mark.parametrize(
    ("way", "reshard"),
    [
        *((way, True) for way in WAYS),
        # `fully_shard` shows whole parameters of units that stay gathered, and warns of writes to them.
        *(pytest.param(way, False, marks=pytest.mark.full) for way in WAYS if "fully_shard" not in way),
    ],
)
def test_calls_compute_with_what_was_written_before_them(way, reshard):
    """In each pass, also where weights in another dtype are copied from the shard once a pass."""
    fill(way, reshard)


@on_ranks(2, in_full(3))
def test_gathers_start_after_writes():
    """Where nothing is gathered ahead, a gather on a stream of its own never reads during the write."""
    fill("not ahead", True)


def assigning(net, x):
    """As ``filling``, by assignment: MoCo's ``param_k.data = param_k.data * m + param_q.data * (1 - m)``."""
    net.seen = []
    for number in (net.number, -net.number):
        for param in net.inner.parameters():
            param.data = torch.full_like(param.data, float(number))
        net.seen.append(net.inner(torch.zeros_like(x)).mean().item())
    net.number += 1
    return x.square().sum()


@pytest.mark.cpu_only(TORN)
@on_ranks(in_full(1), 2, in_full(3))
@pytest.mark.parametrize("way", [way for way in WAYS if "fully_shard" not in way])
def test_calls_compute_with_what_was_assigned_before_them(way):
    """In each pass, whether the unit was gathered ahead or not; DTensors refuse assignments."""
    fill(way, True, assigning)


def stepping(net, x):
    """A fused step of ``inner``; torch counts such writes nowhere."""
    for param in net.inner.parameters():
        param.grad = torch.ones_like(param)
    torch.optim.AdamW(net.inner.parameters(), lr=0.1, fused=True).step()
    for param in net.inner.parameters():
        param.grad = None
    return net.inner(x).square().sum()


@pytest.mark.cpu_only(TORN)
@on_ranks(in_full(1), 2)
@pytest.mark.parametrize("door", DOORS)
def test_a_fused_step_in_a_forward_counts(door):
    """Units gathered ahead are gathered again; gradients of the last backward are dropped by the step here."""
    compare(door, stepping, reshard=True)


def stepping_first(net, x):
    """A fused step of parameters without a gradient writes nothing, so what was gathered is still right."""
    outputs = net.inner(x)
    torch.optim.AdamW(net.parameters(), lr=0.1, fused=True).step()
    return outputs.square().sum()


@on_ranks(2)
@pytest.mark.parametrize("door", DOORS)
def test_a_step_without_gradients_changes_nothing(door):
    """Between a forward and its backward it is no change of weights."""
    compare(door, stepping_first, reshard=True)


def freeze(module):
    module.requires_grad_(False)


def freezing_passed(net, x):
    """A hook freezes ``inner`` when the backward has just computed its gradients."""
    net.inner.requires_grad_(True)
    x.register_hook(lambda grad: freeze(net.inner))
    return net.inner(x).square().sum()


@on_ranks(in_full(1), 2)
@pytest.mark.parametrize("door", ["wrapper", *map(in_full, ["no_flatten", "owned"]), "orig_params", "fully_shard"])
def test_a_hook_may_freeze_what_the_backward_has_passed(door):
    """The gradients are there already, and stay; `summon_full_params` shows them, too."""
    compare(door, freezing_passed, reshard=True)
    net = shard(Net(freezing_passed), door)
    net(randn(2, 3)).backward()
    assert all(param.grad is not None for param in net.parameters())
    if door in WRAPPED:
        with FSDP.summon_full_params(net, with_grads=True):
            assert all(param.grad.any() for param in net.parameters())


class Begun(nn.Module):
    """A root with a parameter that comes last in the backward, and a unit of two layers; hooks freeze both in time."""

    is_unit = True

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Parameter(torch.ones(3))
        self.unit = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        self.unit.is_unit = True
        self.after = nn.Linear(3, 3)
        self.freezes = list
        self.unit[1].register_full_backward_hook(self.freeze)

    def freeze(self, *_):
        for param in self.freezes():
            param.requires_grad_(False)

    def forward(self, x):
        return self.after(self.unit(x * self.last)).square().sum()


@on_ranks(2)
def test_a_hook_may_freeze_a_flat_parameter_in_the_middle_of_it():
    """Parts that the backward has reached by then get gradients; the others do not."""
    net = FSDP(Begun())
    net.module.freezes = net.parameters
    net(randn(2, 3)).backward()
    with FSDP.summon_full_params(net, with_grads=True):
        is_given = {name: bool(param.grad.any()) for name, param in net.module.named_parameters()}
    late = {"last", "unit.0.weight", "unit.0.bias"}
    assert {name for name, given in is_given.items() if not given} == late


@on_ranks(2)
def test_a_hook_may_freeze_a_flat_parameter_of_which_a_part_was_used():
    """It keeps its gradient, although a part of it, which no rank has used, has none."""
    net = Net(freezing_passed)
    net.inner.unused = nn.Parameter(torch.ones(2))
    net = shard(net, "wrapper")
    net(randn(2, 3)).backward()
    assert all(param.grad is not None for param in net.parameters())


WRAPPED = {"wrapper", "no_flatten", "orig_params"}


@on_ranks(2)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("use_reentrant", [True, in_full(False)])
def test_what_a_second_run_trains_again_is_named(door, use_reentrant):
    """The backward has agreed that no rank trains the unit: its gradient would be lost."""
    net = shard(Net(rerun(adversarial, use_reentrant)), door)
    loss = net(randn(2, 3))
    inner = net.get_submodule("module.inner" if door in WRAPPED else "inner")
    inner.requires_grad_(False)
    with pytest.raises(BackwardOrderError, match=r"`inner.* must be trained when the backward begins, and reached"):
        loss.backward()
    inner.requires_grad_(True)
    compare(door, adversarial, reshard=True)


class ThawsOne(nn.Module):
    """A reentrant checkpoint whose second run trains ``late.weight``, which its first has frozen."""

    is_unit = True

    def __init__(self):
        super().__init__()
        self.early, self.late, self.is_second = nn.Linear(3, 3), nn.Linear(3, 3), False

    def run(self, x):
        self.late.weight.requires_grad_(self.is_second)
        self.is_second = not self.is_second
        return self.late(self.early(x))

    def forward(self, x):
        return checkpoint(self.run, x.requires_grad_(), use_reentrant=True)


@on_ranks(2)
@pytest.mark.parametrize("door", ["no_flatten", "orig_params", "fully_shard", in_full("owned")])
def test_one_parameter_that_a_second_run_trains_again_is_named(door):
    """Although other gradients of its unit were ready before."""
    net = shard(ThawsOne(), door)
    loss = net(randn(2, 3)).sum()
    with pytest.raises(BackwardOrderError, match=r"`.*late.weight` must be trained when the backward begins"):
        loss.backward()


def rerun(way, use_reentrant):
    """``way`` in a checkpoint, whose second run sees whole parameters, and sets their flags."""

    def run(net, x):
        return checkpoint(functools.partial(way, net), x, use_reentrant=use_reentrant)

    return run


def frozen_once(net, x):
    """The only call of ``inner`` is frozen; of what follows, both runs save as much."""
    net.inner.requires_grad_(False)
    x = net.inner(x).tanh()
    net.inner.requires_grad_(True)
    return net.first(x[:, :3]).square().sum()


@pytest.mark.pairs
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("way", [adversarial, frozen_once], ids=lambda way: way.__name__)
def test_a_checkpoint_may_freeze_units_inside_it(door, use_reentrant, way):
    """For some of their calls or all; the next pass starts with the flags that the second run has left."""
    compare(door, rerun(way, use_reentrant), reshard=True)


class PartlyFrozen(nn.Linear):
    is_unit = True

    def forward(self, x):
        self.weight.requires_grad_(False)
        return super().forward(x)


@on_ranks(2)
def test_a_forward_that_freezes_a_part_of_a_flat_parameter_is_named():
    """No parameter is registered for one of several. The error is raised once, by what follows, and undoes it."""
    net = shard(PartlyFrozen(3, 3), "wrapper")
    loss = net(randn(2, 3)).sum()
    with pytest.raises(FairshardError, match="`requires_grad` of parameter `weight` must not be changed"):
        loss.backward()
    net.module.forward = functools.partial(nn.Linear.forward, net.module)
    net(randn(2, 3)).sum().backward()
    with FSDP.summon_full_params(net, with_grads=True):
        assert all(param.grad.any() for param in net.parameters())


def ending(net, x):
    return checkpoint(lambda x: net.inner(x).square().sum(), x, use_reentrant=True)


@on_ranks(1, 2, in_full(3))
@pytest.mark.parametrize("door", DOORS)
def test_the_loss_may_be_the_output_of_a_reentrant_checkpoint(door):
    """Autograd does not list the only root of a backward among the nodes that it runs."""
    compare(door, ending, reshard=True)


def probing(net, x):
    if dist.get_rank() == 0:
        probe = torch.zeros(2, requires_grad=True)
        probe.grad = torch.ones(2)
        torch.optim.SGD([probe], lr=0.1).step()
    return net.inner(x).square().sum()


@on_ranks(2)
@pytest.mark.parametrize("door", DOORS)
def test_an_optimizer_of_something_else_concerns_no_unit(door):
    """It may step in a forward, on one rank only."""
    net = shard(Net(probing), door)
    for _ in range(3):
        net(randn(2, 3)).backward()


def halving(net, x):
    y = net.inner(x)
    with torch.no_grad():
        for param in net.inner.parameters():
            param.mul_(0.5)
    return net.inner(y).square().sum()


@on_ranks(1, 2)
@pytest.mark.parametrize("door", ["no_flatten", "orig_params", "fully_shard"])
def test_a_write_between_two_calls_counts_although_the_unit_stays_gathered(door):
    """The shards are registered between the calls, and the second call gathers what was written."""
    torch.manual_seed(0)
    plain = Net(halving).to(rank_device())
    torch.manual_seed(0)
    net = shard(Net(halving), door, reshard_after_forward=False)
    for each in (plain, net):
        for param in each.parameters():
            param.requires_grad_(False)
    for step in range(3):
        torch.testing.assert_close(net(randn(2, 3, key=step)), plain(randn(2, 3, key=step)))


def mixing(net, x):
    with torch.no_grad():
        for old, new in zip(net.inner.parameters(), net.first.parameters(), strict=True):
            old.mul_(0.9).add_(new.sum() + torch.zeros(old.shape, device=x.device))
    return net.inner(x).sum()


@on_ranks(2)
def test_an_average_of_whole_parameters_and_shards_is_told_which_are_whole():
    """`first` stays whole after its call, `inner` is still cut."""
    net = placed(Net(mixing), reshard_after_forward=False)
    with pytest.raises(ParameterShardedError, match=r"first call `reshard\(\)` of `first`, which is whole"):
        net(randn(2, 3))


def fill(way, reshard, how=filling):
    net = Net(how)
    net.inner.requires_grad_(False)
    net.number = 1
    net = WAYS[way](net, reshard)
    for number in range(1, 5):
        net(randn(2, 3)).backward()
        assert net.seen == [number, -number]


def clamping_late(net, x):
    outputs = net.inner(x).square().sum()
    clamp(net)
    return outputs + net.inner(x.detach()).square().sum()


@pytest.mark.cpu_only(TORN)
@on_ranks(2)
@pytest.mark.parametrize("door", ["wrapper", "orig_params"])
def test_a_write_between_two_calls_that_are_trained_raises_in_the_backward(door):
    """Plain PyTorch raises there, too: the first call's gradients need the old weights."""
    net = shard(Net(clamping_late), door)
    for _ in range(2):
        loss = net(randn(2, 3))
        with pytest.raises(ShardChangedError, match="must not change between its forward and its backward"):
            loss.backward()
    net.way = clamping
    net(randn(2, 3)).backward()


class Again(nn.Linear):
    """Calls ``outer``, its wrapper, once, after it has written to ``refs``."""

    def __init__(self):
        super().__init__(3, 3)
        nn.init.constant_(self.weight, 0.5)
        nn.init.zeros_(self.bias)
        self.outer, self.refs, self.is_nested = [], [], False

    def forward(self, x):
        x = super().forward(x)
        if not self.is_nested:
            with torch.no_grad():
                for param in self.refs:
                    param.fill_(2.0)
            self.is_nested = True
            x = self.outer[0](x)
            self.is_nested = False
        return x


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_a_call_inside_its_own_call_computes_with_the_same_weights(use_orig_params):
    """The parameters in use are not freed; the backward raises, and the next pass has the new values."""
    inner = Again().to(rank_device())
    net = FSDP(nn.Sequential(FSDP(inner, use_orig_params=use_orig_params)))
    inner.outer.append(net[0])
    inputs = torch.ones(2, 3, device=rank_device())
    net(inputs).sum().backward()
    inner.refs = list(net.parameters())
    outputs = net(inputs)
    assert outputs.eq(1.5 * 1.5).all()
    with pytest.raises(ShardChangedError, match="must not change between its forward and its backward"):
        outputs.sum().backward()
    assert net(inputs).eq(8 * 6 + 2).all()


class Experts(nn.Module):
    """Three experts, of which the second is frozen for its call, and an average of weights that each forward halves."""

    is_unit = True

    def __init__(self, is_checkpointed):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.average = nn.Linear(4, 4).requires_grad_(False)
        for module in (*self.experts, self.average):
            module.is_unit = True
        self.is_checkpointed = is_checkpointed

    def mix(self, x, chosen):
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = chosen == number
            if number == 1:
                expert.requires_grad_(False)
            mixed = mixed.masked_scatter(mask[:, None].expand_as(x), expert(x[mask]).tanh())
            if number == 1:
                expert.requires_grad_(True)
        return (mixed + x).square().mean(0).sum()

    def forward(self, x, chosen):
        with torch.no_grad():
            for param in self.average.parameters():
                param.mul_(0.5)
        x = x + self.average(x)
        return checkpoint(self.mix, x, chosen, use_reentrant=True) if self.is_checkpointed else self.mix(x, chosen)


@pytest.mark.cpu_only(TORN)
@on_ranks(in_full(1), 2, in_full(3))
@pytest.mark.parametrize("door", ["orig_params", "fully_shard"])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_experts_may_have_no_tokens_and_be_frozen_for_a_call(door, is_checkpointed):
    """Rank 0 has no tokens of the second expert, and in odd steps no rank has any of the third."""
    torch.manual_seed(0)
    plain = Experts(False).to(rank_device())
    torch.manual_seed(0)
    net = shard(Experts(is_checkpointed), door)
    losses = []
    for model in (plain, net):
        optimizer, own = torch.optim.SGD(model.parameters(), lr=0.2), []
        for step in range(4):
            x = randn(6, 4, key=(step, dist.get_rank())).requires_grad_()
            chosen = torch.arange(6, device=x.device) % (3 - step % 2)
            loss = model(x, chosen.masked_fill(chosen == 1, 0) if dist.get_rank() == 0 else chosen)
            loss.backward()
            if model is plain:
                average_grads_(plain.parameters(), keeps_none=True)
            optimizer.step()
            optimizer.zero_grad()
            own.append(loss.item())
        losses.append(own)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
