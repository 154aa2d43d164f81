"""A lock file, so that two runs never write to one folder.

The file names its owner. Whether the owner still lives is known

- exactly, for a process of the same machine and the same container: the kernel is asked for the process of that number
  and start time;
- otherwise from its beats: an owner touches its file every `BEAT_S` seconds, and is dead if it has not for `EXPIRES_S`.
  The one who waits counts on its own clock, so the clocks of hosts and servers do not matter.

The file is created with ``O_EXCL``, which is atomic on NFS too, where ``flock`` is not reliable; a second such file
guards its removal. **The guarantee**: of two runs that see the same folder, only one gets the lock. An owner that could
not touch the file for `EXPIRES_S` (a stopped process, a lost network) may lose it to a run on another host; it notices
at its next beat, and before it publishes a checkpoint. Between that last look and the rename that publishes, nothing
protects it: two checkpoints of one step could replace each other, each of them whole.

Why not the lease of ``filelock``: before its version 4.1, which needs Python 3.11, it asks only for the hostname where
the owner lives. Two containers with the hostname of their machine (``docker run --network host``) held it at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from fairshard.checkpoint.storage import Storage, open_regular
from fairshard.errors import CheckpointError

NAME = ".lock"
BEAT_S, EXPIRES_S = 5.0, 30.0

_MAX_NBYTES = 4096
_MAX_PID = 1 << 31


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock.

    ``since`` is in UTC. ``kernel`` identifies the boot of the machine and the container's process numbers: only where
    it is the same does ``pid`` mean the same process. ``started`` is the kernel's start time of the process. Both are
    empty where they are unknown. ``token`` is drawn for this lock.
    """

    host: str
    pid: int
    since: str
    kernel: str
    started: str
    token: str

    @classmethod
    def this_process(cls) -> Owner:
        """This process as an owner."""
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        pid = os.getpid()
        return cls(socket.gethostname(), pid, since, _kernel(), _state_and_start(pid)[1], uuid.uuid4().hex)

    @classmethod
    def parse(cls, text: str | None) -> Owner | None:
        """The owner that a lock file names; None if it was not completely written."""
        try:
            owner = cls(**json.loads(text or ""))
        except (ValueError, TypeError, RecursionError):
            return None
        texts = (owner.host, owner.since, owner.kernel, owner.started, owner.token)
        is_ours = all(isinstance(text, str) and text.isprintable() for text in texts)
        return owner if is_ours and type(owner.pid) is int and 0 < owner.pid < _MAX_PID else None

    def is_alive(self) -> bool | None:
        """Whether the process lives; None if that cannot be known from here."""
        if not self.kernel or self.kernel != _kernel():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            pass  # a process of another user
        state, started = _state_and_start(self.pid)
        if not (started and self.started):
            return None
        return started == self.started and state not in "ZX"

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}, since {self.since}"


