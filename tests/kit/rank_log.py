"""The output of a rank's process, in a file that its parent reads."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from typing import Protocol


class _Process(Protocol):
    def poll(self) -> int | None: ...
    def send_signal(self, sig: int, /) -> None: ...


class RankLog:
    """A temporary file as the output of one process; removed when it is closed."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process lives)
        self._start = 0

    def fileno(self) -> int:
        """The descriptor to which the process writes."""
        return self._file.fileno()

    def begin(self) -> None:
        """Forget earlier output."""
        self._start = self._size()

    def text(self, limit: int = 8000) -> str:
        """The last ``limit`` bytes since :meth:`begin`."""
        size = self._size()
        start = max(self._start, size - limit)
        return os.pread(self.fileno(), size - start, start).decode(errors="replace")

    def stack(self, process: _Process) -> str:
        """Every thread's Python stack, written by :mod:`faulthandler` even while the process hangs in C."""
        before = self._size()
        process.send_signal(signal.SIGUSR1)
        for _ in range(100):
            time.sleep(0.01)
            if self._size() > before or process.poll() is not None:
                time.sleep(0.05)
                break
        return self.text()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _size(self) -> int:
        return os.fstat(self.fileno()).st_size
