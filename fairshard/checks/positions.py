"""Positions of ranks, for error messages: where a rank is in its training, and on which line of the user's code."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import zip_longest
from types import FrameType
from typing import Protocol

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
_CALLED_BY_NAME = {"__init__": "", "__call__": "", "_call_impl": ".forward"}
_DECORATORS = ("decorate_context", "wrapper", "inner", "call")  # Python 3.10 does not show that they are nested

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
    frame = sys._current_frames().get(thread_id)
    inner: list[FrameType] = []  # innermost first
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        inner.append(frame)
        frame = frame.f_back
    if frame is None:
        return Line()
    where = f" ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}, in {frame.f_code.co_name})"
    return Line(where, _called(inner))


def background() -> list[str]:
    """Descriptions of what threads of this process do beside training."""
    return [one.name.removeprefix(BACKGROUND) for one in threading.enumerate() if one.name.startswith(BACKGROUND)]


def _called(inner: list[FrameType]) -> str:
    """The function that the user has called, if it has led to fairshard; ``inner``: the frames of its call."""
    if not any(frame.f_code.co_filename.startswith(_OWN) for frame in inner):
        return ""
    known = [_name(frame) for frame in reversed(inner) if frame.f_code.co_filename.startswith((_OWN, _TORCH))]
    return next(filter(None, known), "fairshard")


def _name(frame: FrameType) -> str:
    """Name of a public function or method; empty for others, and for those that wrap the user's function."""
    name = frame.f_code.co_name
    owner = frame.f_locals.get("self")
    if name in _CALLED_BY_NAME and owner is not None:
        return type(owner).__name__ + _CALLED_BY_NAME[name]
    if name.startswith(("_", "<")) or "<locals>" in getattr(frame.f_code, "co_qualname", name):
        return ""
    if name in _DECORATORS:
        return ""
    return name if owner is None else f"{type(owner).__name__}.{name}"
