"""A run loads what another saved, with any number of ranks, wrapping and placement, and continues alike."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fairshard.checkpoint import load, save
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import OptimStateKeyType
from tests.checkpoint.compared import assert_same, whole
from tests.covering import all_cells, covering_array
from tests.kit import rank_device, run_ranks
from tests.models import tiny, tiny_batch, tiny_loss, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state
from tests.torch_gaps import needs_fsdp2_on_cpu
from tests.trained import FLATTEN, OPTIMIZERS, PLACEMENTS, PRECISIONS, WRAPPINGS, odd, trained, wrap_odd, wrapped_tiny

SIDES = {
    "wrapping": [*WRAPPINGS, "plain"],
    "flatten": FLATTEN,
    "placement": list(PLACEMENTS),
}
AXES = {
    "saved_on": [1, 2, 3, 4],
    "loaded_on": [1, 2, 3, 5],
    "precision": list(PRECISIONS),
    "optimizer": list(OPTIMIZERS),
    **{f"saved_{name}": values for name, values in SIDES.items()},
    **{f"loaded_{name}": values for name, values in SIDES.items()},
}


def _build(cell, side, seed):
    """The model of one side of a cell, and the optimizer function."""
    own = {name: cell[f"{side}_{name}"] for name in SIDES} | {"precision": cell["precision"]}
    if own["wrapping"] == "plain":
        return tiny(seed=seed), OPTIMIZERS[cell["optimizer"]]
    return wrapped_tiny(own, own["wrapping"], seed), OPTIMIZERS[cell["optimizer"]]


def _save(cell, folder):
    model, optimizer_of = _build(cell, "saved", seed=1)
    model, optimizer = trained(model, optimizer_of)
    save(folder, model, optimizer, step=2)
    return whole(model, optimizer)


def _load(cell, folder):
    model, optimizer_of = _build(cell, "loaded", seed=7)
    optimizer = optimizer_of(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warns that random numbers are not restored
        assert load(folder, model, optimizer) == 2
    return whole(model, optimizer)


def _check(cell, folder):
    saved = run_ranks(cell["saved_on"], _save, cell=cell, folder=str(folder))[0]
    loaded = run_ranks(cell["loaded_on"], _load, cell=cell, folder=str(folder))
    for actual in loaded:
        assert_same(actual, saved)


def _id(cell):
    return "-".join(str(value) for value in cell.values())


@pytest.mark.parametrize("cell", covering_array(AXES), ids=_id)
def test_every_pair_of_sides_and_ranks(cell, tmp_path):
    """Weights, optimizer state and hyperparameters are those that were saved, whatever both sides are."""
    _check(cell, tmp_path / "one")


@pytest.mark.full
@pytest.mark.parametrize("saved_on", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("loaded_on", [1, 2, 3, 4, 5])
def test_every_number_of_ranks_on_either_side(saved_on, loaded_on, tmp_path):
    """Every wrapping loads every other, for every pair of world sizes."""
    axes = {name: values for name, values in AXES.items() if name.endswith(("wrapping", "flatten"))}
    rest = {"precision": "fp32", "optimizer": "adamw", "saved_placement": "device", "loaded_placement": "offload"}
    for number, cell in enumerate(all_cells(axes)):
        _check({**cell, **rest, "saved_on": saved_on, "loaded_on": loaded_on}, tmp_path / str(number))


@pytest.mark.parametrize("ranks", [(1, 3), (3, 2), (2, 5)], ids=str)
def test_odd_parameters(ranks, tmp_path):
    """Parameters of one element, none or no dimension, frozen and tied ones, and both kinds of buffers round-trip."""
    saved = run_ranks(ranks[0], _save_odd, folder=str(tmp_path / "odd"))[0]
    for actual in run_ranks(ranks[1], _load_odd, folder=str(tmp_path / "odd")):
        assert_same(actual, saved)


def _odd_optimizer(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def _save_odd(folder):
    model = wrap_odd(odd())
    optimizer = _odd_optimizer(model)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    save(folder, model, optimizer)
    return whole(model, optimizer)


def _load_odd(folder):
    model = wrap_odd(odd(seed=5), flatten_parameters=False)
    optimizer = _odd_optimizer(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(folder, model, optimizer)
    return whole(model, optimizer)


@on_ranks(2)
@pytest.mark.parametrize("empty", ["a plain module", "an ignored one"])
def test_a_model_without_memory_is_refused(shared_folder, empty):
    """Values copied into the meta device would be lost; with memory the same model loads."""
    layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(rank_device())
    save(shared_folder, FSDP(copy.deepcopy(layers)), step=3)
    target = copy.deepcopy(layers)
    if empty == "a plain module":
        target = target.to("meta")
    else:
        target[1] = target[1].to("meta")
        target = FSDP(target, ignored_modules=[target[1]])
    with pytest.raises(ValueError, match=r"`1\.weight`|`0\.weight`.* on the meta device"):
        load(shared_folder, target)
    if empty == "a plain module":
        assert load(shared_folder, target.to_empty(device=rank_device())) == 3
        assert_same_state(target.state_dict(), layers.state_dict())


# ---- plain torch


@on_ranks(2)
def test_plain_torch_reads_ours(shared_folder):
    """`dcp.load` reads our checkpoint into a plain module and its optimizer; torch converts it to one file."""
    model, optimizer = trained(wrap_tiny(tiny()), OPTIMIZERS["adamw"])
    save(f"{shared_folder}/ours", model, optimizer)
    expected, state = whole(model, optimizer)
    plain, its_optimizer = trained(tiny(seed=4), OPTIMIZERS["adamw"])
    named = FSDP.rekey_optim_state_dict(its_optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, plain)
    target = {"model": plain.state_dict(), "optim": named}
    dcp.load(target, checkpoint_id=f"{shared_folder}/ours")
    assert_same_state(target["model"], expected)
    for name, entries in state["state"].items():
        assert_same_state(target["optim"]["state"][name], entries)
    assert target["optim"]["param_groups"] == state["param_groups"]
    if dist.get_rank() == 0:
        dcp_to_torch_save(f"{shared_folder}/ours", f"{shared_folder}/one.pt")
        converted = torch.load(f"{shared_folder}/one.pt", weights_only=False)["model"]
        assert_same_state(dict(sorted(converted.items())), dict(sorted(expected.items())))


@needs_fsdp2_on_cpu
@on_ranks(2)
@pytest.mark.parametrize("level", ["model", "app", None], ids=str)
@pytest.mark.parametrize("flat_optimizer", [False, True])
def test_what_fsdp2_wrote_is_read(shared_folder, level, flat_optimizer):
    """A model and optimizer of FSDP2, saved with torch's own tools at three levels, continue here bit for bit."""
    mesh = init_device_mesh(rank_device().type, (2,))
    model = tiny()
    for part in (model.first, model.second, model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    _steps(model, optimizer, range(2))
    options = dcp.state_dict.StateDictOptions(flatten_optimizer_state_dict=flat_optimizer)
    of_model = get_model_state_dict(model)
    of_optimizer = get_optimizer_state_dict(model, optimizer, options=options)
    saved = {"model": of_model, "optim": of_optimizer}
    saved = {"app": saved} if level == "app" else saved if level else {**of_model, "optim": of_optimizer}
    dcp.save(saved, checkpoint_id=f"{shared_folder}/theirs")
    ours = wrap_tiny(tiny(seed=3))
    its_optimizer = torch.optim.AdamW(ours.parameters(), lr=0.5)
    assert load(f"{shared_folder}/theirs", ours, its_optimizer) is None
    _steps(model, optimizer, range(2, 4))
    _steps(ours, its_optimizer, range(2, 4))
    assert_same_state(ours.state_dict(), {name: v.full_tensor() for name, v in get_model_state_dict(model).items()})


def _steps(model, optimizer, steps):
    for step in steps:
        *inputs, targets = tiny_batch(dist.get_rank(), step)
        tiny_loss(model(*inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
