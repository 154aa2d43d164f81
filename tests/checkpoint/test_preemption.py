"""A signal stops all ranks after the same step, which is saved."""

import contextlib
import functools
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from fairshard.checkpoint import Checkpointer, Preempted, leave_signals_to_rank, on_preemption
from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.forked import Notes, fork
from tests.kit import rank_device
from tests.on_ranks import on_ranks

REPOSITORY = Path(__file__).parents[2]


def _train(folder, model, asked_at, num_steps=6, every=100):
    """Train until `Preempted`; returns its step. ``asked_at(step, moment)``: whether this rank gets SIGTERM there."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saver = Checkpointer(folder, every=every)
    with on_preemption(saver):
        for step in range(1, num_steps + 1):
            for moment in ("forward", "backward", "step"):
                if asked_at(step, moment):
                    os.kill(os.getpid(), signal.SIGTERM)
                if moment == "forward":
                    loss = model(torch.ones(2, 4, device=rank_device())).sum()
                elif moment == "backward":
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            try:
                saver.maybe_save(step, model, optimizer)
            except Preempted as raised:
                stop = raised
                break
        else:
            return None
    assert (stop.code, stop.step) == (75, step)
    return step


def _same_on_all_ranks(value):
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    assert set(every) == {value}, every


@on_ranks(3)
@pytest.mark.parametrize("moment", ["forward", "backward", "step"])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path, moment):
    """A signal anywhere in step 2 stops all ranks after step 3, which is saved."""
    torch.manual_seed(0)
    model = FSDP(nn.Linear(4, 5).to(rank_device()))
    own = dist.get_rank() == 1
    stopped = _train(tmp_path, model, lambda *at: own and at == (2, moment))
    _same_on_all_ranks(stopped)
    assert stopped == 3
    assert (tmp_path / "latest").read_text() == "step-00000003\n"
    restored = FSDP(nn.Linear(4, 5).to(rank_device()))
    assert Checkpointer(tmp_path).load_latest(restored, torch.optim.SGD(restored.parameters(), lr=0.1)) == 3
    assert all(map(torch.equal, restored.parameters(), model.parameters()))


@on_ranks(2, 3)
def test_without_sharded_units_ranks_ask_each_other_in_the_background(tmp_path):
    """A plain module needs no collectives of the engine: all ranks stop one step after the signal."""
    model = nn.Linear(4, 5).to(rank_device())
    last = dist.get_world_size() - 1
    stopped = _train(tmp_path, model, lambda *at: dist.get_rank() == last and at == (2, "forward"))
    _same_on_all_ranks(stopped)
    assert stopped == 3


def test_earlier_handlers_are_called_and_restored(tmp_path):
    """The handler from before still gets the signal; after the block it is the handler again."""
    seen = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
    try:
        mine = signal.getsignal(signal.SIGUSR2)
        with on_preemption(None, signals=[signal.SIGUSR2]) as preemption:
            assert not preemption.is_due()
            os.kill(os.getpid(), signal.SIGUSR2)
            assert seen == [signal.SIGUSR2]
            assert preemption.number is signal.SIGUSR2
            assert preemption.is_due()
        assert signal.getsignal(signal.SIGUSR2) is mine
        assert not preemption.is_due()
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_the_thread_may_see_the_end_before_it_is_woken(monkeypatch):
    """After a signal it looks every 0.2 s: what `close` writes to must still be open then."""
    before = set(threading.enumerate())
    preemption = on_preemption(None, signals=[signal.SIGUSR2])
    (thread,) = set(threading.enumerate()) - before
    os.kill(os.getpid(), signal.SIGUSR2)
    restore = signal.set_wakeup_fd

    def late(fd):
        thread.join(1)
        return restore(fd)

    monkeypatch.setattr(signal, "set_wakeup_fd", late)
    preemption.close()
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grace": 0}, "`grace` must be a positive number of seconds, but is 0"),
        ({"grace": float("nan")}, "`grace` must be a positive number"),
        ({"signals": []}, "`signals` must name at least one"),
        ({"signals": [signal.SIGUSR2, signal.SIGKILL]}, "must be signals that a process can catch"),
    ],
)
def test_wrong_arguments_change_no_handler(arguments, message):
    """What is wrong is named, and the handlers stay."""
    before = signal.getsignal(signal.SIGUSR2)
    with pytest.raises(ValueError, match=message):
        on_preemption(None, **arguments)
    assert signal.getsignal(signal.SIGUSR2) is before


def test_an_earlier_wakeup_descriptor_is_written_too():
    """An event loop that waits for signals through ``signal.set_wakeup_fd`` still hears of them."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write)
    try:
        with on_preemption(None, signals=(signal.SIGUSR2,)):
            os.kill(os.getpid(), signal.SIGUSR2)
            ready, _, _ = select.select([read], [], [], 20)
            assert ready
            assert os.read(read, 8) == bytes([signal.SIGUSR2])
    finally:
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)


