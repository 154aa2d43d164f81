"""Follows what the user changes in the flat params of a unit between its gather and its call."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from fairshard.errors import FairshardError, ShardChangedError
from fairshard.params.flat_param import FlatParam
from fairshard.utils.failures import reported

_TRAINS = attrgetter("requires_grad")  # `map` with it takes less host time than a loop
_EVERY = 13  # prime, so that writes in every second, fourth, tenth ... pass meet a check


class Following:
    """Makes `flat_params` adopt changes of ``requires_grad``, and finds writes that torch does not count."""

    def __init__(self, flat_params: Sequence[FlatParam]) -> None:
        self._flat_params = flat_params
        self._leaves = [slot.leaf for flat_param in flat_params for slot in flat_param.slots]
        self._registered = [param for flat_param in flat_params for param in flat_param.shows.registered]
        self._leaf_flags: list[bool] = []  # when last followed
        self._flags: list[bool] = []
        self._refused: FairshardError | None = None
        self._num_reused = 0
        self._turn = flat_params[0].tag_id if flat_params else 0

    def follow(self) -> None:
        """See `Leaves.follow_requires_grad`; does nothing if no flag has changed since the last time."""
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused
        if self._leaf_flags != [*map(_TRAINS, self._leaves)] or self._flags != [*map(_TRAINS, self._registered)]:
            for flat_param in self._flat_params:
                flat_param.follow_requires_grad()
            self._leaf_flags = [*map(_TRAINS, self._leaves)]
            self._flags = [*map(_TRAINS, self._registered)]

    def settle(self) -> None:
        """`follow` flags of leaves, before users see the registered parameters instead.

        The next `follow` raises what is refused: this may run after an exception, which must not be replaced.
        """
        if self._leaf_flags != [*map(_TRAINS, self._leaves)]:
            try:
                self.follow()
            except FairshardError as error:
                self._refused = error

    def check_values(self) -> None:
        """A call uses what was gathered before: raise if shards have other values since, of which torch knows nothing.

        To save host time it looks in the first two such calls, and then in each thirteenth, not in all units at once.

        Raises:
            ShardChangedError: names the first such shard.
        """
        self._num_reused += 1
        if self._num_reused > 2 and (self._num_reused + self._turn) % _EVERY:
            return
        for flat_param in self._flat_params:
            is_copy = flat_param.is_gathered and not flat_param.computes_on_shard
            if is_copy and flat_param.gathered.differs(flat_param.shows.shard.detach(), flat_param.line):
                raise reported(
                    ShardChangedError(
                        "Weights must not be written to without torch counting it while they are gathered for the next "
                        f"call, but those of `{flat_param.name}` (rank {flat_param.rank}) were: the call would compute "
                        "with the values from before. torch counts neither writes through `.data` nor those of "
                        "`torch._foreach_*` functions to DTensors. Write to the parameters themselves, one by one "
                        "(`with torch.no_grad(): param.mul_(m)`)."
                    )
                )
