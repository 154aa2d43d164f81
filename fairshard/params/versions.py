"""Writes to shards, by torch's version counters, and assignments to their ``.data``, by addresses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter

from torch import Tensor
from torch.autograd.graph import increment_version

from fairshard.errors import ShardChangedError
from fairshard.params.flat_param import FlatParam

# `map` with them takes less host time than a loop.
_VERSION, _VERSIONED, _SHARD = attrgetter("_version"), attrgetter("shows.versioned"), attrgetter("shows.shard")


def counters_of(flat_params: Sequence[FlatParam]) -> list[int]:
    """The version counters of shards and of the parameters that are views of them."""
    return list(map(_VERSION, chain.from_iterable(map(_VERSIONED, flat_params))))


def versions_of(flat_params: Sequence[FlatParam]) -> list[int]:
    """`counters_of`, then the addresses of shards, which do not move between a forward and its backward."""
    counters = map(_VERSION, chain.from_iterable(map(_VERSIONED, flat_params)))
    return [*counters, *map(Tensor.data_ptr, map(_SHARD, flat_params))]


def check_unchanged(flat_params: Sequence[FlatParam], before: list[int]) -> None:
    """Raise if a shard was written to since the forward, when `versions_of` returned ``before``.

    Raises:
        ShardChangedError: names the first such shard.
    """
    versions = versions_of(flat_params)
    if versions == before:
        return
    owners = [*(flat_param for flat_param in flat_params for _ in flat_param.versioned), *flat_params]
    changed = owners[[new != old for new, old in zip(versions, before, strict=True)].index(True)]
    raise ShardChangedError(
        "The weights of a unit must not change between its forward and its backward, but those of "
        f"`{changed.name}` (rank {changed.rank}) did. Run the backward before the optimizer's step, load_state_dict "
        "or any other change, or run the forward again after it."
    )


def count_writes(shards: Iterable[tuple[Tensor, Tensor]], has_grads: bool) -> None:
    """Count the writes of a step that begins: torch counts neither fused ones, nor foreach ones to DTensors.

    ``shards``: pairs of a parameter and the shard that it shows. ``has_grads``: parameters without a gradient are not
    stepped; otherwise they may get one first.
    """
    written = {id(shard): shard for param, shard in shards if not has_grads or param.grad is not None}
    for shard in written.values():
        increment_version(shard)
