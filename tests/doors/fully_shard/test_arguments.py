"""Arguments that `fully_shard` accepts, and those it refuses before any communication, changing nothing."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fairshard.errors import RanksDisagreeError
from fairshard.nn import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.utils.testing import rank_device
from tests.models import mlp
from tests.on_ranks import on_ranks
from tests.reference import randn
from tests.torch_gaps import needs_fsdp2_on_cpu


def refused(error, match, module, *, whole=True, **kwargs):
    """Check that `fully_shard` raises, and that ``module`` does not change and still trains."""
    before = {name: param for tree in listed(module) for name, param in tree.named_parameters()}
    with pytest.raises(error, match=match):
        fully_shard(module, **kwargs)
    assert not whole or not any(isinstance(tree, FSDPModule) for tree in listed(module))
    after = {name: param for tree in listed(module) for name, param in tree.named_parameters()}
    assert all(after[name] is param for name, param in before.items())
    if whole:
        for tree in listed(module):
            if isinstance(tree, nn.Sequential):
                tree(randn(2, 4)).sum().backward()
                assert all(param.grad is not None for param in tree.parameters())


def listed(module):
    found = module if isinstance(module, (list, tuple)) else [module]
    return [tree for tree in found if isinstance(tree, nn.Module)]


@on_ranks(2)
def test_types_and_values_that_are_refused():
    """Each wrong argument raises an error with its name and value, and changes nothing."""
    model = mlp(4, 6, 4)
    refused(TypeError, "`module` must be an nn.Module.*str", "model")
    refused(TypeError, "holds an object of type int", [model, 3])
    refused(ValueError, "list is empty", [])
    refused(ValueError, "each module once", [model, model])
    refused(TypeError, "`mesh` must be a DeviceMesh, but is ProcessGroup", model, mesh=dist.group.WORLD)
    refused(ValueError, "but has 3", model, mesh=init_device_mesh(rank_device().type, (1, 1, 2)))
    for wrong in (3, 0, -1, 1.0, "all", torch.tensor(2)):
        refused(ValueError, "`reshard_after_forward` must be", model, reshard_after_forward=wrong)
    refused(TypeError, "`mp_policy` must be a MixedPrecisionPolicy, but is None", model, mp_policy=None)
    refused(TypeError, "`mp_policy` must be", model, mp_policy=torch_fsdp.MixedPrecision())
    refused(TypeError, "`mp_policy` must be", model, mp_policy=OffloadPolicy())
    refused(TypeError, "`offload_policy` must be an? OffloadPolicy, but is True", model, offload_policy=True)
    refused(TypeError, "`dp_mesh_dims` must be a DataParallelMeshDims or None", model, dp_mesh_dims=("dp",))
    refused(ValueError, r"`dp` is not one of \(\)", model, dp_mesh_dims=DataParallelMeshDims("dp"))
    refused(TypeError, "`ignored_params` must be an.*an object of type str", model, ignored_params={"0.weight"})
    refused(TypeError, "`ignored_params` must be an iterable", model, ignored_params=3)
    refused(TypeError, "`bucket_cap_mb`", model, bucket_cap_mb="25")
    refused(ValueError, "`order_check`", model, order_check="sometimes")
    refused(TypeError, "`nan_check`", model, nan_check=1)
    with pytest.raises(TypeError, match="process_group"):
        fully_shard(model, process_group=dist.group.WORLD)


@on_ranks(2)
def test_placements_that_are_refused():
    """A missing or uneven dimension, or a result that is not a Shard, raises an error that names the parameter."""
    model = mlp(4, 5, 4)
    by_weight = {
        Shard(1): None,
        Shard(2): (ValueError, r"Shard\(dim=2\) for `0.weight`, which has shape \(5, 4\)"),
        Shard(-3): (ValueError, r"`0.weight`"),
        Replicate(): (TypeError, r"returned Replicate .*`0.weight`"),
        1: (TypeError, r"returned int \(1\) for `0.weight`"),
    }
    for placement, expected in by_weight.items():
        if expected:
            refused(*expected, model, shard_placement_fn=lambda p, found=placement: found if p.dim() > 1 else None)
    refused(ValueError, r"2 ranks do not divide dimension 1 of `2.weight`, which has shape \(4, 5\)", model,
            shard_placement_fn=lambda param: Shard(param.dim() - 1))  # fmt: skip
    refused(TypeError, "must be a function", model, shard_placement_fn=Shard(1))


@on_ranks(2)
def test_a_mesh_of_other_ranks_is_refused():
    """A rank outside the mesh gets an error; the rank inside it shards."""
    mesh = DeviceMesh(rank_device().type, [1])
    model = mlp(4, 6, 4)
    if dist.get_rank() == 0:
        refused(ValueError, r"holds \[1\] and not rank 0", model, mesh=mesh)
    else:
        fully_shard(model, mesh=mesh)(randn(2, 4)).sum().backward()
        assert model[0].weight.grad.full_tensor().shape == (6, 4)


@on_ranks(2)
def test_modules_that_are_refused():
    """Modules without a forward, sharded, wrapped or lazy ones, and non-floating parameters are refused."""
    for container in (nn.ModuleList([mlp(4, 4)]), nn.ModuleDict(), nn.ParameterList([nn.Parameter(torch.ones(3))])):
        refused(ValueError, f"a {type(container).__name__} has none", container)
        refused(ValueError, "must have a forward", [mlp(4, 4), container])
    sharded = fully_shard(mlp(4, 6, 4))
    refused(ValueError, "sharded twice.*already", sharded, whole=False)
    refused(ValueError, "sharded twice", [mlp(4, 4), sharded], whole=False)
    refused(ValueError, "Inner modules.*`0.weight`", sharded[0], whole=False)
    refused(ValueError, "twice.*by FullyShardedDataParallel", FSDP(mlp(4, 4)), whole=False)
    for wrapper in (FSDP(mlp(4, 6, 4)), FSDP(mlp(4, 6, 4), use_orig_params=True)):
        refused(ValueError, "Inner modules.*`0.weight`.*use one of the two", wrapper.module[0], whole=False)
        refused(ValueError, "not by both, but `0`", nn.Sequential(wrapper), whole=False)
        wrapper(randn(2, 4)).sum().backward()
    with pytest.raises(ValueError, match="not by both, but `root`"):
        FSDP(sharded)
    with pytest.raises(ValueError, match="not by both, but `0`"):
        FSDP(nn.Sequential(sharded))
    with pytest.raises(ValueError, match=r"Inner modules.*`0.weight`"):
        FSDP(sharded[0])
    sharded(randn(2, 4)).sum().backward()
    refused(ValueError, "`0.weight` of a lazy module", nn.Sequential(nn.LazyLinear(3)), whole=False)
    mesh = init_device_mesh(rank_device().type, (2,))
    of_dtensors = mlp(4, 6, 4)
    of_dtensors[0].weight = nn.Parameter(distribute_tensor(of_dtensors[0].weight.detach(), mesh, [Replicate()]))
    refused(ValueError, "`0.weight` is on .*`dp_mesh_dims`", of_dtensors, whole=False)
    counting = mlp(4, 6, 4)
    counting.register_parameter("steps", nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False))
    refused((TypeError, ValueError), "`steps`", counting, whole=False)
    assert not isinstance(counting[0].weight, DTensor)


@on_ranks(2)
def test_torch_fsdp2_inside_and_outside():
    """Sharding one model with both torch's FSDP2 and `fully_shard` raises in either order."""
    theirs = mlp(4, 6, 4)
    torch_fsdp.fully_shard(theirs[0])
    refused(ValueError, "`0` is wrapped by torch.distributed.fsdp", theirs, whole=False)
    torch_fsdp.fully_shard(theirs)
    refused(ValueError, "`2?.?weight` is on|Inner", theirs[2], whole=False)
    refused(ValueError, "wrapped by torch.distributed.fsdp", theirs, whole=False)
    ours = mlp(4, 6, 4)
    fully_shard(ours[0])
    with pytest.raises((AssertionError, TypeError, ValueError)):  # torch's own error, which names no module
        torch_fsdp.fully_shard(ours)


