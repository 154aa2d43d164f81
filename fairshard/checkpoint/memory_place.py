"""Where copies in memory are: the folder of this host, the other hosts, and how files get from one to another."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fairshard.checkpoint.agreement import idle, on_all_ranks, rank_in
from fairshard.checkpoint.hosts import Hosts
from fairshard.checkpoint.memory_folder import MemoryFolder, new_run_name, open_folder, run_name
from fairshard.utils.groups import copy_group
from fairshard.utils.messages import exchange_runs

_PARTIAL = ".partial"


@dataclass(frozen=True)
class Place:
    """Where this rank's copies are: the folder of its host, all hosts, and a group for messages about copies."""

    folder: MemoryFolder
    hosts: Hosts
    group: ProcessGroup | None
    rank: int
    life: str
    """Random name of this start of the run, the same on all ranks."""

    @property
    def leads(self) -> bool:
        """Whether this rank removes and renames on its host."""
        return self.hosts.leads(self.rank)


def find_place(root: str, parent: str) -> Place | None:
    """The place below ``parent`` of the run of ``root``; None if it has none. **Collective.**

    Raises:
        CheckpointError: on every rank, if the folder cannot be used.
    """
    return _place_of(root, parent, lambda: run_name(root))


def new_place(root: str, parent: str) -> Place:
    """A new place below ``parent`` for the run of ``root``, which gets a new name. **Collective.**

    Raises:
        CheckpointError: on every rank, if the folder cannot be made.
    """
    place = _place_of(root, parent, lambda: new_run_name(root))
    assert place is not None
    return place


def _place_of(root: str, parent: str, name_on_first: Callable[[], str | None]) -> Place | None:
    group = idle(copy_group())  # of all Checkpointers of this process
    rank = rank_in(group)
    own = uuid.uuid4().hex[:8]
    run, life = on_all_ranks(group, lambda: (None if rank else name_on_first(), own))[0]
    if run is None:
        return None
    folders: list[MemoryFolder] = []
    on_all_ranks(group, lambda: folders.append(open_folder(parent, run, root)))
    return Place(folders[0], _hosts_of(folders[0].path, group), group, rank, life)


@dataclass(frozen=True)
class FileTransfers:
    """Files that one rank sends and receives: pairs of the other rank and the name of the file."""

    sends: list[tuple[int, str]]
    receives: list[tuple[int, str]]


def exchange_files(place: Place, folder: str, sizes: Mapping[str, int], transfers: FileTransfers) -> None:
    """Send and receive files of ``folder``, of the given ``sizes``, from memory to memory. **Collective.**

    A file gets its name once it is complete, and on return all ranks have theirs.

    Raises:
        CheckpointError: on every rank, if a file does not fit.
    """

    def reserve() -> None:
        for _, name in transfers.receives:
            _reserve(f"{folder}/{name}{_PARTIAL}", sizes[name])

    def give_names() -> None:
        for _, name in transfers.receives:
            os.rename(f"{folder}/{name}{_PARTIAL}", f"{folder}/{name}")

    def mapped(pairs: list[tuple[int, str]], suffix: str, writes: bool) -> list[tuple[int, Tensor]]:
        return [(rank, _mapped(f"{folder}/{name}{suffix}", sizes[name], writes)) for rank, name in pairs if sizes[name]]

    on_all_ranks(place.group, reserve)
    assert place.group is not None
    exchange_runs(mapped(transfers.sends, "", False), mapped(transfers.receives, _PARTIAL, True), place.group)
    on_all_ranks(place.group, give_names)


def _reserve(path: str, nbytes: int) -> None:
    """Create a file whose memory is allocated: writing to a mapping beyond that would kill the process."""
    with open(path, "wb") as file:
        if nbytes:
            os.posix_fallocate(file.fileno(), 0, nbytes)


def _mapped(path: str, nbytes: int, writes: bool) -> Tensor:
    """The bytes of a file as a tensor over the same memory."""
    return torch.from_file(path, shared=writes, size=nbytes, dtype=torch.uint8)


def _hosts_of(path: str, group: ProcessGroup | None) -> Hosts:
    """Ranks share a host if they see each other's files: host names and boot ids mislead in containers."""
    own = f"rank-{rank_in(group)}-{uuid.uuid4().hex}"

    def show() -> str:
        Path(path, own).touch()
        return own

    names = on_all_ranks(group, show)
    first_seen = on_all_ranks(group, lambda: next(name for name in names if os.path.exists(f"{path}/{name}")))
    Path(path, own).unlink(missing_ok=True)  # the leader of this host may have removed it already
    return Hosts.of(first_seen)