# ---- processes that end: they are forked from this file's own process, which has no other threads


def _hang(folder):
    """Wait in C++, where no handler of Python runs, as in a collective whose other ranks are gone."""
    dist.FileStore(f"{folder}/store", 2).wait(["never"])


def _second(folder, note):
    on_preemption(None, grace=60)
    note("ready")
    _hang(folder)


def _too_slow(folder, note):
    on_preemption(None, grace=0.3)
    note("ready")
    _hang(folder)


def _with_worker(folder, note):
    """A process with a forked worker, as a data loader has: SIGTERM ends the worker, and asks nobody to stop."""
    preemption = on_preemption(None, grace=60)
    worker = os.fork()
    if not worker:
        note("worker")
        time.sleep(60)
        os._exit(1)
    _, status = os.waitpid(worker, 0)
    note(f"worker ended with {os.waitstatus_to_exitcode(status)}, due: {preemption.is_due()}")


_CASES = {"second": _second, "slow": _too_slow, "worker": _with_worker}


def _play(case, folder):
    log = os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 2)
    _CASES[case](folder, Notes(f"{folder}/notes", 0))
    os._exit(0)


def _await(path, text):
    until = time.monotonic() + 20
    while text not in (path.read_text() if path.exists() else ""):
        assert time.monotonic() < until, f"{path} does not say {text!r}"
        time.sleep(0.005)


def _run_cases(folder):
    """Fork the cases, signal them, and print how each ended and after how long."""
    pids = {}
    for case in _CASES:
        (folder / case).mkdir()
        pids[case] = fork(functools.partial(_play, case, folder / case))
    for case in ("second", "slow"):
        _await(folder / case / "notes", "ready")
        os.kill(pids[case], signal.SIGTERM)
    began = time.monotonic()
    _await(folder / "worker" / "notes", "worker")
    children = Path(f"/proc/{pids['worker']}/task/{pids['worker']}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGTERM)
    os.kill(pids["second"], signal.SIGTERM)  # within a second: it counts as the first
    time.sleep(1.2)
    print("both", os.waitpid(pids["second"], os.WNOHANG))
    os.kill(pids["second"], signal.SIGTERM)
    for case, pid in pids.items():
        _, status = os.waitpid(pid, 0)
        print(case, os.waitstatus_to_exitcode(status), f"{time.monotonic() - began:.1f}")


@pytest.mark.cpu_only("processes of its own, without ranks")
def test_a_process_that_cannot_save_ends_all_the_same(tmp_path):
    """It ends after ``grace``, or at a second signal, even if the main thread hangs in C++; forked workers just end."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.test_preemption", str(tmp_path)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = dict(re.findall(r"^(\w+) (.*)$", done.stdout, re.MULTILINE))
    assert lines["both"] == "(0, 0)"  # still there
    assert lines["second"].split()[0] == lines["slow"].split()[0] == str(128 + signal.SIGTERM)
    assert "a second SIGTERM has arrived" in (tmp_path / "second" / "log").read_text()
    assert "not saved within 0.3 s after SIGTERM" in (tmp_path / "slow" / "log").read_text()
    assert f"worker ended with {-signal.SIGTERM}, due: False" in (tmp_path / "worker" / "notes").read_text()


if __name__ == "__main__":
    _run_cases(Path(sys.argv[1]))


@pytest.mark.cpu_only("processes of its own, without ranks")
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_loader_outlive_a_signal_to_every_process(start):
    """After the signals of a scheduler they load on; their rank can still terminate them, and ends without waiting."""
    loader = DataLoader(
        torch.arange(64), num_workers=1, worker_init_fn=leave_signals_to_rank, multiprocessing_context=start
    )
    batches = iter(loader)
    assert next(batches).item() == 0
    (worker,) = batches._workers
    for name in ("TERM", "USR1"):
        subprocess.run(["kill", f"-{name}", str(worker.pid)], check=True)
    assert [batch.item() for batch in batches] == list(range(1, 64))
    if start == "spawn":  # its threads may take the signal: then it ends a minute later
        return
    batches = iter(loader)
    next(batches)
    (worker,) = batches._workers
    worker.terminate()
    worker.join(20)
    assert worker.exitcode == 0
    with contextlib.suppress(RuntimeError):
        batches._shutdown_workers()
