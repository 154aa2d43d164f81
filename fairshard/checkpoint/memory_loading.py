"""Loading the newest copy in memory: files that this host lacks come from a host that has them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.planner import LoadPlan
from torch.futures import Future

from fairshard.checkpoint.agreement import on_all_ranks
from fairshard.checkpoint.entries import Training
from fairshard.checkpoint.loading import Loading, RankReader
from fairshard.checkpoint.manifest import Manifest, verify_file
from fairshard.checkpoint.memory_folder import FoundCopy
from fairshard.checkpoint.memory_place import FileTransfers, Place, exchange_files
from fairshard.checkpoint.reader import METADATA
from fairshard.checkpoint.storage import LocalStorage
from fairshard.errors import CheckpointError
from fairshard.utils.collector import collector_paused

_log = logging.getLogger("fairshard")


@dataclass
class SpreadCopy:
    """A copy whose files lie on one or several hosts: ``holders`` are the hosts that have each file."""

    name: str
    manifest: Manifest
    holders: dict[str, set[int]]

    @property
    def step(self) -> int:
        """The step of the copy."""
        return self.manifest.step or 0


def newest_copy(place: Place) -> SpreadCopy | None:
    """The newest copy of which the hosts together have every file; None if there is none. **Collective.**"""
    found = on_all_ranks(place.group, lambda: place.folder.copies() if place.leads else [])
    spread: dict[tuple[str, int], SpreadCopy] = {}
    for host, ranks in enumerate(place.hosts.ranks):
        for copy in found[ranks[0]]:
            every = spread.setdefault((copy.name, copy.crc32), _nowhere(copy))
            for file in copy.files:
                every.holders[file].add(host)
    whole = [copy for copy in spread.values() if all(copy.holders.values())]
    return max(whole, key=lambda copy: (copy.step, copy.name), default=None)


def load_copy(copy: SpreadCopy, place: Place, training: Training, verify: str) -> bool:
    """Load ``copy`` as `fairshard.checkpoint.load` does; returns whether it could be used. **Collective.**

    If it is damaged or does not fit, nothing has changed, and rank 0 logs why.
    """
    folder = place.folder.path_of(copy.name)
    files = _Files(copy, place, folder)
    reader = _CollectingReader(folder, place.group, files.collect, copy.manifest if verify == "before" else None)
    loading = Loading(folder, training, place.group, reader)
    try:
        files.collect_metadata()
        with collector_paused():
            loading.trust_files(copy.manifest, verify == "before")
            loading.read()
    except CheckpointError as error:
        if place.rank == 0:
            _log.warning("The copy of step %d in memory is not used: %s", copy.step, error)
        return False
    loading.apply()
    files.finish()
    return True


def _nowhere(copy: FoundCopy) -> SpreadCopy:
    return SpreadCopy(copy.name, copy.manifest, {file: set() for file in copy.manifest.files})


class _Files:
    """The files of a copy, collected from the hosts that have them."""

    def __init__(self, copy: SpreadCopy, place: Place, folder: str) -> None:
        self._copy = copy
        self._place = place
        self._folder = folder
        self._host = place.hosts.host_of(place.rank)

    def collect_metadata(self) -> None:
        """Make the folder where it is missing, and collect the metadata. **Collective.**"""
        on_all_ranks(self._place.group, lambda: os.makedirs(self._folder, exist_ok=True))
        self.collect({METADATA})

    def collect(self, needed: set[str]) -> None:
        """Bring the files ``needed`` by this rank to its host. **Collective.**

        Raises:
            CheckpointError: on every rank, if they do not fit.
        """
        place, holders = self._place, self._copy.holders
        absent = sorted(name for name in needed if name in holders and self._host not in holders[name])
        moves = self._moves(on_all_ranks(place.group, lambda: absent))
        if not moves:
            return
        sizes = {name: entry.nbytes for name, entry in self._copy.manifest.files.items()}
        own = FileTransfers(
            [(target, name) for source, target, name in moves if source == place.rank],
            [(source, name) for source, target, name in moves if target == place.rank],
        )
        exchange_files(place, self._folder, sizes, own)
        for _, target, name in moves:
            holders[name].add(place.hosts.host_of(target))

    def finish(self) -> None:
        """Let the files collected count as a part of the copy."""
        place, copy = self._place, self._copy
        if place.leads:
            place.folder.add_manifest(copy.name, copy.manifest)

    def _moves(self, needed: list[list[str]]) -> list[tuple[int, int, str]]:
        """Who sends which file to whom, for what each rank needs: (source, target, name), the same on all ranks.

        A host receives a file once. The ranks of the host that sends take turns.
        """
        place, holders = self._place, self._copy.holders
        moves: list[tuple[int, int, str]] = []
        coming: set[tuple[int, str]] = set()
        for target, names in enumerate(needed):
            host = place.hosts.host_of(target)
            for name in names:
                if (host, name) not in coming:
                    coming.add((host, name))
                    senders = place.hosts.ranks[min(holders[name])]
                    moves.append((senders[len(moves) % len(senders)], target, name))
        return moves


class _CollectingReader(RankReader):
    """A reader that first collects the files it needs; it compares them with ``sums``, if given, before it reads."""

    def __init__(
        self, folder: str, group: ProcessGroup | None, collect: Callable[[set[str]], None], sums: Manifest | None
    ) -> None:
        super().__init__(folder, group)
        self._copy_folder = folder
        self._collect = collect
        self._sums = sums

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """Collect the files of ``plan``, then read them. **Collective.**"""
        self._collect(self._needed(plan))
        return super().read_data(plan, planner)

    def read_own(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """Compare the files of ``plan``, if asked to, then read them."""
        if self._sums is not None:
            for name in sorted(self._needed(plan) & self._sums.files.keys()):
                verify_file(LocalStorage(), self._copy_folder, name, self._sums.files[name])
        return super().read_own(plan, planner)

    def _needed(self, plan: LoadPlan) -> set[str]:
        places = (self.storage_data.get(item.storage_index) for item in plan.items)
        return {*(place.relative_path for place in places if place is not None), *(plan.storage_data or ())}
