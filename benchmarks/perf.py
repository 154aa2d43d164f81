"""Samples of a process: what its CPU time was spent on, taken by Linux's ``perf`` and sorted by a table of rules."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

STEP_HZ = 499
OVERHEAD_HZ = LOAD_HZ = 4999
START_S = 1.0
"""How long perf is given to attach; it does not say when it has."""


class Lane(NamedTuple):
    """What samples are counted under ``name``: those of which a frame, or only the last one, matches."""

    name: str
    anywhere: str = ""
    innermost: str = ""


class Samples:
    """Samples this process to ``path``, ``frequency`` times a second of CPU time; does nothing without a path."""

    def __init__(self, path: str, frequency: int):
        self._command = ["perf", "record", "-q", "-F", str(frequency), "-g", "-p", str(os.getpid()), "-o", path]
        self._is_wanted = bool(path)
        self._perf: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Take samples from now on."""
        if not self._is_wanted:
            return
        self._perf = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(START_S)
        if self._perf.poll() is not None:
            raise RuntimeError(
                f"perf must be able to sample this process, but `{' '.join(self._command)}` has ended. Try it by hand."
            )

    def stop(self) -> None:
        """End the file."""
        if self._perf is not None:
            self._perf.send_signal(signal.SIGINT)
            self._perf.wait()


def sort(path: Path, lanes: Sequence[Lane]) -> Counter[str]:
    """Count the samples of each lane; the first lane that takes a sample has it, and "the rest" those of none."""
    rules = [(lane.name, re.compile(lane.anywhere or "$^"), re.compile(lane.innermost or "$^")) for lane in lanes]
    counts: Counter[str] = Counter()
    for stack in _stacks(path):
        for name, anywhere, innermost in rules:
            if innermost.search(stack[0]) or any(map(anywhere.search, stack)):
                counts[name] += 1
                break
        else:
            counts["the rest"] += 1
    return counts


def _stacks(path: Path) -> Iterator[list[str]]:
    """Yield the frames of each sample, the innermost first, as ``symbol (file)``."""
    script = ["perf", "script", "-i", str(path), "-F", "ip,sym,dso"]
    text = subprocess.run(script, check=True, capture_output=True, text=True, errors="replace").stdout
    for sample in text.split("\n\n"):
        frames = [line.split(maxsplit=1)[1] for line in sample.splitlines() if len(line.split(maxsplit=1)) == 2]
        if frames:
            yield frames
