"""`fully_shard` of parameters that are DTensors already, compared with PyTorch's function on the same program."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from fairshard.checkpoint import load, save
from fairshard.errors import FairshardError, NonFiniteGradientError
from fairshard.nn import DataParallelMeshDims, ShardPlacementResult, fully_shard
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.optim import CPUOptimizer, ShardedGradScaler
from tests.doors.fully_shard.parallel import Batches, distributed, mesh_of, parallelized, sharded, train, whole
from tests.kit import rank_device
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state

pytestmark = pytest.mark.behaviour("tensor parallelism")

beside_torch = pytest.mark.skipif(
    not hasattr(DeviceMesh, "_concatenate"),
    reason="this torch's own fully_shard does not run on CPUs, and its checkpoints support even cuts only",
)

BF16 = torch_fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
LOW = torch_fsdp.MixedPrecisionPolicy(torch.bfloat16)
OFFLOADED = torch_fsdp.CPUOffloadPolicy(pin_memory=False)
SYNC, ALL_REDUCE = "set_requires_gradient_sync", "set_requires_all_reduce"


def both(mesh, dp, options, model=None, before=lambda model: None):
    """The same model sharded by PyTorch's function, and by ours."""
    made = []
    for engine in (torch_fsdp.fully_shard, fully_shard):
        plain = parallelized(mesh, **(model or {}))
        before(plain)
        made.append(sharded(engine, plain, dp, **options))
    return made


def assert_same_parameters(theirs, ours):
    for (name, param), (own_name, own) in zip(theirs.named_parameters(), ours.named_parameters(), strict=True):
        assert own_name == name
        assert (own.shape, own.placements, own.device_mesh) == (param.shape, param.placements, param.device_mesh), name
        assert torch.equal(own.to_local(), param.to_local()), name


