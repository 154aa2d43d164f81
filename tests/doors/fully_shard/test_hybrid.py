"""Shards over one dimension of a mesh, replicas over the other, and deferred sums over replicas."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fairshard.errors import PartialGradientError, TrainingStateError
from fairshard.nn import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, Owned, RowBlocks, fully_shard
from fairshard.utils.collectives import counters, reset_counters
from tests.kit import rank_device
from tests.models import mlp, tiny, tiny_batch, tiny_loss
from tests.on_ranks import in_full, on_ranks
from tests.reference import randn
from tests.torch_gaps import needs_fsdp2_on_cpu

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


def shard_tiny(model, mesh, **kwargs):
    for part in (model.first.up, model.first, model.second, model.shared):
        fully_shard(part, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


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


def local_grads(plain, key):
    """The gradients of this rank's batch of ``key``."""
    *inputs, targets = tiny_batch(dist.get_rank(), key)
    return list(torch.autograd.grad(tiny_loss(plain(*inputs), targets), list(plain.parameters())))


def backward(model, key):
    *inputs, targets = tiny_batch(dist.get_rank(), key)
    tiny_loss(model(*inputs), targets).backward()


def assert_grads(model, expected):
    rtol = 0.0 if rank_device().type == "cpu" else 1e-5
    for (name, param), grad in zip(model.named_parameters(), expected, strict=True):
        whole = param.grad.full_tensor().to(grad.device)
        torch.testing.assert_close(whole, grad, rtol=rtol, atol=rtol, msg=lambda text, name=name: f"{name}: {text}")


def check_orders(shape, orders, **kwargs):
    plain = tiny()
    mesh = init_device_mesh(rank_device().type, shape)
    model = shard_tiny(copy.deepcopy(plain), mesh, **kwargs)
    for order in orders:
        sums = Sums(shape[1])
        model.zero_grad()
        for step, how in enumerate(order.split()):
            if how == "zero":
                model.zero_grad(set_to_none=step % 2 == 0)
                sums.drop()
                continue
            set_travel(model, how)
            backward(model, step)
            sums.take(local_grads(plain, step), how)
        assert_grads(model, sums.grads)


@on_ranks(2)
def test_sums_that_wait_are_added_on_two_ranks():
    """After any sequence of backwards, one over all ranks gives the mean of all gradients, to the bit."""
    for shape in ((2, 1), (1, 2)):
        check_orders(shape, ORDERS)


@on_ranks(4, timeout=120)
@pytest.mark.parametrize("bucket_cap_mb", [25, pytest.param(0, marks=pytest.mark.full)])
def test_sums_that_wait_are_added_on_four_ranks(bucket_cap_mb):
    """The same holds on four ranks, with both mesh dimensions in use."""
    check_orders((2, 2), ORDERS, bucket_cap_mb=bucket_cap_mb)


