"""Run a test function on several ranks, in reused worker processes.

A :class:`RankPool` keeps its worker processes, so that a test on two ranks costs tens of milliseconds and
torch is imported once per worker. Each call gets a new default process group::

    parent                         worker 0 ... worker W-1
    run(W, fn, x)  -- pickle -->   init_process_group; seed; fn(x)
                   <-- pickle --   result or traceback
                   -- release -->  destroy_process_group

If a rank raises, dies or hangs, :meth:`RankPool.run` raises :class:`RanksFailed` with the traceback of each rank that
raised and the stack of each rank that hung; workers that hung are killed and replaced.

Workers import what they run: a function of ``__main__`` they cannot.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from tests.kit.rank_call import INTERFACE, RankCall, answer, freeze_modules, leave_group
from tests.kit.rank_log import RankLog

_TIMEOUT_S = 60.0
"""Timeout of a call. The groups' own timeout is longer, so that the pool reports a hang first."""

_START_S = 120.0
"""Time for a new worker to import torch; not part of the first call's timeout."""

_GRACE_S = 5.0
"""Time that the other ranks have to finish after one failed, before they count as hung."""

_MAX_THREADS = 120
"""Threads of a worker before it is replaced: each group that is still referenced has three, which poll."""


class RanksFailed(AssertionError):
    """At least one rank raised, died or hung; ``failures`` maps each such rank to its traceback or stack."""

    def __init__(self, failures: dict[int, str]):
        self.failures = failures
        super().__init__("\n".join(f"[rank {rank}] {text}" for rank, text in sorted(failures.items())))


