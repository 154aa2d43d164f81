"""Copies in host memory: what a restart finds there, and what it must not use."""

import contextlib
import logging
import os
import shutil
import threading
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fairshard.checkpoint import Checkpointer, memory_copies, memory_folder, writer
from fairshard.checkpoint.memory_folder import memory_left
from fairshard.checkpoint.saving import _without_warnings
from tests.checkpoint.saved_steps import assert_agreed, attempt, is_same, memory_of, train, trained
from tests.kit import run_ranks

DISK_STEP, COPIED_STEP = 1, 3


# ---- what the ranks do


def folder_of(memory, order):
    """This rank's folder in memory: rank ``r`` is on host ``order[r]``."""
    folder = Path(memory, f"host-{order[dist.get_rank()]}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def checkpointer_in(root, memory, order, **kwargs):
    return Checkpointer(root, every=100, memory_every=1, memory_folder=folder_of(memory, order), **kwargs)


def leave(root, memory, order, until=COPIED_STEP):
    """Train, save step 1 to disk, copy each step; end without `close`. Return this rank's memory after each step."""
    model, optimizer = trained()
    kept = checkpointer_in(root, memory, order)
    states = {}
    for step in range(1, until + 1):
        train(model, optimizer, step)
        kept.copy_to_memory(step, model, optimizer)
        if step == DISK_STEP:
            kept.save(step, model, optimizer)
        states[step] = memory_of(model, optimizer)
    kept.wait()
    return states


def restart(root, memory, order, **kwargs):
    """Resume in a new model; return the step and this rank's memory, and what was logged."""
    model, optimizer = trained(seed=7)
    kept = checkpointer_in(root, memory, order)
    with logged() as lines:
        step = kept.load_latest(model, optimizer, **kwargs)
    return step, memory_of(model, optimizer), lines


@contextlib.contextmanager
def logged():
    """Collect what fairshard logs."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("fairshard")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


# ---- helpers


@pytest.fixture
def folders(tmp_path):
    """A root for checkpoints, and a folder in place of the memory of all hosts."""
    return str(tmp_path / "root"), str(tmp_path / "memory")


def assert_restored(ends, states, step):
    """Every rank has resumed ``step`` with the values that it had then."""
    assert [end[0] for end in ends] == [step] * len(states)
    for (_, found, _), own in zip(ends, states, strict=True):
        assert is_same(found, own[step])


def own_folder(memory, host=0):
    (found,) = Path(memory, f"host-{host}").iterdir()
    return found


def newest_in(memory, host=0):
    (found,) = own_folder(memory, host).glob("step-*")
    return found


# ---- what must hold


def test_a_restart_takes_the_newer_of_memory_and_disk(folders):
    """The newest copy is restored bit for bit; without it, the newest checkpoint on disk is, and the loss is known."""
    root, memory = folders
    states = run_ranks(2, leave, root, memory, (0, 0))
    assert_restored(run_ranks(2, restart, root, memory, (0, 0)), states, COPIED_STEP)
    shutil.rmtree(memory)
    assert_restored(run_ranks(2, restart, root, memory, (0, 0)), states, DISK_STEP)


@pytest.mark.parametrize(
    ("order", "lost", "step"),
    [
        ((0, 1), (0,), COPIED_STEP),
        ((0, 1), (0, 1), DISK_STEP),
        ((0, 1, 1), (1,), COPIED_STEP),
        pytest.param((0, 1), (), COPIED_STEP, marks=pytest.mark.full),
        pytest.param((0, 1), (1,), COPIED_STEP, marks=pytest.mark.full),
        pytest.param((0, 1, 2), (2,), COPIED_STEP, marks=pytest.mark.full),
        pytest.param((0, 1, 2), (1, 2), DISK_STEP, marks=pytest.mark.full),
    ],
)
def test_a_lost_host_is_restored_from_another(folders, order, lost, step):
    """One host's memory may be lost: its ranks get their files from another. Without both copies it is the disk."""
    root, memory = folders
    states = run_ranks(len(order), leave, root, memory, order)
    for host in lost:
        shutil.rmtree(Path(memory, f"host-{host}"))
    assert_restored(run_ranks(len(order), restart, root, memory, order), states, step)


def test_ranks_may_come_back_on_other_hosts(folders):
    """torchrun may number the hosts anew, and one may be a new one: files are found where they are."""
    root, memory = folders
    states = run_ranks(3, leave, root, memory, (0, 1, 2))
    shutil.rmtree(Path(memory, "host-2"))
    assert_restored(run_ranks(3, restart, root, memory, (3, 0, 1)), states, COPIED_STEP)
    for host in (0, 1):  # a second restart: what was fetched counts, and nothing was lost
        assert newest_in(memory, host)
    assert_restored(run_ranks(3, restart, root, memory, (3, 0, 1)), states, COPIED_STEP)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_another_number_of_ranks_loads_a_copy(folders, num_ranks):
    """A copy is an ordinary checkpoint: fewer and more ranks load it, from the hosts that are left."""
    root, memory = folders
    run_ranks(2, leave, root, memory, (0, 1))
    shutil.rmtree(Path(memory, "host-1"))
    order = (0, 1, 1)[:num_ranks]
    own = run_ranks(2, whole_values, root, memory, (0, 1))
    others = run_ranks(num_ranks, whole_values, root, memory, order)
    assert others[0][0] == COPIED_STEP
    for name, value in own[0][1].items():
        assert torch.equal(others[0][1][name], value), name


def whole_values(root, memory, order):
    """The step that a restart resumes, and the model's whole values."""
    model, optimizer = trained(seed=7)
    return checkpointer_in(root, memory, order).load_latest(model, optimizer), model.state_dict()


def test_no_state_in_which_a_process_can_die_is_taken_for_a_whole_copy(folders, tmp_path):
    """From each state of the memory between two changes of it, a restart resumes the older copy or the newer one."""
    root, memory = folders
    states = run_ranks(2, leave_and_record, root, memory, str(tmp_path / "states"))
    num_states = len(os.listdir(tmp_path / "states"))
    assert num_states > 10
    ends = run_ranks(2, restart_from_each, root, memory, str(tmp_path / "states"))
    for own, found in zip(states, ends, strict=True):
        assert len(found) == num_states
        for step, values in found:
            assert is_same(values, own[step])
    steps = [step for step, _ in ends[0]]
    assert steps == sorted(steps)
    assert set(steps) == {COPIED_STEP, COPIED_STEP + 1}


def leave_and_record(root, memory, states):
    """Rank 0 records each state of the memory while the last step is copied."""
    model, optimizer = trained()
    kept = checkpointer_in(root, memory, (0, 0))
    found = {}
    for step in range(1, COPIED_STEP + 2):
        train(model, optimizer, step)
        if step == COPIED_STEP + 1:
            kept.wait()
        with recorded(memory, states) if step > COPIED_STEP and not dist.get_rank() else contextlib.nullcontext():
            kept.copy_to_memory(step, model, optimizer)
            kept.wait()
        found[step] = memory_of(model, optimizer)
    return found


@contextlib.contextmanager
def recorded(memory, states):
    """Copy the memory before each change of a file."""
    os.makedirs(states)
    lock = threading.Lock()

    def record():
        if lock.acquire(blocking=False):  # a copy changes files too
            with contextlib.suppress(OSError):  # the other rank may remove a file meanwhile
                shutil.copytree(memory, Path(states, f"{len(os.listdir(states)):03}"))
            lock.release()

    def recording(change):
        return lambda *args, **kwargs: (record(), change(*args, **kwargs))[1]

    names = ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync")
    with mock.patch.multiple(os, **{name: recording(getattr(os, name)) for name in names}):
        yield
    record()


def restart_from_each(root, memory, states):
    """Resume from each state."""
    found = []
    for state in sorted(os.listdir(states)):
        if not dist.get_rank():
            shutil.rmtree(memory)
            shutil.copytree(Path(states, state), memory)
        dist.barrier()
        found.append(restart(root, memory, (0, 0))[:2])
        dist.barrier()
    return found


@pytest.mark.parametrize(
    ("name", "verify"),
    [
        ("__0_0.distcp", "reading"),
        ("__1_0.distcp", "before"),
        (".metadata", "reading"),
        ("fairshard.json", "reading"),
        pytest.param("__1_0.distcp", "reading", marks=pytest.mark.full),
        pytest.param(".metadata", "before", marks=pytest.mark.full),
    ],
)
def test_a_damaged_copy_is_not_used(folders, name, verify):
    """A flipped bit in any file: the run resumes from the disk, and the log says why."""
    root, memory = folders
    states = run_ranks(2, leave, root, memory, (0, 0))
    path = newest_in(memory) / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    ends = run_ranks(2, restart, root, memory, (0, 0), verify=verify)
    assert_restored(ends, states, DISK_STEP)
    if name != "fairshard.json":
        assert any(f"copy of step {COPIED_STEP} in memory is not used" in line and name in line for line in ends[0][2])


def test_a_cut_file_comes_from_the_other_host(folders):
    """A file that is shorter than its manifest says counts as missing: another host's copy of it is used."""
    root, memory = folders
    states = run_ranks(2, leave, root, memory, (0, 1))
    path = newest_in(memory, 1) / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    assert_restored(run_ranks(2, restart, root, memory, (0, 1)), states, COPIED_STEP)


def test_the_memory_of_another_run_is_not_used(folders):
    """A new run in a folder of the same name finds no copy, and its first copy removes the old ones."""
    root, memory = folders
    run_ranks(2, leave, root, memory, (0, 0))
    (old,) = Path(memory, "host-0").iterdir()
    shutil.rmtree(root)
    assert [end[0] for end in run_ranks(2, restart, root, memory, (0, 0))] == [None, None]
    run_ranks(2, leave, root, memory, (0, 0))
    assert not old.exists()
    assert len(os.listdir(Path(memory, "host-0"))) == 1


def test_the_memory_of_a_living_run_is_not_removed(folders):
    """Containers that share memory may each have a run below one path; and a folder that is removed is made again."""
    root, memory = folders
    run_ranks(2, share_memory, root, memory)


def share_memory(root, memory):
    """Copy in one run; then in another, behind the same path; then in the first again."""
    held = []
    for step in (1, 2):
        model, optimizer = trained()
        kept = checkpointer_in(root, memory, (0, 0))
        train(model, optimizer, step)
        kept.copy_to_memory(step, model, optimizer)
        kept.wait()
        held.append((kept, model, optimizer))
        dist.barrier()
        if dist.get_rank() == 0:
            os.rename(root, f"{root}-of-{step}")
        dist.barrier()
    folder = folder_of(memory, (0, 0))
    assert sorted(path.name[:13] for path in folder.glob("*/step-*")) == ["step-00000001", "step-00000002"]
    dist.barrier()
    first, model, optimizer = held[0]
    if dist.get_rank() == 0:
        shutil.rmtree(first._memory._place.folder.path)
        os.rename(f"{root}-of-1", root)
    dist.barrier()
    first.copy_to_memory(3, model, optimizer)
    first.wait()
    dist.barrier()
    kept = checkpointer_in(root, memory, (0, 0))
    assert kept.load_latest(model, optimizer) == 3


def test_copies_that_a_run_went_back_from_are_not_used(folders):
    """After `load_step` of an earlier step and a save, a restart goes on with that, and other memory is removed.

    Not even the memory of a host that was away meanwhile is used, though it is whole.
    """
    root, memory = folders
    run_ranks(2, leave, root, memory, (0, 1))
    shutil.move(Path(memory, "host-1"), Path(memory, "away"))
    run_ranks(2, go_back, root, memory)
    shutil.rmtree(Path(memory, "host-1"))
    shutil.move(Path(memory, "away"), Path(memory, "host-1"))
    ends = run_ranks(2, restart, root, memory, (0, 1))
    assert [end[0] for end in ends] == [DISK_STEP + 1] * 2
    assert not list(Path(memory, "host-0").glob("*/step-*"))


def go_back(root, memory):
    """Continue from step 1 on disk, and save step 2 there."""
    model, optimizer = trained(seed=7)
    kept = checkpointer_in(root, memory, (0, 1))
    kept.load_step(DISK_STEP, model, optimizer)
    train(model, optimizer, DISK_STEP + 1)
    kept.save(DISK_STEP + 1, model, optimizer)
    kept.wait()


def test_two_copies_must_fit(folders):
    """If a host has no room for two copies, the first one raises on every rank, with the sizes and the cure."""
    root, memory = folders
    for target in ("os.statvfs", "fairshard.checkpoint.memory_copies.free_host_memory"):
        raised = run_ranks(2, copy_without_room, root, memory, target)
        assert_agreed(raised, "Two copies in memory of 2 ranks", "must fit", "host-0" if "os" in target else "memory")
        assert not list(Path(memory).rglob("*.distcp"))


def copy_without_room(root, memory, target):
    model, optimizer = trained()
    kept = checkpointer_in(root, memory, (0, 0))
    nbytes = sum(tensor.nbytes for tensor in memory_of(model, optimizer)[0])
    free = 3 * nbytes  # for both ranks one copy fits, two do not
    full = mock.Mock(return_value=free) if "host" in target else mock.Mock(**{"return_value.f_bavail": free})
    if "host" not in target:
        full.return_value.f_frsize = 1
    with mock.patch(target, full):
        raised = attempt(lambda: kept.copy_to_memory(1, model, optimizer))
    kept.wait()
    return raised


def test_a_copy_that_fails_leaves_the_older_one(folders):
    """Memory that runs out later ends no training: the log says so, the older copy stays, the next one is written."""
    root, memory = folders
    (first, lines), (second, _) = run_ranks(2, run_out_of_memory, root, memory)
    assert any("Step 2 was not copied to memory" in line and "No space left" in line for line in lines)
    assert (first, second) == (1, 1)
    assert newest_in(memory).name.startswith("step-00000003")
    assert not list(own_folder(memory).glob(".tmp-*"))


def run_out_of_memory(root, memory):
    """Copy steps 1, 2 and 3; there is no space for step 2."""
    model, optimizer = trained()
    kept = checkpointer_in(root, memory, (0, 0))
    kept.copy_to_memory(1, model, optimizer)
    kept.wait()
    full = OSError(28, "No space left on device")
    with logged() as lines, mock.patch.object(writer._ChecksumStream, "_write", side_effect=full):
        kept.copy_to_memory(2, model, optimizer)
        kept.wait()
    names = [path.name for path in own_folder(memory).glob("step-*")]
    kept.copy_to_memory(3, model, optimizer)
    kept.wait()
    return sum(name.startswith("step-00000001") for name in names), lines


def test_a_clean_end_removes_the_copies(folders):
    """After `close`, or the end of a `with` block, nothing is left in memory; after an exception everything is."""
    root, memory = folders
    run_ranks(2, end, root, memory, True)
    assert memory_left(root, f"{memory}/host-0") is None
    assert not list(Path(memory, "host-0").iterdir())
    assert ".memory" not in os.listdir(root)
    run_ranks(2, end, root, memory, False)
    assert memory_left(root, f"{memory}/host-0") == str(own_folder(memory))


def end(root, memory, is_clean):
    model, optimizer = trained()
    with contextlib.suppress(KeyError), checkpointer_in(root, memory, (0, 0)) as kept:
        kept.save(1, model, optimizer)
        kept.copy_to_memory(2, model, optimizer)
        if not is_clean:
            raise KeyError


def test_a_copy_does_not_wait_for_a_save(folders):
    """While a checkpoint is written to a slow disk, steps are copied to memory."""
    root, memory = folders
    assert run_ranks(2, copy_during_a_save, root, memory) == [True, True]
    assert newest_in(memory).name.startswith("step-00000003")


def copy_during_a_save(root, memory):
    """Copy steps 2 and 3 while the disk is still writing step 1."""
    model, optimizer = trained()
    kept = checkpointer_in(root, memory, (0, 0))
    released = threading.Event()
    write = writer.CheckpointWriter.write_data

    def held_write(self, plan, planner):
        if str(self.path).startswith(root):
            released.wait()
        return write(self, plan, planner)

    with mock.patch.object(writer.CheckpointWriter, "write_data", held_write):
        kept.save(1, model, optimizer)
        for step in (2, 3):
            train(model, optimizer, step)
            kept.copy_to_memory(step, model, optimizer)
        kept._memory.wait()
        is_held = kept._thread.is_alive()
        released.set()
        kept.wait()
    return is_held


@pytest.mark.parametrize("kind", ["link", "open"])
def test_a_folder_of_someone_else_is_refused(folders, kind):
    """A link, or a folder that others may write, under the name of the run raises on every rank."""
    root, memory = folders
    assert_agreed(run_ranks(2, copy_into_foreign, root, memory, kind), "must be a folder of this user")


def copy_into_foreign(root, memory, kind):
    model, optimizer = trained()
    kept = checkpointer_in(root, memory, (0, 0))
    parent = folder_of(memory, (0, 0))
    if not dist.get_rank():
        name = memory_folder.new_run_name(root)
        if kind == "link":
            (parent / "elsewhere").mkdir(mode=0o700)
            (parent / f"fairshard-{name}").symlink_to(parent / "elsewhere")
        else:
            (parent / f"fairshard-{name}").mkdir()
            (parent / f"fairshard-{name}").chmod(0o777)
    dist.barrier()
    return attempt(lambda: kept.load_latest(model, optimizer))


def test_without_memory_every_nothing_is_copied(folders):
    """`maybe_save` copies at multiples of ``memory_every``; without it `copy_to_memory` raises and says why."""
    root, memory = folders
    assert run_ranks(2, copy_every_second, root, memory) == [[2, 4], [2, 4]]
    with pytest.raises(ValueError, match="memory_every"):
        Checkpointer(root).copy_to_memory(1, torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="`memory_every` must be at least 1, but is 0"):
        Checkpointer(root, memory_every=0)


def copy_every_second(root, memory):
    model, optimizer = trained()
    copied = []
    kept = Checkpointer(root, every=100, memory_every=2, memory_folder=folder_of(memory, (0, 0)))
    save = memory_copies.MemoryCopies.save
    with mock.patch.object(
        memory_copies.MemoryCopies, "save", lambda self, step, t: (copied.append(step), save(self, step, t))
    ):
        for step in range(1, 6):
            kept.maybe_save(step, model, optimizer)
    kept.close()
    return copied


def test_threads_that_ignore_warnings_restore_the_filters():
    """Two threads that ignore warnings at the same time do not leave them ignored."""
    before = list(warnings.filters)
    inside = threading.Event()

    def second():
        inside.set()
        with _without_warnings():
            pass

    thread = threading.Thread(target=second)
    with _without_warnings():
        thread.start()
        inside.wait()
    thread.join()
    assert list(warnings.filters) == before
