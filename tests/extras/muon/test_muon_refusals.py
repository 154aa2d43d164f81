"""What Muon refuses, by name, on all ranks alike and before anything has changed."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fairshard.errors import FairshardError, RanksDisagreeError, ShardOptimizerError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import RowBlocks, fully_shard
from fairshard.optim import CPUOptimizer, Muon
from tests.extras.muon.mixture import LAYOUTS, OPTIONS, Mixture, backward, full, muon_of, train
from tests.kit import rank_device
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state, randn
from tests.torch_gaps import needs_muon


def refused(optimizer, error, match):
    """``optimizer.step()`` raises; its state stays as it was."""
    before = copy.deepcopy(optimizer.state_dict()["state"])
    with pytest.raises(error, match=match):
        optimizer.step()
    after = optimizer.state_dict()["state"]
    assert after.keys() == before.keys()
    for key, state in before.items():
        for name, value in state.items():
            now = after[key][name]
            values = (v.to_local() if isinstance(v, DTensor) else v for v in (now, value))
            assert torch.equal(*values)


@on_ranks(2)
@pytest.mark.parametrize("layout", ["rows", "views"])
def test_a_gradient_that_only_some_ranks_have(layout):
    """All ranks raise and name the matrix and the rank; with the gradient back, the next step has the right bits."""
    model, optimizer = train(layout, 1)
    backward(model, (1, 0))
    before = {name: value.clone() for name, value in full(model.state_dict()).items()}
    weight = next(param for name, param in model.named_parameters() if name.endswith("late.weight"))
    grad = weight.grad
    if dist.get_rank() == 1:
        weight.grad = None
    refused(optimizer, RanksDisagreeError, r"`late\.weight` has none on rank 1")
    assert_same_state(full(model.state_dict()), before)
    weight.grad = grad
    optimizer.step()
    optimizer.zero_grad()
    backward(model, (2, 0))
    optimizer.step()
    expected, _ = train(layout, 3)
    assert_same_state(full(model.state_dict()), full(expected.state_dict()))


@on_ranks(2)
def test_a_dropped_gradient_of_a_matrix_that_one_rank_has_whole():
    """That rank alone decides: the matrix is not stepped, and all others are stepped as always."""
    model, twin = (LAYOUTS["views"](Mixture()) for _ in range(2))
    for one in (model, twin):
        backward(one, 1)
    own = {name: param for name, param in model.named_parameters() if name.endswith("up.weight")}
    (weight,) = own.values()
    found = [None, None]
    dist.all_gather_object(found, weight.numel())
    assert sorted(found) == [0, 54], "one rank must have the whole matrix"
    if weight.numel():
        weight.grad = None
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for one in (model, twin):
        muon_of("views", one).step()
    expected = {**twin.state_dict(), "up.weight": before["up.weight"], "tied.weight": before["up.weight"]}
    assert_same_state(model.state_dict(), expected)


@on_ranks(3)
def test_an_error_of_one_rank_is_raised_on_all():
    """A sparse gradient on one rank makes all raise, and none steps."""
    model, optimizer = train("rows", 1)
    plain = nn.Parameter(torch.ones(3, 2))
    optimizer.add_param_group({"params": [plain]})
    backward(model, (1, 0))
    plain.grad = torch.ones(3, 2).to_sparse() if dist.get_rank() == 2 else torch.ones(3, 2)
    refused(optimizer, RuntimeError, "dense gradients, but one is sparse")
    assert torch.equal(plain, torch.ones(3, 2))
    plain.grad = torch.ones(3, 2)
    optimizer.step()
    assert not torch.equal(plain, torch.ones(3, 2))


@on_ranks(2)
@pytest.mark.parametrize(("layout", "other"), [("rows", "owned"), ("owned", "rows"), ("views", "owned views")])
def test_loaded_state_of_another_layout(layout, other):
    """All ranks raise and name state that is not cut like its parameter; nothing changes, and nobody waits."""
    _, optimizer = train(layout, 1)
    fresh = LAYOUTS[other](Mixture())
    stepping = muon_of(other, fresh)
    stepping.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    backward(fresh, (1, 0))
    before = {name: value.clone() for name, value in full(fresh.state_dict()).items()}
    refused(stepping, ShardOptimizerError, r"must be cut like its parameter, but `\w+` of `.*full_optim_state_dict")
    assert_same_state(full(fresh.state_dict()), before)


@on_ranks(2)
def test_other_matrices_on_some_ranks():
    """Ranks that hold other matrices, or the same in another order, raise and name the first difference."""
    model, _ = train("rows", 1)
    params = [model.up.weight, model.down.weight]
    backward(model, 1)
    reordered = Muon(params if dist.get_rank() else params[::-1], **OPTIONS)
    refused(reordered, RanksDisagreeError, r"rank 0 has `down\.weight`.*rank 1 has `up\.weight`")
    fewer = Muon(params[: 1 + dist.get_rank()], **OPTIONS)
    refused(fewer, RanksDisagreeError, r"rank 0 has nothing more; rank 1 has `down\.weight`")
    none = Muon(params, use_muon=dist.get_rank() == 1, **OPTIONS)
    refused(none, RanksDisagreeError, r"rank 0 has nothing more; rank 1 has `up\.weight`")


@on_ranks(2, in_full(3))
@pytest.mark.parametrize(("num_others", "rows"), [(1, 4), (300, 1)], ids=["whole", "many"])
def test_other_matrices_that_one_rank_has_whole(num_others, rows):
    """They are work for their rank, so ranks that count them differently would choose other owners for cut ones.

    Ranks that have many cut matrices more than others send as long a message at first.
    """
    model = nn.Sequential(nn.Linear(4, 4, bias=False), *(nn.Linear(4, 4, bias=False) for _ in range(num_others)))
    for other in model[1:]:
        fully_shard(other, shard_placement_fn=lambda param: RowBlocks(rows))
    fully_shard(model)
    model(torch.ones(2, 4, device=rank_device())).sum().backward()
    cut, *others = model.parameters()
    groups = [{"params": [cut]}, {"params": others, "use_muon": dist.get_rank() == 0}]
    refused(Muon(groups, **OPTIONS), RanksDisagreeError, r"first difference is: rank 0 has `1\.weight` .*nothing more")
    Muon([cut, *others], **OPTIONS).step()


@on_ranks(2)
@pytest.mark.parametrize("num_matrices", [3, 300])
def test_one_rank_may_prepare_its_steps_again(num_matrices):
    """It loads its own state, adds a group, or makes another optimizer of the same matrices. Others are refused."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_matrices)))
    fully_shard(model)
    twin = copy.deepcopy(model)

    def train(one, optimizer):
        one(torch.ones(2, 4, device=rank_device())).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    optimizer, expected = (Muon(one.parameters(), **OPTIONS) for one in (model, twin))
    for change in ("none", "load", "group", "new"):
        if dist.get_rank() == 1 and change == "load":
            optimizer.load_state_dict(optimizer.state_dict())
        elif dist.get_rank() == 1 and change == "group":
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, device=rank_device()))]})
        elif dist.get_rank() == 1 and change == "new":
            again = Muon(model.parameters(), **OPTIONS)
            del optimizer.param_groups[1]
            again.load_state_dict(optimizer.state_dict())
            optimizer = again
        train(model, optimizer)
        train(twin, expected)
    assert_same_state(full(model.state_dict()), full(twin.state_dict()))
    optimizer.param_groups[0]["use_muon"] = dist.get_rank() == 0
    model(torch.ones(2, 4, device=rank_device())).sum().backward()
    refused(optimizer, RanksDisagreeError, r"rank 0 has `0\.weight` .*rank 1 has nothing more")