def assert_same_training(theirs, ours, batches, is_exact=True, **how):
    """Placements, losses, gradient norms and weights are equal: with two ranks a sum has two terms, in any order."""
    assert_same_parameters(theirs, ours)
    figures, expected = train(ours, batches, **how)[0], train(theirs, batches, **how)[0]
    if is_exact:
        assert figures == expected
        assert_same_state(whole(ours), whole(theirs))
    else:
        torch.testing.assert_close(figures, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(whole(ours), whole(theirs), rtol=1e-6, atol=1e-6)


# PyTorch adds up the gradients of two passes before it sums them over tensor-parallel ranks, we after it, both in fp32.
WIDE = {"accumulates": [SYNC], "is_exact": False}
CASES = [
    ({}, {}, {}),
    ({"mp_policy": BF16}, {"ties": True}, WIDE),
    ({"offload_policy": OFFLOADED}, {"hidden": 5, "recomputes": True}, {"accumulates": [SYNC]}),
]


@beside_torch
@on_ranks(4)
@pytest.mark.parametrize("case", [0, in_full(1), in_full(2)])
def test_training_on_2_x_2_ranks_equals_torch(case):
    """FSDP over 2 ranks of models that are tensor-parallel over 2 gives the numbers of PyTorch's function.

    ``hidden`` 5 gives the tensor-parallel ranks 3 and 2 rows, and 10 gives 5 rows, cut over two ranks into 3 and 2.
    """
    options, model, how = CASES[case]
    mesh, dp = mesh_of(2, 2)
    theirs, ours = both(mesh, dp, options, model)
    assert_same_training(theirs, ours, Batches(dp.get_local_rank()), **how)


@beside_torch
@on_ranks(4)
def test_training_of_replicas_equals_torch():
    """Two replicas of a tensor-parallel model, also with sums that wait for replicas and with keeping parameters."""
    mesh, dp = mesh_of(2, 1, 2)
    theirs, ours = both(mesh, dp, {"reshard_after_forward": False})
    assert_same_training(theirs, ours, Batches(dp.get_local_rank("replicate")), accumulates=[ALL_REDUCE])


@beside_torch
@on_ranks(2)
def test_training_of_one_tensor_parallel_replica_equals_torch():
    """FSDP over one rank, with two tensor-parallel ranks: no data-parallel communication at all."""
    mesh, dp = mesh_of(1, 2)
    for options, model, how in (CASES[0], CASES[2]):
        theirs, ours = both(mesh, dp, options, model)
        assert_same_training(theirs, ours, Batches(0), **how)


@beside_torch
@on_ranks(4)
def test_frozen_and_plain_parameters_beside_dtensors_equal_torch():
    """A unit may hold frozen DTensors and parameters that are no DTensors; both engines train it alike."""

    def freeze(model):
        model.blocks[0].up.weight.requires_grad_(False)
        for block in model.blocks:
            block.register_parameter("scale", nn.Parameter(torch.ones(3)))
            block.register_forward_pre_hook(lambda module, args: (args[0] * module.scale.sum(),))

    mesh, dp = mesh_of(2, 2)
    theirs, ours = both(mesh, dp, {}, before=freeze)
    frozen = whole(ours)["blocks.0.up.weight"]
    assert_same_training(theirs, ours, Batches(dp.get_local_rank()), clips=False)  # torch clips one mesh at a time
    assert torch.equal(whole(ours)["blocks.0.up.weight"], frozen)


SPMD = {  # shape and names of the mesh, dimensions to shard and to replicate over
    "fsdp": ((2, 2), ("data", "tp"), "data", None),
    "replicas": ((2, 2), ("copies", "tp"), None, "copies"),
    "hsdp": ((2, 2, 1), ("copies", "data", "tp"), "data", "copies"),
    "flattened": ((1, 2, 2), ("data", "cp", "tp"), ("data", "cp"), None),
}


@beside_torch
@on_ranks(4)
@pytest.mark.parametrize("case", ["fsdp", in_full("flattened"), in_full("replicas"), in_full("hsdp")])
def test_parameters_on_the_whole_mesh_train_like_torch(case):
    """With ``dp_mesh_dims`` parameters that are DTensors on the whole mesh train as with PyTorch's function."""
    torch_dims = getattr(torch_fsdp, "DataParallelMeshDims", None)
    if torch_dims is None:
        pytest.skip("this torch has no dp_mesh_dims")
    shape, names, shard, replicate = SPMD[case]
    mesh = dist.device_mesh.init_device_mesh(rank_device().type, shape, mesh_dim_names=names)
    dims = {torch_fsdp.fully_shard: torch_dims, fully_shard: DataParallelMeshDims}
    theirs, ours = (
        sharded(engine, distributed(mesh), mesh, dp_mesh_dims=cls(shard, replicate)) for engine, cls in dims.items()
    )
    assert_same_training(theirs, ours, Batches(0, mesh))


@on_ranks(2)
def test_what_dp_mesh_dims_refuses():
    """An int for ``reshard_after_forward``, plain parameters, other meshes and cuts over data-parallel ranks raise."""
    mesh, dp = mesh_of(2, 1)
    dims = DataParallelMeshDims("dp")
    model = distributed(mesh)
    with pytest.raises(ValueError, match="`reshard_after_forward` must be a bool or None with `dp_mesh_dims`"):
        fully_shard(model, mesh=mesh, dp_mesh_dims=dims, reshard_after_forward=2)
    with pytest.raises(ValueError, match="`weight` is a plain tensor"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=dims)
    with pytest.raises(ValueError, match=r"on `mesh`, .*`tokens.weight` is on"):
        fully_shard(parallelized(mesh), mesh=mesh, dp_mesh_dims=dims)
    model.head.weight = nn.Parameter(model.head.weight.detach().redistribute(placements=[Shard(0), Shard(0)]))
    with pytest.raises(ValueError, match=r"`head.weight` is .*on `dp`.*Replicate\(\)"):
        fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    with pytest.raises(ValueError, match="must not be on the ranks that it will be sharded over"):
        fully_shard(distributed(mesh), mesh=dp)
    with pytest.raises(ValueError, match="`shard` or `replicate`"):
        DataParallelMeshDims()


@on_ranks(2)
def test_the_wrapper_refuses_dtensors_by_name():
    """A flat shard cannot hold a DTensor: the error names the parameter and `fully_shard`."""
    mesh, _ = mesh_of(1, 2)
    with pytest.raises(ValueError, match=r"`tokens.weight` is a DTensor.*`fairshard.nn.fully_shard`"):
        FSDP(parallelized(mesh))


@on_ranks(2)
def test_one_leaf_per_parameter_shows_the_gathered_dtensor():
    """While gathered, the original parameter is a DTensor as before; no freed memory is left in it."""
    mesh, dp = mesh_of(2, 1)
    model = parallelized(mesh)
    leaf, placements, values = model.head.weight, model.head.weight.placements, model.head.weight.full_tensor().clone()
    sharded(fully_shard, model, dp, mp_policy=LOW)
    seen = []
    model.head.register_forward_pre_hook(lambda module, args: seen.append((module.weight, module.weight.full_tensor())))
    for _ in range(2):
        model(torch.zeros(1, 4, dtype=torch.int64))
    for shown, whole_value in seen:
        assert shown is leaf
        assert torch.equal(whole_value, values.bfloat16())
    assert (leaf.placements, leaf.device_mesh, leaf.dtype) == (placements, mesh["tp"], torch.bfloat16)
    model.reshard()
    assert not leaf.to_local().numel()
    assert model.head.weight is not leaf
    assert torch.equal(model.head.weight.full_tensor(), values)


@beside_torch
@on_ranks(4)
def test_state_dicts_and_checkpoints_pass_between_engines_and_meshes(tmp_path):
    """Each engine loads what the other has saved on another mesh, full or sharded, and whole values load into ours."""
    shapes = {"theirs": (2, 2), "ours": (1, 4)}
    engines = {"theirs": torch_fsdp.fully_shard, "ours": fully_shard}

    def made(name, seed):
        mesh, dp = mesh_of(*shapes[name])
        model = sharded(engines[name], parallelized(mesh, seed=seed), dp)
        return model, Batches(dp.get_local_rank())

    for saver, loader in (("ours", "theirs"), ("theirs", "ours"), ("ours", "ours")):
        model, batches = made(saver, seed=0)
        optimizer = train(model, batches, 2, optimizer=torch.optim.Adam(model.parameters(), 1e-2))[1]
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        folder = tmp_path / f"{saver}-{loader}"
        dcp.save(state, checkpoint_id=folder)
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        expected = whole(model)
        assert_same_state(full, expected)
        other, _ = made(loader, seed=1)
        new = torch.optim.Adam(other.parameters(), 1e-2)
        target = {"model": get_model_state_dict(other), "optimizer": get_optimizer_state_dict(other, new)}
        dcp.load(target, checkpoint_id=folder)
        set_model_state_dict(other, target["model"])
        set_optimizer_state_dict(other, new, target["optimizer"])
        assert_same_state(whole(other), expected)
        for name, param in model.named_parameters():
            moment = new.state[dict(other.named_parameters())[name]]["exp_avg"]
            assert torch.equal(moment.full_tensor(), optimizer.state[param]["exp_avg"].full_tensor())
        if loader == "ours":
            again, _ = made(loader, seed=2)
            again.load_state_dict(full)
            assert_same_state(whole(again), expected)
            third, _ = made(loader, seed=3)
            set_model_state_dict(third, full, options=StateDictOptions(full_state_dict=True))
            assert_same_state(whole(third), expected)


@beside_torch
@on_ranks(in_full(4))
def test_meta_init_equals_torch():
    """A tensor-parallel model on the meta device gets memory and values after sharding, and trains as PyTorch's."""
    mesh, dp = mesh_of(2, 2)
    values = sharded(fully_shard, parallelized(mesh), dp).state_dict()
    theirs, ours = both(mesh, dp, {}, {"device": "meta"})
    for model in (theirs, ours):
        assert all(param.is_meta for param in model.parameters())
        model.to_empty(device=rank_device())
        model.load_state_dict(values)
    assert_same_training(theirs, ours, Batches(dp.get_local_rank()))


def compiled_before(block, backend, **options):
    block.compile(backend=backend)
    return fully_shard(block, **options)


def compiled_after(block, backend, **options):
    fully_shard(block, **options)
    block.compile(backend=backend)
    return block


def compiled_as_module(block, backend, **options):
    return fully_shard(torch.compile(block, backend=backend), **options)


COMPILED = {"before": compiled_before, "after": compiled_after, "module": compiled_as_module}


def figures_of_compiled(order, backend):
    """Losses and norms of a sequence-parallel model, and of one with compiled blocks."""
    figures = []
    for compiles in (False, True):
        torch.compiler.reset()
        mesh, dp = mesh_of(dist.get_world_size() // 2, 2)
        model = parallelized(mesh)
        for number, block in enumerate(model.blocks):
            if compiles:
                model.blocks[number] = COMPILED[order](block, backend, mesh=dp)
            else:
                fully_shard(block, mesh=dp)
        fully_shard(model, mesh=dp)
        figures.append(train(model, Batches(dp.get_local_rank()), num_steps=3)[0])
    return figures


@pytest.mark.full
@on_ranks(2, 4, timeout=180.0)
@pytest.mark.parametrize("order", COMPILED)
def test_compiled_sequence_parallel_blocks_train_like_others(order):
    """Losses and norms are those without the compiler: no gradient before the blocks is lost.

    The embedding's output is still being communicated when the first block is called, and parameters lie anywhere in
    the unit's memory.
    """
    expected, compiled = figures_of_compiled(order, "aot_eager")
    assert compiled == expected


@pytest.mark.full
@on_ranks(2, 4, timeout=400.0)
@pytest.mark.parametrize("order", COMPILED)
def test_inductor_compiles_sequence_parallel_blocks(order):
    """With inductor, losses and norms agree to rounding: its kernels sum in another order."""
    expected, compiled = figures_of_compiled(order, "inductor")
    torch.testing.assert_close(compiled, expected, rtol=1e-6, atol=0)


@on_ranks(2)
def test_copies():
    """A deepcopy trains like the original; pickling, and another mesh, are refused by name."""
    mesh, dp = mesh_of(2, 1)
    model = sharded(fully_shard, parallelized(mesh), dp)
    other = copy.deepcopy(model)
    batches = Batches(dp.get_local_rank())
    assert train(other, batches)[0] == train(model, batches)[0]
    assert_same_state(whole(other), whole(model))
    third = copy.deepcopy(model)
    assert train(third, batches)[0] == train(model, batches)[0]
    with pytest.raises(FairshardError, match="were DTensors must not be pickled"):
        pickle.dumps(sharded(fully_shard, distributed(mesh), mesh, dp_mesh_dims=DataParallelMeshDims("dp")))
    with pytest.raises(FairshardError, match=r"must not change, but `tokens.weight` would go"):
        model.set_device_mesh(mesh_of(2, 1)[1])


@on_ranks(4)
def test_nan_check_names_the_rank():
    """`nan_check` raises on all ranks, also those of other tensor-parallel ranks, and names the rank of origin."""
    mesh, dp = mesh_of(2, 2)
    model = sharded(fully_shard, parallelized(mesh), dp, nan_check=True)
    train(model, Batches(dp.get_local_rank()), 1)

    def poison(module, args):
        if dist.get_rank() == 3:
            args[0].register_hook(lambda grad: grad * float("nan"))

    model.blocks[0].down.register_forward_pre_hook(poison)
    with pytest.raises(NonFiniteGradientError, match="rank 3"):
        train(model, Batches(dp.get_local_rank()), 1)


class Experts(nn.Module):
    """Each expert-parallel rank multiplies by the experts that it holds."""

    def __init__(self, mesh):
        super().__init__()
        values = torch.arange(4.0 * 3 * 5).view(4, 3, 5) / 60
        self.weight = nn.Parameter(distribute_tensor(values, mesh, [Shard(0)]))

    def forward(self, x):
        return torch.einsum("bi,eij->bj", x, self.weight.to_local())


@beside_torch
@pytest.mark.full
@on_ranks(4)
def test_modules_over_other_ranks_equal_torch():
    """With ``ShardPlacementResult`` experts are sharded over the ranks that hold the same ones, the rest over all."""
    infos = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    if not hasattr(infos, "ShardPlacementResult"):
        pytest.skip("this torch has no ShardPlacementResult")
    whole_mesh = dist.device_mesh.init_device_mesh(rank_device().type, (4,), mesh_dim_names=("all",))
    experts_mesh = dist.device_mesh.init_device_mesh(rank_device().type, (2, 2), mesh_dim_names=("efsdp", "ep"))
    losses, weights = [], []
    for engine, result in ((torch_fsdp.fully_shard, infos.ShardPlacementResult), (fully_shard, ShardPlacementResult)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 3), Experts(experts_mesh["ep"]), nn.Linear(5, 2))
        experts = set(model[1].parameters())
        here, there = (infos.FSDPMeshInfo(mesh, shard_mesh_dim=0) for mesh in (whole_mesh, experts_mesh["efsdp"]))

        def place(param, experts=experts, here=here, there=there, result=result):
            return result(Shard(0), there) if param in experts else result(None, here)

        engine(model, mesh=whole_mesh, shard_placement_fn=place)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x = torch.arange(12.0).view(2, 6) + dist.get_rank()
        for _ in range(2):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        weights.append(whole(model))
    # Four terms are added in another order.
    torch.testing.assert_close(losses[2:], losses[:2], rtol=1e-6, atol=0)
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-5, atol=1e-6)
    assert model[1].weight.device_mesh.mesh_dim_names == ("efsdp", "ep")


