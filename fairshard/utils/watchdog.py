"""Reports the position of every rank through the store when a collective fails.

Each rank has one thread beside its training, with its own connection to the store of the default group::

    rank 0   a collective fails ---- asks ---------------------- reads the answers, raises with all of them
    rank 1   stuck in a lock           `-> its thread answers -'
    rank 2   killed                        (silent)

The thread reads the store only while training makes no progress, so it costs nothing in normal training. The ranks
share nothing else: if the store is gone, with the rank or agent that hosted it, a rank reports only what it knows.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import json
import os
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, zip_longest
from types import FrameType
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore
from torch.distributed import ProcessGroup, distributed_c10d

from fairshard.errors import CollectiveFailedError, FairshardError, RanksDisagreeError

Args = ParamSpec("Args")
Result = TypeVar("Result")

_POLL_S = 0.4
_ANSWERS_WITHIN_S = 2.0
_OTHERS_READ_WITHIN_S = 1.0
_LAST_WORD_WITHIN_S = 0.5
_MAX_ENTERED = 4096


@dataclass(frozen=True)
class Place:
    """Position of one rank.

    ``text`` follows "rank 3:" in a message. ``entered`` names the units that the rank ran in ``step``, in order;
    ranks in the same step should name the same units, up to the point that each has reached. ``is_final`` if the rank
    goes no further, because a collective failed there or because its process ``has_ended``.
    """

    text: str
    step: int = 0
    entered: tuple[str, ...] = ()
    is_final: bool = False
    has_ended: bool = False


class Training(Protocol):
    """The watched training; called from the watchdog's thread."""

    def place(self) -> Place:
        """Current position."""

    def progress(self) -> Hashable:
        """A value that changes as training proceeds."""


