"""Reports the position of every rank through the store when a collective fails.

Each rank has one thread beside its training, with its own connection to the store of the default group, and writes its
position and a number, the *beat*, once a second::

    rank 0   a collective fails ---- reads ------------- reads again, raises with all positions
    rank 1   stuck in a lock    | beat 7 | beat 8 | beat 9 |    alive: its beat has moved
    rank 2   killed             | beat 7                        silent: its beat has not

The ranks share nothing else: if the store is gone, with the rank or agent that hosted it, a rank reports only what it
knows. *Invariant*: a rank is called silent only if the store was quick meanwhile.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore
from torch.distributed import ProcessGroup, distributed_c10d

from fairshard.checks.positions import Place, Training, background, first_difference, line_of
from fairshard.errors import CollectiveFailedError, FairshardError, RanksDisagreeError
from fairshard.utils.failures import observer, observers

_BEAT_S = 1.0
_MAX_BEATS_PER_S = 1000  # of all ranks together
_LATE_S = 0.5  # how late a beat may be, beside a whole period
_SLOW_S = 0.25  # a store that takes as long for one message is slow, and beats may be later
_STORE_TIMEOUT_S = 2.0
_OTHERS_READ_WITHIN_S = 1.0
_LAST_WORD_WITHIN_S = 0.5
_MAX_ENTERED = 4096
_STORE = "the store, which rank 0 or the launcher hosts"


class Watchdog:
    """The watchdog thread of one rank and its state; see `watch`."""

    def __init__(self, world: ProcessGroup, store: Any, connection: Any) -> None:
        self._world = weakref.ref(world)
        self._rank, self._world_size = dist.get_rank(world), dist.get_world_size(world)
        self._period = max(_BEAT_S, self._world_size / _MAX_BEATS_PER_S)
        self._store = connection
        connection.set_timeout(datetime.timedelta(seconds=_STORE_TIMEOUT_S))
        self._prefix = _name_of_group(store, self._rank)
        self._training: Callable[[], Training | None] = lambda: None
        self._thread_id = threading.get_ident()
        self._wake, self._has_report = threading.Event(), threading.Event()
        self._final: Place | None = None  # a collective has failed, or the process ends
        self._reports_until = 0.0
        self._places: dict[int, Place] = {}
        self._silent: dict[int, str] = {}  # why there is no place of these ranks
        self._raised: tuple[Hashable, str] = None, ""
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
        if self._final is None:
            self._reports_until = time.monotonic() + self._silent_after + _OTHERS_READ_WITHIN_S + _LATE_S
            self._final = replace(self._own_place(), is_final=True)
            self._wake.set()
        self._has_report.wait(max(0.0, self._reports_until - time.monotonic()))
        places = {**self._places, self._rank: self._final}
        difference = first_difference({rank: [place] for rank, place in places.items()})
        text = f"A collective failed on rank {self._rank}: {_first_line(error)}\n{self._describe(places)}"
        if difference:
            return RanksDisagreeError(f"{text}\n{difference} Every rank must run the same units in the same order.")
        cure = "End this process and restart all ranks from the last checkpoint."
        return CollectiveFailedError(f"{text}\n{_different_calls(places.values())}{cure}")

    @property
    def has_failed(self) -> bool:
        """Whether a collective has failed."""
        return self._final is not None and not self._final.has_ended

    def leave(self, error: BaseException | None) -> None:
        """Publish that this rank's process ends, with ``error`` if any, because other ranks may wait for it."""
        if not self._thread.is_alive() or self._final is not None:
            return
        how = "its process has ended" + (f" by {type(error).__name__}: {_first_line(error)}," if error else "")
        place = self._own_place(False)
        self._final = replace(place, text=f"gone: {how} {place.text}", is_final=True, has_ended=True)
        self._wake.set()
        self._thread.join(_LAST_WORD_WITHIN_S)

    @property
    def _silent_after(self) -> float:
        return 2 * self._period + _LATE_S

    def _own_place(self, with_line: bool = True) -> Place:
        training = self._training()
        place = Place("not training") if training is None else training.place()
        text, call = place.text, ""
        if with_line:
            line = line_of(self._thread_id)
            call = "" if text.startswith("in ") else line.call  # in a pass, the model's own line is enough
            text += f", in `{call}`{line.where}" if call else line.where
            text += "".join(f", with {task} in the background" for task in background())
            if training is not None and training.progress() == self._raised[0]:
                text += self._raised[1]
        return replace(place, text=text, entered=place.entered[:_MAX_ENTERED], call=call)

    # ---- on the thread

    def _serve(self) -> None:
        beat = 0
        try:
            while not self._is_over():
                place = self._final or self._own_place()
                beat += 1
                self._store.set(self._key(self._rank), json.dumps({"beat": beat, **asdict(place)}))
                if place.is_final:
                    if not place.has_ended:
                        self._find_others()
                    return
                self._wake.wait(self._period)
        except Exception:  # the store's owner is gone; the type depends on its backend
            return
        finally:
            self._has_report.set()

    def _is_over(self) -> bool:
        world = self._world()
        return world is None or dist.group.WORLD is not world

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/place/{rank}"

    def _find_others(self) -> None:
        """Read the positions of the other ranks twice, to see whose beat moves."""
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        waiting, slowest = self._read(dict.fromkeys(others, 0))
        until = time.monotonic() + self._silent_after
        while waiting and time.monotonic() < until:
            time.sleep(self._period / 4)
            waiting, longest = self._read(waiting)
            slowest = max(slowest, longest)
        for rank, beat in waiting.items():
            if slowest > _SLOW_S:
                self._silent[rank] = f"unknown: {_STORE}, is slow, and its answer may be late"
            elif beat:
                self._silent[rank] = "silent: its process has ended or is stopped"
            else:
                self._silent[rank] = "silent: it has not called fairshard yet, or its process has ended"
        self._let_others_read()

    def _read(self, waiting: dict[int, int]) -> tuple[dict[int, int], float]:
        """Read the positions of ranks ``waiting``, whose beat was as given.

        Returns the ranks still to wait for, and the longest time in seconds that the store took for one message.
        """
        left: dict[int, int] = {}
        slowest = 0.0
        for rank, before in waiting.items():
            began = time.monotonic()
            is_there = self._store.check([self._key(rank)])
            slowest = max(slowest, time.monotonic() - began)
            entry: dict[str, Any] = json.loads(self._store.get(self._key(rank))) if is_there else {"beat": 0}
            beat = entry.pop("beat")
            if beat > before > 0 or (beat and entry["is_final"]):
                self._places[rank] = Place(**{**entry, "entered": tuple(entry["entered"])})
            else:
                left[rank] = beat
        return left, slowest

    def _let_others_read(self) -> None:
        """Rank 0 may own the store, and its process may end with this error: wait until the others have read."""
        self._store.set(f"{self._prefix}/read/{self._rank}", "")
        others = [rank for rank, place in self._places.items() if not place.has_ended]
        until = time.monotonic() + (_OTHERS_READ_WITHIN_S if self._rank == 0 else 0)
        while others and time.monotonic() < until:
            others = [rank for rank in others if not self._store.check([f"{self._prefix}/read/{rank}"])]
            time.sleep(0.02)

    def _describe(self, places: dict[int, Place]) -> str:
        by_text: dict[str, list[int]] = {}
        lost = f"unknown: {_STORE}, does not answer"
        for rank in range(self._world_size):
            text = places[rank].text if rank in places else self._silent.get(rank, lost)
            by_text.setdefault(text, []).append(rank)
        return "\n".join(f"  {_ranks(ranks)}: {text}" for text, ranks in by_text.items())


