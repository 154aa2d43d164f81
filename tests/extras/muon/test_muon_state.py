"""Muon's state goes along: under original names, into every layout, on any number of ranks."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from fairshard.checkpoint import load, save
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.optim import Muon
from tests.extras.muon.mixture import LAYOUTS, OPTIONS, Mixture, PlainMuon, backward, full, is_flat, muon_of, train
from tests.kit import run_ranks
from tests.on_ranks import in_full, on_ranks
from tests.reference import Reference, assert_same_state
from tests.torch_gaps import needs_muon

MATRICES = {"up.weight", "down.weight", "experts.weight", "late.weight"}
OTHERS = {"up.bias", "tied.bias", "late.bias", "kernel"}


def continued(model, optimizer):
    """The whole weights after two more steps."""
    for step in (3, 4):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return full(model.state_dict())


def saved_run(layout, folder=None):
    """Train, save, and return the whole weights, the optimizer's whole state, and the weights two steps later."""
    model, optimizer = train(layout, 2)
    if folder is not None:
        save(folder, model, optimizer)
    weights = {name: value.clone() for name, value in full(model.state_dict()).items()}
    state = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
    return weights, state


def loaded_run(layout, folder):
    """Load into another model; returns weights and state as `saved_run`, and whether the next steps run."""
    model = LAYOUTS[layout](Mixture(seed=5))
    optimizer = muon_of(layout, model)
    load(folder, model, optimizer)
    weights = {name: value.clone() for name, value in full(model.state_dict()).items()}
    state = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
    before = weights["down.weight"]
    return weights, state, not torch.equal(continued(model, optimizer)["down.weight"], before)


def assert_same_states(actual, expected):
    assert actual.keys() == expected.keys()
    for name, state in expected.items():
        assert_same_state(dict(sorted(actual[name].items())), dict(sorted(state.items())))


@pytest.mark.filterwarnings("ignore")  # random numbers are not restored
@pytest.mark.parametrize(
    ("layout", "others"),
    [
        ("rows", ["views", "rows offload"]),
        ("flat", ["flat offload", "views"]),
        pytest.param("views held", ["flat", "rows"], marks=pytest.mark.full),
    ],
)
def test_checkpoints_from_two_ranks_to_three_and_one(tmp_path, layout, others):
    """Weights and state are the same bits after a save on 2 ranks and loads on 3 and 1, in other layouts."""
    folder = str(tmp_path / "saved")
    expected = run_ranks(2, saved_run, layout, folder)[0]
    for world_size, other in zip((3, 1), others, strict=True):
        for weights, state, is_moving in run_ranks(world_size, loaded_run, other, folder):
            assert_same_state(weights, expected[0])
            if is_flat(layout) == is_flat(other):
                assert_same_states(state, expected[1])
            else:  # parameters without a gradient have state in a flat shard only
                common = state.keys() & expected[1].keys()
                assert common >= MATRICES | OTHERS
                assert_same_states({k: state[k] for k in common}, {k: expected[1][k] for k in common})
            assert is_moving


@needs_muon
@on_ranks(2)
@pytest.mark.parametrize("layout", ["rows", "flat", in_full("views")])
def test_state_under_original_names_is_torchs(layout):
    """Matrices have a momentum, all others AdamW's state, also from a flat shard that keeps both for all elements."""
    _, state = saved_run(layout)
    flat = is_flat(layout)
    assert MATRICES | OTHERS <= state.keys() <= MATRICES | OTHERS | ({"unused"} if flat else set())
    for name in MATRICES:
        assert state[name].keys() == {"momentum_buffer"}
    for name in OTHERS:
        assert state[name].keys() == {"step", "exp_avg", "exp_avg_sq"}
    reference = Reference(Mixture(), keeps_none=True)
    plain = PlainMuon(reference.master, layout=layout)
    for step in range(2):
        backward(reference, (step, 0))
        reference.reduce_grads()
        plain.step()
        plain.zero_grad()
    for name, param in reference.master.named_parameters():
        if name in state and param.dim() == 2:
            assert torch.equal(state[name]["momentum_buffer"], plain.muon.state[param]["momentum_buffer"])
        elif name in OTHERS:
            assert_same_state(dict(sorted(state[name].items())), dict(sorted(plain.adamw.state[param].items())))
    experts = [plain.muon.state[expert]["momentum_buffer"] for expert in plain.experts]
    assert torch.equal(state["experts.weight"]["momentum_buffer"], torch.stack(experts))


@on_ranks(2)
@pytest.mark.parametrize("layout", ["flat", in_full("views")])
@pytest.mark.parametrize("way", ["full", "sharded", "own"])
def test_state_dicts_go_on_alike(layout, way):
    """Whole, sharded and the optimizer's own state dicts load into a new optimizer, which goes on alike."""
    model, optimizer = train(layout, 2)
    if way == "full":
        saved = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    else:
        saved = FSDP.sharded_optim_state_dict(model, optimizer) if way == "sharded" else optimizer.state_dict()
    saved, weights = copy.deepcopy(saved), copy.deepcopy(model.state_dict())
    expected = copy.deepcopy(continued(model, optimizer))
    other = LAYOUTS[layout](Mixture(seed=3))
    other.load_state_dict(weights)
    again = muon_of(layout, other)
    if way == "full":
        saved = FSDP.shard_full_optim_state_dict(saved, other, optim=again)
    elif way == "sharded":
        saved = FSDP.flatten_sharded_optim_state_dict(saved, other, optim=again)
    again.load_state_dict(saved)
    assert_same_state(continued(other, again), expected)


@on_ranks(2)
def test_torchs_state_dict_functions_before_the_first_forward():
    """torch's functions make a step to create state, before any forward: it changes no weight, and training goes on."""
    model, optimizer = train("rows", 2)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    weights = copy.deepcopy(model.state_dict())
    expected = copy.deepcopy(continued(model, optimizer))
    other = LAYOUTS["rows"](Mixture(seed=3))
    other.load_state_dict(weights)
    again = muon_of("rows", other)
    # Not strict: `unused` has no state to load.
    set_optimizer_state_dict(other, again, saved, options=StateDictOptions(strict=False))
    assert_same_state(full(other.state_dict()), full(weights))
    assert_same_state(continued(other, again), expected)


@needs_muon
@on_ranks(1)
def test_state_of_torchs_muon_loads():
    """A state dict of torch's Muon over the same matrices loads; our options keep their defaults; pickles work."""
    theirs_of, ours_of = Mixture(), Mixture()
    theirs = torch.optim.Muon([theirs_of.up.weight, theirs_of.down.weight], lr=0.1)
    ours = Muon([ours_of.up.weight, ours_of.down.weight], **OPTIONS)
    backward(theirs_of, 1)
    theirs.step()
    ours_of.load_state_dict(theirs_of.state_dict())
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert ours.param_groups[0]["use_muon"] is True
    again = pickle.loads(pickle.dumps(ours))
    assert torch.equal(again.param_groups[0]["params"][0], ours_of.up.weight)
    for model, optimizer in ((theirs_of, theirs), (ours_of, ours)):
        optimizer.zero_grad()
        backward(model, 2)
        optimizer.step()
    assert_same_state(ours_of.state_dict(), theirs_of.state_dict())
    assert dist.get_world_size() == 1