class Watchdog:
    """The watchdog thread of one rank and its state; see `watch` and `explain`."""

    def __init__(self, world: ProcessGroup, store: Any, connection: Any) -> None:
        self._world = weakref.ref(world)
        self._rank, self._world_size = dist.get_rank(world), dist.get_world_size(world)
        self._store = connection
        connection.set_timeout(datetime.timedelta(seconds=_ANSWERS_WITHIN_S))
        self._prefix = _name_of_group(store, self._rank)
        self._training: Callable[[], Training | None] = lambda: None
        self._thread_id = threading.get_ident()
        self._wake, self._has_report = threading.Event(), threading.Event()
        self._is_asking = False
        self._is_lost = False
        self._last_word: Place | None = None
        self._raised: tuple[Hashable, str] = None, ""
        self._num_answered = 0
        self._places: dict[int, Place] = {}
        self._thread = threading.Thread(target=self._serve, name="fairshard watchdog", daemon=True)
        self._thread.start()

    def follow(self, training: Training) -> None:
        """Report the position of ``training``, which runs on the calling thread, as long as it lives."""
        self._training = weakref.ref(training)
        self._thread_id = threading.get_ident()

    def note_raised(self, error: Exception) -> None:
        """Report ``error`` with this rank's position, as long as its training stays there."""
        training = self._training()
        if training is not None:
            self._raised = training.progress(), f", has raised {type(error).__name__}: {_first_line(error)}"

    def explain(self, error: Exception) -> FairshardError:
        """The error to raise for a collective that failed with ``error``; takes a few seconds, once."""
        if not self._is_asking:
            self._is_asking = True
            self._places[self._rank] = self._own_place()
            self._wake.set()
        self._has_report.wait(_ANSWERS_WITHIN_S + _OTHERS_READ_WITHIN_S + _POLL_S)
        places = dict(self._places)
        difference = first_difference({rank: [place] for rank, place in places.items()})
        text = f"A collective failed on rank {self._rank}: {_first_line(error)}\n{self._describe(places)}"
        if difference:
            return RanksDisagreeError(f"{text}\n{difference} Every rank must run the same units in the same order.")
        return CollectiveFailedError(f"{text}\nEnd this process and restart all ranks from the last checkpoint.")

    def leave(self, error: BaseException | None) -> None:
        """Publish that this rank's process ends, with ``error`` if any, because other ranks may wait for it."""
        if not self._thread.is_alive() or self._is_asking:
            return
        how = "its process has ended" + (f" by {type(error).__name__}: {_first_line(error)}," if error else "")
        place = self._own_place(False)
        self._last_word = replace(place, text=f"gone: {how} {place.text}", is_final=True, has_ended=True)
        self._wake.set()
        self._thread.join(_LAST_WORD_WITHIN_S)

    def _own_place(self, with_line: bool = True) -> Place:
        training = self._training()
        place = Place("not training") if training is None else training.place()
        line = _user_line(sys._current_frames().get(self._thread_id)) if with_line else ""
        if with_line and training is not None and training.progress() == self._raised[0]:
            line += self._raised[1]
        return replace(place, text=f"{place.text}{line}", entered=place.entered[:_MAX_ENTERED])

    # ---- on the thread

    def _serve(self) -> None:
        before: Hashable = None
        try:
            while self._last_word is None and not self._is_over():
                self._wake.wait(_POLL_S)
                if self._is_asking:
                    self._ask()
                    return
                training = self._training()
                progress = None if training is None else training.progress()
                del training
                if progress == before and self._store.check([f"{self._prefix}/asked/{self._num_answered + 1}"]):
                    self._num_answered = self._store.add(f"{self._prefix}/asked", 0)
                    self._publish(self._own_place())
                before = progress
            if self._last_word is not None:
                self._publish(self._last_word)
        except Exception:  # the store's owner is gone; the type depends on its backend
            self._is_lost = True
        finally:
            self._has_report.set()

    def _is_over(self) -> bool:
        world = self._world()
        return world is None or dist.group.WORLD is not world

    def _ask(self) -> None:
        self._num_answered = self._store.add(f"{self._prefix}/asked", 1)
        self._store.set(f"{self._prefix}/asked/{self._num_answered}", "")
        self._publish(replace(self._places[self._rank], is_final=True))
        until = time.monotonic() + _ANSWERS_WITHIN_S
        while len(self._places) < self._world_size and time.monotonic() < until:
            self._read(self._num_answered)
            time.sleep(0.02)
        self._read(0)
        self._store.set(f"{self._prefix}/read/{self._rank}", "")
        # Rank 0 may own the store, and its process may end with this error: wait until the others have read.
        others = [rank for rank, place in self._places.items() if rank != self._rank and not place.has_ended]
        until = time.monotonic() + (_OTHERS_READ_WITHIN_S if self._rank == 0 else 0)
        while time.monotonic() < until:
            others = [rank for rank in others if not self._store.check([f"{self._prefix}/read/{rank}"])]
            if not others:
                return
            time.sleep(0.02)

    def _publish(self, place: Place) -> None:
        entry = {"answers": self._num_answered, **asdict(place)}
        self._store.set(f"{self._prefix}/place/{self._rank}", json.dumps(entry))

    def _read(self, question: int) -> None:
        """Read the positions of other ranks that were published for ``question`` or are final."""
        for rank in range(self._world_size):
            key = f"{self._prefix}/place/{rank}"
            if rank in self._places or not self._store.check([key]):
                continue
            entry = json.loads(self._store.get(key))
            if entry.pop("answers") >= question or entry["is_final"]:
                self._places[rank] = Place(**{**entry, "entered": tuple(entry["entered"])})

    def _describe(self, places: dict[int, Place]) -> str:
        by_text: dict[str, list[int]] = {}
        for rank in range(self._world_size):
            if rank in places:
                text = places[rank].text
            elif self._is_lost or not self._has_report.is_set():
                text = "unknown: the store, which rank 0 or the launcher hosts, does not answer"
            else:
                text = "silent: its process has ended or is stopped"
            by_text.setdefault(text, []).append(rank)
        return "\n".join(f"  {_ranks(ranks)}: {text}" for text, ranks in by_text.items())


BEGINS_FORWARD, BEGINS_BACKWARD = "the beginning of a forward", "the beginning of a backward"
"""The entries of `Place.entered` at the beginning of a pass."""

_MISSED_BACKWARD = (
    " A backward that reaches no unit of the model, or raises before it reaches one, does not count: let the loss of "
    "that rank reach the model (`loss + 0 * output.sum()`), or call no backward on any rank."
)


