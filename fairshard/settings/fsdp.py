"""Option objects of both entry points: strategy, prefetch, precision and offload.

PyTorch's classes of the same names (``torch.distributed.fsdp``) are accepted wherever these are.

Source: PyTorch's FSDP and FSDP2, for names and defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, auto
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fairshard.params.rule import BackwardPrefetch as BackwardPrefetch
from fairshard.settings.check import DTYPE, FLAG, FLOATING, Check, check_fields, must


class ShardingStrategy(Enum):
    """Which tensors are sharded over which ranks, and when whole parameters are freed.

    =====================  =======================================  ==================================
    name                   sharded over the ranks                   whole parameters are freed
    =====================  =======================================  ==================================
    FULL_SHARD             parameters, gradients, optimizer state   after forward and after backward
    SHARD_GRAD_OP          the same                                 after backward, but not in no_sync
    NO_SHARD               nothing; gradients are averaged          never, as with DDP
    HYBRID_SHARD           as FULL_SHARD within a group of ranks;   as FULL_SHARD
                           several groups hold replicas
    _HYBRID_SHARD_ZERO2    as HYBRID_SHARD                          as SHARD_GRAD_OP
    =====================  =======================================  ==================================
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()

    @property
    def is_hybrid(self) -> bool:
        """Whether groups of ranks hold replicas."""
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)

    @property
    def reshards_after_forward(self) -> bool:
        """Whether parameters are freed between forward and backward."""
        return self in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


@dataclass(frozen=True)
class CPUOffload:
    """``offload_params``: shards, gradients and optimizer state are kept in host memory."""

    offload_params: bool = False


def _are_classes(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(
        isinstance(kind, type) and issubclass(kind, nn.Module) for kind in value
    )


_CLASSES = Check(_are_classes, "a tuple of module classes")


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes of compute, gradients and buffers; shards and optimizer state keep the dtype of the wrapped module.

    Attributes:
        param_dtype: dtype in which parameters are gathered and compute; their own if None.
        reduce_dtype: dtype in which gradients are reduced; ``param_dtype`` if None.
        buffer_dtype: dtype of floating buffers during forward and backward; their own if None.
        keep_low_precision_grads: gradients of shards keep ``reduce_dtype``, for an optimizer that can use them.
        cast_forward_inputs: floating inputs of this unit's forward are cast to ``param_dtype``.
        cast_root_forward_inputs: inputs of the outermost unit are cast, even without ``cast_forward_inputs``.
        _module_classes_to_ignore: modules that ``auto_wrap_policy`` wraps separately, without mixed precision.
    """

    param_dtype: torch.dtype | None = field(default=None, metadata=must(DTYPE, FLOATING))
    reduce_dtype: torch.dtype | None = field(default=None, metadata=must(DTYPE, FLOATING))
    buffer_dtype: torch.dtype | None = field(default=None, metadata=must(DTYPE, FLOATING))
    keep_low_precision_grads: bool = field(default=False, metadata=must(FLAG))
    cast_forward_inputs: bool = field(default=False, metadata=must(FLAG))
    cast_root_forward_inputs: bool = field(default=True, metadata=must(FLAG))
    _module_classes_to_ignore: Sequence[type[nn.Module]] = field(default=(_BatchNorm,), metadata=must(_CLASSES))

    def __post_init__(self) -> None:
        check_fields(self)


# ---- of `fully_shard`


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


# ---- PyTorch's objects

_ENUMS = {cls.__name__: cls for cls in (ShardingStrategy, BackwardPrefetch)}
_OBJECTS: dict[str, type[Any]] = {
    cls.__name__: cls for cls in (CPUOffload, MixedPrecision, MixedPrecisionPolicy, CPUOffloadPolicy, OffloadPolicy)
}


def adopt(value: Any) -> Any:
    """Our object for one of PyTorch's class of the same name, or of a subclass; any other value is unchanged."""
    for theirs in type(value).__mro__:
        if theirs.__module__.startswith("torch.distributed."):
            if theirs.__name__ in _ENUMS:
                return _ENUMS[theirs.__name__][value.name]
            if theirs.__name__ in _OBJECTS:
                own = _OBJECTS[theirs.__name__]
                return own(**{one.name: getattr(value, one.name) for one in fields(own) if hasattr(value, one.name)})
    return value


def _policy(cls: type) -> Check:
    how = f"Pass a {cls.__name__} of fairshard.nn or torch.distributed.fsdp."
    return Check(cls, f"a {cls.__name__}", how=how)


PRECISION_POLICY, OFFLOAD_POLICY = _policy(MixedPrecisionPolicy), _policy(OffloadPolicy)
