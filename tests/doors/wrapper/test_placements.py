"""Original parameters that are placed by `RowBlocks` or `Owned`: each rank's run of them is whole blocks, or all.

That they train as flat runs, to the bit and with every setting, is shown in ``tests/doors/test_matrix.py``.
"""

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
from tests.kit.doors import whole
from tests.models import loss_of_tiny, tiny, wrap_tiny
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state, run_steps

pytestmark = pytest.mark.behaviour("placements of the wrapper")


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


def trained(placement_fn, num_steps=2):
    """A trained model, and its optimizer."""
    model = wrapped(placement_fn)
    optimizer = torch.optim.AdamW(model.parameters())
    run_steps(model, loss_of_tiny, num_steps, optimizer=optimizer)
    return model, optimizer


@on_ranks(2, in_full(3))
@pytest.mark.parametrize("placement_fn", [blocks_of_two, owned])
def test_runs_are_whole_blocks(placement_fn):
    """The runs of a matrix have whole blocks of two rows, but for its last one, or are all of it or nothing."""
    model, plain = wrapped(placement_fn), tiny()
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, {name: param.numel() for name, param in model.named_parameters()})
    for name, param in plain.named_parameters():
        numels = [of_rank[name] for of_rank in every]
        assert sum(numels) == param.numel()
        if param.dim() > 1 or placement_fn is owned:
            unit = 2 * param[0].numel() if placement_fn is blocks_of_two else param.numel()
            assert all(numel % unit == 0 for numel in [numel for numel in numels if numel][:-1])
        assert placement_fn is not owned or set(numels) <= {0, param.numel()}
    assert_same_state(whole(model), plain.state_dict())


def save(folder, placement_fn):
    model, _ = trained(placement_fn)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    return {name: value.cpu() for name, value in whole(model).items()}


def load(folder, placement_fn):
    model = wrapped(placement_fn, seed=5)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
    return {name: value.cpu() for name, value in whole(model).items()}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (blocks_of_two, owned),
        (owned, None),
        pytest.param(blocks_of_two, None, marks=pytest.mark.full),
        pytest.param(each_kind, owned, marks=pytest.mark.full),
    ],
)
def test_a_checkpoint_loads_with_another_placement(saved, loaded, tmp_path):
    """Placements saved on two ranks load on three, with others and as flat runs."""
    expected = run_ranks(2, save, folder=str(tmp_path / "one"), placement_fn=saved)[0]
    for actual in run_ranks(3, load, folder=str(tmp_path / "one"), placement_fn=loaded):
        assert_same_state(actual, expected)


@on_ranks(2)
def test_other_runs_are_not_taken_for_blocks():
    """A local state dict loads into the same placement only, and has no description in fairscale's format."""
    models = {placement_fn: wrapped(placement_fn) for placement_fn in (*PLACEMENTS, None)}
    for placement_fn in PLACEMENTS:
        local = models[placement_fn].local_state_dict()
        models[placement_fn].load_local_state_dict(local)
        for other in models.keys() - {placement_fn}:
            with pytest.raises(RuntimeError, match="must come from the same rank of the same wrapped model"):
                models[other].load_local_state_dict(local)
        with pytest.raises(ValueError, match="is placed by blocks, or on one rank"):
            models[placement_fn].local_metadata_dict()


@on_ranks(2, in_full(3))
@pytest.mark.parametrize("placement_fn", PLACEMENTS)
def test_whole_parameters_are_shown_and_written_back(placement_fn):
    """`summon_full_params` shows whole parameters and gradients, and writes them back; rank 0 alone loads values."""
    model, _ = trained(placement_fn, 1)
    loss_of_tiny(model, (1,)).backward()
    before = whole(model)
    with FSDP.summon_full_params(model, with_grads=True), torch.no_grad():
        for param in model.parameters():
            assert param.shape == param.grad.shape
            param.mul_(2)
    after = whole(model)
    changed = dict(model.named_parameters()).keys() & before.keys()
    assert changed
    assert all(torch.equal(after[name], 2 * before[name]) for name in changed)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
        model.state_dict()
        model.load_state_dict({} if dist.get_rank() else before)
    assert_same_state(whole(model), before)


@on_ranks(2)
@pytest.mark.parametrize("placement_fn", PLACEMENTS)
def test_optimizer_state_goes_to_flat_runs_and_back(placement_fn):
    """Full optimizer state of a placement, on all ranks and from rank 0, trains on in flat runs, and back again."""
    states = []
    model, optimizer = trained(placement_fn)
    for other_fn in (None, placement_fn):
        other = wrapped(other_fn, seed=3)
        of_other = torch.optim.AdamW(other.parameters())
        other.load_state_dict(model.state_dict())
        state = FSDP.optim_state_dict(model, optimizer)
        of_other.load_state_dict(FSDP.optim_state_dict_to_load(other, of_other, state))
        run_steps(other, loss_of_tiny, 1, optimizer=of_other)
        states.append(whole(other))
        FSDP.scatter_full_optim_state_dict(FSDP.full_optim_state_dict(model, optimizer), other)
    assert_same_state(*states)


@on_ranks(2)
def test_what_is_asked_for_placements():
    """A policy hands the function on to its units; it is not asked for parameters without dimensions."""
    layers = nn.Sequential(nn.Linear(3, 6, bias=False), nn.Linear(6, 3, bias=False)).to(rank_device())
    policy = ModuleWrapPolicy({nn.Linear})
    model = FSDP(layers, auto_wrap_policy=policy, use_orig_params=True, placement_fn=lambda param: RowBlocks())
    for param, width in zip(model.parameters(), (3, 6), strict=True):
        assert param.numel() % width == 0
    model, shapes = nn.Linear(6, 8), []
    model.scale = nn.Parameter(torch.tensor(2.0))

    def place(param):
        shapes.append(tuple(param.shape))
        return RowBlocks(1) if param.shape[0] % 2 == 0 else Owned()

    assert whole(FSDP(model, use_orig_params=True, placement_fn=place))["scale"] == 2.0
    assert shapes == [(8, 6), (8,)]


REFUSED = [  # the error, words of its message, and the call
    (ValueError, "`use_orig_params` must be True with `placement_fn`", lambda: FSDP(tiny(), placement_fn=owned)),
    (TypeError, "`placement_fn` must be a function of a parameter, but is RowBlocks", lambda: wrapped(RowBlocks())),
    (
        ValueError,
        "`register_comm_hook` must communicate equally many elements",
        lambda: wrapped(owned).register_comm_hook(None, lambda state, grad, shard: None),
    ),
    (ValueError, r"must be one of the 2 ranks .* but is 5 for `", lambda: wrapped(lambda param: Owned(5))),
    (
        RanksDisagreeError,
        r"on rank 0 of 2; rank 1 has .* on rank 1 of 2",
        lambda: loss_of_tiny(wrapped(lambda param: Owned(dist.get_rank())), ()),
    ),
]


@on_ranks(2)
def test_what_is_refused():
    """Contradicting arguments, hooks that need equal shards, and owners that do not exist or differ across ranks."""
    for kind, match, call in REFUSED:
        with pytest.raises(kind, match=match):
            call()
