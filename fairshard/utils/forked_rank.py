"""Ranks that are copies of this process, for functions that no other process can import.

A function of ``__main__``, such as the cells of a notebook, exists in one process only, and pickle sends functions by
name. :class:`ForkedRank` therefore runs it in a fork, which has every name of the parent. A fork has one thread: locks
and thread pools of the parent's other threads do not work in it. It lives for one call.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist

from fairshard.utils.rank_log import RankLog


def pickle_for_others(task: tuple[Any, ...]) -> bytes | None:
    """``task`` pickled for a process that imports its functions, or ``None`` if only a fork can run it.

    Raises:
        TypeError: ``task`` cannot be pickled, and has nothing of ``__main__`` that explains it.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    try:
        pickler.dump(task)
    except _NeedsFork:
        return None
    except Exception as error:
        raise TypeError(
            f"A function and its arguments must be picklable to be sent to ranks, but: {error}. Define the function at "
            "the top level of a module (no lambda, no function inside a function) and pass plain values; or define it "
            "in the notebook or script that calls `run_ranks`: its ranks are forks, to which nothing is sent."
        ) from error
    return stream.getvalue()


class _NeedsFork(Exception):
    """An object of ``__main__``: no other process can import it."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if getattr(obj, "__module__", None) == "__main__":
            raise _NeedsFork
        return NotImplemented


def prepare_fork() -> None:
    """Check that a fork of this process can join a process group of its own, and import what every rank would.

    Raises:
        RuntimeError: this process has a process group, which a fork would inherit without the threads that serve it.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "`run_ranks` must be called without a process group if its function is defined in `__main__` (a notebook "
            f"or script), because its ranks are forks of this process; but this process is rank {dist.get_rank()} of "
            f"{dist.get_world_size()}. Call torch.distributed.destroy_process_group() before, or move the function "
            "into a module."
        )
    # The first optimizer imports torch's compiler, in seconds: here once, or in each rank of each call.
    torch.optim.SGD([torch.zeros(1, device="cpu")], lr=0.0)


class ForkedProcess:
    """A child by ``os.fork``, with the methods of :class:`subprocess.Popen` that a pool needs."""

    def __init__(self, main: Callable[[], None]):
        with warnings.catch_warnings():  # Python 3.12 warns of the parent's threads; see `_settle`
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        self._status: int | None = None
        if not self.pid:
            try:
                main()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)

    def poll(self) -> int | None:
        """The exit code, negative for a signal; ``None`` while the process runs."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        """Wait for the end of the process, and return its exit code."""
        status = self._reap(0)
        assert status is not None
        return status

    def _reap(self, flags: int) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, flags)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process now."""
        self.send_signal(signal.SIGKILL)


class ForkedRank:
    """One rank of one call: a fork that runs ``answer``, sends the bytes it returns, and ends when it is released.

    What the rank prints goes to ``log``.
    """

    def __init__(self, answer: Callable[[], bytes]):
        self.log = RankLog()
        self.pipe, theirs = connection.Pipe()
        reading, self._lifeline = os.pipe()

        def main() -> None:
            os.close(self._lifeline)
            _settle(self.log.fileno(), reading)
            theirs.send_bytes(answer())
            with contextlib.suppress(EOFError, ConnectionResetError):
                theirs.recv_bytes()  # the release

        sys.stdout.flush()
        sys.stderr.flush()
        self.process = ForkedProcess(main)
        os.close(reading)
        theirs.close()

    def release(self) -> None:
        """Tell the rank to leave: all ranks have answered, so none is still connecting to it."""
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send_bytes(b"")

    def show(self, rank: int) -> None:
        """Write to this process' output what ``rank`` has printed, with its number before each line."""
        for line in self.log.text(limit=1_000_000).splitlines():
            sys.stdout.write(f"[rank {rank}] {line}\n")

    def close(self) -> None:
        """End the process if it still runs, and close its pipes and its log."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.pipe.close()
        os.close(self._lifeline)
        self.log.close()


def _settle(log: int, lifeline: int) -> None:
    """Cut what a fork shares with its parent: output, signals, threads, and its life."""
    signal.set_wakeup_fd(-1)  # the parent's event loop must not hear this process' signals
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdin = open(os.devnull)  # noqa: SIM115 (open until the process ends)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    # OpenMP's threads are gone, and its pool does not know: with two or more, the first operator would wait for them.
    torch.set_num_threads(1)
    threading.Thread(target=_leave_with_parent, args=(lifeline,), daemon=True).start()


def _leave_with_parent(lifeline: int) -> None:
    """The parent holds the other end, writes nothing, and closes it when it ends."""
    os.read(lifeline, 1)
    os._exit(1)
