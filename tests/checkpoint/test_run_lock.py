"""Two runs never write to one folder, and a dead run does not keep it."""

import gc
import json
import os
import re
import socket
import subprocess
import sys
import threading
from dataclasses import asdict, replace

import pytest
from torch import nn

from fairshard.checkpoint import Checkpointer, run_lock
from fairshard.checkpoint.run_lock import NAME, Owner, RunLock, lock_of
from fairshard.errors import CheckpointError
from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.kit import rank_device
from tests.on_ranks import on_ranks

ELSEWHERE = "another kernel"


def _write(folder, owner):
    folder.mkdir(exist_ok=True)
    (folder / NAME).write_text(json.dumps(asdict(owner)) + "\n")


def _parent(**changes):
    """The parent process, which lives, as an owner."""
    pid = os.getppid()
    return replace(Owner.this_process(), pid=pid, started=run_lock._state_and_start(pid)[1], **changes)


def _dead():
    """A process that has ended, as an owner."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    started = run_lock._state_and_start(process.pid)[1]
    process.wait()
    return replace(Owner.this_process(), pid=process.pid, started=started)


@on_ranks(2)
def test_a_second_run_is_refused_on_all_ranks(tmp_path):
    """`save` and `maybe_save` raise with the other's host, pid and start; nothing is written; reading stays allowed."""
    model = FSDP(nn.Linear(4, 4).to(rank_device()))
    with Checkpointer(tmp_path, every=2, async_save=False) as first:
        first.save(2, model)
    del first
    gc.collect()
    owner = _parent()
    _write(tmp_path, owner)
    before = sorted(os.listdir(tmp_path))
    second = Checkpointer(tmp_path, every=2)
    text = rf"in use by process {owner.pid} on host {re.escape(socket.gethostname())}, since {owner.since}"
    for step, call in ((1, second.maybe_save), (4, second.maybe_save), (4, second.save)):
        with pytest.raises(CheckpointError, match=text):
            call(step, model)
    assert sorted(os.listdir(tmp_path)) == before
    assert second.load_latest(model) == 2


@on_ranks(1)
def test_the_lock_goes_with_its_last_user(tmp_path):
    """Two checkpointers of one process share the lock; without them the folder is free."""
    model = nn.Linear(2, 2)
    first, second = Checkpointer(tmp_path), Checkpointer(tmp_path / ".." / tmp_path.name)
    for checkpointer in (first, second):
        assert not checkpointer.maybe_save(1, model)
    del first, checkpointer
    gc.collect()
    assert (tmp_path / NAME).exists()
    del second
    gc.collect()
    assert os.listdir(tmp_path) == []


@on_ranks(1)
def test_a_run_that_lost_its_lock_publishes_nothing(tmp_path):
    """If another run has taken the folder meanwhile, the save raises, and the checkpoints from before stay."""
    model = nn.Linear(2, 2)
    checkpointer = Checkpointer(tmp_path, async_save=False)
    checkpointer.save(1, model)
    _write(tmp_path, _parent())
    with pytest.raises(CheckpointError, match=r"in use by process \d+ .* This process had not touched its lock"):
        checkpointer.save(2, model)
    assert sorted(path.name for path in tmp_path.iterdir()) == [NAME, "latest", "step-00000001"]


@pytest.mark.parametrize("owner", ["dead", "reused pid", "zombie"])
def test_a_dead_owner_of_this_machine_is_followed_at_once(tmp_path, owner):
    """The kernel tells: no such process, one that started at another time, or one that has ended but is not reaped."""
    zombie = None
    if owner == "zombie":
        zombie = os.fork() or os._exit(0)
        os.waitid(os.P_PID, zombie, os.WEXITED | os.WNOWAIT)
        _write(tmp_path, replace(_parent(), pid=zombie, started=run_lock._state_and_start(zombie)[1]))
    else:
        _write(tmp_path, _dead() if owner == "dead" else replace(_parent(), started="1"))
    lock = RunLock(str(tmp_path))
    assert lock.other() is None
    assert lock.poll()
    assert Owner.parse((tmp_path / NAME).read_text()) == lock.owner
    lock.leave()
    assert os.listdir(tmp_path) == []
    if zombie:
        os.waitpid(zombie, 0)


@pytest.mark.parametrize("content", ["another host", "nothing"])
def test_an_owner_that_cannot_be_asked_is_dead_when_its_beats_end(tmp_path, monkeypatch, content):
    """Of a process elsewhere, or a lock that was never completely written, only the beats tell: 30 s without any."""
    now = [100.0]
    monkeypatch.setattr(run_lock.time, "monotonic", lambda: now[0])
    _write(tmp_path, replace(_parent(), host="elsewhere", kernel=ELSEWHERE))
    if content == "nothing":
        (tmp_path / NAME).write_text("")
    lock = RunLock(str(tmp_path))
    assert not lock.poll()
    now[0] += run_lock.EXPIRES_S - 0.1
    assert not lock.poll()
    os.utime(tmp_path / NAME, ns=(0, 5))
    name = "on host elsewhere" if content == "another host" else "has not written its name"
    with pytest.raises(CheckpointError, match=name):
        lock.poll()
    lock = RunLock(str(tmp_path))
    assert not lock.poll()
    now[0] += run_lock.EXPIRES_S
    assert lock.poll()
    lock.leave()


