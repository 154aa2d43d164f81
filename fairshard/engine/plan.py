"""Planning a backward: what this rank reaches, what all ranks agree on, and the schedule that follows from it.

Most backwards are like the previous one. So the schedule and what depends on the calls alone (`Calls`) are kept for
the next backward; checking whether they still apply takes no Python call per unit.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from fairshard.engine.exchange import ASSUMED, DIFFERENT, DOUBTFUL, PROBLEM, Answers, Peers, agree_on
from fairshard.engine.record import CallRecord, Pass, Sight
from fairshard.engine.schedule import CallPlace, Schedule, UnitRule, build
from fairshard.engine.unit import Unit
from fairshard.errors import FairshardError
from fairshard.utils.autograd import reaches
from fairshard.utils.collectives import Communicator

_MAX_KEPT = 4  # kinds of backwards that take turns, as in a GAN


def holds_for_all(unit: Unit) -> bool:
    """Whether ``unit`` is gathered, which all ranks know.

    With one rank a gather costs nothing, and ranks that hold replicas of it may differ.
    """
    return unit.is_gathered and unit.root.shards[unit] > 1


@dataclass(eq=False)
class Calls:
    """The calls of the passes that await a backward, and what follows from them alone.

    Attributes:
        key: everything that the other attributes were built from; keeps no model alive.
        places: the place of each call.
        events: as in `Pass.events`, but numbered across all passes.
        empty: calls of units without elements; they may differ between ranks, and are in no schedule.
        peers: the groups of ranks that the calls concern; ``digests``: for each, a hash of its calls.
    """

    key: Any
    places: list[CallPlace] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    empty: set[int] = field(default_factory=set)
    peers: list[Peers] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)


@dataclass
class Last:
    """A backward's calls and schedule, kept for the next one, with the inputs the schedule was built from."""

    calls: Calls
    schedule: Schedule = field(default_factory=Schedule)
    key: Any = None