@on_ranks(2)
def test_one_rank_may_prepare_steps_without_exchanges_again():
    """Ranks agree once that they cut no matrix."""
    model = nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4)).to(rank_device())
    for number in range(3):
        if number == 0:
            fully_shard(model)
        if number == 0 or dist.get_rank() == 0:
            optimizer = Muon(model.parameters(), use_muon=False, **OPTIONS)
        model(torch.arange(4, device=rank_device())).square().sum().backward()
        optimizer.step()


@on_ranks(4)
@pytest.mark.parametrize("backwards", [(), in_full((0, 1, 2, 3)), (1,)], ids=str)
def test_an_error_reaches_all_groups_of_the_largest(backwards):
    """Experts on pairs beside a layer on all ranks: a gradient that one expert lacks makes all ranks raise.

    Ranks may list parameters of several groups in any order.
    """
    rank = dist.get_rank()
    pairs = init_device_mesh(rank_device().type, (2, 2), mesh_dim_names=("shards", "experts"))["shards"]
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False)).to(rank_device())
    expert = fully_shard(model[1], mesh=pairs)
    fully_shard(model)
    params = [model[0].weight, expert.weight]
    optimizer = Muon(params[::-1] if rank in backwards else params)
    for step in range(3):
        model(randn(4, 6)).square().sum().backward()
        before = [param.to_local().clone() for param in params]
        grad = expert.weight.grad
        if step < 2:
            if rank == 3:
                expert.weight.grad = None
            refused(optimizer, RuntimeError, r"`1.weight` has none on rank 3")
            assert all(torch.equal(param.to_local(), value) for param, value in zip(params, before, strict=True))
            expert.weight.grad = grad
        if rank == 2 and step == 2:  # alone: the others do not ask again
            optimizer.load_state_dict(optimizer.state_dict())
        elif rank == 1 and step == 2:
            again = Muon(optimizer.param_groups[0]["params"])
            again.load_state_dict(optimizer.state_dict())
            optimizer = again
        optimizer.step()
        assert not any(torch.equal(param.to_local(), value) for param, value in zip(params, before, strict=True))


