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

from fairshard.engine.exchange import ASSUMED, DIFFERENT, PROBLEM, Answers, Peers, agree_on
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
        events: as in `Pass.events`, but numbered across all passes.
        empty: calls of units without elements; they may differ between ranks, and are in no schedule.
        peers: the groups of ranks that the calls concern; ``digests``: for each, a hash of its calls: their units,
            checkpoints and forwards.
        schedule: the schedule; ``inputs``: what it was built from besides.
    """

    key: Any
    places: list[CallPlace] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    empty: set[int] = field(default_factory=set)
    peers: list[Peers] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    schedule: Schedule = field(default_factory=Schedule)
    inputs: Any = None


class Proposal:
    """What this rank knows of a backward of ``passes``, which has reached the model ``first``, before the ranks agree.

    Attributes:
        roots: the models that the passes go through, and the first.
        calls: the recorded calls, in the order of their numbers in the schedule.
        units: those of the models; ``number``: the number of each in the schedule, its position.
        leaves: each flat param, its unit, and its part of `Answers.leaves`.
        known: what is kept of a backward with the same calls.
        answers: what this rank reaches.
        segments: the checkpoints that this rank runs again.
        unseen: units that it reaches, but not through hooks.
    """

    def __init__(self, passes: Sequence[Pass[Unit]], first: Any, is_restricted: bool) -> None:
        self.roots, self.passes = roots_of(passes, first), passes
        self.calls = [call for one in passes for call in one.calls]
        for index, call in enumerate(self.calls):
            call.index = index
        self.units = [unit for root in self.roots for unit in root.units]
        self.number = {unit: index for index, unit in enumerate(self.units)}
        self.leaves: list[tuple[Unit, FlatParam, slice]] = []
        start = 0
        for unit in self.units:
            for flat_param in unit.flat_params:
                stop = start + len(flat_param.slots)
                self.leaves.append((unit, flat_param, slice(start, stop)))
                start = stop
        self.known = self._known_of(self.roots[0].kept)
        self.answers = Answers(bytearray(len(self.calls)), alive=bytearray([one.is_alive for one in passes]))
        self.unseen: set[Unit] = set()
        self.segments: set[int] = set()
        self._answer(is_restricted)

    def agree(self, problem: Exception | None) -> Answers | None:
        """What the ranks answer together; None if they differ in what they have run. **Collective.**

        ``problem``: why this rank cannot begin.

        Raises:
            FairshardError: on every rank, if any has a problem.
        """
        known, own = self.known, self.answers
        agreed = Answers(bytearray(own.calls), bytearray(own.leaves), bytearray(own.alive), own.flags)
        agreed.flags |= PROBLEM if problem is not None else 0
        agree_on(agreed, known.peers, list(map(self._digest, known.peers, known.digests)))
        if agreed.flags & DIFFERENT:
            return None
        if agreed.flags & PROBLEM:
            comms = [peers.comm for peers in known.peers]
            texts = [text for comm in comms for text in comm.gather_objects("" if problem is None else str(problem))]
            others = next((text for text in texts if text), "see its log")
            raise problem or FairshardError(f"The backward could not begin on another rank: {others}")
        return agreed

    def reached_passes(self) -> list[Pass[Unit]]:
        """The passes that the backward of any rank reaches, after `agree` has found a difference. **Collective.**

        In all others ranks may differ: some have collected the garbage of a model, or have dropped one that raised.
        """
        keys = [(one.calls[0].unit.root.number, one.number) for one in self.passes]
        places = zip(self.known.places, self.answers.calls, strict=True)
        found = [keys[place.forward] for place, is_reached in places if is_reached]
        for peers in self.known.peers:
            found = [key for keys_of_rank in peers.comm.gather_objects(found) for key in keys_of_rank]
        return [one for key, one in zip(keys, self.passes, strict=True) if key in found]

    # ---- the calls

    def _known_of(self, kept: list[Known]) -> Known:
        """What is kept of a backward with the same calls, or a new entry in ``kept``."""
        segments = {-1: -1}  # by their numbers, which grow, to 0, 1, ...
        key = (
            [[ref(call.unit) for call in one.calls] for one in self.passes],
            [segments.setdefault(call.segment, len(segments) - 1) for call in self.calls],
            [one.events for one in self.passes],
            [one.is_common for one in self.passes],
            [(ref(root), root.is_common) for root in self.roots],
        )
        found = next((one for one in kept if one.key == key), None) or self._new_known(key, segments)
        kept[:] = [found, *(one for one in kept if one is not found)][:_MAX_KEPT]
        return found

    def _new_known(self, key: Any, segments: dict[int, int]) -> Known:
        made = Known(key)
        for forward, one in enumerate(self.passes):
            start = len(made.places)
            made.events += [event + start if event >= 0 else event - start for event in one.events]
            for call in one.calls:
                is_empty = not call.unit.has_shards
                if is_empty:
                    made.empty.add(len(made.places))
                segment = -1 if is_empty else segments[call.segment]
                made.places.append(CallPlace(self.number[call.unit], forward, segment))
        comms = [comm for root in self.roots if root.is_common for comm in root.comms]
        comms = [comm for comm in dict.fromkeys(comms) if comm.peers]
        made.peers = [self._peers_of(comm, made) for comm in comms]
        made.digests = [self._digest_calls(one, made) for one in made.peers]
        return made

    def _peers_of(self, comm: Communicator, made: Known) -> Peers:
        talking = {unit for unit in self.units if comm in (unit.comm, unit.replicas) and unit.has_shards}
        common = [one.is_common for one in self.passes]
        places = enumerate(zip(self.calls, made.places, strict=True))
        calls = [index for index, (call, place) in places if call.unit in talking and common[place.forward]]
        leaves = [leaf for unit, _, part in self.leaves if unit in talking for leaf in range(part.start, part.stop)]
        return Peers(comm, calls, leaves, sorted({made.places[call].forward for call in calls}))

    @staticmethod
    def _digest_calls(peers: Peers, made: Known) -> int:
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

    def _digest(self, peers: Peers, calls: int) -> int:
        """A hash of what must be the same on all ranks: the ``calls``, ``no_sync``, and what observers know."""
        numbers = [calls]
        for root in self.roots:
            numbers += [unit.sync for unit in root.units if peers.comm in (unit.comm, unit.replicas)]
            numbers += root.history(peers.comm)
        return _hash(numbers)

    # ---- what this rank reaches

    def _answer(self, is_restricted: bool) -> None:
        """Ask autograd which calls and leaves its running task reaches.

        A call that cannot be seen answers as the one around it; one around a reached call is reached, because it
        computes something between its inner calls.
        """
        own, known, calls = self.answers, self.known, self.calls
        unsure: set[Unit] = set()
        for unit, flat_param, _ in self.leaves:
            which = flat_param.reach()
            if 0 in which:
                unsure.add(unit)
            own.leaves += which
        reached, lives = own.calls, own.alive
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
        self.segments.update({segment for segment, mine in zip(segment_of, reached, strict=True) if mine} - {-1})
        for index, call in enumerate(calls):
            if segment_of[index] in self.segments:
                reached[index] = 1
            if index in known.empty:
                reached[index] = 0
            elif reached[index] and call.sight is Sight.LATER and call.unit in unsure:
                assumed.add(call.unit)
        if assumed:
            own.flags = ASSUMED
            self._assume(assumed)

    def _assume(self, units: set[Unit]) -> None:
        """Count all leaves of ``units`` as reached, because their graph does not exist yet."""
        for unit, flat_param, part in self.leaves:
            if unit in units and flat_param.line.numel:
                trained = bytes(node is not None for node in flat_param.nodes)
                self.answers.leaves[part] = map(max, self.answers.leaves[part], trained)


class Plan:
    """What the ranks have agreed on for one backward, and the schedule that follows.

    Attributes:
        own: what this rank has proposed.
        agreed: what any rank reaches.
        alive: the passes that another backward may reach.
        schedule: the list of all communication; ``listed``: the units in it.
        stops: the places in the schedule of the marks that this rank's autograd has to pass.
        reached: the models that the backward of any rank reaches.
    """

    def __init__(self, own: Proposal, agreed: Answers, resident: bytes) -> None:
        self.own, self.agreed = own, agreed
        self.roots, self.units, self.calls = own.roots, own.units, own.calls
        self.alive = [one for one, lives in zip(own.passes, agreed.alive, strict=True) if lives]
        reached = {call.unit.root for call, is_reached in zip(self.calls, agreed.calls, strict=True) if is_reached}
        self.reached = [root for root in self.roots if root in reached]
        self.schedule = self._make_schedule(resident)
        self.listed = {self.units[step.unit] for step in self.schedule.steps}
        self.stops = self._own_marks()
        for root in self.roots:
            root.shared.bucketer.plan(self._bucketed(root))
        for one in own.passes:
            one.was_reached = True

    def _make_schedule(self, resident: bytes) -> Schedule:
        """Build the schedule, or reuse that of the last backward if nothing has changed."""
        owed, known, reached = self._note_owed(self.agreed.leaves), self.own.known, self.agreed.calls
        held = resident or bytes(map(holds_for_all, self.units))
        held = bytes(here or not unit.unshard_in_backward for here, unit in zip(held, self.units, strict=True))
        inputs = reached, held, owed, list(map(self._rule, self.units))
        if known.inputs != inputs:
            known.schedule, known.inputs = build(known.events, known.places, *inputs), inputs
        return known.schedule

    def _own_marks(self) -> set[int]:
        schedule, own = self.schedule, self.own.answers.calls
        marks = (*schedule.at.items(), *schedule.done.items())
        return {place for call, place in marks if own[call]} | {schedule.recompute[one] for one in self.own.segments}

    def _note_owed(self, leaves: bytearray) -> bytes:
        """Record in each flat param which parameters have gradients on any rank; returns which units have any."""
        owed = bytearray(len(self.units))
        for unit, flat_param, part in self.own.leaves:
            flat_param.note_reached(leaves[part])
            owed[self.own.number[unit]] |= 1 in leaves[part]
        return bytes(owed)

    def _rule(self, unit: Unit) -> UnitRule:
        number, prefetch = self.own.number, unit.rule.backward_prefetch
        named = tuple(number[other] for other in unit.ahead_in_backward if other in number)
        return UnitRule(
            unit.keeps.reshard_after_backward and unit.unshard_in_backward,
            unit.rule.keeps_across_passes or unit.keeps.reshard_after_forward,
            prefetch is BackwardPrefetch.BACKWARD_POST,
            named if named or prefetch is None else None,
        )

    def agree_on_leaves(self) -> bytearray:
        """Which parameters have received gradients on any rank, after the backward. **Collective.**"""
        found = Answers()
        for _, flat_param, _ in self.own.leaves:
            found.leaves += flat_param.contributed
        peers = [one._replace(calls=(), alive=()) for one in self.own.known.peers]
        agree_on(found, peers, [0] * len(peers))
        return found.leaves

    def _bucketed(self, root: Any) -> list[Any]:
        """The flat params of ``root`` whose gradients are summed over ranks in a bucket, in the order of sending."""
        return [
            flat_param
            for unit in map(self.units.__getitem__, self.schedule.sends)
            if unit.sync and unit.root is root
            for flat_param in unit.flat_params
            if 1 in flat_param.reached and flat_param.comms.num_ranks > 1
        ]


def agree_on_plan(
    passes: Sequence[Pass[Unit]],
    first: Any,
    is_restricted: bool = False,
    resident: bytes = b"",
    begin: Callable[[], None] | None = None,
) -> Plan:
    """Plan a backward of ``passes``, which has reached the model ``first``, with the other ranks. **Collective.**

    ``is_restricted``: the backward computes only some gradients. ``resident``: for each unit, whether all ranks hold it
    gathered, if this one does not know. ``begin``: is called first, and may raise.

    Raises:
        RanksDisagreeError: on every rank, if they have run different things.
        FairshardError: on every rank, if any has a problem.
    """
    problem = None
    try:
        if begin is not None:
            begin()
        for root in roots_of(passes, first):
            for unit in root.units:
                unit.read_settings()
    except Exception as error:
        problem = error
    own = Proposal(passes, first, is_restricted)
    agreed = own.agree(problem)
    if agreed is None:
        own = Proposal(own.reached_passes(), first, is_restricted)
        agreed = own.agree(problem)
    if agreed is None:
        raise own.roots[0].difference()
    return Plan(own, agreed, resident)


def roots_of(passes: Sequence[Pass[Unit]], first: Any) -> list[Any]:
    """The models that ``passes`` go through, and ``first``, in an order that is the same on all ranks."""
    return sorted({call.unit.root for one in passes for call in one.calls} | {first}, key=_NUMBER)


def _hash(numbers: Sequence[int]) -> int:
    return int.from_bytes(hashlib.blake2b(array("q", numbers).tobytes(), digest_size=8).digest(), "big", signed=True)