class Plan:
    """The plan of one backward through ``passes`` of the models ``roots``.

    Attributes:
        calls: the recorded calls, in the order of their numbers in the schedule.
        units: those of the models; their positions are their numbers in the schedule.
        own: what this rank reaches.
        own_segments: the checkpoints that this rank runs again.
        stops: for each step of the schedule, 1 if it is a mark that this rank's autograd has to pass.
        listed: the units in the schedule.
        reached: the models that the backward of any rank reaches.
        is_assumed: whether leaves count as reached that may turn out not to be.
        sends: whether any gradient is sent or kept.
    """

    def __init__(self, roots: Sequence[Any], passes: Sequence[Pass[Unit]], kept: list[Last]) -> None:
        self._roots, self._passes, self._kept = roots, passes, kept
        self.calls = [call for one in passes for call in one.calls]
        for index, call in enumerate(self.calls):
            call.index = index
        self.units = [unit for root in roots for unit in root.units]
        self._known = self._known_calls()
        self.own, self.own_segments = Answers(), set[int]()
        self.schedule, self.listed = Schedule(), set[Unit]()
        self.stops: Sequence[int] = ()
        self.reached: list[Any] = []
        self.resident = b""  # for each unit, whether it is gathered on all ranks
        self.unseen: set[Unit] = set()  # units that it reaches, but not through hooks
        self.is_assumed = self.sends = False

    def segment_of(self, call: CallRecord[Unit]) -> int:
        """The number of the checkpoint that ``call`` is in; -1 if none."""
        return self._known.places[call.index].segment

    def agree(self, problem: Exception | None, is_restricted: bool, again: bool = False) -> list[Pass[Unit]] | None:
        """Agree with the other ranks, and build the schedule; returns the passes that another backward may reach.

        None if ranks differ in the calls, unless this is done ``again``: see `common`.

        ``problem``: why this rank cannot begin. ``is_restricted``: the backward computes only some gradients.

        **Collective.**

        Raises:
            RanksDisagreeError: on every rank, if they have run different things.
            FairshardError: on every rank, if any has a problem.
        """
        known = self._known
        self._answer(is_restricted)
        agreed = Answers(bytearray(self.own.calls), bytearray(self.own.leaves), bytearray(self.own.alive))
        histories = [self._history(one, self._roots) for one in known.peers]
        flags = (PROBLEM if problem is not None else 0) | (ASSUMED if self.is_assumed else 0)
        flags = agree_on(agreed, known.peers, [*zip(known.digests, histories, strict=True)], flags)
        reached = {call.unit.root for call, is_reached in zip(self.calls, agreed.calls, strict=True) if is_reached}
        self.reached = [root for root in self._roots if root in reached]
        differing = self._roots
        if flags & DOUBTFUL and not flags & (PROBLEM | DIFFERENT):  # what it does not reach may differ
            differing = self.reached
            histories = [self._history(one, self.reached) for one in known.peers]
            no_calls = [one._replace(calls=(), leaves=(), alive=()) for one in known.peers]
            doubts = agree_on(Answers(), no_calls, [(0, number) for number in histories], 0) & DOUBTFUL
            flags |= DIFFERENT if doubts else 0
        if flags & DIFFERENT and not (again or flags & PROBLEM):
            return None
        if flags & DIFFERENT:
            differing[0].raise_difference()
        if flags & PROBLEM:
            comms = [peers.comm for peers in known.peers]
            texts = [text for comm in comms for text in comm.gather_objects("" if problem is None else str(problem))]
            others = next((text for text in texts if text), "see its log")
            raise problem or FairshardError(f"The backward could not begin on another rank: {others}")
        self.is_assumed = bool(flags & ASSUMED)
        self._make_schedule(agreed)
        self.stops = self._own_marks()
        for root in self._roots:
            root.shared.bucketer.plan(self._bucketed(root))
        for one in self._passes:
            one.was_reached = True
        return [one for one, lives in zip(self._passes, agreed.alive, strict=True) if lives]

    def common(self) -> list[Pass[Unit]]:
        """The passes that a backward of some rank may reach. **Collective.**

        Passes that none can reach may differ: some ranks have collected the garbage of their model.
        """
        keys = [(one.calls[0].unit.root.number, one.number) for one in self._passes]
        alive = [key for key, lives in zip(keys, self.own.alive, strict=True) if lives]
        for peers in self._known.peers:
            alive = [key for found in peers.comm.gather_objects(alive) for key in found]
        return [one for key, one in zip(keys, self._passes, strict=True) if key in alive]

    # ---- the calls

    def _known_calls(self) -> Calls:
        """`Calls` of the passes; those of the last backward if nothing has changed."""
        key = (
            [[ref(call.unit) for call in one.calls] for one in self._passes],
            [[call.segment for call in one.calls] for one in self._passes],
            [one.events for one in self._passes],
            [one.is_common for one in self._passes],
            [(ref(root), root.is_common) for root in self._roots],
        )
        self._last = next((last for last in self._kept if last.calls.key == key), None) or Last(self._new_calls(key))
        self._kept[:] = [self._last, *(last for last in self._kept if last is not self._last)][:_MAX_KEPT]
        return self._last.calls

    def _new_calls(self, key: Any) -> Calls:
        made = Calls(key)
        number = {unit: index for index, unit in enumerate(self.units)}
        num_segments = 0
        for forward, one in enumerate(self._passes):
            start = len(made.places)
            made.events += [event + start if event >= 0 else event - start for event in one.events]
            for call in one.calls:
                is_empty = not call.unit.has_shards
                if is_empty:
                    made.empty.add(len(made.places))
                segment = call.segment + num_segments if call.segment >= 0 and not is_empty else -1
                made.places.append(CallPlace(number[call.unit], forward, segment))
            num_segments += one.num_segments
        comms = [comm for root in self._roots if root.is_common for comm in root.comms]
        comms = [comm for comm in dict.fromkeys(comms) if comm.peers]
        made.peers = [self._peers_of(comm, made) for comm in comms]
        made.digests = [self._digest(one, made) for one in made.peers]
        return made

    def _peers_of(self, comm: Communicator, made: Calls) -> Peers:
        talks = [comm in unit.root.comms_of[unit] and unit.has_shards for unit in self.units]
        common = [one.is_common for one in self._passes]
        calls = [call for call, place in enumerate(made.places) if talks[place.unit] and common[place.forward]]
        leaves: list[int] = []
        start = 0
        for unit, is_talking in zip(self.units, talks, strict=True):
            stop = start + sum(len(flat_param.slots) for flat_param in unit.flat_params)
            leaves += range(start, stop) if is_talking else ()
            start = stop
        return Peers(comm, calls, leaves, sorted({made.places[call].forward for call in calls}))

    @staticmethod
    def _digest(peers: Peers, made: Calls) -> int:
        """A hash of the calls, which must be the same on all ranks: units, checkpoints, forwards."""
        counted = set(peers.calls)
        numbers = [len(peers.leaves)]
        forwards: dict[int, int] = {}
        segments: dict[int, int] = {}
        for event in made.events:
            call = event if event >= 0 else ~event
            if call in counted:
                unit, forward, segment = made.places[call]
                place = segments.setdefault(segment, len(segments)) if segment >= 0 else -1
                numbers += [unit if event >= 0 else ~unit, place, forwards.setdefault(forward, len(forwards))]
        return _hash(numbers)

    @staticmethod
    def _history(peers: Peers, roots: Sequence[Any]) -> int:
        """A hash of what must be the same on all ranks besides the calls: ``no_sync``, and what observers know."""
        numbers: list[int] = []
        for root in roots:
            numbers += [unit.sync for unit in root.units if peers.comm in root.comms_of[unit]]
            numbers += root.history(peers.comm)
        return _hash(numbers)

    # ---- what this rank reaches

    def _answer(self, is_restricted: bool) -> None:
        """Ask autograd which calls and leaves its running task reaches.

        A call that cannot be seen answers as the one around it; one around a reached call is reached, because it
        computes something between its inner calls.
        """
        own, known, calls = self.own, self._known, self.calls
        unsure: set[Unit] = set()
        for unit in self.units:
            for flat_param in unit.flat_params:
                which = flat_param.reach()
                if 0 in which:
                    unsure.add(unit)
                own.leaves += which
        lives = own.alive = bytearray([one.is_alive for one in self._passes])
        reached = own.calls = bytearray(len(calls))
        assumed: set[Unit] = set()
        for index, call in enumerate(calls):
            hooks = None if call.hooks is None else call.hooks()
            if hooks is not None and hooks.is_reached(is_restricted):
                reached[index] = 1
                if call.unit in unsure and hooks.makes_graphs():
                    assumed.add(call.unit)
            elif (
                call.sight is Sight.LEAVES and lives[known.places[index].forward] and any(map(reaches, call.unit.nodes))
            ):
                reached[index] = 1
                self.unseen.add(call.unit)
        for index in range(len(calls) - 1, -1, -1):
            around = calls[index].around
            if reached[index] and around is not None:
                reached[around.index] = 1
        for index, call in enumerate(calls):
            around = call.around
            if around is not None and (call.sight is Sight.LATER or call.segment >= 0) and reached[around.index]:
                reached[index] = 1
        segment_of = [place.segment for place in known.places]
        self.own_segments = {segment for segment, mine in zip(segment_of, reached, strict=True) if mine} - {-1}
        for index, call in enumerate(calls):
            if segment_of[index] in self.own_segments:
                reached[index] = 1
            if index in known.empty:
                reached[index] = 0
            elif reached[index] and call.sight is Sight.LATER and call.unit in unsure:
                assumed.add(call.unit)
        if assumed:
            self.is_assumed = True
            self._assume(assumed)

    def _assume(self, units: set[Unit]) -> None:
        """Count all leaves of ``units`` as reached, because their graph does not exist yet."""
        start = 0
        for unit in self.units:
            for flat_param in unit.flat_params:
                if unit in units and flat_param.has_elements:
                    for index, node in enumerate(flat_param.nodes):
                        self.own.leaves[start + index] |= node is not None
                start += len(flat_param.slots)

    def _own_marks(self) -> bytearray:
        schedule = self.schedule
        stops = bytearray(len(schedule.steps))
        for marks in (schedule.at, schedule.done):
            for call, position in marks.items():
                stops[position] = self.own.calls[call]
        for segment, position in schedule.recompute.items():
            stops[position] = segment in self.own_segments
        return stops

    # ---- what follows

    def _make_schedule(self, agreed: Answers) -> None:
        """Build the schedule, or reuse that of the last backward if nothing has changed."""
        owed, last = self._note_owed(agreed.leaves), self._last
        rules = [  # all that `_rule` looks at
            (unit.unshard_in_backward, unit.rule, unit.keeps, unit.is_outermost, ahead and [*map(ref, ahead)])
            for unit in self.units
            for ahead in (unit.prefetch.ahead_in_backward,)
        ]
        resident = self.resident or bytes(map(holds_for_all, self.units))
        key = self._known, agreed.calls, resident, owed, rules
        if last.key != key:
            ruled = tuple(map(self._rule, self.units))
            last.schedule = build(self._known.events, self._known.places, agreed.calls, resident, owed, ruled)
            last.key = key
        self.schedule = last.schedule
        self.listed = {self.units[number] for number in self.schedule.units}

    def _note_owed(self, leaves: bytearray) -> bytes:
        """Record in each flat param which parameters have gradients on any rank; returns which units have any."""
        self.sends = 1 in leaves
        owed = bytearray()
        start = 0
        for unit in self.units:
            before = start
            for flat_param in unit.flat_params:
                stop = start + len(flat_param.slots)
                flat_param.note_reached(leaves[start:stop])
                start = stop
            owed.append(1 in leaves[before:start])
        return bytes(owed)

    def _rule(self, unit: Unit) -> UnitRule:
        ahead = unit.prefetch.ahead_in_backward
        number = {other: place for place, other in enumerate(self.units)} if ahead else {}
        numbers = None if ahead is None else tuple(number[other] for other in ahead if other in number)
        keeps = unit.is_outermost or not unit.keeps.reshard_after_forward
        return UnitRule(
            unit.unshard_in_backward,
            unit.keeps.reshard_after_backward,
            unit.rule.keeps_across_passes or not keeps,
            unit.prefetch.waits_for_grads,
            numbers,
        )

    def agree_on_leaves(self) -> bytearray:
        """Which parameters have received gradients on any rank, after the backward. **Collective.**"""
        found = Answers()
        for unit in self.units:
            for flat_param in unit.flat_params:
                found.leaves += flat_param.contributed
        peers = [one._replace(calls=(), alive=()) for one in self._known.peers]
        agree_on(found, peers, [(0, 0)] * len(peers), 0)
        return found.leaves

    def _bucketed(self, root: Any) -> list[Any]:
        """The flat params of ``root`` whose gradients are summed over ranks in a bucket, in the order of sending."""
        return [
            flat_param
            for unit in map(self.units.__getitem__, self.schedule.sends)
            if unit.sync and unit.root is root
            for flat_param in unit.flat_params
            if flat_param.is_owed and flat_param.hook is None and flat_param.comms.num_ranks > 1
        ]


def _hash(numbers: Sequence[int]) -> int:
    return int.from_bytes(hashlib.blake2b(array("q", numbers).tobytes(), digest_size=8).digest(), "big")
