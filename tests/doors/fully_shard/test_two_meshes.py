"""Modules of one model on different meshes, with replicas on some of them."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh

from fairshard.errors import MixedGroupsError, RanksDisagreeError
from fairshard.nn import fully_shard
from fairshard.optim import CPUOptimizer
from tests.models import mlp
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state, randn
from tests.torch_gaps import needs_fsdp2_on_cpu

pytestmark = [
    pytest.mark.behaviour("two meshes"),
    pytest.mark.cpu_only("its meshes and torch's FSDP2 beside it are on the CPU"),
]

BF16 = torch_fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
OFFLOADED = torch_fsdp.CPUOffloadPolicy(pin_memory=False)
SYNC, ALL_REDUCE = "set_requires_gradient_sync", "set_requires_all_reduce"


def meshes():
    """Replicas of two shards; replicas of experts that only two ranks have; all ranks."""
    dense = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "fsdp"))
    sparse = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replicate", "ep", "efsdp"))
    return dense, sparse["replicate", "efsdp"], init_device_mesh("cpu", (4,), mesh_dim_names=("all",))


def sharded(engine, of_blocks, of_root, freezes=False, **options):
    """An mlp of three Linears, those of ``of_blocks`` on their own meshes, summed by sums only, as ours always are."""
    model = mlp(4, 9, 5, 3)
    model[2].bias.requires_grad_(not freezes)
    for layer, mesh in [*zip((model[0], model[2]), of_blocks, strict=True), (model, of_root)]:
        engine(layer, mesh=mesh, **options)
        layer.set_force_sum_reduction_for_comms(True)
    return model


def clip(params, max_norm):
    """The norm over all meshes, each of which PyTorch's function handles by itself, as torchtitan does it."""
    of_mesh = {}
    for param in params:
        of_mesh.setdefault(param.device_mesh, []).append(param)
    norms = [nn.utils.get_total_norm([p.grad for p in own]).full_tensor().item() for own in of_mesh.values()]
    total = math.sqrt(sum(norm**2 for norm in norms))
    for own in of_mesh.values():
        nn.utils.clip_grads_with_norm_(own, max_norm, torch.tensor(total))
    return total


def train(model, accumulates):
    """Losses, norms, local gradients; then local weights. ``accumulates`` is False in the first of two passes."""
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    figures = []
    for step in range(2):
        for last in (False, True) if accumulates else (True,):
            if accumulates:
                getattr(model, accumulates)(last)
            loss = model(randn(3, 4, key=(step, last))).float().square().sum()
            loss.backward()
            figures.append(loss.item())
        figures += [param.grad.to_local().clone() for param in params]
        figures.append(clip(params, 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return figures, [param.to_local() for param in model.parameters()]


def check_beside_torch(known, names, accumulates=None, **options):
    made = dict(zip(("dense", "sparse", "all"), known, strict=True))
    *blocks, root = (made[name] for name in names.split())
    ours, theirs = (
        train(sharded(engine, blocks, root, **options), accumulates) for engine in (fully_shard, torch_fsdp.fully_shard)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # four terms are added in another order


@needs_fsdp2_on_cpu
@on_ranks(4)
def test_models_on_two_meshes_equal_torch():
    """Losses, norms, gradients and weights: expert parallelism with replicas, and replicas beside plain sharding."""
    known = meshes()
    check_beside_torch(known, "sparse dense dense", ALL_REDUCE, freezes=True)
    check_beside_torch(known, "dense sparse all", SYNC, offload_policy=OFFLOADED)
    check_beside_torch(known, "all dense dense", mp_policy=BF16, reshard_after_forward=False)


@needs_fsdp2_on_cpu
@on_ranks(in_full(4))
@pytest.mark.parametrize("names", ["sparse dense dense", "dense sparse all", "all all dense", "sparse all sparse"])
@pytest.mark.parametrize("accumulates", [None, SYNC, ALL_REDUCE])
def test_more_models_on_two_meshes_equal_torch(names, accumulates):
    """The same with each way to accumulate."""
    known = meshes()
    for options in ({}, {"freezes": True}, {"offload_policy": OFFLOADED}, {"mp_policy": BF16}):
        check_beside_torch(known, names, accumulates, **options)


@on_ranks(4)
def test_state_of_models_on_two_meshes(tmp_path):
    """State dicts and checkpoints of a model restore another one with the same meshes, optimizer included."""
    dense, _, every = meshes()
    states = []
    path = [str(tmp_path)]
    dist.broadcast_object_list(path)
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = sharded(fully_shard, (dense, every), every)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(seed + 1)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        model(randn(3, 4, key=(seed,))).square().sum().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)["state"]}
        (dcp.load if seed else dcp.save)(state, checkpoint_id=path[0])
        states.append(state)
        model.load_state_dict(states[0]["model"])
    assert_same_state(model.state_dict(), states[0]["model"])
    for name, own in states[0]["optim"].items():
        assert_same_state(states[1]["optim"][name], own)


@on_ranks(4)
def test_experts_that_differ_are_told_on_all_ranks():
    """If ranks with the same experts differ, the ranks with other experts raise too, before anything is sent."""
    dense, sparse, _ = meshes()
    for wide in (False, True):
        is_other = dist.get_rank() == 2
        model = mlp(4, 4, 4, 4)
        model[2] = nn.Linear(4, 4, bias=not (wide and is_other))
        for layer, mesh in ((model[2], sparse), (model[4], dense), (model, dense)):
            fully_shard(layer, mesh=mesh)
        if wide:
            with pytest.raises(RuntimeError, match="must wrap the same model"):
                model(randn(3, 4))
        else:
            model[2].register_forward_hook(lambda layer, _, out: layer.forward(out))  # no call of a unit
            output = model(randn(3, 4))
            output = model[2](output) if is_other else output
            with pytest.raises(RanksDisagreeError, match="rank 2"):
                output.sum().backward()


@on_ranks(4)
def test_clipping_over_unequal_replicas_is_refused():
    """`CPUOptimizer` cannot clip if some gradients are means over the shards only: replicas would scale differently."""
    dense, _, _ = meshes()
    model = mlp(4, 9, 5)
    fully_shard(model[0], mesh=dense["fsdp"])
    fully_shard(model, mesh=dense)
    optimizer = CPUOptimizer(model, torch.optim.SGD, lr=0.1, clip_grad_norm=1.0)
    model(randn(3, 4)).sum().backward()
    with pytest.raises(MixedGroupsError, match="`0` has another one than the root"):
        optimizer.step()
