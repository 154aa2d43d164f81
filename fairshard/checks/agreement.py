"""Checks once, before the first gather, that all ranks of a group have built the same units from the same values."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable
from dataclasses import fields
from itertools import zip_longest

import torch
import torch.distributed as dist

from fairshard.engine.observer import Observer
from fairshard.engine.root import Root
from fairshard.engine.training_state import TrainingState
from fairshard.engine.unit import Unit
from fairshard.errors import RanksDisagreeError
from fairshard.params.flat_param import FlatParam
from fairshard.utils.agree import agree
from fairshard.utils.collectives import Communicator
from fairshard.utils.groups import communicator
from fairshard.utils.names import join
from fairshard.utils.user_line import level_of_user


def check_agreement(
    comm: Communicator, units: list[Unit], device: torch.device, refused: Exception | None = None
) -> None:
    """Compare names, shapes and settings of ``units`` across the ranks of ``comm``. **Collective.**

    ``refused``: the error with which this rank refuses its model; the caller raises it if all ranks have the same one.

    Raises:
        RanksDisagreeError: on every rank, naming the first difference.
    """
    own = [line for unit in units for line in (*_describe(unit), *_describe_place(unit, comm))]
    check_same(comm, own if refused is None else [f"a model that raises: {refused}"], device)


def check_same(comm: Communicator, own: list[str], device: torch.device) -> None:
    """Compare the ranks' descriptions of their models, ``own``, line by line. **Collective.**

    Raises:
        RanksDisagreeError: on every rank, naming the first difference.
    """
    if agree(comm, _digest(own), device):
        return
    every = comm.gather_objects(own)
    first, *_ = ranks = ranks_of(comm)
    for rank, lines in zip(ranks, every, strict=True):
        for ours, theirs in zip_longest(every[0], lines, fillvalue="nothing more"):
            if ours != theirs:
                raise RanksDisagreeError(
                    "All ranks must wrap the same model in the same way, but the first difference is: rank "
                    f"{first} has {ours}; rank {rank} has {theirs}. Build the model from the same code and "
                    "configuration on every rank."
                )
    raise RanksDisagreeError("Ranks disagree on the model, but the descriptions do not differ; please report this.")


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
        if not agree(comm, _digest([f"{fqn} {value}" for fqn, value in own.items()]), units[0].device):
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


def ranks_of(comm: Communicator) -> list[int]:
    """The numbers of its ranks among all ranks: those that people know."""
    return dist.get_process_group_ranks(comm.group)


def raise_together(comms: Iterable[Communicator], error: Exception | None) -> None:
    """Raise ``error``; if it is None and another rank has an error, raise one of the same kind. **Collective.**

    A rank that raises alone would leave the others waiting in their next collective.
    """
    for comm in comms:
        if comm.peers:
            kinds = (KeyError, TypeError, ValueError)
            kind = next((kind for kind in kinds if isinstance(error, kind)), RuntimeError)
            every = comm.gather_objects(None if error is None else (kind, str(error)))
            for rank, found in enumerate(every):
                if error is None and found is not None:
                    error = found[0](f"Rank {rank} failed, so all ranks raise: {found[1]}")
    if error is not None:
        raise error


def _digest(lines: list[str]) -> int:
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "big")


def _describe_place(unit: Unit, comm: Communicator) -> list[str]:
    """For a unit with replicas: what must be equal among replicas, or among the ranks that share one replica."""
    shard, replicas = unit.groups.shard, unit.groups.replicas
    if replicas is None:
        return []
    place = f"piece {shard.rank} of {shard.world_size}" if comm.group is replicas.group else "a piece"
    return [f"{place} of unit `{unit.fqn or 'root'}` in {replicas.world_size} replicas"]


def _describe(unit: Unit) -> list[str]:
    config = unit.config
    place = f"unit `{unit.fqn or 'root'}`"
    ahead = {"forward": unit.ahead_in_forward, "backward": unit.ahead_in_backward}
    lines = [f"{place} with {field.name}={getattr(config, field.name)}" for field in fields(config)]
    if unit.members is not None:
        lines.append(f"{place} of {len(unit.members.modules)} modules, outputs in {unit.members.output_dtype}")
    lines += [f"{place}, gathered ahead in {name}: {[u.fqn for u in units]}" for name, units in ahead.items() if units]
    lines += [
        f"{place}, parameter `{slot.fqn}`: {tuple(slot.shape)} {flat_param.shard.dtype}, "
        f"{', '.join(filter(None, (_state_of(flat_param), flat_param.shows.describe(index))))}"
        for flat_param in unit.flat_params
        for index, slot in enumerate(flat_param.slots)
    ]
    return lines


def _state_of(flat_param: FlatParam) -> str:
    return "trainable" if flat_param.requires_grad else "frozen"
