"""Predicted memory of units: a simulation, in bytes, of one training step of the engine.

The simulation follows `Root`, `Unit` and the bucketer: the same code records the order, looks ahead, packs buckets and
makes them wait for each other. It assumes what only a run can show: every module is called once in each place, in the
order of registration; gradients arrive in reverse order; transfers take as long as possible.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from fairshard.engine.record import ForwardOrder, Pass
from fairshard.engine.schedule import CallPlace, Kind, Schedule, UnitRule, build
from fairshard.extras.planning.bucket_bytes import BucketBytes, SourceBytes
from fairshard.extras.planning.wrap_plan import BucketRow, MemoryTerm, WrapPlan
from fairshard.params.rule import GradHome
from fairshard.params.shard_grad import MAX_KEPT_NBYTES
from fairshard.planning.units import PlannedUnit
from fairshard.settings.fsdp1 import BackwardPrefetch
from fairshard.utils.buckets import is_crowded, pack
from fairshard.utils.device import check_device_type

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "adamw": AdamW,
    "adam": Adam,
    "sgd": partial(SGD, lr=0.1),
    "sgd-momentum": partial(SGD, lr=0.1, momentum=0.9),
}
"""Optimizers that a plan accepts by name."""

GATHERED, PARTS, WHOLE_GRADS = "gathered units", "parts kept for the backward", "whole gradients"
BUCKETS, GRADS = "buckets", "gradients"
STAGED, ON_WAY = "shards copied from the host, before the cast", "gradients on their way to the host"


def plan_memory(
    units: Sequence[PlannedUnit],
    world_size: int,
    num_replicas: int | None,
    optimizer: str | Callable[[list[nn.Parameter]], Optimizer],
    device: str,
) -> WrapPlan:
    """The plan of ``units``, outermost first; see `describe` for the arguments.

    Raises:
        ValueError: an argument is invalid, or contradicts a unit's sharding strategy.
    """
    check_device_type("device", device)
    if world_size < 1:
        raise ValueError(f"`world_size` must be at least 1, but is {world_size}.")
    if num_replicas is not None and num_replicas < 1:
        raise ValueError(f"`num_replicas` must be at least 1, but is {num_replicas}.")
    for unit in units:
        _check_strategy(unit, world_size, num_replicas)
    make = OPTIMIZERS.get(optimizer) if isinstance(optimizer, str) else optimizer
    if make is None:
        raise ValueError(
            f"`optimizer` must be one of {', '.join(OPTIMIZERS)} or a function from parameters to an optimizer, but is "
            f"{optimizer!r}."
        )
    step = _Step(units, world_size, num_replicas or 1, device)
    step.run()
    step.run()  # gathers ahead in the order that the first run recorded
    sources = [source for every in step.sources.values() for source in every]
    return WrapPlan(
        world_size,
        device,
        tuple(unit.row(world_size) for unit in units),
        tuple(BucketRow(tuple(dict.fromkeys(s.unit.fqn for s in b.sources)), b.nbytes) for b in step.buckets),
        tuple(term for term in [*_lasting_terms(sources, make), *step.peak_terms()] if term.nbytes),
        step.peak_at,
        tuple(schedule_lines(step.schedule, lambda number: units[number].fqn or "(root)")),
        tuple(unit.padding for unit in units if unit.padding is not None),
    )


def schedule_lines(schedule: Schedule, name: Callable[[int], str]) -> list[str]:
    """``schedule`` in words: one line for each mark, with the actions that follow it."""
    lines: list[str] = []
    for step in schedule.steps:
        word = step.kind.name.lower()
        if step.kind <= Kind.RECOMPUTE or not lines:
            lines.append(f"{word} {name(step.unit)}")
        else:
            lines[-1] += f"  > {word} {name(step.unit)}"
    return lines


def _check_strategy(unit: PlannedUnit, world_size: int, num_replicas: int | None) -> None:
    strategy, part = unit.config.sharding_strategy, unit.config.reshard_after_forward
    where = f"unit `{unit.fqn or 'root'}`"
    if strategy.is_hybrid != (num_replicas is not None):
        raise ValueError(
            "`num_replicas`, of groups of `world_size` ranks, must be given with hybrid strategies and no others, but "
            f"is {num_replicas} and {where} has {strategy.name}."
        )
    if not isinstance(part, bool) and world_size % part:
        raise ValueError(
            f"`reshard_after_forward` must divide the number of ranks, {world_size}, but is {part} for {where}."
        )


def _lasting_terms(sources: Iterable[SourceBytes], make: Callable[[list[nn.Parameter]], Optimizer]) -> list[MemoryTerm]:
    """Memory that is live throughout a step."""
    nbytes: Counter[tuple[str, bool]] = Counter()
    for source in sources:
        on_cpu = source.config.master_on_cpu
        nbytes["shards", on_cpu] += source.flat.shard_nbytes
        if on_cpu and not source.config.cpu_offload:
            nbytes["shards that compute", False] += source.shard_numel * source.flat.compute_dtype.itemsize
        if source.flat.requires_grad:
            nbytes["optimizer state", on_cpu] += _state_nbytes(source, make)
            if on_cpu and source.config.rule.grad_home is GradHome.HOST:
                nbytes[GRADS, True] += source.flat.grad_nbytes
    return [MemoryTerm(name, total, on_host) for (name, on_host), total in nbytes.items()]


def _state_nbytes(source: SourceBytes, make: Callable[[list[nn.Parameter]], Optimizer]) -> int:
    """Bytes of an optimizer's state for one shard, created by a step on the meta device."""
    shard = nn.Parameter(torch.empty(source.shard_numel, dtype=source.flat.param_dtype, device="meta"))
    shard.grad = torch.empty_like(shard)
    optimizer = make([shard])
    optimizer.step()
    return sum(value.nbytes for value in optimizer.state[shard].values() if isinstance(value, Tensor))