class RankPool:
    """Worker processes that serve as the ranks of one call after another.

    ``device`` is ``"cpu"`` (gloo), or the type of an accelerator: its tensors use torch's default backend for it, the
    others gloo. Rank ``r`` uses device ``r`` (modulo their number: several may share one, and NCCL then sends through
    sockets), by default for every new tensor. ``around`` makes a context for each call of a rank; it is pickled; if it
    raises, the rank fails. Not thread-safe: one call at a time.
    """

    def __init__(self, device: str = "cpu"):
        self.device = device
        self.around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self._workers: list[_Worker] = []
        self._store: TCPStore | None = None
        self._num_calls = 0
        self._pid = os.getpid()

    def run(
        self,
        world_size: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = _TIMEOUT_S,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on ranks ``0 .. world_size-1`` and return their results in rank order.

        ``fn``, its arguments and its results are pickled, so ``fn`` is a function of a module, or a
        ``partial`` of one.

        Raises:
            RanksFailed: a rank raised, died, or hung for ``timeout`` seconds.
            TypeError: ``fn`` is no function, ``world_size`` no number, or an argument cannot be pickled.
            ValueError: ``world_size`` is below 1.
        """
        __tracebackhide__ = True  # pytest then shows only the ranks' tracebacks
        if not isinstance(world_size, int) or not callable(fn):
            given = f"{type(world_size).__name__} and {type(fn).__name__}"
            raise TypeError(f"Ranks need their number and a function, but are given {given}. Call `run_ranks(2, fn)`.")
        if world_size < 1:
            raise ValueError(f"`world_size` must be at least 1, but is {world_size}.")
        try:
            body = pickle.dumps((self.around, fn, args, kwargs))
        except Exception as error:
            raise TypeError(
                f"A function and its arguments must be picklable to be sent to ranks, but: {error}. Define the "
                "function at the top level of a module (no lambda, no function inside a function) and pass plain "
                "values."
            ) from error
        self._num_calls += 1
        self.start(world_size)
        workers = self._workers[:world_size]
        for worker in workers:
            worker.await_start()
        for rank, worker in enumerate(workers):
            worker.send(self._call(rank, world_size, body))
        return _results(workers, timeout)

    def _call(self, rank: int, world_size: int, body: bytes) -> RankCall:
        return RankCall(self._num_calls, rank, world_size, self.device, sys.path, body)

    def start(self, world_size: int) -> None:
        """Start missing workers of ``0 .. world_size-1``, without waiting; :meth:`run` calls this."""
        if self._pid != os.getpid():  # in a fork: the workers are the parent's
            self._pid, self._workers, self._store = os.getpid(), [], None
        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank, worker in enumerate(self._workers[:world_size]):
            if worker.process.poll() is not None or worker.num_threads() > _MAX_THREADS:
                worker.kill()
                self._workers[rank] = _Worker(self._store.port)
        while len(self._workers) < world_size:
            self._workers.append(_Worker(self._store.port))

    def pids(self) -> list[int]:
        """The process id of each worker, in rank order."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """End every worker. The pool starts new ones when it is used again."""
        for worker in self._workers:
            worker.kill()
        self._workers = []
        self._store = None


_default_pool: RankPool | None = None


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = _TIMEOUT_S, **kwargs: Any
) -> list[Any]:
    """:meth:`RankPool.run` on one pool that lives as long as this process."""
    __tracebackhide__ = True
    return default_pool().run(world_size, fn, *args, timeout=timeout, **kwargs)


def default_pool(device: str | None = None) -> RankPool:
    """The pool of :func:`run_ranks`; a ``device`` other than the current one replaces it."""
    global _default_pool
    if _default_pool is None or device not in (None, _default_pool.device):
        if _default_pool is not None:
            _default_pool.close()
        _default_pool = RankPool(device or "cpu")
        atexit.register(_default_pool.close)
    return _default_pool


class _Worker:
    """One process, the pipe to it, and the file with its output."""

    def __init__(self, port: int):
        self.log = RankLog()
        self.pipe, theirs = connection.Pipe()
        environ = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(sys.path))
        environ.setdefault(*INTERFACE)
        main = f"from {__name__} import _serve; _serve({theirs.fileno()}, {port})"
        # Its standard input is a lifeline: nothing is ever written to it, and it closes when this process ends.
        self.process = subprocess.Popen(
            [sys.executable, "-c", main],
            stdin=subprocess.PIPE,
            stdout=self.log.fileno(),
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            env=environ,
        )
        theirs.close()
        self._is_up = False

    def num_threads(self) -> int:
        """Number of threads of the process; 0 if the system does not report it."""
        try:
            return len(os.listdir(f"/proc/{self.process.pid}/task"))
        except OSError:
            return 0

    def await_start(self) -> None:
        """Wait until the process has imported torch, when the timeout starts. If it dies, the call reports it."""
        if not self._is_up and self.pipe.poll(_START_S):
            with contextlib.suppress(EOFError, OSError):
                self.pipe.recv_bytes()
            self._is_up = True

    def send(self, call: RankCall) -> None:
        """Start ``call``; later output of the worker belongs to it."""
        self.log.begin()
        with contextlib.suppress(BrokenPipeError):  # a dead worker is reported when its answer is awaited
            self.pipe.send_bytes(pickle.dumps(call))

    def release(self) -> None:
        """Tell the worker to destroy the call's group: all ranks have answered, so no rank is still connecting."""
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send_bytes(b"")

    def kill(self) -> None:
        """Kill the process and close its pipe and files."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.pipe.close()
        self.log.close()


def _results(workers: Sequence[_Worker], timeout: float) -> list[Any]:
    """Wait for the answers of ``workers``, release them, and return their results in rank order."""
    __tracebackhide__ = True
    waiting = _Waiting(workers, timeout)
    while waiting.receive():
        pass
    if waiting.pending:
        waiting.give_up()
    for worker in workers:
        worker.release()
    if waiting.failures:
        raise RanksFailed(waiting.failures)
    return [waiting.results[rank] for rank in range(len(workers))]


class _Waiting:
    """The answers to one call, received or still pending until the deadline."""

    def __init__(self, workers: Sequence[_Worker], timeout: float):
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout
        self.pending: dict[int, _Worker] = dict(enumerate(workers))
        self.results: dict[int, Any] = {}
        self.failures: dict[int, str] = {}

    def receive(self) -> bool:
        """Receive available answers; ``False`` if no answer is pending any more, or no answer arrived in time."""
        ranks = {id(worker.pipe): rank for rank, worker in self.pending.items()}
        left = self.deadline - time.monotonic()
        ready = connection.wait([worker.pipe for worker in self.pending.values()], max(0.0, left))
        for pipe in ready:
            rank = ranks[id(pipe)]
            worker = self.pending.pop(rank)
            try:
                ok, value = pickle.loads(worker.pipe.recv_bytes())
            except (EOFError, OSError):
                ok, value = False, f"died with exit code {worker.process.wait()}"
            except Exception as error:
                ok, value = False, f"returned a value that cannot be unpickled here: {error!r}"
            if ok:
                self.results[rank] = value
            else:
                self.failures[rank] = f"{value}\n{worker.log.text()}"
                self.deadline = min(self.deadline, time.monotonic() + _GRACE_S)
        return bool(ready) and bool(self.pending)

    def give_up(self) -> None:
        """Report the stacks of the ranks that did not answer, and kill them."""
        cause = "did not finish after another rank failed" if self.failures else f"hung for {self.timeout} s"
        for rank, worker in self.pending.items():
            self.failures[rank] = f"{cause}; its stack:\n{worker.log.stack(worker.process)}"
        for worker in self.pending.values():
            worker.process.kill()
            worker.process.wait()


def _serve(fd: int, port: int) -> None:
    """The main function of a worker: answer calls until the pipe closes."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    pipe = connection.Connection(fd)
    store = TCPStore("127.0.0.1", port, is_master=False)
    pipe.send_bytes(b"")  # ready
    try:
        while True:
            call = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(answer(call, store))
            pipe.recv_bytes()  # the release
            leave_group()
            freeze_modules()
    except (EOFError, ConnectionResetError):
        _exit(0)
    except BaseException:
        traceback.print_exc()
        _exit(1)


def _exit_with_parent() -> None:
    sys.stdin.buffer.read()
    _exit(1)


def _exit(code: int) -> None:
    """Exit without destructors: gloo groups sometimes hang when Python drops the last reference."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
