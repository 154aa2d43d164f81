"""The check of the values from which ranks have cut their units."""

from __future__ import annotations

import warnings

from fairshard.checks.agreement import digest, ranks_of
from fairshard.engine.observer import Observer
from fairshard.engine.root import Root
from fairshard.engine.training_state import TrainingState
from fairshard.engine.unit import Unit
from fairshard.utils.agree import agree
from fairshard.utils.groups import communicator
from fairshard.utils.names import join
from fairshard.utils.user_line import level_of_user


class ValuesCheck(Observer):
    """Compares once, before the first gather, the values from which ranks have cut their units."""

    def __init__(self, units: list[Unit]) -> None:
        self._units: list[Unit] | None = units

    def pass_begins(self, unit: Unit, is_trained: bool) -> None:
        """Compare, unless ranks may run different passes, or units are shown. **Collective** once."""
        shown = any(each.state is TrainingState.SUMMON_FULL_PARAMS for each in self._units or ())
        if self._units is not None and unit.root.is_common and not shown:
            self.compare()

    def compare(self) -> None:
        """Warn if ranks have cut units from different values; ignores units changed since. **Collective** once."""
        units, self._units = self._units, None
        if units is not None:
            _compare_values(units)


def compare_values(root: Root) -> None:
    """See `ValuesCheck.compare`."""
    next(observer for observer in root.observers if isinstance(observer, ValuesCheck)).compare()


def _compare_values(units: list[Unit]) -> None:
    groups = {unit: [communicator(group) for group in unit.groups.spanning()] for unit in units}
    for comm in dict.fromkeys(comm for comms in groups.values() for comm in comms):
        own: dict[str, int | None] = {}
        for unit in units:
            if comm in groups[unit]:
                sums, is_cut = unit.origin.sums, not unit.origin.has_changed(unit.flat_params)
                own.update({join(unit.fqn, fqn): int(value) if is_cut else None for fqn, value in sums.items()})
        if not agree(comm, digest([f"{fqn} {value}" for fqn, value in own.items()]), units[0].device):
            _warn_of_difference(ranks_of(comm), comm.gather_objects(own))
    for unit in units:
        unit.origin.sums = {}


def _warn_of_difference(ranks: list[int], every: list[dict[str, int | None]]) -> None:
    for rank, theirs in zip(ranks, every, strict=True):
        for fqn, value in every[0].items():
            if None not in (value, theirs.get(fqn)) and value != theirs[fqn]:
                warnings.warn(
                    f"All ranks should begin with the same weights, but `{fqn}` differed between ranks {ranks[0]} and "
                    f"{rank} when it was sharded: the model now has parts of both. Seed all ranks alike, load a state "
                    "dict, or pass `sync_module_states=True` to every FullyShardedDataParallel.",
                    stacklevel=level_of_user(),
                )
                return
