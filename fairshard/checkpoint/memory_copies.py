"""Copies of the training state in the memory of the hosts: what a restart reads when only processes or a host are lost.

A copy is an ordinary checkpoint whose files lie in ``/dev/shm``, which outlives the processes of the run. Each rank
writes its file there, and sends it to a rank of another host, if there is one::

    snapshot -> own file -> keeper's host -> all ranks done -> manifest, rename -> all ranks done -> old copy goes
    (stall)     (a thread does the rest)

*Invariant*: from the first complete copy on, a complete one exists: the older goes after all hosts have published the
newer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from fairshard.checkpoint.agreement import described, ended, idle, occupy, on_all_ranks, start_writer, unfinished
from fairshard.checkpoint.entries import Training
from fairshard.checkpoint.manifest import FileEntry, Manifest
from fairshard.checkpoint.memory_folder import forget_run
from fairshard.checkpoint.memory_loading import load_copy, newest_copy
from fairshard.checkpoint.memory_place import FileTransfers, Place, exchange_files, find_place, new_place
from fairshard.checkpoint.reader import METADATA
from fairshard.checkpoint.saving import Draft, take_over, write_files
from fairshard.checkpoint.snapshot import Buffers
from fairshard.errors import CheckpointError
from fairshard.utils.dtensors import memory_of
from fairshard.utils.host import free_host_memory
from fairshard.utils.messages import broadcast_object
from fairshard.utils.span_tensor import SpanTensor

_log = logging.getLogger("fairshard")

_NBYTES_BESIDE_ENTRY = 4096
"""Bytes of a file and of the metadata for one entry, beyond its elements; about 2 KiB in torch 2.13."""


class MemoryCopies:
    """Copies every ``every`` steps, of the run whose checkpoints are in ``root``, below ``parent`` on each host."""

    def __init__(self, root: str, every: int, parent: str) -> None:
        self.every = every
        self._root = root
        self._parent = parent
        self._buffers: Buffers = {}
        self._thread: threading.Thread | None = None
        self._place: Place | None = None
        self._has_begun = False
        self._num_copies = 0
        self._copied_step: int | None = None  # the step of the copy that this run continues

    def begin(self) -> Place:
        """Before the first save of any kind: give up the copies that this run does not continue. **Collective** once.

        Raises:
            CheckpointError: on every rank, if there can be no copies.
        """
        if self._place is None or not self._has_begun:
            continued = self._place if self._copied_step is not None else None
            if self._place is not None and continued is None:
                self._place.folder.release()  # on all ranks before the leader drops it
            place = self._place = continued or new_place(self._root, self._parent)

            def drop() -> None:
                if place.leads:
                    place.folder.drop_other_runs(self._root)
                    place.folder.drop_after(self._copied_step or 0)

            on_all_ranks(idle(place.group), drop)
            self._has_begun = True
        return self._place

    def save(self, step: int, training: Training) -> None:
        """Copy ``training`` in the background. **Collective.** It waits for the previous copy.

        Raises:
            CheckpointError: on every rank, if two copies do not fit into the memory of a host.
            TypeError: on every rank, if a value could not be read back as plain data.
        """
        self.wait()
        place = self.begin()
        draft = take_over(idle(place.group), training, step, self._buffers)
        try:
            if not self._num_copies:
                self._check_room(draft, place)
            self._num_copies += 1
        except BaseException:
            draft.snapshot.close()
            raise
        self._thread = start_writer("a copy to memory", partial(self._write, draft, place))
        occupy(place.group, self._thread)  # another Checkpointer of this process has the same group

    def load_newest(self, least: int, training: Training, verify: str) -> int | None:
        """Load the newest copy, if it is of step ``least`` or later; returns its step. **Collective.**"""
        self.start_anew()
        self._place = self._place or find_place(self._root, self._parent)
        if self._place is not None:
            idle(self._place.group)
        copy = None if self._place is None else newest_copy(self._place)
        if self._place is None or copy is None or copy.step < least:
            return None
        if load_copy(copy, self._place, training, verify):
            self._copied_step = copy.step
        return self._copied_step

    def start_anew(self) -> None:
        """The run does not continue a copy: from its first save on, earlier copies are not used."""
        self._copied_step, self._has_begun = None, False

    def wait(self) -> None:
        """Wait for the copy being written, if any.

        Raises:
            CollectiveFailedError: a collective has failed, and the copy has not ended since.
        """
        if self._thread is not None:
            if not ended(self._thread):
                raise unfinished(self._thread)
            self._thread = None

    def close(self) -> None:
        """At the clean end of all ranks, remove all copies. **Collective**: no rank removes them before that."""
        self.wait()
        place = self._place
        if place is not None:
            on_all_ranks(idle(place.group), lambda: None)
            place.folder.release()
            if place.leads:
                place.folder.remove()
            if place.rank == 0:
                forget_run(self._root)
            self._place = None

    # ---- private

    def _check_room(self, draft: Draft, place: Place) -> None:
        """Two copies, the complete one and the one being written, must fit. **Collective.**"""
        sizes = on_all_ranks(place.group, lambda: _nbytes_of(draft.snapshot.entries))

        def check() -> None:
            beside = place.hosts.beside(place.rank)
            kept = sum(sizes[rank] + sum(sizes[other] for other in place.hosts.kept_by(rank)) for rank in beside)
            needed = 2 * kept - place.folder.nbytes()
            for where, free in (
                (f"the file system of {self._parent}", place.folder.free_nbytes()),
                ("this host's memory", free_host_memory()),
            ):
                if needed > free:
                    raise CheckpointError(
                        f"Two copies in memory of {len(beside)} ranks on this host, {_mb(needed)} more, must fit, but "
                        f"{where} has {_mb(free)} free. Leave `memory_every` out, pass another `memory_folder`, or "
                        f"enlarge it (mount -o remount,size=... {self._parent}; docker run --shm-size)"
                    )

        on_all_ranks(place.group, check)

    def _write(self, draft: Draft, place: Place) -> None:
        step = draft.step or 0
        try:
            on_all_ranks(place.group, lambda: place.folder.remake(self._root))
            _write_copy(draft, place, f"step-{step:08}-{place.life}-{self._num_copies}")
        except Exception as error:
            # The older copy and the checkpoints on disk are still there: training goes on, the next copy tries again.
            if place.rank == 0 or not isinstance(error, CheckpointError):
                _log.warning("Step %d was not copied to memory: %s", step, described(error))
            if place.leads:
                with contextlib.suppress(OSError):
                    place.folder.drop_unfinished()
        finally:
            draft.snapshot.close()


def _write_copy(draft: Draft, place: Place, name: str) -> None:
    """Write the copy ``name``, its own and for other hosts, then remove the older. **Collective.**"""
    group, work = place.group, place.folder.unfinished(name)
    on_all_ranks(group, lambda: os.makedirs(work, exist_ok=True))
    by_rank = write_files(draft, work, group)
    files = {file: entry for own in by_rank for file, entry in own.items()}
    manifest = Manifest(draft.step, len(by_rank), files, draft.aliases)
    if len(place.hosts.ranks) > 1:
        _send_metadata(place, work)
        _send_to_keepers(place, work, by_rank)
    on_all_ranks(group, lambda: place.folder.publish(name, manifest) if place.leads else None)
    if place.leads:
        place.folder.keep_only(name)


def _send_metadata(place: Place, work: str) -> None:
    """Write the metadata, which rank 0 has written on its host, on every other host. **Collective.**"""
    path = Path(work, METADATA)
    assert place.group is not None
    assert place.group is not None
    data: bytes = broadcast_object(path.read_bytes() if place.rank == 0 else None, place.group)
    on_all_ranks(place.group, lambda: path.write_bytes(data) if place.leads and not path.exists() else None)


def _send_to_keepers(place: Place, work: str, files: list[dict[str, FileEntry]]) -> None:
    """Send this rank's file to its keeper, and receive those that this rank keeps. **Collective.**"""
    keeper = place.hosts.keeper_of(place.rank)
    assert keeper is not None
    to_send = [(keeper, name) for name in files[place.rank] if name != METADATA]
    to_receive = [(rank, name) for rank in place.hosts.kept_by(place.rank) for name in files[rank] if name != METADATA]
    sizes = {name: entry.nbytes for own in files for name, entry in own.items()}
    exchange_files(place, work, sizes, FileTransfers(to_send, to_receive))


def _nbytes_of(value: Any) -> int:
    """At most as many bytes as ``value`` has in a file."""
    if isinstance(value, (SpanTensor, DTensor)):
        return int(memory_of(value).nbytes) + _NBYTES_BESIDE_ENTRY
    if isinstance(value, Tensor):
        return value.nbytes + _NBYTES_BESIDE_ENTRY
    if isinstance(value, Mapping):
        return sum(map(_nbytes_of, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_nbytes_of, value))
    return 64


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f} MB"
