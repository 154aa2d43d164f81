"""A parameter that no rank's backward reached keeps ``.grad`` None; one that any rank reached gets the mean."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairshard.nn import CPUOffloadPolicy, MixedPrecisionPolicy
from tests.engine.random_nets import shard, whole_state
from tests.kit import rank_device
from tests.on_ranks import in_full, on_ranks

pytestmark = pytest.mark.behaviour("unreached parameters")

BY_PARAM = ["no_flatten", "orig_params", "fully_shard"]  # doors that register one tensor for each parameter
DIM = 3


class Parts(nn.Module):
    """Three layers of one unit, and a fourth in its own unit: a pass uses the layers that it names."""

    def __init__(self):
        super().__init__()
        self.every, self.one, self.nobody, self.apart = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x, names):
        called = self.apart(x)  # on every rank, because it is a unit
        for name in names:
            x = x + torch.tanh(called if name == "apart" else getattr(self, name)(x))
        return x


class Model(nn.Module):
    """A layer, `Parts`, which may be checkpointed, and a head."""

    def __init__(self, mode=None):
        super().__init__()
        self.mode = mode
        self.first, self.parts, self.head = nn.Linear(DIM, DIM), Parts(), nn.Linear(DIM, 2)

    def forward(self, x, names):
        x = self.first(x)
        if self.mode is None:
            x = self.parts(x, names)
        else:
            x = checkpoint(self.parts, x, names, use_reentrant=self.mode == "reentrant")
        return self.head(x)


def build(mode=None):
    torch.manual_seed(0)
    model = Model(mode)
    for part in (model, model.parts, model.parts.apart):
        part.is_unit = True
    return model.to(rank_device())


def on_the_last(name):
    """Layers that each rank uses: all use ``every``; the last rank also uses ``name``."""
    return lambda rank: ["every", name] if rank == dist.get_world_size() - 1 else ["every"]


def nothing(rank):
    """All ranks use only ``every``."""
    return ["every"]


# Passes of a step (whether each one reduces, and which layers each rank uses), and the parts that stay None.
STEPS = {
    "one pass": ([(True, on_the_last("one"))], {"nobody", "apart"}),
    "one pass, apart": ([(True, on_the_last("apart"))], {"nobody", "one"}),
    "one pass, not even every": ([(True, lambda rank: [])], {"nobody", "one", "every", "apart"}),
    "kept, then none": ([(False, on_the_last("one")), (True, nothing)], {"nobody", "apart"}),
    "kept, then nothing of the unit": ([(False, on_the_last("apart")), (True, lambda rank: [])], {"nobody", "one"}),
    "kept none, then one": ([(False, nothing), (True, on_the_last("one"))], {"nobody", "apart"}),
    "kept twice": ([(False, on_the_last("one")), (False, on_the_last("apart")), (True, nothing)], {"nobody"}),
    "added to none": ([(True, nothing), (True, on_the_last("one"))], {"nobody", "apart"}),
    "none is added": ([(True, on_the_last("apart")), (True, nothing)], {"nobody", "one"}),
    "reduced, kept, reduced": (
        [(True, on_the_last("apart")), (False, on_the_last("one")), (True, nothing)],
        {"nobody"},
    ),
}


def loss_of(model, key, names, rank):
    number = hash(key) % 1000 * 10 + rank  # a hash of integers: the same in every process
    x = torch.randn(2, DIM, generator=torch.Generator("cpu").manual_seed(number), device="cpu")
    return model(x.to(rank_device()), names).square().sum()


def take_passes(plain, wrapped, passes, step):
    """Run the backwards of one step: on the plain model for all ranks' losses, on the wrapped one for this rank's."""
    world_size, own = dist.get_world_size(), dist.get_rank()
    for number, (reduces, uses) in enumerate(passes):
        key = step, number
        for rank in range(world_size):
            loss_of(plain, key, uses(rank), rank).backward()
        set_sync(wrapped, reduces)
        loss_of(wrapped, key, uses(own), own).backward()
    set_sync(wrapped, True)
    for param in plain.parameters():
        if param.grad is not None:
            param.grad /= world_size


def set_sync(model, reduces):
    """Make the next backwards reduce gradients, or keep them."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(reduces)
    else:
        for module in model.modules():
            if hasattr(module, "_fairshard_unit"):
                module._fairshard_unit.sync = reduces


def parts_without_grads(model):
    """Parts of the model without gradients; in each part either all parameters have one or none do."""
    missing, found = set(), set()
    for name, param in model.named_parameters():
        part = next((part for part in ("every", "one", "nobody", "apart") if part in name.split(".")), "")
        (missing if param.grad is None else found).add(part)
    assert not missing & found
    return missing


decaying = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1)


def run(door, steps, mode=None, make=decaying, **kwargs):
    """Train with weight decay: a gradient of zeros would decay the weight, None leaves it unchanged."""
    plain = build(mode)
    wrapped = shard(copy.deepcopy(plain), door, **kwargs)
    of_plain, of_wrapped = make(plain.parameters()), make(wrapped.parameters())
    for step, name in enumerate(steps):
        passes, missing = STEPS[name]
        take_passes(plain, wrapped, passes, step)
        assert parts_without_grads(plain) == missing, name
        assert parts_without_grads(wrapped) == missing, name
        for optimizer in (of_plain, of_wrapped):
            optimizer.step()
            optimizer.zero_grad()
    state, initial = whole_state(wrapped), build(mode).state_dict()
    for name, expected in plain.state_dict().items():
        found = state[name].to(expected.device)
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)  # ranks are summed in another order
        if "nobody" in name:
            assert torch.equal(found, initial[name]), name


