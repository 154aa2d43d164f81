"""The only file that uses private names of Dynamo, the tracer of ``torch.compile``; the compiler is not imported.

While compiled code runs, torch calls a *tracer* for each Python frame that starts in the thread. The engine turns it
off while it communicates, and on again for the forward of a user's module, which is then compiled by itself:

- ``torch._C._dynamo.eval_frame.set_eval_frame``: sets the tracer of this thread and returns the one before; about
  10 ns. Without it the tracer stays on, and would trace the engine's functions one by one.
- ``set_code_exec_strategy`` there (``skip_code`` in torch 2.6 to 2.8): the tracer ignores frames of a code object, but
  not those of functions that it calls.
- ``_torchdynamo_disable``: the attribute by which the tracer knows a function that it must call and not trace.
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


def breaks_graph(reason: str) -> Callable[[_F], _F]:
    """Decorator of functions that compiled code calls as they are; ``reason`` says why, if a break is not allowed."""

    def mark(function: _F) -> _F:
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return not_traced(function)

    return mark


def allows_breaks(tracer: Any) -> bool:
    """False for the tracer of ``torch.compile(fullgraph=True)``."""
    for name in ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable"):  # the latter before torch 2.9
        tracer = getattr(tracer, name, tracer)
    return not getattr(tracer, "_one_graph", False)
