"""Sizes in bytes that replace flat params and buckets in a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fairshard.params.rule import GradHome
from fairshard.planning.summary import FlatSizes
from fairshard.planning.units import PlannedUnit
from fairshard.utils.groups import EXCHANGE_RANKS
from fairshard.utils.owned_layout import OwnedLayout
from fairshard.views.copied_out import is_to_align


@dataclass(frozen=True)
class _Ranks:
    world_size: int


@dataclass(frozen=True)
class _Comms:
    shard: _Ranks
    num_replicas: int


class SourceBytes:
    """Size of a flat param, with the attributes that the bucket planner reads."""

    def __init__(self, unit: PlannedUnit, index: int, flat: FlatSizes, device: str, num_ranks: int) -> None:
        self.unit = unit
        self.flat = flat
        self.config = unit.config
        self.params = [slot.leaf for slot in unit.slots[index]]
        self._shapes = [slot.shape for slot in unit.slots[index]]
        self.comms: Any = _Comms(_Ranks(flat.layout.world_size), num_ranks // flat.layout.world_size)
        self.reduce_dtype = unit.config.rule.reduce_dtype_of(flat.compute_dtype)
        self.compute_device = torch.device(device)
        self.shard_numel = flat.shard_numel
        self.line: Any = flat  # has the layout
        self.bucket_numel = flat.layout.padded_numel
        self.bucket_kind = isinstance(flat.layout, OwnedLayout)  # the others share buckets
        self.division = None  # alike for all
        self.landing_dtype = self.reduce_dtype if unit.config.rule.keeps_reduce_dtype else flat.param_dtype

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of the gather buffer, twice if it is copied out to be aligned; 0 if one rank computes on the shard."""
        flat = self.flat
        if flat.layout.world_size == 1 and flat.compute_dtype == flat.param_dtype and not self.config.master_on_cpu:
            return 0
        is_copied = is_to_align(self._shapes, flat.layout.offsets, flat.compute_dtype, self.compute_device)
        return flat.full_nbytes * (2 if is_copied else 1)

    @property
    def is_cast(self) -> bool:
        """Whether the gathered parameters have another dtype than the shard."""
        return self.flat.compute_dtype != self.flat.param_dtype

    @property
    def grad_stays(self) -> bool:
        """Whether the reduced gradient stays on the compute device."""
        return not self.config.master_on_cpu or self.config.rule.grad_home is not GradHome.HOST


class BucketBytes:
    """Sizes of a bucket and of the temporary buffers of its reduction."""

    def __init__(self, sources: Sequence[SourceBytes], device: str) -> None:
        self.sources = sources
        world_size = sources[0].comms.shard.world_size
        dtype = sources[0].reduce_dtype
        self.width = sum(source.shard_numel for source in sources)
        self.nbytes = sum(source.bucket_numel for source in sources) * dtype.itemsize
        self.missing = set(sources)
        self.is_open = False
        num_replicas = sources[0].comms.num_replicas
        sums_in_order = device == "cpu" and world_size * num_replicas > 1  # gloo: rows are summed in fp32 or wider
        self.sum_dtype = torch.promote_types(dtype, torch.float32) if sums_in_order else dtype
        self.sum_nbytes = self.width * self.sum_dtype.itemsize
        first = world_size if world_size > 1 else num_replicas
        self.received_nbytes = self.width * _num_rows(first) * dtype.itemsize if sums_in_order else 0
        # A direct exchange sums in memory that it has received, unless the sum is wider.
        is_in_place = sums_in_order and first in EXCHANGE_RANKS and self.sum_dtype == dtype
        self.in_place_nbytes = self.sum_nbytes if is_in_place else 0
        self.cast_nbytes = 0 if self.sum_dtype == dtype else self.sum_nbytes  # the cast of one row, while it is added
        # The sum over ranks is kept until it is summed over replicas.
        is_second = sums_in_order and world_size > 1 and num_replicas > 1
        num_new = _num_rows(num_replicas) + (num_replicas not in EXCHANGE_RANKS)
        self.replica_nbytes = self.sum_nbytes * num_new if is_second else 0


def _num_rows(num_ranks: int) -> int:
    """Number of rows received for a sum; a direct exchange does not copy the rank's own row."""
    return num_ranks - 1 if num_ranks in EXCHANGE_RANKS else num_ranks
