"""Stopping on a signal: all ranks finish the step, save it, and end with status 75.

A scheduler that needs the machine sends a signal first, SIGTERM as a rule, to every process or only to one. The Python
handler of a signal runs on the main thread, which may wait in a collective until other ranks answer. So a thread
watches for signals too: it ends the process when the time is over, or at a second signal::

    signal --> handler (main thread):  note the request; call the earlier handler
           `-> thread:                 ends the process after `grace` seconds, or at a second signal
    maybe_save:                        ranks ask each other; the answer comes in the next one, on all ranks:
                                       save, wait, raise Preempted
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch.distributed as dist

from fairshard.utils.messages import Poll

STATUS = 75
"""Exit status of a rank that a signal has stopped: ``EX_TEMPFAIL`` of sysexits.h, "try again"."""

_SAME_SIGNAL_S = 1.0
"""Signals within this time count as one: schedulers signal every process, and launchers pass their own signal on."""
_WORKER_ENDS_WITHIN_S = 60.0


class Preempted(SystemExit):
    """Ends the process with `STATUS` after a signal, unless it is caught. All ranks raise it, after the same step.

    Attributes:
        step: the last step, which is saved.
    """

    def __init__(self, step: int) -> None:
        super().__init__(STATUS)
        self.step = step


class Stoppable(Protocol):
    """A `Checkpointer`.

    Attributes:
        preemption: is asked after each step whether to stop.
    """

    preemption: Preemption | None


class Preemption:
    """Waits for a signal that asks this process to stop; see `on_preemption`.

    Attributes:
        number: the signal that this rank has received first, or None.
    """

    def __init__(self, signals: Sequence[int], grace: float) -> None:
        self.number: signal.Signals | None = None
        self._signals = frozenset(signals)
        self._grace = grace
        self._poll: Poll | None = None
        self._earlier: dict[int, Any] = {}
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._earlier_fd = -1
        self._is_closed = False
        self._closing = threading.Lock()

    def is_due(self) -> bool:
        """Whether to stop now: the same answer on all ranks. **Collective**; call it once after each step.

        Ranks ask each other in the background, and the answer comes one call later.
        """
        is_asked = self.number is not None and not self._is_closed
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return is_asked
        self._poll = self._poll or Poll()
        found = self._poll.is_asked and self._poll.answer()
        self._poll.ask(is_asked)
        return found

    def close(self) -> None:
        """Restore the earlier handlers, and forget a signal. Called on the main thread."""
        if not self._is_closed:
            with self._closing:
                self._restore(self._earlier_fd)
                os.write(self._write, b"\0")  # ends the thread

    def __enter__(self) -> Preemption:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- private

    def _begin(self) -> None:
        try:
            for number in sorted(self._signals):
                self._earlier[number] = signal.signal(number, self._handle)
        except (OSError, ValueError):
            self._restore()
            raise
        self._earlier_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        _all.add(self)
        threading.Thread(target=self._watch, name="fairshard signals", daemon=True).start()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number is None:
            self.number = signal.Signals(number)
        earlier = self._earlier.get(number)
        if callable(earlier) and earlier is not signal.default_int_handler:
            earlier(number, frame)

    def _restore(self, wakeup_fd: int = -1) -> None:
        """Signals find the earlier handlers, as if there were none here; also in a process that was just forked."""
        self._is_closed = True
        signal.set_wakeup_fd(wakeup_fd)
        for number, earlier in self._earlier.items():
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)

    # ---- on the thread

    def _watch(self) -> None:
        first = math.inf
        number = signal.SIGTERM
        try:
            while True:
                ends = first + self._grace
                left = None if first == math.inf else max(0.0, ends - time.monotonic())
                ready, _, _ = select.select([self._read], [], [], left)
                if self._is_closed:
                    return
                if time.monotonic() >= ends:
                    _end(number, f"training was not saved within {self._grace:g} s after {number.name}")
                for byte in os.read(self._read, 256) if ready else b"":
                    self._pass_on(byte)
                    if byte not in self._signals:
                        continue
                    if first == math.inf:
                        first, number = time.monotonic(), signal.Signals(byte)
                    elif time.monotonic() > first + _SAME_SIGNAL_S:
                        _end(number, f"a second {signal.Signals(byte).name} has arrived")
        finally:
            with self._closing:  # `close` may still have to write
                os.close(self._read)
                os.close(self._write)

    def _pass_on(self, byte: int) -> None:
        if self._earlier_fd >= 0:
            with contextlib.suppress(OSError):
                os.write(self._earlier_fd, bytes([byte]))


def on_preemption(
    checkpointer: Stoppable | None, *, signals: Sequence[int] = (signal.SIGTERM,), grace: float = 30.0
) -> Preemption:
    """Stop training after one of ``signals``: `Checkpointer.maybe_save` then saves the step and raises `Preempted`.

    Every rank calls it, on its main thread, before training; a signal may reach any rank, or all. All ranks stop after
    the same step, the one after that in which the signal arrives, with exit status 75 unless `Preempted` is caught.
    Call ``maybe_save`` once after every step. Without a ``checkpointer``, ask `Preemption.is_due` after every step.

    A process that is not done ``grace`` seconds after its first signal ends with status 128 + signal, as it does at
    once at a second signal that comes more than a second later. The newest checkpoint stays whole. Earlier Python
    handlers of the signals are also called. Processes forked later get the earlier handlers back.

    Raises:
        ValueError: ``grace`` is not positive, a signal cannot be caught, or this is not the main thread.
    """
    if not (math.isfinite(grace) and grace > 0):
        raise ValueError(f"`grace` must be a positive number of seconds, but is {grace}.")
    numbers = sorted({int(number) for number in signals})
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("`on_preemption` must be called on the main thread, which alone may set handlers of signals.")
    if not numbers:
        raise ValueError("`signals` must name at least one signal, but is empty.")
    preemption = Preemption(numbers, grace)
    try:
        preemption._begin()
    except (OSError, ValueError) as error:
        raise ValueError(f"`signals` must be signals that a process can catch, but are {numbers}: {error}.") from error
    if checkpointer is not None:
        checkpointer.preemption = preemption
    return preemption


def leave_signals_to_rank(worker_id: int = 0) -> None:
    """Make this process, a worker of a `DataLoader`, go on after signals that ask the ranks to stop.

    Pass it as ``worker_init_fn``. Schedulers signal every process of a job; a worker that ends raises in its rank, so
    that the step is not saved. A worker still ends with its rank, and when its rank terminates it: at once if it was
    forked on Linux, otherwise within a minute.
    """
    numbers = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP}
    for number in numbers:  # threads that a library has started before take signals, too, and do not tell the sender
        signal.signal(number, _end_later)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        rank = os.getppid()
        threading.Thread(target=_await_rank, args=(numbers, rank), name="fairshard worker", daemon=True).start()


def _end_later(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGTERM:
        timer = threading.Timer(_WORKER_ENDS_WITHIN_S, os._exit, (0,))
        timer.daemon = True
        timer.start()


def _await_rank(numbers: set[signal.Signals], rank: int) -> None:
    """End the process when ``rank`` terminates it; its daemons must end then, or the rank would wait for them."""
    while True:
        found = signal.sigwaitinfo(numbers)
        if found.si_signo == signal.SIGTERM and found.si_pid == rank:
            os._exit(0)


def _end(number: signal.Signals, why: str) -> NoReturn:
    text = f"fairshard: {why}: the process ends now. The newest checkpoint is whole.\n"
    os.write(2, text.encode())  # the main thread may hold the lock of `sys.stderr`
    os._exit(128 + number)


_all: weakref.WeakSet[Preemption] = weakref.WeakSet()


def _after_fork() -> None:
    for preemption in list(_all):
        preemption._restore()


os.register_at_fork(after_in_child=_after_fork)
