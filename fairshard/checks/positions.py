"""Positions of ranks, for error messages: where a rank is in its training, and on which line of the user's code."""

from __future__ import annotations

import ast
import faulthandler
import os
import re
import tempfile
import threading
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from functools import cache
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

BACKGROUND = "fairshard background: "
"""Prefix of the names of threads that communicate beside training; the rest says what they do."""

GATHERED_AGAIN = "the second gather of {}, whose weights it wrote in the forward"
"""An entry of `Place.entered`; format it with the name of a unit."""

BEGINS_FORWARD, BEGINS_BACKWARD = "the beginning of a forward", "the beginning of a backward"
"""The entries of `Place.entered` at the beginning of a pass."""

_AGAIN = GATHERED_AGAIN.partition("{")[0]

_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_LIBRARIES = (_OWN, _TORCH, os.path.dirname(os.__file__) + os.sep, "<")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?{3}) in (.*)$', re.MULTILINE)

_MISSED_BACKWARD = (
    " A backward that reaches no unit of the model, or raises before it reaches one, does not count: let the loss of "
    "that rank reach the model (`loss + 0 * output.sum()`), or call no backward on any rank."
)
_WROTE_ALONE = " A forward that writes to weights must do so on every rank."


@dataclass(frozen=True)
class Place:
    """Position of one rank.

    ``text`` follows "rank 3:" in a message. ``entered`` names the units that the rank ran in ``step``, in order;
    ranks in the same step should name the same units, up to the point that each has reached. ``is_final`` if the rank
    goes no further, because a collective failed there or because its process ``has_ended``. ``call``: the function of
    fairshard that the user has called, if the rank is in one outside of a pass; otherwise empty.
    """

    text: str
    step: int = 0
    entered: tuple[str, ...] = ()
    is_final: bool = False
    has_ended: bool = False
    call: str = ""


class Training(Protocol):
    """The watched training; called from the watchdog's thread."""

    def place(self) -> Place:
        """Current position."""

    def progress(self) -> Hashable:
        """A value that changes as training proceeds."""


def first_difference(places: dict[int, list[Place]], to_the_end: bool = False) -> str:
    """The first difference between the lowest rank and another in one step, as a sentence; empty if they agree.

    ``to_the_end``: the steps are complete, so a longer one also differs.
    """
    first, *others = sorted(places)
    for rank in others:
        theirs = {place.step: place.entered for place in places[rank]}
        for place in places[first]:
            if place.step not in theirs:
                continue
            for ours, other in zip_longest(place.entered, theirs[place.step]):
                if ours != other and (to_the_end or (ours and other)):
                    at = [entry or "the end" for entry in (ours, other)]
                    text = f"In step {place.step} rank {first} is at {at[0]}, rank {rank} at {at[1]}."
                    if any(entry.startswith(_AGAIN) for entry in at):
                        return text + _WROTE_ALONE
                    return text + _MISSED_BACKWARD if set(at) == {BEGINS_FORWARD, BEGINS_BACKWARD} else text
    return ""


@dataclass(frozen=True)
class Line:
    """``where`` a thread is in the user's code, as `` (file:line, in function)``; ``call`` as in `Place`."""

    where: str = ""
    call: str = ""


def line_of(thread_id: int) -> Line:
    """The innermost line of a thread outside of torch, fairshard and the standard library."""
    frames = _frames(thread_id)
    inner = list(takewhile(lambda frame: frame.path.startswith(_LIBRARIES), frames))
    if len(inner) == len(frames):
        return Line()
    at = frames[len(inner)]
    return Line(f" ({os.path.basename(at.path)}:{at.line}, in {at.function})", _called(inner))


def background() -> list[str]:
    """Descriptions of what threads of this process do beside training."""
    return [one.name.removeprefix(BACKGROUND) for one in threading.enumerate() if one.name.startswith(BACKGROUND)]


class _Frame(NamedTuple):
    path: str
    line: str  # a number, or ??? in code of which the compiler knows none
    function: str


def _frames(thread_id: int) -> list[_Frame]:
    """Frames of a thread that runs on, innermost first, at most 100.

    Not by `sys._current_frames`: up to Python 3.11, ``f_back`` may collect garbage, and so let the thread run on. What
    it then returns is the memory of a frame that has ended, and reading it crashes the process.
    """
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        text = file.read().decode("unicode_escape")
    _, _, own = text.partition(f"hread 0x{thread_id:016x} ")
    return [_Frame(*found) for found in _FRAME.findall(own.partition("\n\n")[0])]


def _called(inner: list[_Frame]) -> str:
    """The function that the user has called, if it has led to fairshard; ``inner``: the frames of its call."""
    if not any(frame.path.startswith(_OWN) for frame in inner):
        return ""
    known = (_public_name(frame) for frame in reversed(inner) if frame.path.startswith((_OWN, _TORCH)))
    return next(filter(None, known), "fairshard")


def _public_name(frame: _Frame) -> str:
    """Name of a public function or method, or of the class whose constructor it is; empty for others."""
    at = (name for lines, name in _public_names(frame.path) if frame.line in lines)
    return next((name for name in at if frame.function in (name, "__init__")), "")


@cache
def _public_names(path: str) -> list[tuple[Collection[str], str]]:
    """The lines and names of the public functions, methods and constructors that a file defines."""
    found = []
    for node in ast.parse(Path(path).read_bytes()).body:
        for function in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(function, ast.FunctionDef):
                name = getattr(node, "name", "") if function.name == "__init__" else function.name
                lines = range(function.lineno, (function.end_lineno or 0) + 1)
                found.append((set(map(str, lines)), name))
    return [(lines, name) for lines, name in found if not name.startswith("_")]