@on_ranks(2)
def test_one_module_with_parameters_on_different_ranks_is_refused():
    """A module that itself has parameters on other ranks than its unit cannot be gathered at once."""
    mesh, dp = mesh_of(2, 1)

    def place(param):
        return ShardPlacementResult(None, mesh["tp"]) if param.ndim == 1 else None

    with pytest.raises(ValueError, match=r"same ranks, but .*`bias`"):
        fully_shard(nn.Linear(2, 2), mesh=dp, shard_placement_fn=place)


@beside_torch
@on_ranks(2)
def test_our_checkpoints_pass_between_meshes(tmp_path):
    """`fairshard.checkpoint` saves a model on one mesh, and loads it on another."""

    def made(shape, seed):
        mesh, dp = mesh_of(*shape)
        model = sharded(fully_shard, parallelized(mesh, seed=seed), dp)
        return model, torch.optim.Adam(model.parameters(), 1e-2), Batches(dp.get_local_rank())

    model, optimizer, batches = made((2, 1), 0)
    train(model, batches, optimizer=optimizer)
    save(tmp_path / "step", model, optimizer)
    other, new, _ = made((1, 2), 1)
    load(tmp_path / "step", other, new)
    assert_same_state(whole(other), whole(model))
    for name, param in model.named_parameters():
        moment = new.state[dict(other.named_parameters())[name]]["exp_avg"]
        assert torch.equal(moment.full_tensor(), optimizer.state[param]["exp_avg"].full_tensor())


