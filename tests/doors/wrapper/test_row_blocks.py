"""Original parameters that are placed by `RowBlocks`: each rank's run of them is whole blocks."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import RowBlocks, StateDictType
from fairshard.nn.wrap import ModuleWrapPolicy
from fairshard.utils.testing import rank_device, run_ranks
from tests.models import tiny, tiny_batch, tiny_loss, wrap_tiny
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state


def blocks_of_two(param):
    """Blocks of two rows of matrices; vectors are cut anywhere."""
    return RowBlocks(2) if param.dim() > 1 else None


def wrapped(placement_fn, seed=1, **kwargs):
    return wrap_tiny(tiny(seed=seed), use_orig_params=True, placement_fn=placement_fn, **kwargs)


def train(model, optimizer, steps):
    for step in steps:
        *inputs, targets = tiny_batch(dist.get_rank(), step)
        tiny_loss(model(*inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2, in_full(3))
def test_runs_are_whole_blocks():
    """A run of a matrix has whole blocks of two rows, but for its last one; the runs of all ranks are the matrix."""
    plain = dict(tiny().named_parameters())
    model = wrapped(blocks_of_two)
    own = {name: param.numel() for name, param in model.named_parameters()}
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    for name, param in plain.items():
        numels = [of_rank[name] for of_rank in every]
        assert sum(numels) == param.numel()
        if param.dim() > 1:
            holders = [numel for numel in numels if numel]
            assert all(numel % (2 * param[0].numel()) == 0 for numel in holders[:-1])
    assert_same_state(model.state_dict(), tiny().state_dict())


SETTINGS = [
    {},
    {"cpu_offload": True},
    {"mixed_precision": True, "compute_dtype": torch.bfloat16},
    {"bucket_cap_mb": 0, "reshard_after_forward": False},
]


@on_ranks(in_full(1), 2, in_full(3))
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_bits_are_those_of_flat_runs(optimizer):
    """Weights trained with blocks are those trained with runs that are cut anywhere, to the bit."""
    make = {
        "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    }[optimizer]
    for kwargs in SETTINGS:
        found = []
        for placement_fn in (None, blocks_of_two):
            model = wrapped(placement_fn, **kwargs)
            train(model, make(model.parameters()), range(3))
            found.append(model.state_dict())
        assert_same_state(*found)


def save(folder):
    model = wrapped(blocks_of_two)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(2))
    whole = copy.deepcopy(model.state_dict())
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    return {name: value.cpu() for name, value in whole.items()}


def load(folder, by_blocks):
    model = wrapped(blocks_of_two if by_blocks else None, seed=5)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
    return {name: value.cpu() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("by_blocks", [True, False])
def test_a_checkpoint_loads_with_another_placement(by_blocks, tmp_path):
    """Blocks saved on two ranks load on three, as blocks and as flat runs."""
    expected = run_ranks(2, save, folder=str(tmp_path / "one"))[0]
    for actual in run_ranks(3, load, folder=str(tmp_path / "one"), by_blocks=by_blocks):
        assert_same_state(actual, expected)


@on_ranks(2)
def test_other_runs_are_not_taken_for_blocks():
    """A local state dict of blocks loads into the same blocks only, and has no description in fairscale's format."""
    model = wrapped(blocks_of_two)
    local = model.local_state_dict()
    model.load_local_state_dict(local)
    with pytest.raises(RuntimeError, match="must come from the same rank of the same wrapped model"):
        wrapped(None).load_local_state_dict(local)
    with pytest.raises(ValueError, match="is placed by blocks, or on one rank"):
        model.local_metadata_dict()


@on_ranks(2)
def test_a_policy_hands_the_placement_on():
    """Units that a policy makes place their parameters like the outermost."""
    layers = nn.Sequential(nn.Linear(3, 6, bias=False), nn.Linear(6, 3, bias=False)).to(rank_device())
    policy = ModuleWrapPolicy({nn.Linear})
    model = FSDP(layers, auto_wrap_policy=policy, use_orig_params=True, placement_fn=lambda param: RowBlocks())
    for param, width in zip(model.parameters(), (3, 6), strict=True):
        assert param.numel() % width == 0


def test_arguments_that_contradict_each_other():
    """Flat parameters have no blocks, and a placement is a function."""
    with pytest.raises(ValueError, match="`use_orig_params` must be True with `placement_fn`"):
        FSDP(nn.Linear(2, 2), placement_fn=blocks_of_two)
    with pytest.raises(TypeError, match="`placement_fn` must be a function of a parameter, but is RowBlocks"):
        FSDP(nn.Linear(2, 2), use_orig_params=True, placement_fn=RowBlocks())
