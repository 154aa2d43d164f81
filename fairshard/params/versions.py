"""Writes to shards, by torch's version counters, and assignments to their ``.data``, by addresses."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from torch import Tensor

from fairshard.errors import ShardChangedError
from fairshard.params.flat_param import FlatParam

_VERSION = attrgetter("_version")  # `map` with it takes less host time than a loop


class ShardVersions:
    """The version counters and addresses of the shards of ``flat_params``, which keep their tensors from now on."""

    __slots__ = ("_flat_params", "_places", "_versioned")

    def __init__(self, flat_params: Sequence[FlatParam] = ()) -> None:
        self._flat_params = flat_params
        self._versioned = [tensor for flat_param in flat_params for tensor in flat_param.shows.versioned]
        self._places = [tensor for flat_param in flat_params for tensor in flat_param.shows.addressed]

    def read(self) -> list[int]:
        """The version counters of shards and of their views, then the addresses of what users may assign to."""
        return [*map(_VERSION, self._versioned), *map(Tensor.data_ptr, self._places)]

    def check_unchanged(self, before: list[int]) -> None:
        """Raise if a shard was written to since the forward, when `read` returned ``before``.

        Raises:
            ShardChangedError: names the first such shard.
        """
        versions = self.read()
        if versions == before:
            return
        owners = [flat_param for flat_param in self._flat_params for _ in flat_param.shows.versioned]
        owners += [flat_param for flat_param in self._flat_params for _ in flat_param.shows.addressed]
        changed = owners[[new != old for new, old in zip(versions, before, strict=True)].index(True)]
        raise ShardChangedError(
            "The weights of a unit must not change between its forward and its backward, but those of "
            f"`{changed.name}` (rank {changed.line.rank}) did. Run the backward before the optimizer's step, "
            "load_state_dict or any other change, or run the forward again after it."
        )
