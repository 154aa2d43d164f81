"""Raise the error of one rank on all ranks, so that no rank waits for a failed one."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException

from fairshard.checkpoint.reader import first_line, without_warnings
from fairshard.checks.positions import BACKGROUND
from fairshard.checks.watchdog import has_failed, watch
from fairshard.errors import CheckpointError, CollectiveFailedError, FairshardError
from fairshard.utils.collectives import gather_objects
from fairshard.utils.failures import explained
from fairshard.utils.groups import fail_at_once, host_group, timeout_of

T = TypeVar("T")

_KINDS: dict[str, type[Exception]] = {kind.__name__: kind for kind in (TypeError, ValueError, KeyError)}
_BUSY = "fairshard: busy"
"""Message of a rank that is at work, so that the others neither time out nor wait for a rank that is stopped."""
_BUSY_EVERY_S = 0.2
_LOOKS_EVERY_S = 0.2
_ENDS_WITHIN_S = 6.0  # of a writer, once a collective has failed


def on_all_ranks(group: ProcessGroup | None, fn: Callable[[], T]) -> list[T]:
    """Call ``fn``, which must not use ``group``, on every rank; returns the results by rank. **Collective.**

    ``fn`` may take longer on one rank than the timeout of ``group``: while it runs, a thread takes part in the
    exchanges of the ranks that are done::

        rank 0  | fn | result ...... | result ...... | result
        rank 1  | fn ------------------------- | result
                       thread: busy .. busy ..       (five times a second)

    So a rank that is stopped is noticed by the timeout, and one that writes to a slow disk is waited for.

    Raises:
        CheckpointError, TypeError, ValueError: on every rank, the error of the lowest rank that raised.
        CollectiveFailedError: a rank has ended, is stopped, or does something else.
    """
    value, error, failed = None, None, None
    busy = _Busy(group)
    try:
        value = fn()
    except Exception as raised:  # any error must reach the other ranks
        error, failed = raised, (type(raised).__name__, described(raised))
    finally:
        busy.end()
    if busy.failure is not None:
        raise busy.failure
    every: list[Any] = [_BUSY]
    while _BUSY in every:
        every = _gathered((value, failed), group)
    for rank, (_, failed) in enumerate(every):
        if failed is not None:
            name, text = failed
            where = f" (rank {rank} of {len(every)})" if len(every) > 1 else ""
            raise _KINDS.get(name, CheckpointError)(f"{text.rstrip('.')}{where}.") from error
    return [value for value, _ in every]


def on_first_rank(group: ProcessGroup | None, fn: Callable[[], T]) -> T:
    """Call ``fn`` like `on_all_ranks`, but on rank 0 only; its result, on all ranks. **Collective.**"""
    found: Any = on_all_ranks(group, lambda: fn() if rank_in(group) == 0 else None)[0]
    return found  # type: ignore[no-any-return]


def done_on_all_ranks(group: ProcessGroup | None, fn: Callable[[], T]) -> T:
    """Call ``fn`` like `on_all_ranks`, but return this rank's result, which is not sent. **Collective.**"""
    own: list[T] = []
    on_all_ranks(group, lambda: own.append(fn()))
    return own[0]


def _gathered(value: Any, group: ProcessGroup | None) -> list[Any]:
    try:
        return gather_objects(value, group)
    except FairshardError:
        fail_at_once(group)
        raise


class _Busy:
    """Until its `end`, sends `_BUSY` to the other ranks in turn."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self.failure: Exception | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._send, args=(group,), name="fairshard busy", daemon=True)
        if group is not None and group.size() > 1:
            self._thread.start()

    def _send(self, group: ProcessGroup) -> None:
        timeout = timeout_of(group)
        every = _BUSY_EVERY_S if timeout is None else min(_BUSY_EVERY_S, timeout.total_seconds() / 4)
        try:
            while not self._is_over.wait(every):
                _gathered(_BUSY, group)
        except Exception as error:  # for the thread that waits for this one
            self.failure = error

    def end(self) -> None:
        """Stop sending."""
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()


_writers: weakref.WeakKeyDictionary[ProcessGroup, threading.Thread] = weakref.WeakKeyDictionary()


def idle_group() -> ProcessGroup | None:
    """`host_group`, once no background save uses it: concurrent users would receive each other's messages.

    Raises:
        CollectiveFailedError: see `await_writer`.
    """
    watch()
    group = host_group()
    if group is not None and group in _writers:
        await_writer(_writers[group])
    return group


def start_writer(task: str, write: Callable[[], None], group: ProcessGroup | None) -> threading.Thread:
    """Start ``write``, which uses ``group``, on a thread. Before Python ends it waits for it, but not for ever."""
    writer = threading.Thread(target=write, name=f"{BACKGROUND}{task}", daemon=True)
    writer.start()
    threading.Thread(target=_ended, args=(writer,), name="fairshard end of writer").start()
    if group is not None:
        _writers[group] = writer
    return writer


def await_writer(writer: threading.Thread) -> None:
    """Wait until ``writer`` ends.

    Raises:
        CollectiveFailedError: a collective has failed in this process, and it has not ended seconds after that.
    """
    if not _ended(writer):
        task = writer.name.removeprefix(BACKGROUND)
        raise CollectiveFailedError(f"A collective has failed, and {task} has not ended since. End this process.")


def _ended(writer: threading.Thread) -> bool:
    while writer.is_alive() and not has_failed():
        writer.join(_LOOKS_EVERY_S)
    writer.join(_ENDS_WITHIN_S)
    return not writer.is_alive()


def rank_in(group: ProcessGroup | None) -> int:
    """This process's rank; 0 without a group."""
    return 0 if group is None else group.rank()


def size_of(group: ProcessGroup | None) -> int:
    """The number of processes; 1 without a group."""
    return 1 if group is None else group.size()


def with_torch(call: Callable[..., Any], values: Any, group: ProcessGroup | None, **options: Any) -> None:
    """Call a function of torch.distributed.checkpoint. **Collective** over ``group``.

    Raises:
        CheckpointError: on every rank, that of the lowest rank that raised; or this rank's own error of fairshard.
    """
    try:
        with without_warnings():
            explained(call)(values, process_group=group, **options)
    except CheckpointException as error:
        own = error.failures.get(rank_in(group), (None,))[0]
        raise (own if isinstance(own, FairshardError) else CheckpointError(described(error))) from error


def described(error: BaseException) -> str:
    """One line about ``error``; for a failure in torch.distributed.checkpoint, the error of its lowest failed rank."""
    if isinstance(error, CheckpointException):
        rank = min(error.failures)
        return f"{described(error.failures[rank][0])} (rank {rank})"
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.strerror or error}: {error.filename}" if error.filename else str(error.strerror or error)
    return first_line(error)
