"""Follows the user's changes of ``requires_grad`` in the flat params of a unit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter

from fairshard.params.flat_param import FlatParam

# `map` with them takes less host time than a loop.
_LEAF_TRAINS, _TRAINS = attrgetter("leaf.requires_grad"), attrgetter("requires_grad")
_REGISTERED = attrgetter("shows.registered")


class Following:
    """Makes `flat_params` adopt changes of ``requires_grad``, if any flag has changed since the last time."""

    def __init__(self, flat_params: Sequence[FlatParam]) -> None:
        self._flat_params = flat_params
        self._slots = [slot for flat_param in flat_params for slot in flat_param.slots]
        self._flags: list[bool] = []

    def follow(self) -> None:
        """See `Leaves.follow_requires_grad`."""
        if self._flags != self._read():
            for flat_param in self._flat_params:
                flat_param.follow_requires_grad()
            self._flags = self._read()

    def _read(self) -> list[bool]:
        registered = chain.from_iterable(map(_REGISTERED, self._flat_params))
        return [*map(_LEAF_TRAINS, self._slots), *map(_TRAINS, registered)]
