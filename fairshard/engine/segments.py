"""Segments: the calls of units inside one call of ``torch.utils.checkpoint``, which are recomputed together.

The backward of a segment first runs the segment's forward again, with all of its units, even those that no gradient
reaches. This is the only file that inspects the frames of torch's checkpoint. If it does not find any (another
implementation), a call counts as not checkpointed, and gathers for its recomputation are not in the schedule.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from fairshard.engine.exec_order import Bracket
from fairshard.utils.autograd import nodes_before, reaches, sequence_number

# From torch 2.14 `checkpoint` only reads its arguments, which may be missing: it also makes decorators.
_CHECKPOINT: CodeType = inspect.unwrap(getattr(torch_checkpoint, "_checkpoint_impl", checkpoint)).__code__
_REENTRANT: CodeType = CheckpointFunction.forward.__code__
_PACKS_FOR_CHECKPOINT = "_checkpoint_hook."
_saved_tensor_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


@dataclass(frozen=True)
class Segment:
    """One call of a checkpoint.

    Attributes:
        key: object that identifies the segment.
        node: graph node that recomputes the segment, if the checkpoint is reentrant.
        start: no graph node created inside the segment has a smaller sequence number.
    """

    key: Any
    node: Any = None
    start: int = 0


def current_segment(is_grad_enabled: bool) -> Segment | None:
    """The outermost checkpoint on the stack, or None."""
    hooks: Any = ("unknown",)
    if _saved_tensor_hooks is not None:
        try:
            hooks = _saved_tensor_hooks(True)  # a non-reentrant checkpoint sets these
        except (RuntimeError, TypeError):
            hooks = ("unknown",)
    return None if hooks is None and is_grad_enabled else _find_segment(hooks)


def _find_segment(hooks: Any) -> Segment | None:
    frame: FrameType | None = sys._getframe(1)
    key = node = None
    given: Any = ()
    while frame is not None:
        if frame.f_code is _CHECKPOINT:
            names = frame.f_locals
            key, given = names.get("gen", key), (*names["args"], *names["kwargs"].values())
        elif frame.f_code is _REENTRANT:
            key = node = frame.f_locals["ctx"]
        frame = frame.f_back
    if key is None:
        pack = None if hooks is None else hooks[0]
        if not getattr(pack, "__qualname__", "").startswith(_PACKS_FOR_CHECKPOINT):
            return None
        key = pack  # entered by module hooks, as with `torch.distributed._composable.checkpoint`
    inputs = [value.grad_fn for value in given if isinstance(value, torch.Tensor) and value.grad_fn is not None]
    return Segment(key, node, max((sequence_number(input) + 1 for input in inputs), default=0))


def find_recomputed(
    brackets: Sequence[Bracket[Any]],
    events: Sequence[int],
    segment_of: Sequence[int],
    starts: Sequence[int],
    reached: Sequence[int],
) -> set[int]:
    """The segments that the running backward recomputes although it reaches no call in them.

    This happens if the backward reaches nodes that the enclosing call has computed inside the segment. Nodes that may
    lie either inside or right after the segment count as inside.

    Args:
        brackets: the calls.
        events: starts and ends of the calls, as in `Pass.events`.
        segment_of: for each call, the segment that it is in; -1 if none.
        starts: for each segment, the smallest sequence number of its nodes.
        reached: for each call, whether the backward reaches it.
    """
    last = {segment: call for call, segment in enumerate(segment_of) if segment >= 0}
    known = {segment for segment, is_reached in zip(segment_of, reached, strict=True) if is_reached}
    found: set[int] = set()
    running: list[int] = []
    for event in events:
        if event < 0:
            running.pop()
            continue
        segment = segment_of[event]
        if segment >= 0 and segment not in known:
            known.add(segment)
            around = next((call for call in reversed(running) if segment_of[call] != segment), None)
            if around is not None and reached[around] and brackets[event].node is None:
                following, start = last[segment] + 1, starts[segment]
                stop = brackets[following].began if following < len(brackets) else 0
                if _computes_between(brackets[around], start, stop if stop > start else _NEVER):
                    found.add(segment)
        running.append(event)
    return found


_NEVER = 1 << 62


def _computes_between(bracket: Bracket[Any], start: int, stop: int) -> bool:
    """Whether the running backward executes a node of the call whose sequence number is in ``[start, stop)``."""
    call = None if bracket.call is None else bracket.call()
    probes = [] if call is None else [probe for reference in call.probes if (probe := reference()) is not None]
    waiting = [node for probe in probes for node in probe.nodes if reaches(node)]
    if stop == _NEVER and any(sequence_number(node) < start for node in waiting):
        return True  # the output's own node may lie in the range
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        number = sequence_number(node)
        if start <= number < stop:
            return True
        if number >= start:
            new = {before for before in nodes_before(node) if before not in seen and reaches(before)}
            seen |= new
            waiting += new
    return False
