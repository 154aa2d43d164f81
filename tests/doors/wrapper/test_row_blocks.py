"""Original parameters that are placed by `RowBlocks` or `Owned`: each rank's run of them is whole blocks, or all."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp

from fairshard.errors import RanksDisagreeError
from fairshard.nn import FullStateDictConfig, Owned, RowBlocks, StateDictType
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn.wrap import ModuleWrapPolicy
from tests.kit import rank_device, run_ranks
from tests.models import tiny, tiny_batch, tiny_loss, wrap_tiny
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state


def blocks_of_two(param):
    """Blocks of two rows of matrices; vectors are cut anywhere."""
    return RowBlocks(2) if param.dim() > 1 else None


def owned(param):
    """One rank has all."""
    return Owned()


def each_kind(param):
    """A placement of each kind."""
    return owned(param) if param.dim() > 1 else [None, Owned(0), RowBlocks()][param.numel() % 3]


PLACEMENTS = [blocks_of_two, owned, each_kind]


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
@pytest.mark.parametrize("optimizer", [in_full("sgd"), "adamw"])
def test_bits_are_those_of_flat_runs(optimizer):
    """Weights trained with placements are those trained with runs that are cut anywhere, to the bit."""
    make = {
        "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    }[optimizer]
    for kwargs in SETTINGS:
        found = []
        for placement_fn in (None, *PLACEMENTS):
            model = wrapped(placement_fn, **kwargs)
            train(model, make(model.parameters()), range(3))
            found.append(model.state_dict())
        for state in found[1:]:
            assert_same_state(state, found[0])


def save(folder, placement_fn):
    model = wrapped(placement_fn)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(2))
    whole = copy.deepcopy(model.state_dict())
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    return {name: value.cpu() for name, value in whole.items()}


def load(folder, placement_fn):
    model = wrapped(placement_fn, seed=5)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
    return {name: value.cpu() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "placements", [(blocks_of_two, owned), (owned, None), in_full((blocks_of_two, None)), in_full((each_kind, owned))]
)
def test_a_checkpoint_loads_with_another_placement(placements, tmp_path):
    """Placements saved on two ranks load on three, with others and as flat runs."""
    saved, loaded = placements
    expected = run_ranks(2, save, folder=str(tmp_path / "one"), placement_fn=saved)[0]
    for actual in run_ranks(3, load, folder=str(tmp_path / "one"), placement_fn=loaded):
        assert_same_state(actual, expected)


@on_ranks(2)
def test_other_runs_are_not_taken_for_blocks():
    """A local state dict loads into the same placement only, and has no description in fairscale's format."""
    models = {placement_fn: wrapped(placement_fn) for placement_fn in (*PLACEMENTS, None)}
    for placement_fn in PLACEMENTS:
        local = models[placement_fn].local_state_dict()
        for other, model in models.items():
            if other is placement_fn:
                model.load_local_state_dict(local)
            else:
                with pytest.raises(RuntimeError, match="must come from the same rank of the same wrapped model"):
                    model.load_local_state_dict(local)
        with pytest.raises(ValueError, match="is placed by blocks, or on one rank"):
            models[placement_fn].local_metadata_dict()


@on_ranks(2)
def test_owners_have_all_and_agree():
    """A run is a whole parameter or nothing; owners that differ across ranks, and hooks on equal shards, raise."""
    model = wrapped(owned)
    own = {name: param.numel() for name, param in model.named_parameters()}
    for name, param in tiny().named_parameters():
        assert own[name] in (0, param.numel())
    every = [None] * 2
    dist.all_gather_object(every, own)
    assert all(every[0][name] + every[1][name] == param.numel() for name, param in tiny().named_parameters())
    with pytest.raises(ValueError, match="`register_comm_hook` must communicate equally many elements"):
        model.register_comm_hook(None, lambda state, grad, shard: None)
    with pytest.raises(ValueError, match=r"must be one of the 2 ranks .* but is 5 for `"):
        wrapped(lambda param: Owned(5))
    with pytest.raises(RanksDisagreeError, match=r"on rank 0 of 2; rank 1 has .* on rank 1 of 2"):
        train(wrapped(lambda param: Owned(dist.get_rank())), None, range(1))


@on_ranks(2, in_full(3))
@pytest.mark.parametrize("placement_fn", PLACEMENTS)
def test_whole_parameters_are_shown_and_written_back(placement_fn):
    """`summon_full_params` shows whole parameters and gradients, and writes them back; rank 0 alone loads values."""
    model = wrapped(placement_fn)
    train(model, torch.optim.AdamW(model.parameters()), range(1))
    *inputs, targets = tiny_batch(0, 1)
    tiny_loss(model(*inputs), targets).backward()
    before = model.state_dict()
    with FSDP.summon_full_params(model, with_grads=True), torch.no_grad():
        for param in model.parameters():
            assert param.shape == param.grad.shape
            param.mul_(2)
    trained = dict(model.named_parameters()).keys() & before.keys()
    assert trained
    after = model.state_dict()
    assert all(torch.equal(after[name], 2 * before[name]) for name in trained)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
        model.state_dict()
        model.load_state_dict({} if dist.get_rank() else before)
    assert_same_state(model.state_dict(), before)


@on_ranks(2)
@pytest.mark.parametrize("placement_fn", PLACEMENTS)
def test_optimizer_state_goes_to_flat_runs_and_back(placement_fn):
    """Full optimizer state of a placement, on all ranks and from rank 0, trains on in flat runs, and back again."""
    states = []
    model = wrapped(placement_fn)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(2))
    for other_fn in (None, placement_fn):
        other = wrapped(other_fn, seed=3)
        of_other = torch.optim.AdamW(other.parameters())
        other.load_state_dict(model.state_dict())
        state = FSDP.optim_state_dict(model, optimizer)
        of_other.load_state_dict(FSDP.optim_state_dict_to_load(other, of_other, state))
        train(other, of_other, range(2, 3))
        states.append(other.state_dict())
        full = FSDP.full_optim_state_dict(model, optimizer)
        FSDP.scatter_full_optim_state_dict(full, other)
    assert_same_state(*states)


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


@on_ranks(2)
def test_a_parameter_without_dimensions_has_the_default_placement():
    """As with `fully_shard`, the function is not asked: it may count rows."""
    model = nn.Linear(6, 8)
    model.scale = nn.Parameter(torch.tensor(2.0))
    shapes = []

    def place(param):
        shapes.append(tuple(param.shape))
        return RowBlocks(1) if param.shape[0] % 2 == 0 else Owned()

    wrapped_model = FSDP(model, use_orig_params=True, placement_fn=place)
    assert shapes == [(8, 6), (8,)]
    assert wrapped_model.state_dict()["scale"] == 2.0
