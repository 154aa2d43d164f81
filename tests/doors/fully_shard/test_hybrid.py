"""Shards over one dimension of a mesh, replicas over the other, and deferred sums over replicas."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed.device_mesh import init_device_mesh

from fairshard.errors import PartialGradientError, TrainingStateError
from fairshard.nn import CPUOffloadPolicy, MixedPrecisionPolicy, Owned, RowBlocks, fully_shard
from fairshard.utils.collectives import counters, reset_counters
from tests.kit import rank_device, run_ranks
from tests.kit.doors import shard, whole_grads
from tests.models import loss_of_tiny, mlp, tiny
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state, randn, squares
from tests.torch_gaps import needs_fsdp2_on_cpu

pytestmark = pytest.mark.behaviour("replicas of fully_shard")

# How each backward reduces gradients: not at all, over shards, or over all ranks. "zero": drop all gradients.
ORDERS = [
    "shards all",
    "shards shards all all",
    "none shards all",
    "shards none all",
    "none shards none all",
    "all shards all",
    "shards zero all",
    "shards zero shards all",
    "none shards zero none all",
]


def set_travel(model, how):
    model.set_requires_gradient_sync(how != "none")
    model.set_requires_all_reduce(how != "shards")


class Sums:
    """The expected gradients, computed term by term from those of a plain replica."""

    def __init__(self, num_shards):
        self.num_shards = num_shards
        self.drop()

    def drop(self):
        self.local, self.kept, self.grads = None, None, None

    def take(self, grads, how):
        """Add the local gradients ``grads``, reduced as ``how`` says."""
        self.local = _plus(self.local, grads)
        if how == "none":
            return
        of_shards = self._over_shards(self.local)
        self.local = None
        if how == "shards" and len(of_shards) > 1:  # one replica has nothing to defer
            self.kept = of_shards if self.kept is None else list(map(_plus, of_shards, self.kept))
            return
        if self.kept is not None:
            of_shards, self.kept = list(map(_plus, of_shards, self.kept)), None
        total = functools.reduce(_plus, of_shards)
        self.grads = _plus(self.grads, [grad / dist.get_world_size() for grad in total])

    def _over_shards(self, grads):
        """For each replica, the sum over its ranks in order."""
        found = []
        for grad in grads:
            every = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
            dist.all_gather(every, grad)
            every = [one.float() for one in every]
            step = self.num_shards
            found.append([functools.reduce(torch.add, every[at : at + step]) for at in range(0, len(every), step)])
        return [list(of_replica) for of_replica in zip(*found, strict=True)]


def _plus(before, now):
    return now if before is None else [one + other for one, other in zip(before, now, strict=True)]


OFFLOADED = {"offload_policy": CPUOffloadPolicy()}
PLACED = {
    "blocks": {"shard_placement_fn": lambda param: RowBlocks(2)},
    "owned": {"shard_placement_fn": lambda param: Owned()},
}
MESHES = [  # shape, settings, whether it runs only in full
    ((2, 1), {}, False),
    ((1, 2), {}, False),
    ((2, 1), OFFLOADED, False),
    ((2, 2), {}, False),
    ((2, 2), {"bucket_cap_mb": 0}, True),
    *(((2, 1), placed, False) for placed in PLACED.values()),
    *(((2, 2), {**placed, **more}, True) for placed in PLACED.values() for more in ({}, OFFLOADED)),
    *((shape, more, True) for shape in ((1, 4), (4, 1)) for more in ({}, OFFLOADED)),
]


@pytest.mark.parametrize("number", [in_full(number) if mesh[2] else number for number, mesh in enumerate(MESHES)])
def test_sums_that_wait_are_added(number):
    """After any sequence of backwards, one over all ranks gives the mean of all gradients, to the bit."""
    shape, _, _ = MESHES[number]
    run_ranks(shape[0] * shape[1], check_orders, number, timeout=120)


def check_orders(number):
    shape, kwargs, _ = MESHES[number]
    plain = tiny()
    mesh = init_device_mesh(rank_device().type, shape)
    model = shard(copy.deepcopy(plain), "fully_shard", "first.up", "first", "second", "shared", mesh=mesh, **kwargs)
    for order in ORDERS:
        sums = Sums(shape[1])
        model.zero_grad()
        for step, how in enumerate(order.split()):
            if how == "zero":
                model.zero_grad(set_to_none=step % 2 == 0)
                sums.drop()
                continue
            set_travel(model, how)
            loss_of_tiny(model, (step,)).backward()
            loss = loss_of_tiny(plain, (step,))
            sums.take(list(torch.autograd.grad(loss, list(plain.parameters()))), how)
        rtol = 0.0 if rank_device().type == "cpu" else 1e-5
        names = [name for name, _ in plain.named_parameters()]
        assert_same_state(whole_grads(model), dict(zip(names, sums.grads, strict=True)), rtol, rtol)


@on_ranks(2)
def test_what_waits_is_wide():
    """Deferred bf16 gradients are kept in fp32, so adding to them does not round before the mean."""
    mesh = init_device_mesh(rank_device().type, (2, 1))
    model = fully_shard(mlp(4, 3), mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
    for how, size in (("shards", 256.0), ("all", 1.0)):
        set_travel(model, how)
        model(torch.full((1, 4), size, device=rank_device())).sum().backward()
    assert model[0].weight.grad.full_tensor().unique().tolist() == [257.0]


def linears(shape=(2, 1), **kwargs):
    """Three Linears, each a unit, on a mesh of ``shape``."""
    mesh = init_device_mesh(rank_device().type, shape)
    return shard(mlp(4, 9, 5, 3), "fully_shard", "0", "2", "4", mesh=mesh, **kwargs)


@on_ranks(2)
def test_what_waits_survives_other_events():
    """Deferred sums survive evaluation, and a unit that the backward does not reach."""
    model, first = linears(), linears()
    set_travel(model, "shards")
    squares(model, 0).backward()
    assert all(not param.grad.to_local().any() for param in model.parameters())
    with torch.no_grad():
        model(randn(3, 4))
    set_travel(model, "all")
    model[2](randn(3, 9, key=(1,))).sum().backward()  # only the second Linear
    squares(first, 0).backward()
    torch.testing.assert_close(model[0].weight.grad, first[0].weight.grad, rtol=1e-6, atol=1e-6)


@on_ranks(2)
def test_what_an_interrupted_backward_has_sent_of_what_waits_is_lost():
    """If a backward raises after it has sent deferred sums, steps raise until gradients are zeroed."""
    model, expected = linears(bucket_cap_mb=0), linears()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    raises = []

    def fail(grad):
        if raises:
            raise RuntimeError(raises.pop())

    def watch(module, args, out):
        if out.requires_grad:
            out.register_hook(fail)

    model[1].register_forward_hook(watch)
    for set_to_none in (True, False):
        set_travel(model, "shards")
        squares(model, 0).backward()
        set_travel(model, "all")
        raises.append("on purpose")
        with pytest.raises(RuntimeError, match="on purpose"):
            squares(model, 1).backward()  # the last Linear's is in flight
        squares(model, 1).backward()
        with pytest.raises(PartialGradientError):
            optimizer.step()
        optimizer.zero_grad(set_to_none)
        squares(model, 0).backward()
        if set_to_none:
            squares(expected, 0).backward()
        assert_same_state(whole_grads(model), whole_grads(expected), 1e-6, 1e-6)
        model.zero_grad()


@on_ranks(2)
def test_gradients_that_wait_must_not_be_clipped():
    """Clipping would miss deferred sums, so it raises in torch; after a full reduction it works."""
    model = linears()
    for how in ("all", "shards"):
        set_travel(model, how)
        squares(model).backward()
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    model.zero_grad()
    set_travel(model, "all")
    squares(model).backward()
    expected = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in whole_grads(model).values()]))
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    torch.testing.assert_close(norm.full_tensor(), expected, rtol=1e-6, atol=0)


@on_ranks(4)
def test_nothing_is_sent_to_replicas_while_sums_wait():
    """Each bucket takes one reduce-scatter, and no all-reduce until the last backward."""
    model = linears((2, 2))
    model(randn(3, 4)).sum().backward()
    seen = []
    for how in ("none", "shards", "all"):
        set_travel(model, how)
        reset_counters()
        model(randn(3, 4)).sum().backward()
        seen.append([counters().get(kind, (0, 0))[0] for kind in ("reduce_scatter", "all_reduce")])
    assert seen == [[0, 0], [1, 0], [1, 1]]


@needs_fsdp2_on_cpu
@pytest.mark.cpu_only("torch's FSDP2 sums in gloo's order")
@on_ranks(4)
def test_sums_that_wait_are_those_of_torch():
    """PyTorch's FSDP2, set to reduce by sums as we always do, gives the same gradients, also with a divisor."""
    mesh = init_device_mesh(rank_device().type, (2, 2), mesh_dim_names=("replicas", "shards"))
    results = []
    for engine in (fully_shard, torch.distributed.fsdp.fully_shard):
        model = mlp(4, 9, 5)
        for module in (model[0], model[2], model):
            engine(module, mesh=mesh)
            module.set_force_sum_reduction_for_comms(True)
        for key in range(4):
            model.set_requires_all_reduce(key >= 2)
            if key == 3:
                model[0].set_gradient_divide_factor(3.0)
            squares(model, key).backward()
        results.append([param.grad.full_tensor() for param in model.parameters()])
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


@on_ranks(2)
def test_one_module_alone_can_wait():
    """With ``recurse=False`` one module defers its sum; the others reduce as before, in their own buckets."""
    model = linears()
    model[0].set_requires_all_reduce(False, recurse=False)
    model(randn(3, 4)).sum().backward()
    assert not model[0].weight.grad.to_local().any()
    assert model[2].weight.grad.to_local().any()


@on_ranks(1)
def test_wrong_arguments_are_named():
    """A flag that is not a bool raises an error, and so does a change in the middle of a pass."""
    model = fully_shard(mlp(2, 2))
    for wrong in (1, None, "no"):
        with pytest.raises(ValueError, match="`requires_all_reduce` must be True or False"):
            model.set_requires_all_reduce(wrong)
    with pytest.raises(ValueError, match="`recurse` must be True or False"):
        model.set_requires_all_reduce(True, recurse=1)
    model.register_forward_hook(lambda *_: model.set_requires_all_reduce(False))
    with pytest.raises(TrainingStateError, match="must be called between passes"):
        model(torch.ones(1, 2, device=rank_device()))
