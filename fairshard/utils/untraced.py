"""Functions that compiled code calls as they are: methods of doors, and hooks on optimizers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from fairshard.utils.dynamo import set_tracer
from fairshard.utils.graph_breaks import breaks_graph

_P = ParamSpec("_P")
_T = TypeVar("_T")


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