@on_ranks(2, in_full(4), timeout=120)
@pytest.mark.parametrize("offload", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("place", [RowBlocks(2), Owned()], ids=["blocks", "owned"])
def test_sums_that_wait_are_added_for_unequal_rows(offload, place):
    """The same holds for parameters that are cut between blocks of two rows, or not at all."""
    shape = (2, dist.get_world_size() // 2)
    policy = CPUOffloadPolicy() if offload else OffloadPolicy()
    check_orders(shape, ORDERS, offload_policy=policy, shard_placement_fn=lambda param: place)


@on_ranks(in_full(4), timeout=120)
@pytest.mark.parametrize("shape", [(1, 4), (4, 1)])
@pytest.mark.parametrize("offload", [False, True])
def test_sums_that_wait_are_added_on_other_meshes(shape, offload):
    """The same holds with only one replica or one shard, and with shards in host memory."""
    check_orders(shape, ORDERS, offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy())


@on_ranks(2)
def test_sums_wait_beside_offloaded_shards():
    """Deferred sums are the same with gradients in host memory."""
    check_orders((2, 1), ORDERS, offload_policy=CPUOffloadPolicy())


@on_ranks(2)
def test_what_waits_is_wide():
    """Deferred bf16 gradients are kept in fp32, so adding to them does not round before the mean."""
    mesh = init_device_mesh(rank_device().type, (2, 1))
    model = fully_shard(mlp(4, 3), mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
    for how, size in (("shards", 256.0), ("all", 1.0)):
        set_travel(model, how)
        model(torch.full((1, 4), size, device=rank_device())).sum().backward()
    assert model[0].weight.grad.full_tensor().unique().tolist() == [257.0]


def linears(mesh, **kwargs):
    model = mlp(4, 9, 5, 3)
    for layer in (layer for layer in model if isinstance(layer, nn.Linear)):
        fully_shard(layer, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


def whole_grads(model):
    return [param.grad.full_tensor() for param in model.parameters()]


@on_ranks(2)
def test_what_waits_survives_other_events():
    """Deferred sums survive evaluation, and a unit that the backward does not reach."""
    mesh = init_device_mesh(rank_device().type, (2, 1))
    model, first = linears(mesh), linears(mesh)
    set_travel(model, "shards")
    model(randn(3, 4, key=(0,))).square().sum().backward()
    assert all(not param.grad.to_local().any() for param in model.parameters())
    with torch.no_grad():
        model(randn(3, 4))
    set_travel(model, "all")
    model[2](randn(3, 9, key=(1,))).sum().backward()  # only the second Linear
    first(randn(3, 4, key=(0,))).square().sum().backward()
    torch.testing.assert_close(whole_grads(model)[0], whole_grads(first)[0], rtol=1e-6, atol=1e-6)


@on_ranks(2)
def test_what_an_interrupted_backward_has_sent_of_what_waits_is_lost():
    """If a backward raises after it has sent deferred sums, steps raise until gradients are zeroed."""
    mesh = init_device_mesh(rank_device().type, (2, 1))
    model, expected = linears(mesh, bucket_cap_mb=0), linears(mesh)
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
        model(randn(3, 4, key=(0,))).square().sum().backward()
        set_travel(model, "all")
        raises.append("on purpose")
        with pytest.raises(RuntimeError, match="on purpose"):
            model(randn(3, 4, key=(1,))).square().sum().backward()  # the last Linear's is in flight
        model(randn(3, 4, key=(1,))).square().sum().backward()
        with pytest.raises(PartialGradientError):
            optimizer.step()
        optimizer.zero_grad(set_to_none)
        model(randn(3, 4, key=(0,))).square().sum().backward()
        if set_to_none:
            expected(randn(3, 4, key=(0,))).square().sum().backward()
        torch.testing.assert_close(whole_grads(model), whole_grads(expected), rtol=1e-6, atol=1e-6)
        model.zero_grad()


@on_ranks(2)
def test_gradients_that_wait_must_not_be_clipped():
    """Clipping would miss deferred sums, so it raises in torch; after a full reduction it works."""
    mesh = init_device_mesh(rank_device().type, (2, 1))
    model = linears(mesh)
    for how in ("all", "shards"):
        set_travel(model, how)
        model(randn(3, 4)).square().sum().backward()
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    model.zero_grad()
    set_travel(model, "all")
    model(randn(3, 4)).square().sum().backward()
    expected = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in whole_grads(model)]))
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    torch.testing.assert_close(norm.full_tensor(), expected, rtol=1e-6, atol=0)


@on_ranks(4)
def test_nothing_is_sent_to_replicas_while_sums_wait():
    """Each bucket takes one reduce-scatter, and no all-reduce until the last backward."""
    mesh = init_device_mesh(rank_device().type, (2, 2))
    model = linears(mesh)
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
    for shard in (fully_shard, torch.distributed.fsdp.fully_shard):
        model = mlp(4, 9, 5)
        for module in (model[0], model[2], model):
            shard(module, mesh=mesh)
            module.set_force_sum_reduction_for_comms(True)
        for key in range(4):
            model.set_requires_all_reduce(key >= 2)
            if key == 3:
                model[0].set_gradient_divide_factor(3.0)
            model(randn(3, 4, key=(key,))).square().sum().backward()
        results.append(whole_grads(model))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@on_ranks(2)
def test_one_module_alone_can_wait():
    """With ``recurse=False`` one module defers its sum; the others reduce as before, in their own buckets."""
    mesh = init_device_mesh(rank_device().type, (2, 1))
    model = linears(mesh)
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
