"""Planning a backward: what this rank reaches, what all ranks agree on, and the schedule that follows from it.

Most backwards are like the previous one. So the schedule and what depends on the calls alone (`Known`) are kept for
the next backward; checking whether they still apply takes no Python call per unit.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any
from weakref import ref

import numpy as np

from fairshard.engine.exchange import ASSUMED, DIFFERENT, PROBLEM, Peers, agree_on
from fairshard.engine.record import Pass, Sight
from fairshard.engine.schedule import CallPlace, Schedule, UnitRule, build
from fairshard.engine.unit import Unit
from fairshard.errors import FairshardError
from fairshard.params.flat_param import FlatParam
from fairshard.params.rule import BackwardPrefetch
from fairshard.utils.autograd import reaches
from fairshard.utils.collectives import Communicator

_NUMBER = attrgetter("number")
_MAX_KEPT = 4  # kinds of backwards that take turns, as in a GAN


def holds_for_all(unit: Unit) -> bool:
    """Whether ``unit`` is gathered, which all ranks know.

    With one rank a gather costs nothing, and ranks that hold replicas of it may differ.
    """
    return unit.is_gathered and unit.comm.world_size > 1


@dataclass(eq=False)
class Known:
    """What follows from the calls of the passes that await a backward, and the schedule of the last backward of them.

    Attributes:
        key: the calls, and everything else that the next attributes were built from; keeps no model alive.
        places: the place of each call.
        events: as in `Pass.events`, but numbered across all passes, and without calls of units without elements: these
            may differ between ranks, and are in no schedule.
        peers: the groups of ranks that the calls concern.
        schedule: the schedule; ``inputs``: what it was built from besides.
    """

    key: Any
    places: list[CallPlace] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    peers: list[Peers] = field(default_factory=list)
    schedule: Schedule = field(default_factory=Schedule)
    inputs: Any = None


class Plan:
    """A backward of ``passes``, which has reached the model ``first``: what this rank reaches, then what all agree on.

    Attributes:
        roots: the models that the passes go through, and the first.
        ended: passes that no other backward reaches before this one is over, and afterwards only those of ``passes``.
        calls: the recorded calls, in the order of their numbers in the schedule.
        units: those of the models; ``number``: the number of each in the schedule, its position.
        leaves: each flat param, its unit, and its part of `answers`.
        known: what is kept of a backward with the same calls.
        own: for each call, whether this rank reaches it.
        answers: a byte of 0 or 1 for each parameter: whether it has a gradient to send; then for each call: whether
            this backward reaches it. Those of this rank, after `agree` of any.
        flags: those of `exchange`, as well.
        segments: the checkpoints that this rank runs again.
        unseen: units that it reaches, but not through hooks.
        schedule: the list of all communication; ``listed``: the units in it; like those below set by `conclude`.
        stops: the places in the schedule of the marks that this rank's autograd has to pass.
        reached: the models that the backward of any rank reaches, and ``first``, which comes first.
    """

    def __init__(
        self, passes: Sequence[Pass[Unit]], kept: Sequence[Pass[Unit]], first: Any, is_restricted: bool,
        begin: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.roots, self.passes, self._first = roots_of(passes, first), passes, first
        self.ended = passes
        self._problem = self._begin(begin)
        self.calls = [call for one in passes for call in one.calls]
        for index, call in enumerate(self.calls):
            call.index = index
        self.units = [unit for root in self.roots for unit in root.units]
        self.number = {unit: index for index, unit in enumerate(self.units)}
        self.leaves: list[tuple[Unit, FlatParam, slice]] = []
        self.answers = bytearray()
        for unit in self.units:
            for flat_param in unit.flat_params:
                start = len(self.answers)
                self.answers += flat_param.reach()
                self.leaves.append((unit, flat_param, slice(start, len(self.answers))))
        self._num_leaves = len(self.answers)
        self.known = self._known_of(self.roots[0].kept, any(root.is_common for root in roots_of(kept, first)))
        self.own = bytearray(len(self.calls))
        self.unseen: set[Unit] = set()
        self.segments: set[int] = set()
        self.flags = self._answer(is_restricted)
        self.answers += self.own

    def _begin(self, begin: Callable[[], None]) -> Exception | None:
        """Read what users have set; returns why this rank cannot begin, if so."""
        try:
            begin()
            for unit in (unit for root in self.roots for unit in root.units):
                unit.read_settings()
        except Exception as error:
            return error
        return None

    def agree(self) -> bool:
        """Make `answers` those of all ranks; returns whether these have run the same. **Collective.**

        Raises:
            FairshardError: on every rank, if any has a problem.
        """
        peers, problem = self.known.peers, self._problem
        flags = self.flags | (PROBLEM if problem is not None else 0)
        self.flags = agree_on(self.answers, flags, peers, list(map(self._digest, peers)))
        if self.flags & PROBLEM and not self.flags & DIFFERENT:
            texts = [text for one in peers for text in one.comm.gather_objects("" if problem is None else str(problem))]
            others = next((text for text in texts if text), "see its log")
            raise problem or FairshardError(f"The backward could not begin on another rank: {others}")
        return not self.flags & DIFFERENT

    def reached_passes(self, kept: Sequence[Pass[Unit]]) -> list[Pass[Unit]]:
        """Those of ``kept`` that any rank's backward reaches, after `agree` has found a difference. **Collective.**

        In all others ranks may differ: some have collected the garbage of a model, or have dropped one that raised.
        """
        keys = [(one.calls[0].unit.root.number, one.number) for one in self.passes]
        listed = [~event for event in self.known.events if event < 0]
        found = [keys[self.known.places[call].forward] for call in listed if self.own[call]]
        for peers in self.known.peers:
            found = [key for keys_of_rank in peers.comm.gather_objects(found) for key in keys_of_rank]
        return [one for one in kept if (one.calls[0].unit.root.number, one.number) in found]

    # ---- the calls

    def _known_of(self, kept: list[Known], exchanges: bool) -> Known:
        """What ``kept`` has of a backward with the same calls, or a new entry; ``exchanges``: ranks compare it."""
        segments = {-1: -1}  # by their numbers, which grow, to 0, 1, ...
        key = (
            [[ref(call.unit) for call in one.calls] for one in self.passes],
            [segments.setdefault(call.segment, len(segments) - 1) for call in self.calls],
            [one.events for one in self.passes],
            [one.is_common for one in self.passes],
            [ref(root) for root in self.roots],
            exchanges,
        )
        found = next((one for one in kept if one.key == key), None) or self._new_known(key, segments, exchanges)
        kept[:] = [found, *(one for one in kept if one is not found)][:_MAX_KEPT]
        return found

    def _new_known(self, key: Any, segments: dict[int, int], exchanges: bool) -> Known:
        made = Known(key)
        for forward, one in enumerate(self.passes):
            start = len(made.places)
            for call in one.calls:
                segment = segments[call.segment] if call.unit.has_shards else -1
                made.places.append(CallPlace(self.number[call.unit], forward, segment))
            for event in one.events:
                if one.calls[event if event >= 0 else ~event].unit.has_shards:
                    made.events.append(event + start if event >= 0 else event - start)
        comms = self._first.comms if exchanges else ()
        made.peers = [self._peers_of(comm, made) for comm in comms if comm.peers]
        return made

    def _peers_of(self, comm: Communicator, made: Known) -> Peers:
        talking = {self.number[unit] for unit in self.units if comm in (unit.comm, unit.replicas) and unit.has_shards}
        parts = [part for unit, _, part in self.leaves if self.number[unit] in talking]
        questions = [leaf for part in parts for leaf in range(part.start, part.stop)]
        numbers = [len(questions)]
        forwards: dict[int, int] = {}
        segments = {-1: -1}
        for event in made.events:
            call = event if event >= 0 else ~event
            unit, forward, segment = made.places[call]
            if unit in talking and self.passes[forward].is_common:
                if event >= 0:
                    questions.append(self._num_leaves + call)
                place = segments.setdefault(segment, len(segments))
                numbers += [unit if event >= 0 else ~unit, place, forwards.setdefault(forward, len(forwards))]
        return Peers(comm, np.array(questions, np.int64), _hash(numbers))

    def _digest(self, peers: Peers) -> int:
        """A hash of what must be the same on all ranks: the calls, ``no_sync``, and what observers know."""
        numbers = [peers.digest]
        for root in self.roots:
            numbers += [unit.sync for unit in root.units if peers.comm in (unit.comm, unit.replicas)]
            numbers += root.history(peers.comm)
        return _hash(numbers)

    # ---- what this rank reaches

    def _answer(self, is_restricted: bool) -> int:
        """Ask autograd which calls its running task reaches; returns the flags of the answers.

        A call is reached if its hooks or leaves show it, or if one inside of it is, because it computes something
        between its inner calls; one that cannot be seen, if that around it is; and all of a checkpoint that runs again.
        """
        own, calls, places, segments = self.own, self.calls, self.known.places, self.segments
        unsure = {unit for unit, one, part in self.leaves if one.line.numel and 0 in self.answers[part]}
        assumed: set[Unit] = set()  # units with a part of the graph that does not exist yet
        for index in range(len(calls) - 1, -1, -1):  # inner calls before those around them
            call = calls[index]
            hooks = None if call.hooks is None else call.hooks()
            if hooks is not None and hooks.is_reached(is_restricted):
                own[index] = 1
                if call.unit in unsure and hooks.makes_graphs():
                    assumed.add(call.unit)
            elif call.sight is Sight.LEAVES and any(map(reaches, call.unit.nodes)):
                own[index] = 1
                self.unseen.add(call.unit)
            if own[index]:
                segments |= {places[index].segment} - {-1}
                if call.around is not None:
                    own[call.around.index] = 1
        for index, call in enumerate(calls):
            segment, is_blind = places[index].segment, call.sight is Sight.LATER or call.segment >= 0
            if segment in segments or (is_blind and call.around is not None and own[call.around.index]):
                own[index] = 1
                segments |= {segment} - {-1}
            if own[index] and call.sight is Sight.LATER and call.unit in unsure:
                assumed.add(call.unit)
        for unit, flat_param, part in self.leaves:
            if unit in assumed and flat_param.line.numel:
                trained = bytes(node is not None for node in flat_param.nodes)
                self.answers[part] = map(max, self.answers[part], trained)
        return ASSUMED if assumed else 0

    # ---- what all reach

    def conclude(self, resident: bytes) -> None:
        """After `agree`: make the schedule, and tell flat params and bucketers what comes.

        ``resident``: see `agree_on_plan`.
        """
        number, known = self.number, self.known
        owed = bytearray(len(self.units))
        for unit, flat_param, part in self.leaves:
            flat_param.note_reached(self.answers[part])
            owed[number[unit]] |= 1 in self.answers[part]
        held = resident or bytes(map(holds_for_all, self.units))
        stays = [here or not unit.unshard_in_backward for here, unit in zip(held, self.units, strict=True)]
        reached = self.answers[self._num_leaves :]
        inputs = reached, stays, owed, list(map(self._rule, self.units))
        if known.inputs != inputs:
            known.schedule, known.inputs = build(known.events, known.places, *inputs), inputs
        self.schedule = schedule = known.schedule
        self.listed = {self.units[step.unit] for step in schedule.steps}
        marks = (*schedule.at.items(), *schedule.done.items())
        self.stops = {place for call, place in marks if self.own[call]}
        self.stops |= {schedule.recompute[segment] for segment in self.segments}
        roots = {self.calls[call].unit.root for call in schedule.at}
        self.reached = [self._first, *(root for root in self.roots if root in roots and root is not self._first)]
        sent = [self.units[unit] for unit in schedule.sends if self.units[unit].sync]
        for root in self.roots:
            flat_params = [each for unit in sent if unit.root is root for each in unit.flat_params]
            root.shared.bucketer.plan([one for one in flat_params if 1 in one.reached and one.comms.num_ranks > 1])
        for one in self.passes:
            one.was_reached = True

    def _rule(self, unit: Unit) -> UnitRule:
        number, prefetch = self.number, unit.rule.backward_prefetch
        ahead = unit.ahead_in_backward
        named = tuple(number[other] for other in ahead if other in number) if ahead else ()
        return UnitRule(
            unit.keeps.reshard_after_backward and unit.unshard_in_backward,
            unit.rule.keeps_across_passes or unit.keeps.reshard_after_forward,
            prefetch is BackwardPrefetch.BACKWARD_POST,
            named if named or prefetch is None else None,
        )

    def agree_on_leaves(self) -> bytearray:
        """Which parameters have received gradients on any rank, after the backward. **Collective.**"""
        found = bytearray()
        for _, flat_param, _ in self.leaves:
            found += flat_param.contributed
        found += bytes(len(self.answers) - len(found))
        agree_on(found, 0, self.known.peers, [0] * len(self.known.peers))
        return found


def agree_on_plan(
    passes: Sequence[Pass[Unit]],
    kept: Sequence[Pass[Unit]],
    first: Any,
    is_restricted: bool = False,
    resident: bytes = b"",
    begin: Callable[[], None] = lambda: None,
) -> Plan:
    """Plan a backward of ``passes``, which has reached the model ``first``, with the other ranks. **Collective.**

    ``kept``: also those that have ended on this rank, and that others may reach. ``is_restricted``: the backward
    computes only some gradients. ``resident``: for each unit, whether all ranks hold it gathered, if this one does not
    know. ``begin``: is called first, and may raise.

    Raises:
        RanksDisagreeError: on every rank, if they have run different things.
        FairshardError: on every rank, if any has a problem.
    """
    plan = Plan(passes, kept, first, is_restricted, begin)
    if plan.agree():
        plan.ended = kept
    else:
        plan = Plan(plan.reached_passes(kept), kept, first, is_restricted)
        if not plan.agree():
            raise plan.roots[0].difference()
    plan.conclude(resident)
    return plan


def roots_of(passes: Sequence[Pass[Unit]], first: Any) -> list[Any]:
    """The models that ``passes`` go through, and ``first``, in an order that is the same on all ranks."""
    return sorted({call.unit.root for one in passes for call in one.calls} | {first}, key=_NUMBER)


def _hash(numbers: Sequence[int]) -> int:
    return int.from_bytes(hashlib.blake2b(array("q", numbers).tobytes(), digest_size=8).digest(), "big", signed=True)
