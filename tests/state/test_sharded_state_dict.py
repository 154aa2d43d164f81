"""Sharded values: plain torch.distributed.checkpoint saves and loads them, for any world size and any cut."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from fairshard.nn import FSDP, OptimStateKeyType, ShardedStateDictConfig, StateDictType
from fairshard.utils.collectives import counters, reset_counters
from fairshard.utils.span_tensor import SpanTensor
from tests.kit import CollectiveCounter, rank_device, run_ranks
from tests.models import mlp, tiny, wrap_each, wrap_tiny
from tests.on_ranks import Body, on_ranks
from tests.reference import assert_same_state
from tests.trained import OPTIMIZERS, odd, trained, wrap_odd, wrapped_tiny

SHARDED = StateDictType.SHARDED_STATE_DICT
CELL = {"flatten": True, "precision": "fp32", "placement": "device"}


def sharded(model, optimizer=None):
    """The sharded state of model and optimizer, as a script saves it."""
    with FSDP.state_dict_type(model, SHARDED):
        state = {"model": model.state_dict()}
        if optimizer is not None:
            state["optim"] = FSDP.optim_state_dict(model, optimizer)
    return state


def save(folder, world_size, cell=CELL, wrapping="nested"):
    """Save a trained model and optimizer on ``world_size`` ranks; return their whole states."""
    return run_ranks(world_size, Body(__name__, "save_body"), folder=str(folder), cell=cell, wrapping=wrapping)[0]


def save_body(folder, cell, wrapping):
    model, optimizer = trained(wrapped_tiny(cell, wrapping), OPTIMIZERS["adamw"])
    dcp.save(sharded(model, optimizer), checkpoint_id=folder)
    return model.state_dict(), FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)


def load_body(folder, cell, wrapping, expected):
    model = wrapped_tiny(cell, wrapping, seed=9)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()  # creates the state that the load fills
    state = sharded(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    with FSDP.state_dict_type(model, SHARDED):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state["optim"]))
    assert_same_state(model.state_dict(), expected[0])
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    assert full["param_groups"] == expected[1]["param_groups"]
    for name, own in expected[1]["state"].items():
        assert_same_state(full["state"][name], own)


@pytest.mark.parametrize(
    ("saves", "loads", "cells", "wrappings"),
    [
        (1, 3, (CELL, CELL), ("whole", "nested")),
        (2, 1, ({**CELL, "flatten": False}, CELL), ("nested", "nested")),
        (2, 3, (CELL, {**CELL, "flatten": False}), ("nested", "whole")),
        (3, 2, ({**CELL, "placement": "offload"}, {**CELL, "precision": "bf16"}), ("nested", "nested")),
        (3, 3, (CELL, CELL), ("inner", "nested")),
    ],
)
def test_any_world_size_and_wrapping_loads_it(tmp_path, saves, loads, cells, wrappings):
    """Weights and optimizer state load bit for bit into another world size and another wrapping."""
    expected = save(tmp_path, saves, cells[0], wrappings[0])
    run_ranks(
        loads,
        Body(__name__, "load_body"),
        folder=str(tmp_path),
        cell=cells[1],
        wrapping=wrappings[1],
        expected=expected,
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_modules_and_optimizers_load_it(tmp_path):
    """A plain module and its optimizer load the checkpoint by name, without any of our classes."""
    weights, optim = save(tmp_path, 3)
    plain = tiny(seed=9)
    empty = copy.deepcopy(optim)
    for own in empty["state"].values():
        for value in own.values():
            value.fill_(-1)
    state = {"model": plain.state_dict(), "optim": empty}
    dcp.load(state, checkpoint_id=str(tmp_path))
    assert_same_state(state["model"], weights)
    optimizer = OPTIMIZERS["adamw"](plain.parameters())
    optimizer.load_state_dict(FSDP.rekey_optim_state_dict(state["optim"], OptimStateKeyType.PARAM_ID, plain))
    moments = optimizer.state[plain.first.up.weight]["exp_avg"]
    assert torch.equal(moments, optim["state"]["first.up.weight"]["exp_avg"])


def dtensor_body(folder, expected):
    mesh = init_device_mesh(rank_device().type, (dist.get_world_size(),))
    by_fsdp2 = mlp(4, 5, 3, seed=9)
    for layer in (by_fsdp2[0], by_fsdp2[2], by_fsdp2):
        fully_shard(layer, mesh=mesh)
    by_columns = {
        name: distribute_tensor(value.clone(), mesh, [Shard(value.dim() - 1)])
        for name, value in mlp(4, 5, 3, seed=9).state_dict().items()
    }
    for state in (by_fsdp2.state_dict(), by_columns):
        dcp.load(state, checkpoint_id=folder)
        assert_same_state({name: value.full_tensor() for name, value in state.items()}, expected)
        model = wrap_each(mlp(4, 5, 3, seed=8))
        with FSDP.state_dict_type(model, SHARDED):
            model.load_state_dict(state)
        assert_same_state(model.state_dict(), expected)
    dcp.save(by_columns, checkpoint_id=f"{folder}/dtensors")
    model = wrap_each(mlp(4, 5, 3, seed=7))
    state = sharded(model)["model"]
    dcp.load(state, checkpoint_id=f"{folder}/dtensors")
    with FSDP.state_dict_type(model, SHARDED):
        model.load_state_dict(state)
    assert_same_state(model.state_dict(), expected)


def save_mlp_body(folder):
    dcp.save(sharded(wrap_each(mlp(4, 5, 3)))["model"], checkpoint_id=folder)


@pytest.mark.cpu_only("its DTensors are on a mesh of the CPU")
@pytest.mark.parametrize("world_size", [2, 3])
def test_dtensors_load_it_and_are_loaded(tmp_path, world_size):
    """FSDP2's parameters and DTensors sharded by columns read what we wrote; we read what they wrote, and load them."""
    run_ranks(2, Body(__name__, "save_mlp_body"), folder=str(tmp_path))
    run_ranks(world_size, Body(__name__, "dtensor_body"), folder=str(tmp_path), expected=mlp(4, 5, 3).state_dict())


