"""How a rank that fails tells whoever launched it why.

The error file is the one that torch's elastic launcher names to each rank, in its format, so that torchrun
shows the traceback too. Two keys are ours: a time finer than its whole seconds, to tell the first failure from
those that follow from it, and whether the message alone says everything.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Failure:
    """What a rank left behind: one line, and its traceback where that helps."""

    rank: int
    message: str
    trace: str
    time_ns: int


def record_failure(error: Exception, rank: int, expected: bool) -> None:
    """Write ``error`` into this rank's error file, if it has one; ``expected`` leaves out the traceback."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {
        "py_callstack": traceback.format_exc(),
        "timestamp": str(int(time.time())),
        "time_ns": time.time_ns(),
        "rank": rank,
        "expected": expected,
    }
    entry = {"message": {"message": describe(error, expected), "extraInfo": extra}}
    Path(path).write_text(json.dumps(entry), encoding="utf-8")


def describe(error: Exception, expected: bool) -> str:
    """An error in words; one that was expected needs no type."""
    return str(error) if expected else f"{type(error).__name__}: {error}"


def first_failure(paths: Iterable[Path]) -> Failure | None:
    """The earliest failure in these files, which lie in folders named by local rank; None where there is none.

    A rank that fails before our own code runs has its error written by torch, without our keys.
    """
    failures: list[Failure] = []
    for path in paths:
        try:
            message = json.loads(path.read_text(encoding="utf-8"))["message"]
            extra = message["extraInfo"]
            trace = "" if extra.get("expected") else extra["py_callstack"]
            time_ns = extra.get("time_ns", int(extra["timestamp"]) * 10**9)
            failures.append(Failure(extra.get("rank", int(path.parent.name)), message["message"], trace, time_ns))
        except (OSError, ValueError, KeyError, TypeError):  # not written to its end, or of another form
            continue
    return min(failures, key=lambda failure: failure.time_ns, default=None)
