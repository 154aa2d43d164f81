"""Raise the error of one rank on all ranks, so that no rank waits for a failed one."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException

from fairshard.checkpoint.reader import first_line
from fairshard.errors import CheckpointError
from fairshard.utils.messages import gather_objects, host_group

T = TypeVar("T")

_KINDS: dict[str, type[Exception]] = {kind.__name__: kind for kind in (TypeError, ValueError, KeyError)}


def on_all_ranks(group: ProcessGroup | None, fn: Callable[[], T]) -> list[T]:
    """Call ``fn`` on every rank; returns the results by rank. **Collective.**

    Raises:
        CheckpointError, TypeError, ValueError: on every rank, the error of the lowest rank that raised.
    """
    value: T | None = None
    own: Exception | None = None
    failure: tuple[str, str] | None = None
    try:
        value = fn()
    except Exception as error:  # any error must reach the other ranks
        own, failure = error, (type(error).__name__, described(error))
    every = gather_objects((value, failure), group)
    for rank, (_, failed) in enumerate(every):
        if failed is not None:
            name, text = failed
            where = f" (rank {rank} of {len(every)})" if len(every) > 1 else ""
            raise _KINDS.get(name, CheckpointError)(f"{text.rstrip('.')}{where}.") from own
    return [value for value, _ in every]


_writers: weakref.WeakKeyDictionary[ProcessGroup, threading.Thread] = weakref.WeakKeyDictionary()


def idle_group() -> ProcessGroup | None:
    """`host_group`, once no background save uses it: concurrent users would receive each other's messages."""
    group = host_group()
    writer = None if group is None else _writers.get(group)
    if writer is not None:
        writer.join()
    return group


def occupy(group: ProcessGroup | None, writer: threading.Thread) -> None:
    """Make `idle_group` wait until ``writer`` ends."""
    if group is not None:
        _writers[group] = writer


def rank_in(group: ProcessGroup | None) -> int:
    """This process's rank; 0 without a group."""
    return 0 if group is None else group.rank()


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
