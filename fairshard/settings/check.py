"""Checks of options: of one, kept beside its default in the field of a dataclass, and of several together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

_ELSEWHERE = {
    "MixedPrecisionPolicy": "It is for fully_shard: pass `MixedPrecision(param_dtype=..., reduce_dtype=...)` here.",
    "CPUOffloadPolicy": "It is for fully_shard: pass `cpu_offload=True` here.",
    "OffloadPolicy": "It is for fully_shard: leave it out here.",
    "MixedPrecision": "It is for FullyShardedDataParallel: pass `MixedPrecisionPolicy(param_dtype=..., "
    "reduce_dtype=...)` here.",
    "CPUOffload": "It is for FullyShardedDataParallel: pass `CPUOffloadPolicy()` here.",
}
"""The argument to pass in place of an option object of the other API, by the name of its class."""


@dataclass(frozen=True)
class Check:
    """What a value must be, in ``words``; otherwise an ``error`` is raised that says ``how``.

    ``accepts``: types, of one of which it must be an instance, or a function of the value that must return True.
    ``how`` may also be a function of the value.
    """

    accepts: type | tuple[type, ...] | Callable[[Any], object]
    words: str
    error: type[Exception] = TypeError
    how: str | Callable[[Any], str] = ""

    def __call__(self, name: str, value: Any) -> None:
        """Check the ``value`` of option ``name``."""
        accepts: Any = self.accepts
        if not (isinstance(value, accepts) if isinstance(accepts, (type, tuple)) else accepts(value)):
            how = _ELSEWHERE.get(type(value).__name__) or (self.how(value) if callable(self.how) else self.how)
            raise self.error(f"`{name}` must be {self.words}, but is {value!r}.{' ' if how else ''}{how}")


def require(holds: object, text: str, error: type[Exception] = ValueError) -> None:
    """Raise ``error`` with ``text`` unless ``holds``: for what several arguments, or an argument and a module, must be.

    ``text`` is made whether it is needed or not: for setup, not for passes.
    """
    if not holds:
        raise error(text)


def must(*checks: Check) -> dict[str, Any]:
    """Metadata of a field of a dataclass whose values must pass ``checks``, one after the other."""
    return {"checks": checks}


def check_fields(options: Any) -> None:
    """Check the fields of ``options`` that are not the defaults as their metadata says; for ``__post_init__``."""
    for one in fields(options):
        value = getattr(options, one.name)
        for check in one.metadata.get("checks", ()) if value is not one.default else ():
            check(one.name, value)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a number, and no flag."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_NONE, _BF16 = type(None), "Pass torch.bfloat16."
FLAG = Check(bool, "True or False")
CALLABLE = Check(callable, "callable")
FUNCTION_OF_PARAMETER = Check(lambda value: value is None or callable(value), "a function of a parameter")
FLAG_OR_NONE = Check((bool, _NONE), "True, False or None")
DTYPE = Check((torch.dtype, _NONE), "a floating dtype or None", how=_BF16)
FLOATING = Check(lambda value: value is None or value.is_floating_point, DTYPE.words, ValueError, _BF16)
