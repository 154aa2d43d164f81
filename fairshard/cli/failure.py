"""How a rank reports to the launcher that it failed, or that a signal stopped it.

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

_STOPPED, _PID, _ENDING = "stopped", "pid", "ending"


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


def note_start() -> None:
    """Note for the other ranks of this host which process this rank is, until `note_end`."""
    if (folder := _folder()) is not None:
        (folder / _PID).write_text(f"{os.getpid()}\n", encoding="utf-8")


def note_end(stopped_after: int | None = None) -> None:
    """Note that this rank has not failed; for the launcher, after which step a signal has stopped it."""
    if (folder := _folder()) is not None:
        if stopped_after is not None:
            (folder / _STOPPED).write_text(f"{stopped_after}\n", encoding="utf-8")
        (folder / _PID).unlink(missing_ok=True)


def other_failed() -> bool:
    """Whether another rank of this host has failed or was killed, so that the launcher ends this one too.

    The launcher ends ranks with the signal that also asks them to save their step, which they cannot do then.
    """
    folder = _folder()
    for noted in [] if folder is None else folder.parent.glob(f"*/{_PID}"):
        try:
            if noted.with_name("error.json").exists():
                return True
            os.kill(int(noted.read_text(encoding="utf-8")), 0)
        except ProcessLookupError:
            return noted.exists()
        except (OSError, ValueError):  # not completely written, or a process of another user
            continue
    return False


def note_ending(logs: Path) -> None:
    """Note for the ranks that a signal ends the launcher, whose folder is ``logs``."""
    (logs / _ENDING).touch()


def is_ending() -> bool:
    """Whether a signal ends this rank's launcher."""
    folder = _folder()
    return folder is not None and (folder.parents[2] / _ENDING).exists()  # logs/RUN/ATTEMPT/RANK


def num_stopped(logs: Path) -> int:
    """Number of ranks that a signal has stopped in the launcher's last attempt, whose folders are in ``logs``."""
    attempts = sorted(logs.rglob("attempt_*"), key=lambda path: int(path.name.removeprefix("attempt_")))
    return sum(1 for _ in attempts[-1].rglob(_STOPPED)) if attempts else 0


def _folder() -> Path | None:
    """The folder that torch's elastic launcher has assigned to this rank; beside it are those of the host's others."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(path).parent if path and path != os.devnull else None


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