def first_difference(places: dict[int, list[Place]], to_the_end: bool = False) -> str:
    """The first difference between the lowest rank and another in one step, as a sentence; empty if they agree.

    ``to_the_end``: the steps are complete, so a longer one also differs.
    """
    first, *others = sorted(places)
    for rank in others:
        theirs = {place.step: place.entered for place in places[rank]}
        for place in places[first]:
            if place.step not in theirs:
                continue
            for ours, other in zip_longest(place.entered, theirs[place.step]):
                if ours != other and (to_the_end or (ours and other)):
                    at = [entry or "the end" for entry in (ours, other)]
                    text = f"In step {place.step} rank {first} is at {at[0]}, rank {rank} at {at[1]}."
                    return text + _MISSED_BACKWARD if set(at) == {BEGINS_FORWARD, BEGINS_BACKWARD} else text
    return ""


_watchdogs: weakref.WeakKeyDictionary[ProcessGroup, Watchdog] = weakref.WeakKeyDictionary()


def watch(training: Training) -> None:
    """Make this rank's watchdog report the position of ``training``; the first call starts the watchdog.

    No watchdog runs for a single rank, for ranks that are threads, or if the store allows no second connection.
    """
    world = dist.group.WORLD
    if world is None or dist.get_world_size(world) == 1 or dist.get_backend(world) in ("fake", "threaded"):
        return
    if world not in _watchdogs:
        store = distributed_c10d._get_default_store()
        connection = _second_connection(store)
        if connection is None:
            return
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
        _watchdogs[world] = Watchdog(world, store, connection)
    _watchdogs[world].follow(training)


def _second_connection(store: Any) -> Any:
    """Another connection to the server or file of ``store``, without its prefixes if torch < 2.7; None if impossible.

    A thread that waits for a store holds its connection, so the watchdog's thread needs its own.
    """
    if hasattr(store, "clone"):
        return store.clone()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
    path = getattr(store, "path", None)  # of a FileStore
    return None if path is None else FileStore(path, -1)


def _name_of_group(store: Any, rank: int) -> str:
    """A name for the default group in its ``store``, the same on all ranks and with any prefix.

    A store may outlive a default group: the number of watchdogs that a rank has begun on it identifies the group. A
    connection without the prefixes of ``store`` may see other groups with that number, so the first rank draws a name.
    """
    key = f"fairshard/group {store.add(f'fairshard/begun/{rank}', 1)}"
    return f"fairshard/{bytes(store.compare_set(key, '', uuid.uuid4().hex)).decode()}"


def explain(error: Exception) -> FairshardError:
    """The error to raise for a collective that failed with ``error``, with the known positions of all ranks."""
    world = dist.group.WORLD
    watchdog = _watchdogs.get(world) if world is not None else None
    if watchdog is None:
        return CollectiveFailedError(f"A collective failed: {error}")
    return watchdog.explain(error)


def reported(error: FairshardError) -> FairshardError:
    """``error``, which this rank may raise alone: ranks that wait for it until a collective fails then name it."""
    world = dist.group.WORLD
    watchdog = _watchdogs.get(world) if world is not None else None
    if watchdog is not None:
        watchdog.note_raised(error)
    return error


def explained(collective: Callable[Args, Result]) -> Callable[Args, Result]:
    """Decorate a ``collective`` that does not return a work: its failures are raised through `explain`."""

    @functools.wraps(collective)
    def call(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        try:
            return collective(*args, **kwargs)
        except FairshardError:
            raise
        except RuntimeError as error:
            raise explain(error) from error

    return call


def _at_exit() -> None:
    with contextlib.suppress(Exception):
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        for watchdog in list(_watchdogs.values()):
            watchdog.leave(error)


_LIBRARIES = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, os.path.dirname(__file__), os.__file__))


def _user_line(frame: FrameType | None) -> str:
    """The innermost line of a thread outside of torch, fairshard and the standard library."""
    while frame is not None and frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
        frame = frame.f_back
    if frame is None:
        return ""
    return f" ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}, in {frame.f_code.co_name})"


def _ranks(ranks: list[int]) -> str:
    """``rank 1`` or ``ranks 0, 2-4``."""
    breaks = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(ranks)) if b != a + 1), len(ranks)]
    runs = [ranks[start:stop] for start, stop in pairwise(breaks)]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


def _first_line(error: BaseException | None) -> str:
    return str(error).strip().partition("\n")[0]
