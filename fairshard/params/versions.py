"""Writes to shards, by torch's version counters, and assignments to their ``.data``, by addresses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from torch import Tensor
from torch.autograd.graph import increment_version

from fairshard.errors import ShardChangedError
from fairshard.params.flat_param import FlatParam

_VERSION = attrgetter("_version")  # `map` with it takes less host time than a loop


def counters_of(flat_params: Sequence[FlatParam]) -> list[int]:
    """The version counters of shards and of the parameters that are views of them."""
    return [tensor._version for flat_param in flat_params for tensor in flat_param.shows.versioned]


class ShardVersions:
    """The version counters and addresses of the shards of ``flat_params``, which keep their tensors from now on."""

    __slots__ = ("_flat_params", "_places", "_versioned")

    def __init__(self, flat_params: Sequence[FlatParam] = ()) -> None:
        self._flat_params = flat_params
        self._versioned = [tensor for flat_param in flat_params for tensor in flat_param.shows.versioned]
        self._places = [tensor for flat_param in flat_params for tensor in flat_param.shows.addressed]

    def read(self) -> list[int]:
        """`counters_of`, then the addresses of what users may assign to."""
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


def count_writes(shards: Iterable[tuple[Tensor, Tensor]], has_grads: bool) -> None:
    """Count the writes of a step that begins: torch counts neither fused ones, nor foreach ones to DTensors.

    ``shards``: pairs of a parameter and the shard that it shows. ``has_grads``: parameters without a gradient are not
    stepped; otherwise they may get one first.
    """
    written = {id(shard): shard for param, shard in shards if not has_grads or param.grad is not None}
    for shard in written.values():
        increment_version(shard)
