"""Reports the position of every rank through the store when a collective fails.

Each rank has one thread beside its training, with its own connection to the store of the default group::

    rank 0   a collective fails ---- asks ---------------------- reads the answers, raises with all of them
    rank 1   stuck in a lock           `-> its thread answers -'
    rank 2   killed                        (silent)

The thread reads the store once a second at most while training makes progress, so it costs next to nothing there. The
ranks share nothing else: if the store is gone, with the rank or agent that hosted it, a rank reports only what it
knows. *Invariant*: a rank is called silent only if the store was quick all the time that its answer may take.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import json
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore
from torch.distributed import ProcessGroup, distributed_c10d

from fairshard.errors import CollectiveFailedError, FairshardError, RanksDisagreeError
from fairshard.utils.positions import Place, Training, background, first_difference, line_of

Args = ParamSpec("Args")
Result = TypeVar("Result")

_POLL_S = 0.4
_POLL_IN_PROGRESS_S = 1.0
_ANSWERS_WITHIN_S = 2.0
_SLOW_S = 0.25  # a store that takes as long for one answer is slow: answers of ranks take several
_LATE_ANSWERS_WITHIN_S = 2.0  # in addition, if the store is slow
_OTHERS_READ_WITHIN_S = 1.0
_REPORTS_WITHIN_S = 4.5
_LAST_WORD_WITHIN_S = 0.5
_MAX_ENTERED = 4096


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
        self._reports_until = 0.0
        self._is_lost = self._is_slow = False
        self._strangers: set[int] = set()  # ranks that have no watchdog
        self._last_word: Place | None = None
        self._raised: tuple[Hashable, str] = None, ""
        self._num_answered = 0
        self._places: dict[int, Place] = {}
        connection.set(f"{self._prefix}/here/{self._rank}", "")
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
            self._reports_until = time.monotonic() + _REPORTS_WITHIN_S
            self._is_asking = True
            self._places[self._rank] = self._own_place()
            self._wake.set()
        self._has_report.wait(max(0.0, self._reports_until - time.monotonic()))
        places = dict(self._places)
        difference = first_difference({rank: [place] for rank, place in places.items()})
        text = f"A collective failed on rank {self._rank}: {_first_line(error)}\n{self._describe(places)}"
        if difference:
            return RanksDisagreeError(f"{text}\n{difference} Every rank must run the same units in the same order.")
        cure = "End this process and restart all ranks from the last checkpoint."
        return CollectiveFailedError(f"{text}\n{_different_calls(places.values())}{cure}")

    @property
    def has_failed(self) -> bool:
        """Whether a collective has failed."""
        return self._is_asking

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
        before: Hashable = None
        last_read = 0.0
        try:
            while self._last_word is None and not self._is_over():
                self._wake.wait(_POLL_S)
                if self._is_asking:
                    self._ask()
                    return
                training = self._training()
                progress = None if training is None else training.progress()
                del training
                now = time.monotonic()
                if progress == before or now - last_read > _POLL_IN_PROGRESS_S:
                    last_read = now
                    if self._store.check([self._question(self._num_answered + 1)]):
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

    def _question(self, number: int) -> str:
        return f"{self._prefix}/asked/{number}"

    def _ask(self) -> None:
        began = time.monotonic()
        self._num_answered = self._store.add(f"{self._prefix}/asked", 1)
        self._store.set(self._question(self._num_answered), "")
        self._publish(replace(self._places[self._rank], is_final=True))
        now = time.monotonic()
        until, latest = now + _ANSWERS_WITHIN_S, began + _ANSWERS_WITHIN_S + _LATE_ANSWERS_WITHIN_S
        self._is_slow = until > latest
        while len(self._places) < self._world_size and now < min(until, latest):
            self._store.check([self._question(self._num_answered)])
            asked, now = now, time.monotonic()
            if now - asked > _SLOW_S:  # then answers are late, too
                until = now + _ANSWERS_WITHIN_S
            self._is_slow = until > latest
            self._read(self._num_answered)
            time.sleep(0.02)
            now = time.monotonic()
        self._read(0)
        for rank in range(self._world_size):
            if rank not in self._places and not self._store.check([f"{self._prefix}/here/{rank}"]):
                self._strangers.add(rank)
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
            elif self._is_slow:
                text = "unknown: the store, which rank 0 or the launcher hosts, is slow, and its answer may be late"
            elif rank in self._strangers:
                text = "silent: it has not called fairshard yet, or its process has ended"
            else:
                text = "silent: its process has ended or is stopped"
            by_text.setdefault(text, []).append(rank)
        return "\n".join(f"  {_ranks(ranks)}: {text}" for text, ranks in by_text.items())



_watchdogs: weakref.WeakKeyDictionary[ProcessGroup, Watchdog] = weakref.WeakKeyDictionary()


def watch(training: Training | None = None) -> None:
    """Start this rank's watchdog, unless it runs; from now on it reports the position of ``training``, if given.

    No watchdog runs for a single rank, for ranks that are threads, or if the store allows no second connection. Not
    collective; a rank without a watchdog cannot tell others where it is, so everything that communicates starts it.
    """
    world = dist.group.WORLD if dist.is_available() else None
    if world is None:
        return
    if world not in _watchdogs:
        if dist.get_world_size(world) == 1 or dist.get_backend(world) in ("fake", "threaded"):
            return
        store = distributed_c10d._get_default_store()
        connection = _second_connection(store)
        if connection is None:
            return
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
        _watchdogs[world] = Watchdog(world, store, connection)
    if training is not None:
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
    watchdog = _current()
    if watchdog is None:
        return CollectiveFailedError(f"A collective failed: {error}")
    return watchdog.explain(error)


def has_failed() -> bool:
    """Whether a collective of the default group, or of a group made from it, has failed in this process."""
    watchdog = _current()
    return watchdog is not None and watchdog.has_failed


def _current() -> Watchdog | None:
    world = dist.group.WORLD if dist.is_available() else None
    return None if world is None else _watchdogs.get(world)


def reported(error: FairshardError) -> FairshardError:
    """``error``, which this rank may raise alone: ranks that wait for it until a collective fails then name it."""
    watchdog = _current()
    if watchdog is not None:
        watchdog.note_raised(error)
    return error


def explained(collective: Callable[Args, Result]) -> Callable[Args, Result]:
    """Decorate a ``collective``, or what starts one: its failures are raised through `explain`."""

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