@on_ranks(4)
def test_groups_that_do_not_contain_each_other():
    """Layers cut along two axes of a mesh: all ranks raise before anything has changed; two optimizers step them."""
    mesh = init_device_mesh(rank_device().type, (2, 2), mesh_dim_names=("rows", "columns"))
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False)).to(rank_device())
    for layer, name in zip(model, mesh.mesh_dim_names, strict=True):
        fully_shard(layer, mesh=mesh[name])
    params = list(model.parameters())
    model(randn(4, 6)).square().sum().backward()
    refused(Muon(params), ShardOptimizerError, "do not contain each other. Build a Muon for the matrices of each group")
    before = [param.to_local().clone() for param in params]
    for param in params:
        Muon([param]).step()
    assert not any(torch.equal(param.to_local(), value) for param, value in zip(params, before, strict=True))


@on_ranks(2)
def test_a_step_before_any_forward():
    """A wrapped model knows its ranks from the first forward on: a step before it raises, and after it works."""
    model = LAYOUTS["views"](Mixture())
    optimizer = muon_of("views", model)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    refused(optimizer, FairshardError, r"forward must have run .* `\w+\.weight`")
    optimizer.zero_grad()
    backward(model, 1)
    optimizer.step()


@on_ranks(2)
def test_options_of_cpu_optimizer_that_step_shard_by_shard():
    """Muon steps matrices together, so early steps and narrow state are refused when the optimizer is built."""
    model = LAYOUTS["flat offload"](Mixture())
    for option in ({"overlap": True}, {"state_dtype": torch.bfloat16}):
        with pytest.raises(ValueError, match=f"Muon must step all shards together.*{next(iter(option))}"):
            CPUOptimizer(model, Muon, **option, **OPTIONS)
    optimizer = CPUOptimizer(model, Muon, clip_grad_norm=1.0, **OPTIONS)
    backward(model, 1)
    optimizer.step()


@needs_muon
@on_ranks(2)
def test_torchs_muon_on_shards_is_refused_with_a_cure():
    """torch's class on a shard of matrices raises as before; the error names ours, which works."""
    model = FSDP(nn.Linear(4, 6), use_orig_params=True)
    with pytest.raises(ShardOptimizerError, match=r"Use fairshard\.optim\.Muon"):
        CPUOptimizer(model, torch.optim.Muon, lr=0.1)
    CPUOptimizer(model, Muon, lr=0.1)


@on_ranks(2)
def test_dtensors_that_no_unit_holds():
    """A DTensor of somebody else, or a matrix that tensor parallelism cuts as well, is refused by name."""
    mesh = init_device_mesh(rank_device().type, (1, 2), mesh_dim_names=("data", "tensor"))
    foreign = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh["tensor"], [Shard(0)]))
    with pytest.raises(ShardOptimizerError, match=r"one is a DTensor of shape \(4, 4\)"):
        Muon([foreign])
    layer = nn.Linear(4, 6)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["tensor"], [Shard(0)]))
    layer.bias = nn.Parameter(distribute_tensor(layer.bias.detach(), mesh["tensor"], [Replicate()]))
    fully_shard(layer, mesh=mesh["data"])
    with pytest.raises(ShardOptimizerError, match="`weight` is also cut by tensor parallelism"):
        Muon(layer.parameters())
    Muon(layer.parameters(), use_muon=False)


@on_ranks(1)
def test_arguments_out_of_range():
    """Each is refused when a group is added, which then is not; negative, NaN and complex too."""
    param = nn.Parameter(randn(3, 2))
    cases = [
        ({"lr": -1.0}, "`lr` must not be negative"),
        ({"momentum": float("nan")}, "`momentum` must not be negative"),
        ({"lr": torch.ones(2)}, "`lr` must have one element"),
        ({"adjust_lr_fn": "other"}, "`adjust_lr_fn` must be one of"),
        ({"ns_coefficients": (1.0, 2.0)}, "`ns_coefficients` must be three numbers"),
        ({"ns_steps": 100}, "`ns_steps` must be from 0 to 99"),
        ({"adamw_betas": (0.9, 1.0)}, "`adamw_betas` must be in"),
    ]
    optimizer = Muon([param])
    for options, match in cases:
        with pytest.raises(ValueError, match=match):
            Muon([param], **options)
        with pytest.raises(ValueError, match=match):
            optimizer.add_param_group({"params": [nn.Parameter(randn(2, 2))], **options})
    with pytest.raises(ValueError, match="must be real"):
        Muon([nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))])
    assert len(optimizer.param_groups) == 1
