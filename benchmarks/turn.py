"""Engines that run at the same time but compute one at a time; see `launch.launch_in_turns`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """Lets one engine step at a time: rank 0 waits for a byte before each step, and passes it on after the step."""

    take: int
    give: int

    @classmethod
    def open(cls, paths: Sequence[str]) -> Turn:
        """Open the pipes, both for reading and writing, so that neither call waits for the other side."""
        return cls(*(os.open(path, os.O_RDWR) for path in paths))

    def wait(self) -> None:
        """Return when it is this engine's turn."""
        os.read(self.take, 1)

    def pass_on(self) -> None:
        """Let the next engine step."""
        os.write(self.give, b".")
