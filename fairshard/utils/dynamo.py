"""Private names of Dynamo, the tracer of ``torch.compile``; the compiler is not imported.

Only this file and ``graph_breaks.py`` use such names.

While compiled code runs, torch calls a *tracer* for each Python frame that starts in the thread. The engine turns it
off while it communicates, and on again for the forward of a user's module, which is then compiled by itself:

- ``torch._C._dynamo.eval_frame.set_eval_frame``: sets the tracer of this thread and returns the one before; about
  10 ns. Without it the tracer stays on, and would trace the engine's functions one by one.
- ``set_code_exec_strategy`` there (``skip_code`` in torch 2.6 to 2.8): the tracer ignores frames of a code object, but
  not those of functions that it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])
_frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)


set_tracer: Callable[[Any], Any] = getattr(_frames, "set_eval_frame", lambda _tracer: None)
"""Set the tracer of this thread, None for no tracer, and return the one before."""


def not_traced(function: _F) -> _F:
    """Make the tracer ignore the frame of ``function``; functions that it calls are traced, and callers inline it."""
    if hasattr(_frames, "skip_code"):
        _frames.skip_code(function.__code__)
    elif hasattr(_frames, "set_code_exec_strategy"):
        action = _frames._FrameAction
        _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(action.SKIP, action.DEFAULT))
    return function
