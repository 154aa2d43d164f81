"""Keyword arguments that a function does not have: an error that names the one that was meant."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import ParamSpec, TypeVar

Params = ParamSpec("Params")
Result = TypeVar("Result")


def named_keywords(
    name: str, cures: Mapping[str, str] | None = None
) -> Callable[[Callable[Params, Result]], Callable[Params, Result]]:
    """Decorator of the function, or ``__init__``, that users call by ``name``; see `check_keywords`."""

    def decorate(function: Callable[Params, Result]) -> Callable[Params, Result]:
        known = keywords_of(function)
        assert known is not None

        @functools.wraps(function)
        def call(*args: Params.args, **kwargs: Params.kwargs) -> Result:
            if not known >= kwargs.keys():
                check_keywords(name, kwargs, known, cures)
            return function(*args, **kwargs)

        return call

    return decorate


def keywords_of(function: Callable[..., object]) -> frozenset[str] | None:
    """The names of the arguments of ``function``, a function or a class; None if it takes any keyword."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters) - {"self"}


def check_keywords(
    name: str, given: Iterable[str], known: Collection[str], cures: Mapping[str, str] | None = None
) -> None:
    """Check that ``name`` has all arguments ``given``; ``cures`` say what to pass in place of some.

    Raises:
        TypeError: it does not have one; with the nearest of the ``known``, or all of them.
    """
    for argument in given:
        if argument in known:
            continue
        close = difflib.get_close_matches(argument, known, n=1)
        if cures and argument in cures:
            how = cures[argument]
        elif close:
            how = f"Did you mean `{close[0]}`?"
        else:
            how = f"It has {', '.join(f'`{one}`' for one in sorted(known))}."
        raise TypeError(f"{name} has no argument `{argument}`. {how}")
