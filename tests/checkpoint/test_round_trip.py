"""What one run saves another loads: any number of ranks, any wrapping, any placement, and goes on alike."""

import contextlib
import itertools
import random
import threading
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fairshard.checkpoint import Checkpointer, load, save
from fairshard.checkpoint.entries import Training
from fairshard.checkpoint.saving import take
from fairshard.checkpoint.snapshot import Snapshot
from fairshard.errors import CheckpointError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import OptimStateKeyType
from fairshard.optim import CPUOptimizer, ShardedGradScaler
from fairshard.utils.testing import run_ranks
from tests.covering import all_cells, covering_array
from tests.models import tiny, tiny_batch, tiny_loss, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state
from tests.trained import OPTIMIZERS, PLACEMENTS, PRECISIONS, WRAPPINGS, odd, trained, wrap_odd, wrapped_tiny

SIDES = {
    "wrapping": [*WRAPPINGS, "plain"],
    "flatten": [True, False],
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


def _whole(model, optimizer):
    """Model and optimizer state under original names, on every rank."""
    state = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    return {name: value.clone() for name, value in model.state_dict().items()}, state


def _save(cell, folder):
    model, optimizer_of = _build(cell, "saved", seed=1)
    model, optimizer = trained(model, optimizer_of)
    save(folder, model, optimizer, step=2)
    return _whole(model, optimizer)


def _load(cell, folder):
    model, optimizer_of = _build(cell, "loaded", seed=7)
    optimizer = optimizer_of(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that random numbers do not go on
        assert load(folder, model, optimizer) == 2
    return _whole(model, optimizer)


def _assert_same(actual, expected):
    assert_same_state(actual[0], expected[0])
    assert actual[1]["state"].keys() == expected[1]["state"].keys()
    for name, state in expected[1]["state"].items():
        assert_same_state(dict(sorted(actual[1]["state"][name].items())), dict(sorted(state.items())))
    ours, theirs = (
        [{k: v for k, v in group.items() if k not in ("foreach", "fused")} for group in side[1]["param_groups"]]
        for side in (actual, expected)
    )
    assert ours == theirs


def _check(cell, folder):
    saved = run_ranks(cell["saved_on"], _save, cell=cell, folder=str(folder))[0]
    loaded = run_ranks(cell["loaded_on"], _load, cell=cell, folder=str(folder))
    for actual in loaded:
        _assert_same(actual, saved)


def _id(cell):
    return "-".join(str(value) for value in cell.values())


@pytest.mark.parametrize("cell", covering_array(AXES), ids=_id)
def test_every_pair_of_sides_and_ranks(cell, tmp_path):
    """Weights, optimizer state and hyperparameters are those that were saved, whatever the other side is."""
    _check(cell, tmp_path / "one")


@pytest.mark.full
@pytest.mark.parametrize("saved_on", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("loaded_on", [1, 2, 3, 4, 5])
def test_every_number_of_ranks_on_either_side(saved_on, loaded_on, tmp_path):
    """All wrappings onto all wrappings, for every pair of world sizes."""
    axes = {name: values for name, values in AXES.items() if name.endswith(("wrapping", "flatten"))}
    rest = {"precision": "fp32", "optimizer": "adamw", "saved_placement": "device", "loaded_placement": "offload"}
    for number, cell in enumerate(all_cells(axes)):
        _check({**cell, **rest, "saved_on": saved_on, "loaded_on": loaded_on}, tmp_path / str(number))


@pytest.mark.parametrize("ranks", [(1, 3), (3, 2), (2, 5)], ids=str)
def test_odd_parameters(ranks, tmp_path):
    """One element, none, no dimension, frozen and tied weights, buffers that are kept and some that are not."""
    saved = run_ranks(ranks[0], _save_odd, folder=str(tmp_path / "odd"))[0]
    for actual in run_ranks(ranks[1], _load_odd, folder=str(tmp_path / "odd")):
        _assert_same(actual, saved)


def _odd_optimizer(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def _save_odd(folder):
    model = wrap_odd(odd())
    optimizer = _odd_optimizer(model)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    save(folder, model, optimizer)
    return _whole(model, optimizer)


def _load_odd(folder):
    model = wrap_odd(odd(seed=5), flatten_parameters=False)
    optimizer = _odd_optimizer(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(folder, model, optimizer)
    return _whole(model, optimizer)


# ---- plain torch


@on_ranks(2)
def test_plain_torch_reads_ours(shared_folder):
    """`dcp.load` into a plain module and its optimizer's state, and the conversion to one file."""
    model, optimizer = trained(wrap_tiny(tiny()), OPTIMIZERS["adamw"])
    save(f"{shared_folder}/ours", model, optimizer)
    expected, state = _whole(model, optimizer)
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


@on_ranks(2)
@pytest.mark.parametrize("level", ["model", "app", None], ids=str)
@pytest.mark.parametrize("flat_optimizer", [False, True])
def test_what_fsdp2_wrote_is_read(shared_folder, level, flat_optimizer):
    """A model and optimizer of FSDP2, saved with torch's own tools at three levels, go on here bit for bit."""
    mesh = init_device_mesh("cpu", (2,))
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


# ---- what goes with model and optimizer


@on_ranks(1, 2)
@pytest.mark.parametrize("async_save", [True, False])
def test_everything_goes_on(shared_folder, async_save):
    """Scheduler, scaler, position and random numbers after a resume are those of a run that was not cut off."""
    ends = []
    for resumed in (False, True):
        model = wrap_tiny(tiny(), mixed_precision=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
        scaler = ShardedGradScaler("cpu", init_scale=8.0, growth_interval=2)
        position = {"text": "a", "offsets": torch.zeros(2)}
        of_all = (model, optimizer, scheduler, scaler, position)
        checkpointer = Checkpointer(f"{shared_folder}/{async_save}", every=2, async_save=async_save)
        random.seed(dist.get_rank() + 9 * resumed)
        np.random.seed(dist.get_rank() + 9 * resumed)
        torch.manual_seed(dist.get_rank() + 9 * resumed)
        done = checkpointer.load_step(2, *of_all) if resumed else 0
        drawn = []
        for step in range(done, 5):
            if step == 2 and not resumed:
                assert checkpointer.maybe_save(step, *of_all)
            loss = model(torch.randint(13, (2, 5)), torch.randn(2, 5, 6) * np.random.rand() * random.random())
            drawn = [*drawn[-2:], loss.detach().clone()]
            scaler.scale(loss.float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            position["offsets"] += 1
        checkpointer.wait()
        end = (model.state_dict(), scheduler.state_dict(), scaler.state_dict(), position, drawn)
        ends.append(end)
    (state, *rest), (its_state, *its_rest) = ends
    assert_same_state(its_state, state)
    assert its_rest[0] == rest[0]
    assert its_rest[1] == rest[1]
    assert torch.equal(its_rest[2]["offsets"], rest[2]["offsets"])
    assert all(torch.equal(a, b) for a, b in zip(its_rest[3], rest[3], strict=True))


@on_ranks(3)
def test_buffers_that_differ_between_ranks_stay_so(shared_folder):
    """BatchNorm's statistics are each rank's own; on another number of ranks they are rank 0's."""
    wrapped = FSDP(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)))
    wrapped(torch.full((4, 3), float(dist.get_rank() + 1)))
    save(f"{shared_folder}/own", wrapped)
    other = FSDP(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)))
    load(f"{shared_folder}/own", other)
    assert_same_state(other.state_dict(), wrapped.state_dict())
    plain = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    target = {"model": plain.state_dict()}
    dcp.load(target, checkpoint_id=f"{shared_folder}/own")
    assert torch.equal(target["model"]["0.running_mean"], torch.full((3,), 0.1))


@on_ranks(2)
@pytest.mark.parametrize("extra", [{"f": print}, {"a": [{"b": object()}]}, {"n": np.zeros(2)}], ids=["fn", "obj", "np"])
def test_what_is_not_plain_data_is_refused_on_all_ranks(shared_folder, extra):
    """One rank's extra could run code when it is read: a TypeError that names it, everywhere, and no folder."""
    extra = extra if dist.get_rank() == 1 else {}
    with pytest.raises(TypeError, match=r"`extra\['\w'\]` is .* \(rank 1 of 2\)"):
        save(f"{shared_folder}/refused", FSDP(nn.Linear(2, 2)), extra=extra)


# ---- in the background


@on_ranks(1, 2)
@pytest.mark.parametrize(
    ("kind", "placement"),
    [  # a plain optimizer does not see held gradients
        pair
        for pair in itertools.product(["plain", "overlap", "after"], ["device", "offload", "held"])
        if pair != ("plain", "held")
    ],
)
def test_a_background_save_is_of_its_moment(shared_folder, kind, placement):
    """The writer is held back while steps, early ones too, change what it has not read: what is saved is older."""
    held = {"cpu_offload": True, "move_grads_to_cpu": False}
    settings = {"device": {}, "offload": {"cpu_offload": True}, "held": held}
    model = wrap_tiny(tiny(), **settings[placement])
    if kind == "plain":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:
        optimizer = CPUOptimizer(model, torch.optim.AdamW, lr=0.01, overlap=kind == "overlap")

    def step():
        tokens, extra = torch.ones(2, 5, dtype=torch.long), torch.ones(2, 5, 6)
        if kind == "overlap":
            with optimizer.last_backward():
                model(tokens, extra).square().mean().backward()
        else:
            model(tokens, extra).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    before = _whole(model, optimizer)
    with _held_writer() as writer, Checkpointer(f"{shared_folder}/one") as checkpointer:
        checkpointer.save(2, model, optimizer)
        writer.wait()
        step()
        writer.release()
        step()
    other = wrap_tiny(tiny(seed=2))
    its_optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    assert load(f"{shared_folder}/one", other, its_optimizer) == 2
    _assert_same(_whole(other, its_optimizer), before)


class _HeldWriter:
    """Holds a writer before it reads the third box."""

    def __init__(self):
        self._released, self._reached = threading.Event(), threading.Event()
        self._read, self._count = Snapshot.read, 0

    def read(self, snapshot, part):
        """What stands in for `Snapshot.read`."""
        self._count += 1
        if self._count == 3:
            self._reached.set()
            assert self._released.wait(60)
        return self._read(snapshot, part)

    def wait(self):
        """Until the writer has come there."""
        assert self._reached.wait(60)

    def release(self):
        """Let it go on."""
        self._released.set()


@contextlib.contextmanager
def _held_writer():
    writer = _HeldWriter()
    with mock.patch.object(Snapshot, "read", lambda snapshot, part: writer.read(snapshot, part)):
        yield writer


@on_ranks(2)
def test_an_edit_during_a_background_save_is_noticed(shared_folder):
    """Masters that are saved where they are change without a step: the save fails, says so, and leaves nothing."""
    model = wrap_tiny(tiny(), cpu_offload=True)
    checkpointer = Checkpointer(f"{shared_folder}/edited")
    with _held_writer() as writer:
        checkpointer.save(1, model)
        writer.wait()
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
        writer.release()
        with pytest.raises(CheckpointError, match=r"only optimizers may change them"):
            checkpointer.wait()
    assert checkpointer.load_latest(model) is None
    checkpointer.save(2, model)
    checkpointer.wait()
    assert checkpointer.load_latest(model) == 2


@on_ranks(2)
def test_masters_in_host_memory_are_not_copied(shared_folder):
    """With offload and no step in between a background save copies no shard; without offload it copies each once."""
    for offload in (True, False):
        model = wrap_tiny(tiny(), cpu_offload=offload)
        model, optimizer = trained(model, OPTIMIZERS["adamw"])
        draft = take(Training(model, optimizer), 1, {})
        nbytes = sum(param.nbytes for param in model.parameters())
        assert draft.snapshot.nbytes_copied == (0 if offload else 3 * nbytes)
        draft.snapshot.close()
