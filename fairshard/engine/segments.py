"""Which calls of units a checkpoint recomputes together: those inside one call of ``torch.utils.checkpoint``.

The backward of such a segment first runs its forward again, all units of it, whichever of them its gradients reach.
The only file that looks at the frames of torch's checkpoint; where they cannot be found (another implementation), a
call counts as not checkpointed, and what it gathers when it is recomputed is not part of the schedule.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction, checkpoint

_CHECKPOINT: CodeType = inspect.unwrap(checkpoint).__code__
_REENTRANT: CodeType = CheckpointFunction.forward.__code__
_saved_tensor_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


@dataclass(frozen=True)
class Segment:
    """``key`` is one object for all calls of the segment. ``node`` recomputes it, if it is reentrant."""

    key: Any
    node: Any = None


def current_segment() -> Segment | None:
    """The outermost checkpoint that is on the stack; None if there is none."""
    if torch.is_grad_enabled() and not _is_saving_elsewhere():
        return None
    frame: FrameType | None = sys._getframe(1)
    key = node = None
    while frame is not None:
        if frame.f_code is _CHECKPOINT:
            key = frame.f_locals.get("gen", key)
        elif frame.f_code is _REENTRANT:
            key = node = frame.f_locals["ctx"]
        frame = frame.f_back
    return None if key is None else Segment(key, node)


def _is_saving_elsewhere() -> bool:
    """Whether saved tensors go through hooks, as they do inside a checkpoint that is not reentrant."""
    if _saved_tensor_hooks is None:
        return True
    try:
        return _saved_tensor_hooks(True) is not None
    except (RuntimeError, TypeError):
        return True
