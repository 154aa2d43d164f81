"""Functions that compiled code calls as they are, outside of its graphs.

Private names of Dynamo, besides those in ``dynamo.py``:

- ``_torchdynamo_disable``: the attribute by which the tracer knows a function that it must call and not trace.
- ``_one_graph`` of a tracer: whether it must trace everything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from fairshard.utils.dynamo import not_traced, set_tracer

_P = ParamSpec("_P")
_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])


def breaks_graph(reason: str) -> Callable[[_F], _F]:
    """Decorator of functions that compiled code calls as they are; ``reason`` says why, if a break is not allowed."""

    def mark(function: _F) -> _F:
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return not_traced(function)

    return mark


def untraced(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorator of methods and hooks: compiled code calls ``function`` as it is, and nothing in it is traced."""

    @breaks_graph("it may communicate, which cannot be compiled")
    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        tracer = set_tracer(None)
        try:
            return function(*args, **kwargs)
        finally:
            set_tracer(tracer)

    return call


def allows_breaks(tracer: Any) -> bool:
    """False for the tracer of ``torch.compile(fullgraph=True)``."""
    for name in ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable"):  # the latter before torch 2.9
        tracer = getattr(tracer, name, tracer)
    return not getattr(tracer, "_one_graph", False)
