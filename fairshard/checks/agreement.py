"""Checks once, before the first gather, that all ranks of a group have built the same units from the same values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import fields
from itertools import zip_longest

import torch
import torch.distributed as dist

from fairshard.engine.unit import Unit
from fairshard.errors import RanksDisagreeError
from fairshard.params.flat_param import FlatParam
from fairshard.utils.agree import agree
from fairshard.utils.collectives import Communicator


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
    if not agree(comm, digest(own), device):
        raise RanksDisagreeError(
            "All ranks must wrap the same model in the same way, but the first difference is: "
            f"{differing_line(comm, own)}. Build the model from the same code and configuration on every rank."
        )


def differing_line(comm: Communicator, own: list[str]) -> str:
    """The first of the lines ``own`` in which ranks differ, in words. **Collective.**"""
    every = comm.gather_objects(own)
    first, *_ = ranks = ranks_of(comm)
    for rank, lines in zip(ranks, every, strict=True):
        for ours, theirs in zip_longest(every[0], lines, fillvalue="nothing more"):
            if ours != theirs:
                return f"rank {first} has {ours}; rank {rank} has {theirs}"
    return "none in these descriptions; please report this"


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


def digest(lines: list[str]) -> int:
    """A number of 56 bits that is the same for the same ``lines``."""
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
