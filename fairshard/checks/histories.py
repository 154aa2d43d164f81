"""Compares what the ranks have run so far outside of backwards: before a save, a state dict, and at the end of a run.

A backward compares the same histories itself, in the exchange that plans it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fairshard.checks.order_check import OrderCheck, difference_among
from fairshard.engine.root import Root
from fairshard.engine.tree import unit_of, walk
from fairshard.utils.agree import agree
from fairshard.utils.collectives import Communicator, gather_objects
from fairshard.utils.groups import on_host

Histories = dict[str, tuple[int, ...]]
"""For each model and group of ranks, numbers that must be the same on these ranks; see `Root.history`."""


def histories(module: nn.Module) -> Histories:
    """The histories of the models in ``module`` that have run."""
    return {_key(fqn, comm): root.history(comm) for root, fqn in _roots(module).items() for comm in _real(root)}


def check_histories(module: nn.Module, every: Sequence[Histories], group: dist.ProcessGroup | None) -> None:
    """Raise on all ranks of ``group`` if their histories ``every``, by rank, differ. **Collective** if they do.

    Raises:
        RanksDisagreeError: naming the first difference.
    """
    for key in sorted({key for one in every for key in one}):
        if len({one[key] for one in every if key in one}) > 1:
            mine = {_key(fqn, comm): root for root, fqn in _roots(module).items() for comm in _real(root)}
            root = mine.get(key)
            own = root and (dist.get_rank(), OrderCheck.of(root).recorded())
            entries: list[Any] = gather_objects(own, group)
            raise difference_among(dict(entry for entry in entries if entry is not None))


def compare_ranks(module: nn.Module) -> None:
    """Compare what the ranks have run of the models in ``module``, which no pass is going through. **Collective.**

    Call it at the end of your own training loop: a backward and a save compare what was run before them, and nothing
    does so for what is run after the last one. It sends 16 bytes.

    Raises:
        RanksDisagreeError: on every rank, naming the first difference.
    """
    for root in _roots(module):
        same = [agree(on_host(comm), _hash(root.history(comm)), _HOST) for comm in _real(root)]
        if not all(same):
            raise root.difference()


_HOST = torch.device("cpu")


def _roots(module: nn.Module) -> dict[Root, str]:
    """The models in ``module`` that have run, and are not in ``join``, which has its own order; with their names."""
    found: dict[Root, str] = {}
    for fqn, part in walk(module):
        root = None if (unit := unit_of(part)) is None else unit.root
        if isinstance(root, Root) and root.join is None:
            found.setdefault(root, fqn)
    return found


def _real(root: Root) -> list[Communicator]:
    return [comm for comm in root.comms if comm.peers]


def _key(fqn: str, comm: Communicator) -> str:
    return f"{fqn} {dist.get_process_group_ranks(comm.group)}"


def _hash(numbers: Sequence[int]) -> int:
    return int.from_bytes(hashlib.blake2b(array("q", numbers).tobytes(), digest_size=7).digest(), "big")
