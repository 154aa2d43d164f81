"""Broken files and checkpoints of another model: one clear error on every rank, and nothing lost."""

import contextlib
import io
import os
import pickle

import pytest
import torch
from torch import nn

from fairshard.checkpoint import Checkpointer, load
from fairshard.checkpoint.manifest import read_manifest
from fairshard.checkpoint.storage import Storage
from fairshard.errors import CheckpointError
from tests.checkpoint.saved_steps import (
    FILES,
    assert_agreed,
    assert_resumes_from,
    attempt,
    fail_to_save,
    is_same,
    memory_of,
    train,
    try_to_load,
)
from tests.kit import run_ranks
from tests.models import mlp, tiny, wrap_each, wrap_tiny


def fail_to_load(target, how):
    """Return what loading raises on each rank, and whether its memory is unchanged."""
    return zip(*run_ranks(2, try_to_load, str(target), how), strict=True)


def truncate(path):
    """Cut off the second half."""
    os.truncate(path, path.stat().st_size // 2)


def flip(path):
    """Change one bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path):
    """Remove all content."""
    path.write_bytes(b"")


DAMAGES = {"truncated": truncate, "flipped": flip, "empty": empty, "missing": os.unlink}


# ---- files


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_on_every_rank(root, name, damage):
    """Every rank raises the same error, which names the file; nothing is loaded; the previous checkpoint is fine."""
    path = root / "step-00000006" / name
    DAMAGES[damage](path)
    raised, same = fail_to_load(path.parent, "load")
    assert_agreed(raised, name, *["missing"] * (damage == "missing"))
    assert all(same)
    raised, same = fail_to_load(root, "load_latest")
    assert_agreed(raised, str(path), "step-00000003")  # another checkpoint to use
    assert all(same)
    (root / "latest").write_text("step-00000003\n")
    assert_resumes_from(root, 3)


@pytest.mark.parametrize("key", ["model.first.norm.weight", "optim.state.first.norm.weight.exp_avg"])
def test_metadata_that_lost_a_piece(root, key):
    """Plain torch's checkpoints have no checksums, but a tensor with a missing piece is still noticed."""
    folder = root / "step-00000006"
    (folder / "fairshard.json").unlink()
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.storage_meta.modules.clear()
    metadata.state_dict_metadata[key].chunks.pop()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    raised, same = fail_to_load(folder, "load")
    assert_agreed(raised, str(folder / ".metadata"), key, "pieces of it are missing")
    assert all(same)


def forget_manifest(folder):
    """Make it a checkpoint of plain torch, without a manifest and the mark of one."""
    (folder / "fairshard.json").unlink()
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.storage_meta.modules.clear()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def fail_to_load_plain(folder):
    """Return what loading into a plain model raises, and whether its memory is unchanged."""
    model = tiny(seed=7)
    before = [value.clone() for value in model.state_dict().values()]
    raised = attempt(lambda: load(folder, model))
    return raised, all(map(torch.equal, before, model.state_dict().values()))


@pytest.mark.parametrize("name", FILES[:2])
def test_what_was_read_before_a_file_ends_is_not_kept(root, name):
    """Without checksums a cut file is noticed only while it is read: even a plain model stays unchanged."""
    folder = root / "step-00000006"
    forget_manifest(folder)
    os.truncate(folder / name, 4096)  # keeps a few tensors
    raised, same = zip(*run_ranks(2, fail_to_load_plain, str(folder)), strict=True)
    assert_agreed(raised, name)
    assert all(same)


def test_a_file_that_was_cut_says_so(root):
    """The length is checked before the bytes, and the error states it."""
    path = root / "step-00000006" / "__1_0.distcp"
    nbytes = path.stat().st_size
    truncate(path)
    raised, _ = fail_to_load(path.parent, "load")
    assert_agreed(raised, f"{path} must have {nbytes} bytes, but has {path.stat().st_size}")


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "not a text"])
def test_a_damaged_pointer_is_named_on_every_rank(root, damage):
    """The content of a damaged `latest` is not guessed: the error tells what may be written into it."""
    path = root / "latest"
    {**DAMAGES, "not a text": lambda path: path.write_bytes(b"\xff\xfe")}[damage](path)
    for how in ("load", "load_latest"):
        raised, same = fail_to_load(root, how)
        assert_agreed(raised, str(path))
        assert all(same)
    path.write_text("step-00000003\n")
    assert_resumes_from(root, 3)