@needs_fsdp2_on_cpu
@on_ranks(2)
def test_a_model_of_torch_trains_after_the_refusal():
    """A model that torch's FSDP2 has sharded still trains after `fully_shard` has refused it."""
    theirs = mlp(4, 6, 4)
    for module in (theirs[0], theirs):
        torch_fsdp.fully_shard(module)
    refused(ValueError, "wrapped by torch.distributed.fsdp", theirs, whole=False)
    theirs(randn(2, 4)).sum().backward()


@on_ranks(2)
def test_what_is_returned_and_accepted():
    """`fully_shard` returns its argument, and accepts the policies of both libraries and a bucket cap of 0."""
    model = mlp(4, 6, 4)
    pair = [model[0], model[2]]
    assert fully_shard(pair) is pair
    assert fully_shard(model) is model
    assert isinstance(model, FSDPModule)
    assert isinstance(model, nn.Sequential)
    assert [type(part).__name__ for part in model] == ["FSDPLinear", "Tanh", "FSDPLinear"]
    for policy in (MixedPrecisionPolicy(torch.bfloat16), torch_fsdp.MixedPrecisionPolicy(torch.bfloat16)):
        for offload in (CPUOffloadPolicy(), torch_fsdp.CPUOffloadPolicy(pin_memory=False), torch_fsdp.OffloadPolicy()):
            model = fully_shard(mlp(4, 6, 4), mp_policy=policy, offload_policy=offload, bucket_cap_mb=0)
            assert model(randn(2, 4)).dtype is torch.bfloat16
    model = fully_shard(mlp(4, 6, 8), shard_placement_fn=lambda p: Shard(-1) if p.dim() > 1 else None)
    assert model[0].weight.placements == (Shard(1),)
    assert model[0].bias.placements == (Shard(0),)
    model(randn(2, 4)).sum().backward()
    with pytest.warns(UserWarning, match="reshard_after_forward=1"):
        model = fully_shard(mlp(4, 6, 4), reshard_after_forward=1)
    model(randn(2, 4))
    assert gathered(model) == [""]
    model = fully_shard(nn.Sequential(fully_shard(mlp(4, 6, 4), reshard_after_forward=2)))
    model(randn(2, 4))
    assert gathered(model) == [""]


