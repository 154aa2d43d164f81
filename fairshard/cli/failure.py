"""How a failing rank reports its error to the launcher.

Each rank writes the error file that torch's elastic launcher assigns to it, in the launcher's format, so that torchrun
also shows the traceback. Two keys are ours: ``time_ns``, finer than the launcher's whole seconds, to tell the first
failure from those that it caused; and ``expected``, true if the message needs no traceback.
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
    """A rank's error: one line, and the traceback unless the error was expected."""

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
    """Text of an error; an expected error needs no type."""
    return str(error) if expected else f"{type(error).__name__}: {error}"


def first_failure(paths: Iterable[Path]) -> Failure | None:
    """The earliest failure in these files, which are in folders named after local ranks; None without failures.

    torch writes the error of a rank that fails before our own code runs, without our keys.
    """
    failures: list[Failure] = []
    for path in paths:
        try:
            message = json.loads(path.read_text(encoding="utf-8"))["message"]
            extra = message["extraInfo"]
            trace = "" if extra.get("expected") else extra["py_callstack"]
            time_ns = extra.get("time_ns", int(extra["timestamp"]) * 10**9)
            failures.append(Failure(extra.get("rank", int(path.parent.name)), message["message"], trace, time_ns))
        except (OSError, ValueError, KeyError, TypeError):  # not complete, or in another format
            continue
    return min(failures, key=lambda failure: failure.time_ns, default=None)
