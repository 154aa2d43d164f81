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
_PACKS_FOR_CHECKPOINT = "_checkpoint_hook."
_saved_tensor_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


@dataclass(frozen=True)
class Segment:
    """``key`` is one object for all calls of the segment. ``node`` recomputes it, if it is reentrant."""

    key: Any
    node: Any = None


def current_segment() -> Segment | None:
    """The outermost checkpoint that is on the stack; None if there is none."""
    pack = _packing()
    if torch.is_grad_enabled() and pack is None:
        return None
    frame: FrameType | None = sys._getframe(1)
    key = node = None
    while frame is not None:
        if frame.f_code is _CHECKPOINT:
            key = frame.f_locals.get("gen", key)
        elif frame.f_code is _REENTRANT:
            key = node = frame.f_locals["ctx"]
        frame = frame.f_back
    if key is None and getattr(pack, "__qualname__", "").startswith(_PACKS_FOR_CHECKPOINT):
        key = pack  # entered by module hooks, as `torch.distributed._composable.checkpoint` does
    return None if key is None else Segment(key, node)


def _packing() -> Any:
    """The hook that saved tensors go through, as they do inside a checkpoint that is not reentrant; None without."""
    if _saved_tensor_hooks is None:
        return "unknown"
    try:
        hooks = _saved_tensor_hooks(True)
    except (RuntimeError, TypeError):
        return "unknown"
    return None if hooks is None else hooks[0]
