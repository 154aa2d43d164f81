"""What users of `fully_shard` say with an object: in which precision, and where what is kept.

PyTorch's classes of the same names (``torch.distributed.fsdp``) are accepted wherever these are.

Source: PyTorch's FSDP2, whose names and defaults these are.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from fairshard.settings.fsdp1 import MixedPrecision


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """In which dtype what is done; shards, their gradients and optimizer state keep the dtype of the parameters.

    Attributes:
        param_dtype: parameters are gathered and compute in it; their own dtype if None.
        reduce_dtype: gradients travel, and add up in accumulation, in it; ``param_dtype`` if None.
        output_dtype: floating outputs of each module that is sharded are cast to it; None leaves them.
        cast_forward_inputs: floating inputs of each module that is sharded are cast to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.cast_forward_inputs, bool):
            raise TypeError(f"`cast_forward_inputs` must be True or False, but is {self.cast_forward_inputs!r}.")
        if not isinstance(self.output_dtype, (torch.dtype, type(None))):
            raise TypeError(f"`output_dtype` must be a floating dtype or None, but is {self.output_dtype!r}.")
        if self.output_dtype is not None and not self.output_dtype.is_floating_point:
            raise ValueError(f"`output_dtype` must be a floating dtype or None, but is {self.output_dtype}.")
        self.precision  # noqa: B018 (checks the other two)

    @property
    def precision(self) -> MixedPrecision:
        """What the policy comes to for one unit."""
        casts = self.cast_forward_inputs and self.param_dtype is not None
        return MixedPrecision(
            param_dtype=self.param_dtype,
            reduce_dtype=self.reduce_dtype,
            cast_forward_inputs=casts,
            cast_root_forward_inputs=casts,
        )


@dataclass(frozen=True)
class OffloadPolicy:
    """Nothing is kept in host memory."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, their gradients and optimizer state are kept in host memory; parameters are gathered from there.

    ``pin_memory`` is accepted: host memory is pinned where a GPU is, and as much as there is room for.
    """

    pin_memory: bool = True


def adopt_policy(name: str, given: Any, cls: type[Any]) -> Any:
    """``given``, an object of ``cls`` or of PyTorch's class of the same name, or one below it, as one of ours.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(given, cls):
        return given
    for theirs in type(given).__mro__:
        if theirs.__module__.startswith("torch.distributed."):
            for own in (MixedPrecisionPolicy, CPUOffloadPolicy, OffloadPolicy):
                if own.__name__ == theirs.__name__ and issubclass(own, cls):
                    return own(**{field.name: getattr(given, field.name) for field in fields(own)})
    raise TypeError(f"`{name}` must be a {cls.__name__}, but is {given!r}.")
