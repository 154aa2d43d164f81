"""Ranks that tests kill: forked, to start fast; the notes they write survive the kill; those of a launcher."""

import atexit
import contextlib
import os
import sys
import threading
import time
from pathlib import Path


class Notes:
    """A file that each rank appends lines to; with the time if ``is_timed``."""

    def __init__(self, path, rank, is_timed=False):
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._rank = rank
        self._is_timed = is_timed

    def __call__(self, text):
        stamp = f"{time.monotonic():.3f} " if self._is_timed else ""
        os.write(self._file, f"{self._rank} {stamp}{text}\n".encode())


def fork(play):
    """Fork a process that runs ``play()``, which does not return; return its pid."""
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        play()
    return pid


def play_to_the_end(body, log, note):
    """Call ``body()`` in a forked process with its output in ``log``, and end as Python ends a program.

    Notes the exception that ended it. Does not return.
    """
    code = 1
    try:
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        body()
        code = 0
    except BaseException as error:
        sys.last_exc = error
        note(f"raised {type(error).__name__}: {' / '.join(str(error).splitlines())}")
        sys.excepthook(*sys.exc_info())
    finally:
        try:
            threading._shutdown()  # waits for all threads that are not daemons
            atexit._run_exitfuncs()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def children_of(parent):
    """The ranks that the launcher ``parent`` has started, by pid."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            above = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if above == parent and b"resource_tracker" not in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return sorted(found)