@on_ranks(in_full(1), 2, in_full(3))
@pytest.mark.parametrize("door", [in_full("no_flatten"), "orig_params", "fully_shard"])
def test_what_no_rank_reached_stays_none(door):
    """After any kind of step, a parameter that no rank reached in any pass has None, every other has the mean."""
    for name in STEPS:
        run(door, [name, name])
    run(door, list(STEPS))
    run(door, list(STEPS)[::-1])


@on_ranks(in_full(1), 2, in_full(3))
@pytest.mark.parametrize("door", BY_PARAM)
def test_weight_decay_of_adamw_leaves_what_no_rank_reached(door):
    """AdamW changes parameters that have a gradient, even of zeros; those that no rank reached keep every bit."""
    run(door, ["one pass", "added to none", "kept, then none"], make=partial(torch.optim.AdamW, lr=0.1))


@pytest.mark.pairs
@on_ranks(in_full(1), 2, in_full(3))
@pytest.mark.parametrize("door", BY_PARAM)
@pytest.mark.parametrize("mode", [in_full("reentrant"), "not_reentrant"])
def test_inside_a_checkpoint(door, mode):
    """Recomputation shows which parameters a checkpoint reaches: the same ones stay None."""
    for name in STEPS:
        run(door, [name, name], mode)
    run(door, list(STEPS), mode)


@on_ranks(1, 2)
@pytest.mark.parametrize("door", ["wrapper", *BY_PARAM])
@pytest.mark.parametrize("name", ["every", "one"])
def test_what_a_checkpoint_could_have_reached_waits_for_nothing(door, name):
    """Under ``no_sync``, recomputation shows that parameters have no gradient; others that wait still do."""
    plain, rank = build("reentrant"), dist.get_rank()
    wrapped = shard(copy.deepcopy(plain), door)
    optimizer = decaying(wrapped.parameters())
    for _ in range(2):
        take_passes(plain, wrapped, [(False, on_the_last(name)), (False, lambda rank: [])], 0)
        wrapped.mode = None
        loss_of(wrapped, 1, [], rank).backward()
        if door != "wrapper":
            assert parts_without_grads(wrapped) == parts_without_grads(plain)
        optimizer.step()
        wrapped.mode = "reentrant"
        for model in (plain, wrapped):
            model.zero_grad()


@pytest.mark.pairs
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("door", BY_PARAM)
@pytest.mark.parametrize("mode", [None, "reentrant"])
def test_with_parameters_in_host_memory(door, mode):
    """With gradients in host memory, the same parameters have None."""
    offload = {"offload_policy": CPUOffloadPolicy()} if door == "fully_shard" else {"cpu_offload": True}
    run(door, list(STEPS), mode, **offload)


WIDER = {"mixed_precision": True, "compute_dtype": torch.bfloat16, "fp32_reduce_scatter": True}


@on_ranks(in_full(1), 2, in_full(3))
@pytest.mark.parametrize("door", BY_PARAM)
def test_sums_that_are_kept_in_a_wider_dtype(door):
    """``no_sync`` keeps a unit's bf16 gradients in one fp32 tensor; parameters that no rank reached still have None."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    wrapped = shard(build(), door, **({"mp_policy": policy} if door == "fully_shard" else WIDER))
    for name, (passes, missing) in STEPS.items():
        for number, (reduces, uses) in enumerate(passes):
            set_sync(wrapped, reduces)
            loss_of(wrapped, number, uses(dist.get_rank()), dist.get_rank()).backward()
        set_sync(wrapped, True)
        assert parts_without_grads(wrapped) == missing, name
        wrapped.zero_grad()


@pytest.mark.pairs
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("mode", [None, "reentrant", "not_reentrant"])
@pytest.mark.parametrize("cpu_offload", [False, True])
def test_a_flat_shard_is_none_or_whole(mode, cpu_offload):
    """A flat shard that any rank reaches has zeros in its unreached parts; one that no rank reaches has None."""
    wrapped = shard(build(mode), "wrapper", cpu_offload=cpu_offload)
    rank = dist.get_rank()
    for _ in range(2):
        loss_of(wrapped, 0, on_the_last("one")(rank), rank).backward()
        parts, apart = wrapped.parts.params[0], wrapped.parts.apart.params[0]
        assert apart.grad is None
        line = _gathered(parts.grad)
        sizes = [sum(p.numel() for p in part.parameters()) for part in (nn.Linear(DIM, DIM),) * 3]
        every, one, nobody = line[: sum(sizes)].split(sizes)
        assert every.any()
        assert one.any()
        assert not nobody.any()
        wrapped.zero_grad()
        loss_of(wrapped, 1, [], rank).backward()
        assert parts.grad is None
        assert apart.grad is None
        wrapped.zero_grad()


def _gathered(grad):
    parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, grad)
    return torch.cat(parts)


@on_ranks(2)
@pytest.mark.parametrize("door", BY_PARAM)
def test_zeros_of_the_other_ranks_count(door):
    """A gradient that only one rank has is still divided by the number of all ranks."""
    plain, rank = build(), dist.get_rank()
    wrapped = shard(copy.deepcopy(plain), door)
    before = whole_state(wrapped)["parts.one.bias"].clone()
    loss_of(plain, 0, on_the_last("one")(1), 1).backward()
    loss_of(wrapped, 0, on_the_last("one")(rank), rank).backward()
    torch.optim.SGD(wrapped.parameters(), lr=1.0).step()
    expected = before - plain.parts.one.bias.grad / 2
    torch.testing.assert_close(whole_state(wrapped)["parts.one.bias"], expected, rtol=2e-6, atol=2e-6)