ODD = {"pipe": os.mkfifo, "folder": os.mkdir, "dangling link": lambda path: os.symlink("nowhere", path)}


@pytest.mark.parametrize(
    "changes", [{"pid": "1"}, {"pid": 10**30}, {"pid": 1.5}, {"pid": None}, {"pid": -1}, {"host": "\x1b[2J"}, None]
)
def test_a_lock_that_no_run_wrote_names_nobody(tmp_path, changes):
    """Like a lock that was not completely written, it is waited for, and ends neither a reader nor a start."""
    text = "[" * 4000 if changes is None else json.dumps({**asdict(_parent()), **changes})
    (tmp_path / NAME).write_text(text)
    assert Owner.parse(text) is None
    assert lock_of(str(tmp_path)).other() is None
    assert not RunLock(str(tmp_path)).poll()


@pytest.mark.parametrize("odd", ODD)
@on_ranks(1)
def test_a_lock_that_is_no_file_is_refused(tmp_path, odd):
    """Nothing waits for it, and nothing is saved beside it."""
    ODD[odd](tmp_path / NAME)
    with pytest.raises(CheckpointError, match=r"\.lock must be the file .* Remove it"):
        Checkpointer(tmp_path, async_save=False).save(1, nn.Linear(2, 2))
    assert os.listdir(tmp_path) == [NAME]


def test_an_owner_beats_and_writes_its_lock_again(tmp_path, monkeypatch):
    """A beat changes the file's time; a lock that was removed by hand is back at the next beat."""
    monkeypatch.setattr(run_lock, "BEAT_S", 0.01)
    lock = RunLock(str(tmp_path))
    assert lock.poll()
    path = tmp_path / NAME
    for change in (lambda: os.utime(path, ns=(0, 0)), path.unlink):
        change()
        for _ in range(1000):
            if path.exists() and path.stat().st_mtime_ns:
                break
            lock._is_over.wait(0.01)
        assert path.stat().st_mtime_ns
    lock.leave()
    assert not path.exists()


def test_a_save_waits_until_an_owner_elsewhere_counts_as_dead(tmp_path, monkeypatch):
    """It does not go on without the lock meanwhile; `close` gives the folder free at once."""
    monkeypatch.setattr(run_lock, "EXPIRES_S", 0.2)
    monkeypatch.setattr("fairshard.checkpoint.checkpointer._POLL_S", 0.05)
    _write(tmp_path, replace(_parent(), kernel=ELSEWHERE))
    checkpointer = Checkpointer(tmp_path, async_save=False)
    checkpointer.save(1, nn.Linear(1, 1))
    assert Owner.parse((tmp_path / NAME).read_text()) == lock_of(str(tmp_path)).owner
    checkpointer.close()
    assert not (tmp_path / NAME).exists()


def test_a_reader_changes_nothing_in_a_folder_in_use(tmp_path):
    """A checkpoint that the owner has just moved out of the way is put back only if no owner lives."""
    model = nn.Linear(1, 1)
    with Checkpointer(tmp_path, async_save=False) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, model)
    (tmp_path / "latest").write_text("step-00000001")
    (tmp_path / "step-00000002").rename(tmp_path / ".replaced-step-00000002")
    _write(tmp_path, _parent())
    assert Checkpointer(tmp_path).load_latest(model) == 1
    assert (tmp_path / ".replaced-step-00000002").exists()
    (tmp_path / NAME).unlink()
    assert Checkpointer(tmp_path).load_latest(model) == 1
    assert (tmp_path / "step-00000002").exists()


def test_of_many_that_find_a_dead_owner_one_gets_the_lock(tmp_path):
    """Eight locks polled at the same time, again and again: each time one of them has the folder."""
    dead = _dead()
    for number in range(25):
        folder = tmp_path / str(number)
        _write(folder, dead)
        locks = [RunLock(str(folder)) for _ in range(8)]
        start = threading.Barrier(len(locks))
        won = []

        def contend(lock, start=start, won=won):
            start.wait()
            try:
                while not lock.poll():
                    pass
                won.append(lock)
            except CheckpointError:
                pass

        threads = [threading.Thread(target=contend, args=(lock,)) for lock in locks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = won
        assert Owner.parse((folder / NAME).read_text()) == winner.owner
        winner.leave()
        assert os.listdir(folder) == []


def test_a_folder_that_cannot_be_written_is_reported_by_the_save(tmp_path):
    """A lock needs a folder: without one, the save itself raises, as it did before there were locks."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Not a directory"):
        Checkpointer(tmp_path / "file" / "root", async_save=False).save(1, nn.Linear(1, 1))
    assert lock_of(str(tmp_path / "file" / "root")).other() is None