def watch(training: Training | None = None) -> None:
    """Start this rank's watchdog, unless it runs; from now on it reports the position of ``training``, if given.

    No watchdog runs for a single rank, for ranks that are threads, or if the store allows no second connection. Not
    collective; a rank without a watchdog cannot tell others where it is, so all that wraps, trains or saves starts it.
    """
    world = dist.group.WORLD if dist.is_available() else None
    if world is None:
        return
    if world not in observers:
        if dist.get_world_size(world) == 1 or dist.get_backend(world) in ("fake", "threaded"):
            return
        store = distributed_c10d._get_default_store()
        connection = _second_connection(store)
        if connection is None:
            return
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
        observers[world] = Watchdog(world, store, connection)
    own = observers[world]
    if training is not None and isinstance(own, Watchdog):
        own.follow(training)


def has_failed() -> bool:
    """Whether a collective of the default group, or of a group made from it, has failed in this process."""
    own = observer()
    return isinstance(own, Watchdog) and own.has_failed


def _at_exit() -> None:
    own = observer()
    if isinstance(own, Watchdog):
        with contextlib.suppress(Exception):
            own.leave(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))


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


def _different_calls(places: Iterable[Place]) -> str:
    """Which calls all ranks must make, if only some are in them; empty otherwise."""
    calls = {place.call for place in places}
    named = sorted(calls - {""}) if len(calls) > 1 else []
    return "".join(f"`{call}` is collective: every rank must call it, in the same order. " for call in named)


def _ranks(ranks: list[int]) -> str:
    """``rank 1`` or ``ranks 0, 2-4``."""
    breaks = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(ranks)) if b != a + 1), len(ranks)]
    runs = [ranks[start:stop] for start, stop in pairwise(breaks)]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


def _first_line(error: BaseException | None) -> str:
    return str(error).strip().partition("\n")[0]