def odd_body(folder):
    source, target = (wrap_odd(odd(seed)) for seed in (1, 2))
    dcp.save(sharded(source), checkpoint_id=folder)
    state = sharded(target)
    dcp.load(state, checkpoint_id=folder)
    with FSDP.state_dict_type(target, SHARDED):
        target.load_state_dict(state["model"])
    assert_same_state(target.state_dict(), odd().state_dict())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_odd_parameters_through_files(tmp_path, world_size):
    """One-element, empty and 0-d parameters survive a save and a load."""
    run_ranks(world_size, Body(__name__, "odd_body"), folder=str(tmp_path))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("flatten", [True, False])
def test_the_runs_of_all_ranks_are_the_whole(flatten):
    """In rank order, the runs of all ranks hold every element exactly once."""
    model = wrap_odd(odd(), flatten_parameters=flatten)
    own = {
        name: (value.start, value.run)
        for name, value in sharded(model)["model"].items()
        if isinstance(value, SpanTensor)
    }
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    for name, value in odd().state_dict().items():
        if name in own:
            line = torch.full((value.numel(),), torch.nan)
            for start, run in (found[name] for found in every):
                assert line[start : start + run.numel()].isnan().all()
                line[start : start + run.numel()] = run
            assert torch.equal(line, value.flatten())


@on_ranks(2)
def test_it_is_made_without_communication():
    """Making sharded state needs no collectives and gathers no unit."""
    model = wrap_tiny(tiny())
    model.state_dict()
    reset_counters()
    with CollectiveCounter() as counter:
        sharded(model)
    assert counters() == {}
    assert counter.calls == []


