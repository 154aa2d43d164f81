"""Checks of single options, kept beside their defaults in the fields of dataclasses."""

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


def elsewhere(value: Any) -> str:
    """The argument to pass in place of ``value``, if that is an option object of the other API; otherwise empty."""
    return _ELSEWHERE.get(type(value).__name__, "")


@dataclass(frozen=True)
class Check:
    """What a value must be, in ``words``: ``accepts(value)`` is true, or an ``error`` is raised that says ``how``."""

    accepts: Callable[[Any], bool]
    words: str
    error: type[Exception] = TypeError
    how: str = ""

    def __call__(self, name: str, value: Any) -> None:
        """Check the ``value`` of option ``name``."""
        if not self.accepts(value):
            how = elsewhere(value) or self.how
            raise self.error(f"`{name}` must be {self.words}, but is {value!r}.{' ' if how else ''}{how}")


def must(*checks: Check) -> dict[str, Any]:
    """Metadata of a field of a dataclass whose values must pass ``checks``, one after the other."""
    return {"checks": checks}


def check_fields(options: Any) -> None:
    """Check every field of the dataclass ``options`` as its metadata says; for ``__post_init__``."""
    for one in fields(options):
        for check in one.metadata.get("checks", ()):
            check(one.name, getattr(options, one.name))


def is_number(value: Any) -> bool:
    """Whether ``value`` is a number, and no flag."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_BF16 = "Pass torch.bfloat16."
FLAG = Check(lambda value: isinstance(value, bool), "True or False")
CALLABLE = Check(callable, "callable")
FUNCTION_OF_PARAMETER = Check(lambda value: value is None or callable(value), "a function of a parameter")
FLAG_OR_NONE = Check(lambda value: value is None or isinstance(value, bool), "True, False or None")
DTYPE = Check(lambda value: isinstance(value, (torch.dtype, type(None))), "a floating dtype or None", how=_BF16)
FLOATING = Check(lambda value: value is None or value.is_floating_point, DTYPE.words, ValueError, _BF16)