class RunLock:
    """The lock of one ``folder`` on a disk. `lock_of` makes it, once for all its users in this process."""

    def __init__(self, folder: str) -> None:
        self.owner = Owner.this_process()
        self._folder = folder
        self._path = os.path.join(folder, NAME)
        self._text = json.dumps(asdict(self.owner)) + "\n"
        self._seen: tuple[str | None, int] = None, 0  # text and last beat of another owner
        self._seen_at = 0.0
        self._removal_seen_at = 0.0
        self._num_users = 0
        self._guard = threading.RLock()  # a garbage collection in a beat may end the last user
        self._is_over = threading.Event()

    def poll(self) -> bool:
        """Try to take the lock; False while it is not known whether its owner lives: then call it again.

        If True, `leave` must follow.

        Raises:
            CheckpointError: another process has it, or its name is taken by what is not a file.
            OSError: the folder cannot be written.
        """
        while not self._num_users and not self._create():
            text, beat = self._read()
            if text is not None and (not self._is_dead(text, beat) or not self._remove_dead(text)):
                return False
        if not self._num_users:
            threading.Thread(target=self._beat, name="fairshard lock", daemon=True).start()
        self._num_users += 1
        return True

    def check(self) -> None:
        """Raise if another process has taken the lock.

        Raises:
            CheckpointError: it has.
        """
        text = None
        with contextlib.suppress(OSError):
            text, _ = self._read()
        if text not in (None, self._text):
            raise self._refusal(Owner.parse(text), f" This process had not touched its lock for {EXPIRES_S:g} s.")

    def leave(self) -> None:
        """One user has ended; removes the lock after the last one, unless it belongs to another process."""
        self._num_users -= 1
        if self._num_users or os.getpid() != self.owner.pid:
            return
        with self._guard:
            self._is_over.set()
            with contextlib.suppress(OSError):
                if self._read()[0] == self._text:
                    os.unlink(self._path)
        _locks.pop(self._folder, None)

    def other(self) -> Owner | None:
        """Another process that holds the lock and is known to live."""
        with contextlib.suppress(OSError):
            text, _ = self._read()
            owner = None if text == self._text else Owner.parse(text)
            return owner if owner is not None and owner.is_alive() else None
        return None

    # ---- private

    def _is_dead(self, text: str, beat: int) -> bool:
        """Whether the owner that the lock names is dead; False if that is not known yet.

        Raises:
            CheckpointError: it lives.
        """
        owner = Owner.parse(text)
        alive = None if owner is None else owner.is_alive()
        if alive is None:
            if self._seen[0] != text:
                self._seen, self._seen_at = (text, beat), time.monotonic()
            alive = self._seen[1] != beat
            if not alive and time.monotonic() < self._seen_at + EXPIRES_S:
                return False
        if alive:
            raise self._refusal(owner)
        return True

    def _refusal(self, owner: Owner | None, more: str = "") -> CheckpointError:
        name = "a process that has not written its name yet" if owner is None else str(owner)
        return CheckpointError(
            f"Only one run may write to {self._folder}, but it is in use by {name}.{more} End that run, or choose "
            "another folder."
        )

    def _create(self) -> bool:
        Storage().make(self._folder)
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(self._path).st_mode):
                raise CheckpointError(
                    f"{self._path} must be the file with which a run locks its folder, but is not a file. Remove it."
                )
        try:
            with open(self._path, "x", encoding="utf-8") as file:
                try:
                    file.write(self._text)
                    file.flush()
                except OSError:
                    os.unlink(self._path)
                    raise
        except FileExistsError:
            return False
        return True

    def _read(self) -> tuple[str | None, int]:
        """The file's text and the time of its last beat; None without a file."""
        try:
            with open_regular(self._path) as file:  # NFS asks its server at each open
                return file.read(_MAX_NBYTES).decode(errors="replace"), os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None, 0

    def _remove_dead(self, text: str) -> bool:
        """Remove the file of a dead owner if it still has this ``text``; False if another process is about to.

        *Invariant*: only the creator of the second file may remove the first of another owner, so the lock of one who
        was quicker stays.
        """
        aside = f"{self._path}-removal"
        try:
            open(aside, "x").close()
        except FileExistsError:
            now = time.monotonic()
            self._removal_seen_at = self._removal_seen_at or now
            if now >= self._removal_seen_at + EXPIRES_S:  # its creator died in these few lines
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(aside)
            return False
        try:
            if self._read()[0] == text:
                os.unlink(self._path)
        finally:
            os.unlink(aside)
        return True

    def _beat(self) -> None:
        while not self._is_over.wait(BEAT_S):
            with self._guard, contextlib.suppress(OSError):  # a server may be back before the lock expires
                if self._is_over.is_set():
                    return
                text, _ = self._read()
                if text is None:
                    self._create()
                elif text == self._text:
                    os.utime(self._path)
                else:
                    return


_locks: dict[str, RunLock] = {}  # of this process, by folder


def lock_of(folder: str) -> RunLock:
    """The lock of ``folder`` for all its users in this process."""
    path = os.path.realpath(folder)
    lock = _locks.get(path)
    if lock is None or lock.owner.pid != os.getpid():  # a forked process has locks of its own
        lock = _locks[path] = RunLock(path)
    return lock


def _kernel() -> str:
    """The boot of this machine and the process numbers of this container; empty where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _state_and_start(pid: int) -> tuple[str, str]:
    """State and start time of a process, as in ``/proc/PID/stat``; empty where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]
