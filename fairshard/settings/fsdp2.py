"""Option objects of `fully_shard`: precision and offload.

PyTorch's classes of the same names (``torch.distributed.fsdp``) are accepted wherever these are.

Source: PyTorch's FSDP2, for names and defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch

from fairshard.settings.check import DTYPE, FLAG, FLOATING, check_fields, elsewhere, must
from fairshard.settings.fsdp1 import MixedPrecision


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of compute and gradients; shards, their gradients and optimizer state keep the parameters' dtype.

    Attributes:
        param_dtype: dtype in which parameters are gathered and compute; their own if None.
        reduce_dtype: dtype in which gradients are reduced and accumulated; ``param_dtype`` if None.
        output_dtype: floating outputs of each sharded module are cast to it; None does not cast.
        cast_forward_inputs: floating inputs of each sharded module are cast to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = field(default=None, metadata=must(DTYPE, FLOATING))
    reduce_dtype: torch.dtype | None = field(default=None, metadata=must(DTYPE, FLOATING))
    output_dtype: torch.dtype | None = field(default=None, metadata=must(DTYPE, FLOATING))
    cast_forward_inputs: bool = field(default=True, metadata=must(FLAG))

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def precision(self) -> MixedPrecision:
        """The policy as a `MixedPrecision` for one unit."""
        casts = self.cast_forward_inputs and self.param_dtype is not None
        return MixedPrecision(
            param_dtype=self.param_dtype,
            reduce_dtype=self.reduce_dtype,
            cast_forward_inputs=casts,
            cast_root_forward_inputs=casts,
        )


@dataclass(frozen=True)
class OffloadPolicy:
    """No offload: nothing is kept in host memory."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, their gradients and optimizer state are kept in host memory; parameters are gathered from there.

    ``pin_memory`` is accepted without effect: with a GPU, host memory is always pinned as far as limits allow.
    """

    pin_memory: bool = True


def adopt_policy(name: str, given: Any, cls: type[Any]) -> Any:
    """Convert ``given``, an object of ``cls``, of PyTorch's class of that name, or of a subclass, to our class.

    Raises:
        TypeError: ``given`` is of another type.
    """
    if isinstance(given, cls):
        return given
    for theirs in type(given).__mro__:
        if theirs.__module__.startswith("torch.distributed."):
            for own in (MixedPrecisionPolicy, CPUOffloadPolicy, OffloadPolicy):
                if own.__name__ == theirs.__name__ and issubclass(own, cls):
                    return own(**{field.name: getattr(given, field.name) for field in fields(own)})
    how = elsewhere(given) or f"Pass a {cls.__name__} of fairshard.nn or torch.distributed.fsdp."
    raise TypeError(f"`{name}` must be a {cls.__name__}, but is {given!r}. {how}")
