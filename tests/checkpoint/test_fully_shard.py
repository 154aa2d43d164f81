"""Models of `fully_shard` are saved and loaded like wrapped ones: on other ranks, and in the background."""

import threading
import warnings
from unittest import mock

import pytest
import torch
from torch.distributed import checkpoint as dcp

from fairshard.checkpoint import Checkpointer, load, save
from fairshard.checkpoint.consolidate import consolidate_torch
from fairshard.checkpoint.contents import read_contents
from fairshard.checkpoint.entries import Training
from fairshard.checkpoint.saving import take
from fairshard.checkpoint.snapshot import Snapshot
from fairshard.nn import CPUOffloadPolicy
from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.checkpoint.compared import assert_same
from tests.doors.fully_shard.stateful import SHARDED, copied, hybrid_mesh, shard_odd, train_odd, whole_of
from tests.kit import run_ranks
from tests.on_ranks import in_full, on_ranks
from tests.trained import OPTIMIZERS, odd, wrap_odd

BUILDS = {
    **SHARDED,
    "wrapped": wrap_odd,
    "plain": lambda model: model,
    "offloaded": lambda model: shard_odd(model, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "replicas": lambda model: shard_odd(model, mesh=hybrid_mesh()),
}


def _built(how, seed, optimizer="adamw"):
    """An `Odd` model sharded as `BUILDS` says, and its optimizer."""
    model = BUILDS[how](odd(seed=seed))
    return model, OPTIMIZERS[optimizer]([param for param in model.parameters() if param.requires_grad])


def _whole(model, optimizer):
    """Weights and moments under original names, on every rank."""
    return copied(whole_of(model.state_dict())), FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)


def _save(how, folder, optimizer):
    model, own = _built(how, 1, optimizer)
    train_odd(model, own, range(2))
    save(folder, model, own, step=2)
    return _whole(model, own)


def _load(how, folder, optimizer):
    model, own = _built(how, 5, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warns that random numbers are not restored
        assert load(folder, model, own) == 2
    loaded = _whole(model, own)
    train_odd(model, own, range(1))
    return loaded


@pytest.mark.parametrize(
    ("saved", "loaded", "optimizer"),
    [
        ((3, "rows"), (2, "wrapped"), "adamw"),
        ((2, "wrapped"), (3, "columns"), "adamw"),
        ((3, "owned"), (2, "blocks"), "adamw"),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in [
                ((2, "columns"), (1, "rows"), "fused"),
                ((2, "wrapped"), (4, "owned"), "adam"),
                ((1, "rows"), (4, "replicas"), "momentum"),
                ((4, "replicas"), (2, "offloaded"), "adam"),
                ((2, "offloaded"), (1, "plain"), "fused"),
                ((1, "plain"), (3, "rows"), "amsgrad"),
                ((3, "wrapped"), (4, "rows"), "adagrad"),
                ((4, "whole"), (3, "columns"), "momentum"),
                ((3, "columns"), (2, "wrapped"), "sgd"),
            ]
        ),
    ],
)
def test_any_number_of_ranks_and_either_door(saved, loaded, optimizer, tmp_path):
    """Weights, moments and hyperparameters are those that were saved, and the offline tools read them."""
    folder = str(tmp_path / "one")
    expected = run_ranks(saved[0], _save, how=saved[1], folder=folder, optimizer=optimizer)[0]
    for actual in run_ranks(loaded[0], _load, how=loaded[1], folder=folder, optimizer=optimizer):
        assert_same(actual, expected)
    contents = read_contents(folder)
    assert not contents.problems
    assert {entry.key: entry.tied_to for entry in contents.tensors}["model.down.weight"] == "model.up.weight"
    consolidate_torch(folder, tmp_path / "whole.pt")
    values = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert values.keys() == expected[0].keys()
    assert all(torch.equal(value, expected[0][name]) for name, value in values.items())


@on_ranks(2)
@pytest.mark.parametrize("how", ["rows", "columns", "offloaded"])
def test_a_background_save_is_of_its_moment(shared_folder, how):
    """Steps taken before the writer reads do not change what is saved; a resumed run continues bit for bit."""
    model, optimizer = _built(how, 1)
    extra = {"position": 3}
    train_odd(model, optimizer, range(2))
    expected = _whole(model, optimizer)
    released, read = threading.Event(), Snapshot.read

    def held(snapshot, part):
        assert released.wait(60)
        return read(snapshot, part)

    with mock.patch.object(Snapshot, "read", held), Checkpointer(f"{shared_folder}/{how}", keep_last=1) as checkpointer:
        checkpointer.save(2, model, optimizer, extra=extra)
        noise = torch.rand(3)
        train_odd(model, optimizer, range(2, 4))
        released.set()
    goal = _whole(model, optimizer)
    for _ in range(2):  # a fresh model each time
        other, of_other = _built(how, 5)
        its_extra = {}
        assert Checkpointer(f"{shared_folder}/{how}").load_latest(other, of_other, extra=its_extra) == 2
        assert its_extra == extra
        assert torch.equal(torch.rand(3), noise)
        assert_same(_whole(other, of_other), expected)
        train_odd(other, of_other, range(2, 4))
        assert_same(_whole(other, of_other), goal)


@on_ranks(2)
def test_each_value_is_copied_once():
    """A save copies each value once, tied weights included, and copies nothing that is in host memory."""
    for how in ("rows", "offloaded"):
        model, optimizer = _built(how, 1)
        train_odd(model, optimizer, range(1))
        draft = take(Training(model, optimizer), 1, {})
        nbytes = [(1 + 2 * param.requires_grad) * param.to_local().nbytes for param in model.parameters()]
        assert draft.snapshot.nbytes_copied == (0 if how == "offloaded" else sum(nbytes))
        draft.snapshot.close()


@on_ranks(in_full(4))
def test_replicas_write_each_piece_once(shared_folder):
    """With two replicas of two shards, the checkpoint holds two pieces of each parameter."""
    model, optimizer = _built("replicas", 1)
    train_odd(model, optimizer, range(1))
    save(f"{shared_folder}/one", model, optimizer)
    metadata = dcp.FileSystemReader(f"{shared_folder}/one").read_metadata()
    places = [index for index in metadata.storage_data if index.fqn == "model.up.weight"]
    assert len(places) == 2
    for name, entry in metadata.state_dict_metadata.items():
        if hasattr(entry, "chunks"):
            assert sum(chunk.sizes.numel() for chunk in entry.chunks) == entry.size.numel(), name