def test_without_a_pointer_the_newest_whole_checkpoint_is_taken(root, written):
    """A run that was killed before it wrote its first `latest` can resume."""
    (root / "latest").unlink()
    assert_resumes_from(root, 6, written[1])


def test_every_flipped_bit_of_a_manifest_is_found(root):
    """No flipped bit can change the step, a file's checksum or anything else unnoticed."""
    good = (root / "step-00000006" / "fairshard.json").read_bytes()
    manifest = read_manifest(OneFile(good), "run")
    assert manifest.step == 6
    for place in range(8 * len(good)):
        data = bytearray(good)
        data[place // 8] ^= 1 << place % 8
        with contextlib.suppress(CheckpointError):
            assert read_manifest(OneFile(data), "run") == manifest, place  # one space became another


class OneFile(Storage):
    """Every file has these bytes."""

    def __init__(self, data):
        self._data = data

    def exists(self, path):
        """Every file exists."""
        return True

    def open(self, path, mode):
        """The same bytes for every file."""
        return io.BytesIO(self._data)


def test_a_file_in_place_of_a_folder_is_named(tmp_path):
    """A file where the root folder should be raises an error that names it, and stays unchanged."""
    path = tmp_path / "root"
    path.write_text("a file")
    raised, same = fail_to_load(path, "load_latest")
    assert_agreed(raised, str(path), "Not a directory")
    assert all(same)
    assert_agreed(run_ranks(2, fail_to_save, str(path)), str(path), "Not a directory")
    assert path.read_text() == "a file"


def fail_to_load_other(root, case):
    """Load a checkpoint of another model or of other optimizer groups; return what is raised."""
    if case == "model":
        model = wrap_each(mlp(6, 11, 6))
    elif case == "sizes":
        model = tiny(seed=7)
        model.head = nn.Linear(6, 14)
        model = wrap_tiny(model)
    elif case == "less":
        model = tiny(seed=7)
        model.first.norm = nn.Identity()
        model = wrap_tiny(model)
    else:
        model = wrap_tiny(tiny(seed=7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    before = memory_of(model, optimizer)
    raised = attempt(lambda: Checkpointer(root).load_latest(model, optimizer))
    return raised, is_same(before, memory_of(model, optimizer))


def save_two_groups(root):
    """Save a checkpoint of an optimizer with two learning rates."""
    model = wrap_tiny(tiny())
    params = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:], "lr": 0.5}], lr=0.02)
    train(model, optimizer, 1)
    Checkpointer(root, async_save=False).save(6, model, optimizer)


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("model", "CheckpointError", ["step-00000006", "`0.weight` is missing", "this model"]),
        ("sizes", "CheckpointError", ["step-00000006", "`head.weight` has shape (13, 6) instead of (14, 6)"]),
        ("less", "CheckpointError", ["step-00000006", "but: `first.norm.weight` is not in the model"]),
        ("groups", "ValueError", ["hyperparameters", "group 0", "differ"]),
    ],
)
def test_what_another_model_or_optimizer_saved_is_refused(root, case, kind, words):
    """Every rank raises the same error, before anything is changed."""
    if case == "groups":
        run_ranks(2, save_two_groups, str(root))
    raised, same = zip(*run_ranks(2, fail_to_load_other, str(root), case), strict=True)
    for found, text in raised:
        assert (found, text) == (kind, raised[0][1])
        assert all(word in text for word in words), text
    assert all(same)


# ---- disks
