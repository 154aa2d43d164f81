"""Broken disks, ranks that disagree, overlapping saves: one clear error on every rank, and nothing lost."""

import contextlib
import os
import re
import resource
import shutil
import subprocess
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.checkpoint import Checkpointer, load, save
from fairshard.checkpoint.storage import storage_of
from fairshard.checkpoint.writer import CheckpointWriter
from fairshard.errors import CheckpointError
from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.checkpoint.saved_steps import (
    assert_agreed,
    assert_resumes_from,
    attempt,
    fail_to_save,
    failing,
    load_latest,
    names_in,
    save_steps,
    trained,
)
from tests.kit import delayed, rank_device, run_ranks
from tests.models import mlp
from tests.on_ranks import on_ranks


@contextlib.contextmanager
def disk(path, *options):
    """A small disk in memory, mounted on ``path``."""
    path.mkdir(exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", path], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"needs permission to mount a tmpfs: {mounted.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def save_into_little_room(root, disk_folder, rooms, async_save):
    """Save with each of ``rooms`` (free pages); return what each save raises and which files are there then."""
    model, optimizer = trained()
    found = []
    for step, pages in enumerate(rooms, start=10):
        kept = Checkpointer(root, keep_last=100, async_save=async_save)
        dist.barrier()
        if dist.get_rank() == 0:
            stat = os.statvfs(disk_folder)
            (Path(disk_folder) / "filler").write_bytes(b"\0" * max(0, stat.f_bavail - pages) * stat.f_bsize)
        dist.barrier()
        raised = attempt(lambda kept=kept, step=step: (kept.save(step, model, optimizer), kept.wait()))
        dist.barrier()
        there = names_in(root), (Path(root) / "latest").read_text()
        dist.barrier()
        if dist.get_rank() == 0:
            (Path(disk_folder) / "filler").unlink()
            shutil.rmtree(f"{root}/step-{step:08}", ignore_errors=True)
            (Path(root) / "latest").write_text("step-00000006\n")
        found.append((raised, there))
    return found


@pytest.mark.cpu_only("is about disks, and needs no device")
@pytest.mark.parametrize(("async_save", "pages"), [(True, 4), pytest.param(False, 1, marks=pytest.mark.full)])
def test_a_full_disk_is_an_error_wherever_it_strikes(written, tmp_path, async_save, pages):
    """With more and more room a save fails later and later, and each time leaves the disk as it was."""
    with disk(tmp_path / "disk", "size=2m") as folder:
        root = Path(shutil.copytree(written[0], folder / "root"))
        rooms = range(0, 100, pages)
        every = run_ranks(2, save_into_little_room, str(root), str(folder), rooms, async_save)
        failed = [raised for raised, _ in every[0] if raised is not None]
        assert 30 < len(failed) * pages < 90  # there was too little room, and then enough
        for (raised, there), (other, _), step in zip(*every, range(10, 10 + len(rooms)), strict=True):
            new = f"step-{step:08}"
            assert (raised is None) == (other is None)
            if raised is None:
                assert there == (["latest", "step-00000003", "step-00000006", new], f"{new}\n")
            else:
                assert_agreed([raised, other], str(root), "No space left on device")
                saved = [new] if "is saved, but" in raised[1] else []  # complete, but not named in `latest`
                assert saved or f"{new} was not saved" in raised[1]
                assert saved or ".tmp-step" in raised[1]  # names the file
                assert there == (["latest", "step-00000003", "step-00000006", *saved], "step-00000006\n")
        files = ("_0.distcp", "/.metadata", "fairshard.json")  # of any rank: which one runs out first is a race
        struck = {name for _, text in failed for name in files if name in text}
        assert len(struck) >= (2 if pages > 1 else 3), struck
        assert_resumes_from(root, 6, written[1])


@pytest.mark.cpu_only("is about disks, and needs no device")
def test_a_folder_that_is_only_read(written, tmp_path):
    """A read-only folder can be loaded from; a save into it fails on every rank and names it."""
    with disk(tmp_path / "disk", "size=2m") as folder:
        root = Path(shutil.copytree(written[0], folder / "root"))
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        assert_agreed(run_ranks(2, fail_to_save, str(root)), str(root), "Read-only file system")
        assert_resumes_from(root, 6, written[1])


def save_with_rank_1_limited(root):
    """Save while rank 1 may not write files over 4 KiB; return what is raised."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        return fail_to_save(root)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_one_rank_that_cannot_write_is_named_on_all(root, written):
    """The other ranks do not wait for it, and learn which rank failed, on which file, and why."""
    raised = run_ranks(2, save_with_rank_1_limited, str(root))
    assert_agreed(raised, "step-00000009 was not saved", "File too large", "__1_0.distcp", "rank 1")
    assert_resumes_from(root, 6, written[1])


# ---- ranks that disagree


def save_differently(root, case):
    """Save differently on rank 1, then alike on both; return what the first save raised."""
    model, optimizer = trained()
    kept = Checkpointer(root)
    is_other = dist.get_rank() == 1
    extra = {"fn": test_one_rank_that_cannot_write_is_named_on_all} if is_other and case == "extra" else {"at": 1}
    step = 10 if is_other and case == "step" else 9
    if is_other and case == "memory":
        with failing("fairshard.checkpoint.saving.Snapshot", MemoryError("no memory for the copy")):
            raised = attempt(lambda: kept.save(step, model, optimizer, extra=extra))
    else:
        raised = attempt(lambda: kept.save(step, model, optimizer, extra=extra))
    kept.save(12, model, optimizer, extra={"at": 2})
    kept.wait()
    return raised


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("extra", "TypeError", ["extra", "fn", "rank 1"]),
        ("step", "CheckpointError", ["same step", "[9, 10]"]),
        ("memory", "CheckpointError", ["no memory for the copy", "rank 1"]),
    ],
)
def test_a_rank_that_differs_is_named_on_all(root, case, kind, words):
    """All ranks raise the same error, nothing is left behind, and the next save works."""
    raised = run_ranks(2, save_differently, str(root), case)
    for found, text in raised:
        assert (found, text) == (kind, raised[0][1])
        assert all(word in text for word in words), text
    assert sorted(os.listdir(root)) == ["latest", "step-00000003", "step-00000006", "step-00000012"]
    assert_resumes_from(root, 12)


def save_without_state(root, num_groups):
    """Save without rank 1's optimizer state of the inner unit, then with it; return what the first save raised."""
    group = dist.new_group([0, 1]) if num_groups == 2 else None
    model = FSDP(nn.Sequential(mlp(3, 4), FSDP(mlp(4, 2), process_group=group)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3, device=rank_device())).sum().backward()
    optimizer.step()
    state = optimizer.state.pop(model[1].params[0]) if dist.get_rank() == 1 else None
    kept = Checkpointer(root)
    raised = attempt(lambda: kept.save(9, model, optimizer))
    if state is not None:
        optimizer.state[model[1].params[0]] = state
    kept.save(12, model, optimizer)
    kept.wait()
    return raised


@pytest.mark.parametrize("num_groups", [1, 2])
def test_optimizer_state_that_one_rank_lacks_is_named_on_all(root, num_groups):
    """A save that would lose half of a tensor raises and leaves nothing behind, whatever groups shard the units."""
    words = r"of `1.0.weight`, `1.0.bias` is .* on rank 0 and absent on rank 1"
    for kind, text in run_ranks(2, save_without_state, str(root), num_groups):
        assert kind == "ValueError"
        assert re.search(words, text), text
    assert sorted(os.listdir(root)) == ["latest", "step-00000003", "step-00000006", "step-00000012"]


def save_to_own_disk(root):
    """Save while rank 1 sees another disk under the same path; return what each rank raises."""
    begin = CheckpointWriter.__init__

    def elsewhere(writer, folder, num_ranks):
        own = folder.replace(root, f"{root}-{dist.get_rank()}") if dist.get_rank() else folder
        os.makedirs(own, exist_ok=True)
        begin(writer, own, num_ranks)

    with mock.patch.object(CheckpointWriter, "__init__", elsewhere):
        return fail_to_save(root)


def test_ranks_that_do_not_share_the_folder(root, written):
    """A checkpoint with half of its files is not published."""
    raised = run_ranks(2, save_to_own_disk, str(root))
    assert_agreed(raised, "step-00000009 was not saved", "must see the same folder", "__1_0.distcp")
    assert_resumes_from(root, 6, written[1])


# ---- crashes that a kill rarely hits, and overlapping saves


def test_a_step_is_saved_again_without_a_moment_without_one(root, written):
    """A run killed between the two renames of a save of an existing step resumes from the old checkpoint."""
    os.rename(root / "step-00000006", root / ".replaced-step-00000006")
    (root / ".tmp-step-00000006-1234").mkdir()
    found, state = run_ranks(2, load_latest, str(root))[0]
    assert found == 6
    assert all(torch.equal(state[name], value) for name, value in written[1].items())
    run_ranks(2, save_steps, str(root), (9,))
    assert sorted(os.listdir(root)) == ["latest", "step-00000003", "step-00000006", "step-00000009"]


def test_what_was_replaced_goes_when_the_new_one_is_there(root, written):
    """A run killed just after the second rename resumes from the new checkpoint."""
    shutil.copytree(root / "step-00000003", root / ".replaced-step-00000006")
    found, state = run_ranks(2, load_latest, str(root))[0]
    assert found == 6
    assert all(torch.equal(state[name], value) for name, value in written[1].items())
    assert_resumes_from(root, 6)


def save_6_again(root, fails):
    """Save step 6 of another model over the old one; if ``fails``, the last rename, on rank 0, fails."""
    rename = os.rename

    def renaming(source, target):
        if fails and os.path.basename(source).startswith(".tmp-step"):
            raise OSError(5, "Input/output error", source)
        rename(source, target)

    model, optimizer = trained(seed=2)
    with mock.patch("os.rename", renaming):
        raised = attempt(lambda: Checkpointer(root, keep_last=1, async_save=False).save(6, model, optimizer))
    return raised, model.state_dict()


@pytest.mark.parametrize("fails", [True, False])
def test_a_step_that_is_saved_again(root, written, fails):
    """The checkpoint of the step is replaced; if that fails, the old one is restored."""
    raised, state = zip(*run_ranks(2, save_6_again, str(root), fails), strict=True)
    if fails:
        assert_agreed(raised, "step-00000006 was not saved", "Input/output error")
        assert_resumes_from(root, 6, written[1])
    else:
        assert raised == (None, None)
        assert sorted(os.listdir(root)) == ["latest", "step-00000006"]
        assert_resumes_from(root, 6, state[0])


def save_twice_at_once(folder):
    """Background saves of two checkpointers, the first late on rank 1, more saves and a load, without a pause."""
    model, optimizer = trained()
    one, other = Checkpointer(f"{folder}/one"), Checkpointer(f"{folder}/other")
    with delayed(CheckpointWriter, "write_data", 1, 0.3):
        one.save(1, model, optimizer)
        other.save(2, model, optimizer)
        save(f"{folder}/third", model, optimizer, step=3)
        one.save(4, model, optimizer)
        assert load(f"{folder}/third", model, optimizer) == 3
        one.wait()
    return names_in(f"{folder}/one"), names_in(f"{folder}/other")


def test_saves_that_meet_wait_for_each_other(tmp_path):
    """Saves share a group: run in a different order on another rank, they would receive each other's messages."""
    assert (
        run_ranks(2, save_twice_at_once, str(tmp_path))
        == [(["latest", "step-00000001", "step-00000004"], ["latest", "step-00000002"])] * 2
    )


def destroy_too_early(root, rank_1_is_late):
    """Destroy the group before the saving thread uses it; a late rank 1 writes after rank 0 has cleaned up."""
    model, optimizer = trained()
    kept = Checkpointer(root)
    is_late, destroyed = rank_1_is_late and dist.get_rank() == 1, threading.Event()
    begin = CheckpointWriter.__init__

    def late(*args):
        destroyed.wait()
        deadline = time.monotonic() + 30
        while is_late and names_in(root) and time.monotonic() < deadline:
            time.sleep(0.01)
        begin(*args)

    with mock.patch.object(CheckpointWriter, "__init__", late):
        kept.save(1, model, optimizer)
        dist.destroy_process_group()
        destroyed.set()
        return attempt(kept.wait)


@pytest.mark.parametrize("rank_1_is_late", [False, True])
def test_a_group_destroyed_during_a_save_is_an_error_that_says_so(tmp_path, rank_1_is_late):
    """No checkpoint is published: without the group, torch would let every rank write the files of a single process.

    Rank 0 removes the unfinished folder, and a late rank does not create it again.
    """
    raised = run_ranks(2, destroy_too_early, str(tmp_path / "root"), rank_1_is_late)
    assert_agreed(raised, "step-00000001 was not saved", "Call Checkpointer.wait() before")
    assert names_in(tmp_path / "root") == []


def fail_in_background(root):
    """Save to a disk that fails in the background; return what the next save raises."""
    model, optimizer = trained()
    kept = Checkpointer(root)
    failed = attempt(lambda: None)
    with failing("fairshard.checkpoint.saving.dcp.save", OSError(5, "Input/output error", "/disk/piece")):
        kept.save(9, model, optimizer)
        failed = attempt(lambda: kept.save(12, model, optimizer))
    kept.save(15, model, optimizer)
    kept.wait()
    return failed


def test_a_failed_background_save_is_raised_by_the_next_call(root):
    """The failure is raised once; the call after that works."""
    raised = run_ranks(2, fail_in_background, str(root))
    for kind, text in raised:
        assert kind == "CheckpointError"
        assert "step-00000009 was not saved: Input/output error: /disk/piece" in text
    assert_resumes_from(root, 15)


# ---- places


@pytest.mark.parametrize("place", ["relative", "slash", "path", "file", "memory"])
def test_places_that_a_process_alone_saves_to(tmp_path, monkeypatch, place):
    """Without torch.distributed, saves go to a relative path, even if the program changes folder later, or a URL."""
    monkeypatch.chdir(tmp_path)
    root = {
        "relative": "run",
        "slash": f"{tmp_path}/run/",
        "path": tmp_path / "run",
        "file": f"file://{tmp_path}/run",
        "memory": f"memory://{tmp_path.name}/run",
    }[place]
    model = mlp(3, 4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    with Checkpointer(root, keep_last=2) as kept:
        monkeypatch.chdir("/")
        for step in (1, 2, 3, 3):
            kept.save(step, model, optimizer)
    if place not in ("file", "memory"):
        assert sorted(os.listdir(tmp_path / "run")) == ["latest", "step-00000002", "step-00000003"]
        assert not Path("/run/latest").exists()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    monkeypatch.chdir(tmp_path)
    assert Checkpointer(root).load_latest(model, optimizer) == 3
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("num_copies", [0, 1, 2])
@pytest.mark.parametrize("crash", [OSError, KeyboardInterrupt])
def test_a_remote_place_that_fails_while_files_get_their_names(tmp_path, num_copies, crash):
    """Remote files cannot be renamed: an incomplete checkpoint has no manifest and is removed."""
    root = f"memory://{tmp_path.name}/run"
    model = mlp(3, 2)
    kept = Checkpointer(root, async_save=False)
    kept.save(1, model)
    files = storage_of(root)._fs
    copy, left = files.cp_file, iter(range(num_copies))

    def failing(source, target):
        if next(left, None) is None:
            raise crash("the network is gone")
        copy(source, target)

    with mock.patch.object(files, "cp_file", failing), pytest.raises((CheckpointError, KeyboardInterrupt)):
        kept.save(2, model)
    assert storage_of(root).names(root) == ["latest", "step-00000001"]
    assert Checkpointer(root).load_latest(model) == 1
    kept.save(2, model)
    assert Checkpointer(root).load_latest(model) == 2


@pytest.mark.parametrize("step", [-1, 1.5, True, None])
def test_a_step_that_is_no_number_of_steps(tmp_path, step):
    """A step that is not a whole number is refused: no load would find its checkpoint."""
    with pytest.raises(ValueError, match="must be a number of steps"):
        Checkpointer(tmp_path).save(step, mlp(3, 2))


@on_ranks(2, timeout=20)
def test_ranks_that_save_at_other_steps_are_told(shared_folder):
    """If ranks differ in when they save, the first `maybe_save` raises on all of them, with both numbers."""
    rank = dist.get_rank()
    checkpointer = Checkpointer(shared_folder, every=10 + rank)
    with pytest.raises(ValueError, match=r"`every` .* is 10 on rank 0 and 11 on rank 1 of 2"):
        checkpointer.maybe_save(1, nn.Linear(2, 2))
    assert not os.listdir(shared_folder)


@pytest.mark.parametrize("argument", [{"memory_every": 5}, {"memory_folder": "/dev/shm"}])
def test_an_argument_for_copies_in_memory_says_what_to_do_instead(tmp_path, argument):
    """fairshard copied its state to other hosts until 0.6; a script that asks for it must not go on without."""
    with pytest.raises(TypeError, match=r"has no argument `memory_.*second Checkpointer.*/dev/shm/run"):
        Checkpointer(tmp_path, **argument)


@on_ranks(2)
def test_a_save_that_ranks_call_with_other_arguments_raises_on_all(shared_folder):
    """Ranks would believe in a folder that is not there, or in a step that none is."""
    model = FSDP(nn.Linear(4, 4))
    rank = dist.get_rank()
    with pytest.raises(CheckpointError, match=r"must save to the same folder, but theirs are .*of-0, .*of-1\."):
        save(f"{shared_folder}/of-{rank}", model)
    for step in (-1, True, 2.0, rank - 1):
        with pytest.raises(ValueError, match=r"`step` must be a number of steps, but is (-1|True|2\.0)"):
            save(f"{shared_folder}/saved", model, step=step)
    dist.barrier()
    assert os.listdir(shared_folder) == []
    save(f"{shared_folder}/saved", model, step=0)