@on_ranks(2)
@pytest.mark.parametrize("offload", [True, False])
def test_it_belongs_to_the_caller(offload):
    """Later steps do not change it, and changing it does not change the model."""
    model = wrap_odd(odd())
    with FSDP.state_dict_type(model, SHARDED, ShardedStateDictConfig(offload_to_cpu=offload)):
        state = model.state_dict()
        before = copy.deepcopy(state)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
            model.module.kept.add_(1)
        for name, value in state.items():
            run, kept = (value.run, before[name].run) if isinstance(value, SpanTensor) else (value, before[name])
            assert torch.equal(run, kept)
            run.zero_()
        assert model.state_dict()["kept"].tolist() == [1, 2, 3]
        assert model.params[0].abs().sum() > 0


@on_ranks(2)
def test_what_this_rank_does_not_have_is_refused():
    """A sharded dict with another cut raises on all ranks, and names the parameter and the elements that are there."""
    model = wrap_each(mlp(4, 5, 3))
    state = sharded(FSDP(mlp(4, 5, 3, seed=2)))["model"]
    with pytest.raises(RuntimeError, match="another wrapping or world size"):
        with FSDP.state_dict_type(model, SHARDED):
            model.load_state_dict(state)
    state = wrap_each(mlp(4, 5, 3)).state_dict()
    wrong = {**state, "0.weight": torch.ones(5, 3)} if dist.get_rank() == 1 else state
    with FSDP.state_dict_type(model, SHARDED):
        with pytest.raises(RuntimeError, match=r"size mismatch for 0.weight"):
            model.load_state_dict(wrong)
        model.load_state_dict(state)
    assert_same_state(model.state_dict(), state)


@on_ranks(2)
def test_it_loads_only_as_what_it_is():
    """Loading a sharded value where a whole one is expected raises, and names the elements on this rank."""
    model = wrap_each(mlp(4, 5, 3))
    state = sharded(wrap_each(mlp(4, 5, 3, seed=2)))["model"]
    for target in (model, mlp(4, 5, 3)):
        with pytest.raises(RuntimeError, match=r"this rank has elements \d+ to \d+ of it"):
            target.load_state_dict(state)


@on_ranks(2)
def test_it_can_be_pickled():
    """``torch.save`` of sharded state stores this rank's elements only, and loads with ``weights_only=True``."""
    model = wrap_each(mlp(100, 50, 3))
    state = sharded(model)["model"]
    file = io.BytesIO()
    torch.save(state, file)
    assert file.tell() < 4 * (100 * 50 + 50 + 50 * 3 + 3) // 2 + 8000
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    target = wrap_each(mlp(100, 50, 3, seed=2))
    with FSDP.state_dict_type(target, SHARDED):
        target.load_state_dict(loaded)
    assert_same_state(target.state_dict(), model.state_dict())


def async_body(folder):
    model = wrap_tiny(tiny())
    expected = model.state_dict()
    done = dcp.async_save(sharded(model), checkpoint_id=folder)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    done.result()
    state = sharded(model)
    dcp.load(state, checkpoint_id=folder)
    with FSDP.state_dict_type(model, SHARDED):
        model.load_state_dict(state["model"])
    assert_same_state(model.state_dict(), expected)


def test_asynchronous_saves(tmp_path):
    """``dcp.async_save`` stages and writes sharded values."""
    run_ranks(2, Body(__name__, "async_body"), folder=str(tmp_path))


@on_ranks(2)
def test_whole_values_are_cast():
    """A whole value of another dtype is cast into the shard, as in a plain module."""
    model, plain = wrap_each(mlp(4, 5, 3)), mlp(4, 5, 3)
    half = {name: value.bfloat16() for name, value in mlp(4, 5, 3, seed=2).state_dict().items()}
    with FSDP.state_dict_type(model, SHARDED):
        model.load_state_dict(half)
    plain.load_state_dict(half)
    assert_same_state(model.state_dict(), plain.state_dict())
