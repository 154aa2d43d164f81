"""Whether shards are what they were: torch counts the writes to a tensor."""

from __future__ import annotations

from collections.abc import Sequence

from fairshard.errors import ShardChangedError
from fairshard.params.flat_param import FlatParam


def versions_of(flat_params: Sequence[FlatParam]) -> list[int]:
    """How often each parameter that is a view of a shard, or a shard, has been written to."""
    return [param._version for flat_param in flat_params for param in flat_param.shows.versioned]


def check_unchanged(flat_params: Sequence[FlatParam], before: list[int]) -> None:
    """Raise unless the shards are what they were when `versions_of` gave ``before``, in the forward.

    Raises:
        ShardChangedError: naming the first that is not.
    """
    versions = versions_of(flat_params)
    if versions == before:
        return
    owners = [flat_param for flat_param in flat_params for _ in flat_param.versioned]
    changed = owners[[new != old for new, old in zip(versions, before, strict=True)].index(True)]
    raise ShardChangedError(
        "The weights of a unit must not change between its forward and its backward, but those of "
        f"`{changed.name}` (rank {changed.rank}) did. Run the backward before the optimizer's step, load_state_dict "
        "or any other change, or run the forward again after it."
    )