@on_ranks(2)
def test_ignored_params():
    """Ignored parameters stay plain, whole tensors with each rank's own gradient."""
    model = mlp(4, 6, 4)
    plain = copy.deepcopy(model)
    fully_shard(model, ignored_params={model[0].weight, nn.Parameter(torch.ones(1))})
    assert not isinstance(model[0].weight, DTensor)
    assert isinstance(model[0].bias, DTensor)
    for net in (model, plain):
        net(randn(3, 4)).square().sum().backward()
    assert torch.equal(model[0].weight.grad, plain[0].weight.grad)
    dist.all_reduce(plain[0].bias.grad)
    assert torch.equal(model[0].bias.grad.full_tensor(), plain[0].bias.grad / 2)


@on_ranks(2)
def test_ranks_that_disagree():
    """When ranks disagree, the first forward raises on all of them and names the difference."""

    def cut_last(param):
        return Shard(param.dim() - 1)

    first = dist.get_rank() == 0
    cases = [
        ({"shard_placement_fn": cut_last if first else None}, "sharded on dim 1.*sharded on dim 0"),
        (
            {"mp_policy": MixedPrecisionPolicy(output_dtype=torch.float16 if first else None)},
            "outputs in torch.float16",
        ),
        ({"mp_policy": MixedPrecisionPolicy(torch.bfloat16 if first else None)}, "bfloat16"),
        ({"reshard_after_forward": first}, "reshard_after_forward=True"),
        ({"bucket_cap_mb": 0 if first else 25}, "bucket_cap_mb|buckets"),
        ({"order_check": "off" if first else "always"}, "order_check"),
    ]
    for kwargs, match in cases:
        model = fully_shard(mlp(4, 6, 8), **kwargs)
        with pytest.raises(RanksDisagreeError, match=match):
            model(randn(2, 4))
    model = mlp(4, 6, 4)
    for part in [[model[0], model[2]]] if first else [model[0], model[2]]:
        fully_shard(part)
    with pytest.raises(RanksDisagreeError, match="0, 2"):
        fully_shard(model)(randn(2, 4))


def test_names_of_data_parallel_dimensions_are_tuples():
    """As torch's class has them."""
    dims = DataParallelMeshDims("dp", ("host", "pod"))
    assert (dims.shard_names, dims.replicate_names) == (("dp",), ("host", "pod"))
    assert DataParallelMeshDims(replicate="host").shard_names == ()
