"""Names of the folders of steps."""

from __future__ import annotations

import re

STEP = re.compile(r"step-(\d{8,})")
"""Matches the name of the folder of a step."""


def step_name(step: int) -> str:
    """The name of the folder of a step."""
    return f"step-{step:08}"


def step_of(folder: str) -> int:
    """The step of the folder of a step."""
    return int(folder.rpartition("/")[2].removeprefix("step-"))


def check_step(step: int) -> None:
    """Raise unless ``step`` is a number of steps.

    Raises:
        ValueError: it is not.
    """
    if type(step) is not int or step < 0:
        raise ValueError(f"`step` must be a number of steps, but is {step!r}.")
