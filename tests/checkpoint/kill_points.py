"""Kills inside saves, at chosen points.

The kill comes from the process that saves: an audit hook sees each change of a file or folder *before* it happens and
kills at the chosen one. The disk is left as a crash between any two system calls would leave it.
"""

import os
import re
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from fairshard.checkpoint import checkpointer, writer

# In the order in which a save reaches them. Every rank reaches those in ANY_RANK; only rank 0 reaches the others.
POINTS = {
    "folder": "before the temporary folder is made",
    "half a piece": "with half of a block of a rank's file written",
    "piece written": "after a rank's file is written, before it is synced",
    "metadata": "after all ranks' files, before .metadata",
    "manifest": "before the manifest",
    "manifest named": "before the manifest gets its name",
    "set aside": "before the older checkpoint of the same step is moved out of the way",
    "publish": "before the rename",
    "published": "after the rename, before it is synced",
    "pointer": "after the rename, before `latest` is written",
    "pointer named": "before `latest` is replaced",
    "pointed": "after `latest` is replaced, before it is synced",
    "prune": "before the oldest checkpoint is moved out of the way",
    "half pruned": "with a part of the oldest checkpoint removed",
}
_OPENED = {".metadata": "metadata", ".tmp-fairshard.json": "manifest", ".tmp-latest": "pointer"}
_RENAMED = {
    r"\S+ fairshard\.json": "manifest named",
    r"\S+ latest": "pointer named",
    r"\.tmp-\S+ step-\d+": "publish",
    r"\S+ \.replaced-\S+": "set aside",
    r"step-\d+ \.old-\S+": "prune",
}
ANY_RANK = ("folder", "half a piece", "piece written")


@dataclass(frozen=True)
class Kill:
    """Kill ``who`` with -9 when ``rank`` reaches ``point`` in the ``nth`` save of this start, or a later one.

    ``who`` is ``"own"`` (that rank), ``"other"`` or ``"all"``.
    """

    point: str
    nth: int
    rank: int
    who: str


class Killer:
    """Sees every change to the run's folders before it happens, and kills at one of them."""

    def __init__(self, run, rank, pids, note):
        self._run = run
        self._kill = run.kill
        self._is_ours = run.kill is not None and run.kill.rank == rank
        self._rank, self._pids, self._note = rank, pids, note
        self._removal = threading.local()  # ``num_files`` of the removal of a checkpoint that this thread has begun
        self._renamed = None  # source and target of the last rename in the root
        self.num_saves = 0
        if self._is_ours:
            sys.addaudithook(self._hook)

    def reach(self, point):
        """Kill if this is the point."""
        if not self._is_due(point):
            return
        self._note(f"kill {point}")
        self._is_ours = False
        others = [pid for rank, pid in enumerate(self._pids) if rank != self._rank]
        for pid in {"own": [], "other": others, "all": others}[self._kill.who]:
            os.kill(pid, signal.SIGKILL)
        if self._kill.who != "other":
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_due(self, point):
        return self._is_ours and point == self._kill.point and self.num_saves >= self._kill.nth

    def _hook(self, event, args):
        if not self._is_ours:
            return
        if event == "open" and isinstance(args[0], (str, os.PathLike)) and args[2] & (os.O_WRONLY | os.O_RDWR):
            self._on_open(os.fspath(args[0]))
        elif event == "os.rename":
            self._on_rename(*map(os.fspath, args[:2]))
        elif event == "os.mkdir" and _name(args[0]).startswith(".tmp-"):
            self.reach("folder")
        elif event in ("os.remove", "os.rmdir"):
            self._on_remove()
        elif event == "shutil.rmtree":
            self._removal.num_files = 0 if _name(args[0]).startswith(".old-step-") else None

    def _on_open(self, path):
        for begin, point in _OPENED.items():
            if _name(path).startswith(begin):
                self.reach(point)

    def _on_rename(self, source, target):
        self._renamed = _name(source), _name(target)
        for names, point in _RENAMED.items():
            if re.fullmatch(names, " ".join(self._renamed)):
                self.reach(point)

    def _on_remove(self):
        if getattr(self._removal, "num_files", None) is not None:
            self._removal.num_files += 1
            if self._removal.num_files == 2:
                self.reach("half pruned")

    def wrote(self, stream, block):
        """Write half of the block and kill, if the kill is due."""
        if self._is_due("half a piece") and len(block) > 1:
            stream._raw.write(memoryview(block).cast("B")[: len(block) // 2])
            stream._raw.flush()
            self.reach("half a piece")

    def sync(self, descriptor):
        """A file or folder is about to be synced."""
        if not self._is_ours:
            return
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.endswith(".distcp"):
            self.reach("piece written")
        elif self._renamed is not None and path == self._run.root:
            (_, target), self._renamed = self._renamed, None
            if target == "latest":
                self.reach("pointed")
            elif target.startswith("step-"):
                self.reach("published")


def watch(note, killer):
    """Note where each save begins and ends, and let ``killer`` see what it does."""
    write, fsync, save = writer._ChecksumStream.write, os.fsync, checkpointer.Checkpointer._write

    def watched_write(stream, block):
        killer.wrote(stream, block)
        return write(stream, block)

    def watched_fsync(descriptor):
        killer.sync(descriptor)
        fsync(descriptor)

    def watched_save(self, draft, group):
        killer.num_saves += 1
        note(f"save {draft.step} begins")
        save(self, draft, group)
        note(f"save {draft.step} {'failed' if self._failure else 'ends'}")

    writer._ChecksumStream.write = watched_write
    os.fsync = watched_fsync
    checkpointer.Checkpointer._write = watched_save


def _name(path):
    return Path(os.fspath(path)).name if isinstance(path, (str, os.PathLike)) else ""