@beside_torch
@on_ranks(2)
def test_a_scaler_skips_a_step_on_all_tensor_parallel_ranks():
    """An overflow in the part of one tensor-parallel rank skips the step on all; PyTorch's scaler and ours agree."""
    mesh, dp = mesh_of(1, 2)
    found = []
    for kind in (torch.amp.GradScaler, ShardedGradScaler):
        scaler = kind(rank_device().type, init_scale=4.0)
        model = sharded(fully_shard, parallelized(mesh), dp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(2):
            scaler.scale(Batches(0).loss(model, step)).backward()
            if step and dist.get_rank():
                model.blocks[0].up.weight.grad.to_local()[-1:] = float("inf")
            before = whole(model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert torch.equal(whole(model)["head.weight"], before["head.weight"]) == bool(step)
        assert scaler.get_scale() == 2.0
        found.append(whole(model))
    assert_same_state(*found)


@on_ranks(2)
def test_our_clipping_refuses_what_it_would_count_wrongly():
    """`CPUOptimizer` sums norms over data-parallel ranks only: for tensor-parallel parameters it names torch's."""
    mesh, dp = mesh_of(1, 2)
    model = sharded(fully_shard, parallelized(mesh), dp, offload_policy=OFFLOADED)
    optimizer = CPUOptimizer(model, torch.optim.SGD, lr=0.1, clip_grad_norm=1.0)
    Batches(0).loss(model, 0).backward()
    with pytest.raises(ValueError, match=r"`\S+` are also on .*torch.nn.utils.clip_grad_norm_"):
        optimizer.step()
