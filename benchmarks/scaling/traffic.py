"""What a rank sends and receives in one step, read from a plan of `fairshard.nn.wrap.describe`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fairshard.nn import ShardingStrategy, wrap

GATHER, REDUCE, REPLICAS = "all-gather", "reduce-scatter", "all-reduce"
Plan = wrap.WrapPlan
AGREEMENT_NBYTES = 2048
"""Bytes of a rank's message in the exchange at the start of a backward (docs/notes/agreement.md)."""


@dataclass(frozen=True)
class Ranks:
    """``num_shards`` ranks share a model; ``num_replicas`` groups of them average gradients (1: flat sharding)."""

    num_shards: int
    num_replicas: int = 1

    @property
    def world_size(self) -> int:
        return self.num_shards * self.num_replicas

    @property
    def is_hybrid(self) -> bool:
        return self.num_replicas > 1


@dataclass(frozen=True)
class Message:
    """One collective of ``num_ranks`` ranks over a tensor of ``nbytes`` in all: the whole unit, or the whole bucket."""

    kind: str
    units: tuple[str, ...]
    nbytes: int
    num_ranks: int

    @property
    def received_nbytes(self) -> int:
        """Bytes that a rank receives, and sends: all but its own part; for a ring's all-reduce twice that."""
        others = self.nbytes - self.nbytes // self.num_ranks
        return 2 * others if self.kind == REPLICAS else others


@dataclass(frozen=True)
class Mark:
    """A place in the backward: ``word`` is ``at`` or ``done``; ``gathers`` and ``sends`` follow it, in order."""

    word: str
    unit: str
    gathers: tuple[Message, ...]
    sends: tuple[Message, ...]


@dataclass(frozen=True)
class Traffic:
    """The messages of a step: ``forward``, one gather for each unit in the order of calls, then the ``backward``."""

    forward: tuple[Message, ...]
    backward: tuple[Mark, ...]

    def __iter__(self) -> Iterator[Message]:
        yield from self.forward
        for mark in self.backward:
            yield from (*mark.gathers, *mark.sends)

    def count(self) -> Counter[str]:
        """Number of messages by kind."""
        return Counter(message.kind for message in self)

    def nbytes(self) -> Counter[str]:
        """Bytes received by kind."""
        total: Counter[str] = Counter()
        for message in self:
            total[message.kind] += message.received_nbytes
        return total


def plan_of(model: nn.Module, block: type[nn.Module], ranks: Ranks, bucket_cap_mb: float = 25) -> Plan:
    """The plan of ``model`` with a unit per ``block`` on an accelerator: bf16 with fp32 masters, AdamW."""
    strategy = ShardingStrategy.HYBRID_SHARD if ranks.is_hybrid else ShardingStrategy.FULL_SHARD
    return wrap.describe(
        model,
        wrap.ModuleWrapPolicy({block}),
        ranks.num_shards,
        num_replicas=ranks.num_replicas if ranks.is_hybrid else None,
        device="cuda",
        bucket_cap_mb=bucket_cap_mb,
        mixed_precision=True,
        compute_dtype=torch.bfloat16,
        sharding_strategy=strategy,
    )


def traffic_of(plan: Plan, ranks: Ranks) -> Traffic:
    """The messages of a step that follows ``plan``, whose units are called once, in the order of registration."""
    full = {unit.fqn or "(root)": unit.full_nbytes for unit in plan.units}
    gather = {name: Message(GATHER, (name,), nbytes, ranks.num_shards) for name, nbytes in full.items()}
    bucket_of = {fqn or "(root)": bucket for bucket in plan.buckets for fqn in bucket.units}
    missing = {id(bucket): {fqn or "(root)" for fqn in bucket.units} for bucket in plan.buckets}
    backward = []
    for line in plan.schedule:
        mark, *actions = line.split("  > ")
        gathers: list[Message] = []
        sends: list[Message] = []
        for action in actions:
            verb, _, name = action.partition(" ")
            if verb == "gather":
                gathers.append(gather[name])
            elif verb == "send" and name in bucket_of:
                bucket = bucket_of[name]
                missing[id(bucket)].discard(name)
                if not missing[id(bucket)]:
                    sends += _reduction(bucket.units, bucket.nbytes, ranks)
        word, _, name = mark.partition(" ")
        backward.append(Mark(word, name, tuple(gathers), tuple(sends)))
    return Traffic(tuple(gather.values()), tuple(backward))


def _reduction(units: Sequence[str], nbytes: int, ranks: Ranks) -> list[Message]:
    names = tuple(units)
    messages = [Message(REDUCE, names, nbytes, ranks.num_shards)]
    if ranks.is_hybrid:
        messages.append(Message(REPLICAS, names, nbytes // ranks.num_shards, ranks.num_replicas))
    return messages