class _Step:
    """Simulation of the live bytes of a training step that drops gradients at its end."""

    def __init__(self, units: Sequence[PlannedUnit], world_size: int, num_replicas: int, device: str) -> None:
        self._root = units[0]
        self._cap = units[0].config.bucket_cap_mb
        self._world_size = world_size
        self._num_ranks = world_size * num_replicas
        self._device = device
        self.sources = {
            unit: [
                SourceBytes(unit, index, flat, device, self._num_ranks)
                for index, flat in enumerate(unit.flat_sizes(world_size))
            ]
            for unit in units
        }
        self._source_of = {param: s for every in self.sources.values() for s in every for param in s.params}
        self._units = list(units)
        self._order: ForwardOrder[PlannedUnit] = ForwardOrder()
        self._pass: Pass[PlannedUnit] = Pass()
        self._calls: list[int] = []  # calls that the backward has not reached, as ``~number``
        self.schedule = Schedule()
        self._cursor = 0
        self._gathered: dict[PlannedUnit, int] = {}
        self._ahead: set[PlannedUnit] = set()
        self._has_grad: set[nn.Parameter] = set()
        self._flying: deque[BucketBytes] = deque()
        self.buckets: list[BucketBytes] = []
        self._bucket_of: dict[SourceBytes, BucketBytes] = {}
        terms = GATHERED, STAGED, PARTS, WHOLE_GRADS, BUCKETS, GRADS, ON_WAY
        self._live = Counter(dict.fromkeys(terms, 0))
        self._on_way: deque[int] = deque()
        self._peak = self._live.copy()
        self._at = self.peak_at = "between steps"

    def peak_terms(self) -> list[MemoryTerm]:
        """Memory live at the peak, except for the lasting terms."""
        return [MemoryTerm(name, nbytes) for name, nbytes in self._peak.items()]

    def run(self) -> None:
        """Simulate a forward and a backward, then drop the gradients."""
        self._order.begin()
        self._pass = Pass()
        self._forward(self._root)
        while self._ahead:
            self._free(self._ahead.pop())
        self._plan_backward()
        self._backward(self._root)
        self._walk(len(self.schedule.steps))
        self._live[PARTS], self._at = 0, "at the end of the backward"
        for bucket in self.buckets:
            if bucket.is_open and bucket not in self._flying:
                self._launch(bucket)
        while self._flying:
            self._land()
        for unit in list(self._gathered):
            self._free(unit)
        self._has_grad.clear()
        self._live[GRADS] = self._live[ON_WAY] = 0
        self._on_way.clear()

    def _plan_backward(self) -> None:
        """Build the schedule that the engine would follow if all ranks reach every unit."""
        number = {unit: index for index, unit in enumerate(self._units)}
        one = self._pass
        places = [CallPlace(number[call.unit], 0) for call in one.calls]
        mode = self._root.config.backward_prefetch
        rule = UnitRule(waits=mode is BackwardPrefetch.BACKWARD_POST, ahead=() if mode is None else None)
        resident = [unit in self._gathered for unit in self._units]
        owed = [any(s.flat.requires_grad and s.bucket_numel for s in self.sources[unit]) for unit in self._units]
        self.schedule = build(one.events, places, [1] * len(places), resident, owed, [rule] * len(self._units))
        self._cursor = 0
        self._calls = [event for event in one.events if event < 0]
        self._plan_buckets(self._units[index] for index in self.schedule.sends)

    def _walk(self, stop: int) -> None:
        """Follow the schedule through the mark at ``stop``, up to the next mark."""
        steps = self.schedule.steps
        while self._cursor < len(steps):
            kind, number, _ = steps[self._cursor]
            unit = self._units[number]
            if kind <= Kind.RECOMPUTE and self._cursor > stop:
                return
            self._cursor += 1
            if kind is Kind.GATHER:
                self._gather(unit)
            elif kind is Kind.FREE:
                self._free(unit)
            elif kind is Kind.SEND:
                for source in self.sources[unit]:
                    if source in self._bucket_of:
                        self._reduce(source)

    def _plan_buckets(self, order: Iterable[PlannedUnit]) -> None:
        sources = [s for unit in order for s in self.sources[unit] if s.flat.requires_grad and s.bucket_numel]
        packed = [[source] for source in sources] if self._num_ranks == 1 else pack(sources, self._cap)
        self.buckets = [BucketBytes(members, self._device) for members in packed]
        self._bucket_of = {source: bucket for bucket in self.buckets for source in bucket.sources}

    def _forward(self, unit: PlannedUnit) -> None:
        self._at = f"in the forward of {unit.fqn or 'the root'}"
        self._ahead.discard(unit)
        self._pass.enter(unit)
        ahead = self._order.enter(unit)
        self._gather(unit)
        if ahead is not None and ahead not in self._gathered and self._root.config.forward_prefetch is not False:
            self._ahead.add(ahead)
            self._gather(ahead)
        for step in unit.steps:
            if isinstance(step, PlannedUnit):
                self._forward(step)
        self._pass.leave()
        part = unit.config.reshard_after_forward
        if unit is not self._root and part:
            if not isinstance(part, bool) and part != self._world_size:
                self._add(PARTS, self._gathered.get(unit, 0) // part)
            self._free(unit)

    def _backward(self, unit: PlannedUnit) -> None:
        self._at = f"in the backward of {unit.fqn or 'the root'}"
        self._walk(self.schedule.at[~self._calls.pop()])  # proves that the calls before are done
        for step in reversed(unit.steps):
            if isinstance(step, PlannedUnit):
                self._backward(step)
                self._at = f"in the backward of {unit.fqn or 'the root'}"
            elif step.requires_grad and step not in self._has_grad:
                self._has_grad.add(step)
                self._add(WHOLE_GRADS, step.numel() * self._source_of[step].flat.compute_dtype.itemsize)

    def _gather(self, unit: PlannedUnit) -> None:
        if unit not in self._gathered:
            self._gathered[unit] = sum(source.gathered_nbytes for source in self.sources[unit])
            for source in self.sources[unit]:
                self._add(GATHERED, source.gathered_nbytes)
                if self._device != "cpu" and source.config.master_on_cpu and source.is_cast:
                    self._add(STAGED, source.flat.shard_nbytes)
                    self._live[STAGED] -= source.flat.shard_nbytes

    def _free(self, unit: PlannedUnit) -> None:
        self._live[GATHERED] -= self._gathered.pop(unit, 0)

    def _reduce(self, source: SourceBytes) -> None:
        bucket = self._bucket_of[source]
        flying = self._flying
        while flying and not bucket.is_open and is_crowded(bucket.nbytes, [each.nbytes for each in flying], self._cap):
            self._land()
        if not bucket.is_open:
            bucket.is_open = True
            self._add(BUCKETS, bucket.nbytes)
        bucket.missing.discard(source)
        numel = sum(param.numel() for param in source.params)
        self._live[WHOLE_GRADS] -= numel * source.flat.compute_dtype.itemsize
        if not bucket.missing:
            self._launch(bucket)

    def _launch(self, bucket: BucketBytes) -> None:
        if self._num_ranks == 1:  # the gradient is the bucket's memory, unless it is cast
            self._deliver(bucket)
            return
        self._add(BUCKETS, bucket.received_nbytes)
        if self._device != "cpu":  # the work after the transfer is queued now
            self._add(BUCKETS, bucket.sum_nbytes)
            self._deliver(bucket)
        self._flying.append(bucket)

    def _land(self) -> None:
        bucket = self._flying.popleft()
        if self._device == "cpu":
            self._add(BUCKETS, bucket.sum_nbytes - bucket.in_place_nbytes + bucket.cast_nbytes)
            self._live[BUCKETS] -= bucket.received_nbytes - bucket.in_place_nbytes + bucket.cast_nbytes
            self._add(BUCKETS, bucket.replica_nbytes)
            self._live[BUCKETS] -= bucket.replica_nbytes
            self._deliver(bucket)
        self._live[BUCKETS] -= bucket.nbytes
        self._close(bucket)

    def _deliver(self, bucket: BucketBytes) -> None:
        """Turn the sum, counted with the buckets, into gradients of shards, or copy it to their memory."""
        for source in bucket.sources:
            if source.grad_stays and source.flat.param_dtype != bucket.sum_dtype:
                self._add(GRADS, source.flat.grad_nbytes)
            elif source.grad_stays:
                self._live[GRADS] += source.flat.grad_nbytes
            elif self._device != "cpu":
                self._send_to_host(source.flat.grad_nbytes, is_cast=source.flat.param_dtype != bucket.sum_dtype)
        self._live[BUCKETS] -= bucket.sum_nbytes
        if self._num_ranks == 1:
            self._close(bucket)

    def _send_to_host(self, nbytes: int, is_cast: bool) -> None:
        """Keep a gradient until its copy has finished; see `fairshard.params.shard_grad.GradTransfers.copy`."""
        while sum(self._on_way) > MAX_KEPT_NBYTES:
            self._live[ON_WAY] -= self._on_way.popleft()
        self._on_way.append(nbytes)
        if is_cast:
            self._add(ON_WAY, nbytes)
        else:  # the sum's own memory
            self._live[ON_WAY] += nbytes

    @staticmethod
    def _close(bucket: BucketBytes) -> None:
        bucket.is_open = False
        bucket.missing = set(bucket.sources)

    def _add(self, term: str, nbytes: int) -> None:
        self._live[term] += nbytes
        if self._live.total() > self._peak.total():
            self._peak = self._live.copy()
            self.peak_at = self._at
