"""Arithmetic of buckets, without tensors: which gradients share one, and how many buckets have memory at a time."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch

MB = 1024 * 1024
_MAX_IN_FLIGHT = 2


class PlannedSource(Protocol):
    """One flat gradient, of ``bucket_numel`` elements over all ranks; a bucket has sources of one ``bucket_kind``."""

    comms: Any
    reduce_dtype: torch.dtype
    compute_device: torch.device
    shard_numel: int
    """Elements that this rank gets."""

    @property
    def bucket_numel(self) -> int:
        """See above; equal on all ranks."""

    @property
    def bucket_kind(self) -> Any:
        """The class of its bucket."""


SourceT = TypeVar("SourceT", bound=PlannedSource)


def pack(order: Sequence[SourceT], bucket_cap_mb: float) -> list[list[SourceT]]:
    """Group ``order`` into buckets: consecutive gradients of one kind share a bucket up to the cap."""
    packed: list[list[SourceT]] = []
    filling: dict[tuple[object, ...], tuple[list[SourceT], int]] = {}
    for source in order:
        key = (source.comms, source.reduce_dtype, source.compute_device, source.bucket_kind)
        own = source.bucket_numel * source.reduce_dtype.itemsize
        sources, nbytes = filling.get(key, ([], 0))
        if not sources or nbytes + own > bucket_cap_mb * MB:
            sources, nbytes = [], 0
            packed.append(sources)
        sources.append(source)
        filling[key] = sources, nbytes + own
    return packed


def is_crowded(nbytes: int, flying: Sequence[int], bucket_cap_mb: float) -> bool:
    """Whether a bucket must wait for memory: two are in flight, or all together would exceed two caps."""
    return len(flying) >= _MAX_IN_FLIGHT or nbytes + sum(flying) > 2 * bucket_cap_mb * MB
