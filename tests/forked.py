"""Ranks that tests kill: forked, to start fast; the notes they write survive the kill."""

import os
import sys
import time


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
