"""Predicted memory of a training step: bytes of units, and a walk over the units from the last to the first.

While a unit's backward computes, these are live, beside what lasts: the outermost unit and this one, the next one,
gathered ahead, this one's whole gradients, at most two buckets on their way, and the gradients of shards so far. The
walk assumes what only a run can show: every module is called once, in the order of registration, and transfers take as
long as possible.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from fairshard.extras.planning.wrap_plan import BucketRow, MemoryTerm
from fairshard.params.rule import GradHome
from fairshard.params.shard_grad import MAX_KEPT_NBYTES
from fairshard.planning.units import PlannedUnit
from fairshard.utils.buckets import MB, is_crowded
from fairshard.utils.groups import EXCHANGE_RANKS
from fairshard.views.copied_out import is_to_align

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "adamw": AdamW,
    "adam": Adam,
    "sgd": partial(SGD, lr=0.1),
    "sgd-momentum": partial(SGD, lr=0.1, momentum=0.9),
}
"""Optimizers that a plan accepts by name."""

GATHERED, PARTS, WHOLE_GRADS = "gathered units", "parts kept for the backward", "whole gradients"
BUCKETS, GRADS, ON_WAY = "buckets", "gradients", "gradients on their way to the host"


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of one unit: ``gathered``, and its ``whole`` gradients.

    ``sent``: its part of a bucket; ``received``: of the others' buckets; ``summing``: live besides in the sum.
    ``grad``: gradients of its shards on the device; ``to_host``: those that go to the host. ``stays``: gathered between
    forward and backward; ``part``: what it keeps then if it is sharded over fewer ranks.
    """

    fqn: str
    gathered: int
    whole: int
    sent: int
    received: int
    summing: int
    grad: int
    to_host: int
    stays: bool
    part: int

    @staticmethod
    def of(unit: PlannedUnit, world_size: int, num_ranks: int, device: str) -> UnitBytes:
        """The bytes of a planned unit on one of ``num_ranks`` ranks, which shard it over ``world_size``."""
        config, found = unit.config, Counter[str]()
        stays_here = not config.master_on_cpu or config.rule.grad_home is not GradHome.HOST
        for flat, slots in zip(unit.flat_sizes(world_size), unit.slots, strict=True):
            shards, dtype = flat.layout.world_size, flat.compute_dtype
            shapes = [slot.shape for slot in slots]
            copies = 2 if is_to_align(shapes, flat.layout.offsets, dtype, torch.device(device)) else 1
            if shards > 1 or dtype != flat.param_dtype or config.master_on_cpu:  # otherwise computes on the shard
                found["gathered"] += copies * flat.full_nbytes
            if not flat.requires_grad:
                continue
            found["whole"] += flat.layout.numel * dtype.itemsize
            if stays_here or device != "cpu":
                found["grad" if stays_here else "to_host"] += flat.grad_nbytes
            if num_ranks > 1:
                reduce = config.rule.reduce_dtype_of(dtype)
                found["sent"] += flat.layout.padded_numel * reduce.itemsize
                received, summing = _sums(flat.shard_numel, reduce, (shards, num_ranks // shards), device)
                found["received"] += received
                found["summing"] += summing
        names = ("gathered", "whole", "sent", "received", "summing", "grad", "to_host")
        part = config.reshard_after_forward
        is_fewer = not isinstance(part, bool) and part != world_size
        kept = found["gathered"] // part if is_fewer else 0
        sizes = {name: found[name] for name in names}
        return UnitBytes(unit.fqn, **sizes, stays=not part, part=kept)


class Walk:
    """The memory at the worst moment of a backward over ``units``, outermost first: ``terms``, and where it is, ``at``.

    ``late_nbytes`` are whole gradients of the outermost unit that arrive before those of the others.
    """

    def __init__(self, units: Sequence[UnitBytes], cap_mb: float, gathers_ahead: bool, late_nbytes: int) -> None:
        self.terms: dict[str, int] = {}
        self.at = ""
        self.buckets: list[BucketRow] = []
        self._root, *self._inner = units
        self._parts = sum(unit.part for unit in self._inner)
        self._ahead = gathers_ahead
        self._is_queued = not any(unit.received for unit in units)  # on an accelerator, the sum with the transfer
        landed: list[UnitBytes] = []
        flying: deque[list[UnitBytes]] = deque()
        for bucket in _packed([*reversed(self._inner), self._root], cap_mb):
            size = sum(unit.sent for unit in bucket)
            opened = 0
            for unit in bucket:
                whole = unit.whole + (0 if unit is self._root else late_nbytes)
                self._see(unit, True, whole, opened + _nbytes(flying), landed)
                while not opened and flying and is_crowded(size, [_nbytes([each]) for each in flying], cap_mb):
                    self._land(unit, whole, flying, landed)
                landed += [] if unit.sent else [unit]  # of one rank: copied at once
                opened = size
                self._see(unit, False, whole, opened + _nbytes(flying), landed)
            if size:
                flying.append([unit for unit in bucket if unit.sent])
                landed += flying[-1] if self._is_queued else []
                self.buckets.append(BucketRow(tuple(unit.fqn for unit in flying[-1]), size))
        while flying:
            self._land(self._root, 0, flying, landed)

    def _land(self, unit: UnitBytes, whole: int, flying: deque[list[UnitBytes]], landed: list[UnitBytes]) -> None:
        """Sum the oldest bucket, whose gradients then are the shards'."""
        self._see(unit, False, whole, _nbytes(flying) + sum(each.summing for each in flying[0]), landed)
        done = flying.popleft()
        landed += [] if self._is_queued else done

    def _see(self, unit: UnitBytes, computes: bool, whole: int, buckets: int, landed: list[UnitBytes]) -> None:
        """Note the terms of a moment at ``unit`` if they are more than before; unless it ``computes``, it is freed."""
        is_over = unit is self._root and not computes
        gathered = 0 if is_over else self._root.gathered
        if unit is not self._root:
            index = self._inner.index(unit)
            gathered += unit.gathered if computes else 0
            for place, other in enumerate(self._inner[:index]):
                is_next = self._ahead and place == index - 1
                if other.stays or is_next or unit.fqn.startswith(f"{other.fqn}."):
                    gathered += other.gathered
        terms = {GATHERED: gathered, WHOLE_GRADS: whole, BUCKETS: buckets, PARTS: 0 if is_over else self._parts}
        terms[GRADS] = sum(other.grad for other in landed)
        terms[ON_WAY] = min(MAX_KEPT_NBYTES, sum(other.to_host for other in landed))
        if sum(terms.values()) > sum(self.terms.values()):
            self.terms, self.at = terms, f"in the backward of {unit.fqn or 'the root'}"


def lasting_terms(
    units: Iterable[PlannedUnit], world_size: int, make: Callable[[list[nn.Parameter]], Optimizer]
) -> list[MemoryTerm]:
    """Memory that is live throughout a step."""
    nbytes: Counter[tuple[str, bool]] = Counter()
    for unit in units:
        config, on_cpu = unit.config, unit.config.master_on_cpu
        for flat in unit.flat_sizes(world_size):
            nbytes["shards", on_cpu] += flat.shard_nbytes
            if on_cpu and not config.cpu_offload:
                nbytes["shards that compute", False] += flat.shard_numel * flat.compute_dtype.itemsize
            if flat.requires_grad:
                nbytes["optimizer state", on_cpu] += _state_nbytes(flat.shard_numel, flat.param_dtype, make)
                if on_cpu and config.rule.grad_home is GradHome.HOST:
                    nbytes[GRADS, True] += flat.grad_nbytes
    return [MemoryTerm(name, total, on_host) for (name, on_host), total in nbytes.items()]


def _state_nbytes(numel: int, dtype: torch.dtype, make: Callable[[list[nn.Parameter]], Optimizer]) -> int:
    """Bytes of an optimizer's state for one shard, created by a step on the meta device."""
    shard = nn.Parameter(torch.empty(numel, dtype=dtype, device="meta"))
    shard.grad = torch.empty_like(shard)
    optimizer = make([shard])
    optimizer.step()
    return sum(value.nbytes for value in optimizer.state[shard].values() if isinstance(value, Tensor))


def _sums(numel: int, dtype: torch.dtype, ranks: tuple[int, int], device: str) -> tuple[int, int]:
    """Bytes that a rank receives for a sum over shards and then replicas, and of what is live besides in the sum.

    Backends of accelerators sum by themselves. With gloo a rank sums the rows that it receives, in fp32 or wider.
    """
    first, second = (ranks[0], ranks[1]) if ranks[0] > 1 else (ranks[1], 1)
    row, wide = numel * dtype.itemsize, torch.promote_types(dtype, torch.float32)
    if device != "cpu":
        return 0, 0
    received, total = row * _num_rows(first), numel * wide.itemsize
    casts = 2 * total if wide != dtype else 0 if first in EXCHANGE_RANKS else total
    replicas = total * (1 + _num_rows(second) + (second not in EXCHANGE_RANKS)) if second > 1 else 0
    return received, max(casts, replicas - received)


def _num_rows(num_ranks: int) -> int:
    """Number of rows received for a sum; a direct exchange does not copy the rank's own row."""
    return num_ranks - 1 if num_ranks in EXCHANGE_RANKS else num_ranks


def _nbytes(buckets: Iterable[list[UnitBytes]]) -> int:
    return sum(unit.sent + unit.received for bucket in buckets for unit in bucket)


def _packed(order: Sequence[UnitBytes], cap_mb: float) -> list[list[UnitBytes]]:
    """Units that share a bucket: consecutive ones, up to the cap."""
    packed: list[list[UnitBytes]] = []
    for unit in order:
        if not packed or sum(other.sent for other in packed[-1]) + unit.sent > cap_mb * MB:
            packed.append([])
        packed[-1].append(unit)
    return packed
