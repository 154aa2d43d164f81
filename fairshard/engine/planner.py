"""Planning a backward: what this rank reaches, what all ranks agree on, and the schedule that follows from it.

Most backwards are like the previous one. So the schedule and what depends on the calls alone (`Calls`) are kept for
the next backward; checking whether they still apply takes no Python call per unit.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fairshard.engine.exec_order import Bracket, Pass, around
from fairshard.engine.model import Model
from fairshard.engine.notices import other_rank_error
from fairshard.engine.reach import Peers, Question, Reach, Verdict, agree_on
from fairshard.engine.schedule import ENDS, CallPlace, Schedule, UnitRule, build
from fairshard.engine.segments import find_recomputed
from fairshard.engine.unit import Unit
from fairshard.params.flat_param import FlatParam
from fairshard.utils.autograd import reaches, runs
from fairshard.utils.collectives import Communicator


@dataclass(eq=False)
class Calls:
    """The calls of the forwards that await a backward, and what follows from them.

    Attributes:
        key: everything that the other attributes were built from.
        places: the place of each call; calls of units without parameters are in no checkpoint.
        segment_of: for each call, the checkpoint that it is in; -1 if none.
        events: starts and ends of calls, as in `Pass.events`, but numbered across all forwards.
        empty: calls of units without parameters; they may differ between ranks, and are in no schedule.
        peers: the groups of ranks that the calls concern.
        digests: for each of ``peers``, the calls that concern it, as bytes.
    """

    key: Any
    places: list[CallPlace]
    segment_of: list[int]
    events: list[int]
    empty: set[int]
    peers: list[Peers]
    digests: list[bytes]


@dataclass
class Last:
    """A backward's calls and schedule, kept for the next one, with the inputs the schedule was built from."""

    calls: Calls | None = None
    schedule: Schedule = field(default_factory=Schedule)
    listed: frozenset[Unit] = frozenset()
    key: Any = None


class Planner:
    """The plan of one backward through ``models``, ordered by number.

    Attributes:
        mark: value of `Bracket.plan` for the calls of this backward.
        number: the number of each unit in `Schedule`.
        brackets: the calls, in the order of their numbers in `Schedule`.
        segment_of: for each call, the checkpoint that it is in; -1 if none.
        own_segments: the checkpoints that this rank recomputes.
        unannounced: calls that this rank's backward enters through an output of an inner call, not through their own.
        stops: for each step of the schedule, 1 if it is a mark that this rank's autograd has to pass.
        from_parts: for each unit, whether it is gathered from kept parts; see `KeptParts`.
        is_assumed: whether leaves count as reached that may turn out not to be; see `Reach`.
        sends: whether any gradient is sent or kept.
    """

    def __init__(self, models: Sequence[Model]) -> None:
        self._models = models
        self.units = [unit for model in models for unit in model.units]
        self.model_of = {unit: model for model in models for unit in model.units}
        self.number = {unit: number for number, unit in enumerate(self.units)}
        self.mark = object()
        self.schedule = Schedule()
        self.brackets: list[Bracket[Unit]] = []
        self.own_segments: set[int] = set()
        self.unannounced: list[int] = []
        self.segment_of: list[int] = []
        self.stops: Sequence[int] = ()
        self.listed: frozenset[Unit] = frozenset()
        self.from_parts: list[bool] = []
        self.is_assumed = self.sends = False
        self._is_partial: dict[Unit, bool] = {}  # True: the graph shows no path to some of its leaves
        self._peers: list[Peers] = []

    def plan(
        self, numbers: Sequence[int], problem: Exception | None, is_restricted: bool, is_final: bool
    ) -> frozenset[int]:
        """Agree with the other ranks and build the schedule, unless ranks reach different models.

        In that case, returns the numbers of all these models, otherwise an empty set. ``numbers``: of the models that
        this rank reaches. ``problem``: why this rank cannot begin. ``is_restricted``: the backward computes only some
        gradients. ``is_final``: all ranks are known to plan the same models.

        **Collective.**

        Raises:
            RanksDisagreeError: on every rank, if they have run different things.
            FairshardError: on every rank, if any has a problem.
        """
        passes = [one for model in self._models for one in model.record.passes]
        if len(self._models) > 1:
            passes.sort(key=lambda one: one.number)
        self.brackets = []
        lives = bytearray(len(passes))
        for forward, one in enumerate(passes):
            for bracket in one.brackets:
                if bracket.is_unseen and (bracket.index < 0 or is_final):
                    lives[forward] = 1  # nothing shows when an unseen call is dropped: it awaits one backward
                bracket.index, bracket.plan = len(self.brackets), self.mark
                self.brackets.append(bracket)
        calls = self._calls(passes)
        self._peers = calls.peers
        self.segment_of = calls.segment_of
        own = self._own_reach(calls, passes, lives, is_restricted)
        agreed = replace(own, **{name: bytearray(answers) for name, answers in vars(own).items()})
        hashes = [self._hash(*pair) for pair in zip(self._peers, calls.digests, strict=True)]
        verdict = agree_on(Question(agreed, self._peers, hashes, problem is not None, numbers, is_final))
        self._raise_for(verdict, problem)
        if verdict.is_open:
            return verdict.models
        self._make_schedule(calls, agreed)
        self.stops = self._own_marks(own)
        self.listed = self._models[0].last.listed
        self.is_assumed = 1 in agreed.assumed
        self.from_parts = [not no_part for no_part in agreed.no_part]
        for model in self._models:
            model.record.keep([one for one, lives in zip(passes, agreed.alive, strict=True) if lives])
            model.shared.bucketer.plan(self._bucketed(model))
        return frozenset()

    def take_entered(self, passed: int) -> list[Bracket[Unit]]:
        """Those of ``unannounced`` that begin up to the step ``passed`` and end after it; forgets all that begin."""
        at, done = self.schedule.at, self.schedule.done
        entered = [call for call in self.unannounced if at[call] <= passed]
        self.unannounced = [call for call in self.unannounced if at[call] > passed]
        return [self.brackets[call] for call in entered if passed < done[call]]

    # ---- the calls

    def _calls(self, passes: list[Pass[Unit]]) -> Calls:
        """`Calls` of ``passes``; reuses those of the last backward if nothing has changed."""
        key = (
            [[bracket.unit for bracket in one.brackets] for one in passes],
            [[bracket.segment for bracket in one.brackets] for one in passes],
            [one.events for one in passes],
            [one.is_common for one in passes],
            [model.is_common for model in self._models],
            self.units,
            [[one.number, one.jumps] for one in passes] if len(self._models) > 1 else None,
        )
        last: Last = self._models[0].last
        if last.calls is None or last.calls.key != key:
            last.calls = self._new_calls(key, passes)
        return last.calls

    def _new_calls(self, key: Any, passes: list[Pass[Unit]]) -> Calls:
        events: list[int] = []
        places: list[CallPlace] = []
        segment_of: list[int] = []
        num_segments = 0
        for forward, one in enumerate(passes):
            start = len(places)
            events += [event + start if event >= 0 else event - start for event in one.events]
            for bracket in one.brackets:
                segment = bracket.segment + num_segments if bracket.segment >= 0 else -1
                segment_of.append(segment)
                place = CallPlace(self.number[bracket.unit], forward, segment if bracket.unit.has_shards else -1)
                places.append(place)
            num_segments += len(one.starts)
        if len(self._models) > 1:  # a model may be called inside of another one
            moments = [moment for one in passes for moment in one.moments]
            events = [event for _, event in sorted(zip(moments, events, strict=True))]
        comms = [comm for model in self._models if model.is_common for comm in model.comms]
        comms = [comm for comm in dict.fromkeys(comms) if comm.world_size > 1 and comm.is_real]
        peers = [self._peers_of(comm, passes, places) for comm in comms]
        empty = {call for call, bracket in enumerate(self.brackets) if not bracket.unit.has_shards}
        digests = [self._digest(one, events, places) for one in peers]
        return Calls(key, places, segment_of, events, empty, peers, digests)

    def _peers_of(self, comm: Communicator, passes: list[Pass[Unit]], places: list[CallPlace]) -> Peers:
        talking = [comm in self.model_of[unit].comms_of[unit] and unit.has_shards for unit in self.units]
        is_common = [one.is_common for one in passes]
        calls = [call for call, place in enumerate(places) if talking[place.unit] and is_common[place.forward]]
        leaves: list[int] = []
        start = 0
        for unit, talks in zip(self.units, talking, strict=True):
            stop = start + sum(len(flat_param.slots) for flat_param in unit.flat_params)
            if talks:
                leaves += range(start, stop)
            start = stop
        alive = sorted({places[call].forward for call in calls})
        return Peers(comm, calls, alive, leaves, [number for number, talks in enumerate(talking) if talks])

    def _digest(self, peers: Peers, events: list[int], places: list[CallPlace]) -> bytes:
        """The calls that must be the same on all ranks, as bytes: units, checkpoints, forwards."""
        counted = set(peers.calls)
        numbers = [len(peers.units)]
        forwards: dict[int, int] = {}
        for event in events:
            call = event if event >= 0 else ~event
            if call in counted:
                place = places[call]
                forward = forwards.setdefault(place.forward, len(forwards))
                numbers += [place.unit if event >= 0 else ~place.unit, self.brackets[call].segment, forward]
        return array("q", numbers).tobytes()

    def _hash(self, peers: Peers, digest: bytes) -> int:
        """A hash of what must be the same on all ranks: calls, ``no_sync``, and the models' histories."""
        numbers: list[int] = [self.units[number].sync for number in peers.units]
        for model in self._models:
            numbers += model.history(peers.comm)
        content = digest + array("q", numbers).tobytes()
        return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "big")

    # ---- what this rank reaches

    def _own_reach(self, calls: Calls, passes: list[Pass[Unit]], lives: bytearray, is_restricted: bool) -> Reach:
        units = self.units
        own = Reach(alive=lives, assumed=bytearray(len(units)))
        own.reaches_inputs = bytearray([bracket.reaches_inputs for bracket in self.brackets])
        own.missing = bytearray([not (unit.is_gathered or unit.is_held) or unit.stamp is None for unit in units])
        own.no_part = bytearray([unit.parts is None or not unit.has_parts for unit in units])
        unsure: set[Unit] = set()
        for unit in units:
            for flat_param in unit.flat_params:
                which = flat_param.reach()
                if 0 in which:
                    unsure.add(unit)
                own.leaves += which
        reached = own.calls = bytearray(len(self.brackets))
        unseen = {bracket.unit for bracket in self.brackets if bracket.is_unseen}
        unseen = {unit for unit in unseen if any(map(reaches, unit.nodes))}
        for index, bracket in enumerate(self.brackets):
            call = None if bracket.call is None else bracket.call()
            node = None if bracket.node is None else bracket.node()
            if call is None and node is None:
                reached[index] = bracket.is_unseen and bracket.unit in unseen
                continue
            lives[calls.places[index].forward] = 1
            unit = bracket.unit
            if (call is not None and call.is_reached(is_restricted)) or (node is not None and runs(node)):
                reached[index] = 1
                if node is not None or (unit in unsure and self._is_unsure(unit, call)):
                    own.assumed[self.number[unit]] = 1
            elif bracket.is_unseen and unit in unseen:
                reached[index] = 1
        if 1 in own.assumed:
            self._assume(own)
        self.unannounced = []
        passed_by = [index for index, one in enumerate(reached) if not one and lives[calls.places[index].forward]]
        if 1 in reached and not calls.empty.issuperset(passed_by):
            self._reach_around(calls, own)
        self.own_segments = {segment for segment, mine in zip(self.segment_of, reached, strict=True) if mine} - {-1}
        if any(one.starts for one in passes):
            starts = [start for one in passes for start in one.starts]
            self.own_segments |= find_recomputed(self.brackets, calls.events, self.segment_of, starts, reached)
            for index, segment in enumerate(self.segment_of):
                reached[index] |= segment in self.own_segments
        for index in calls.empty:
            reached[index] = 0
        return own

    def _reach_around(self, calls: Calls, own: Reach) -> None:
        """Count a call as reached if the backward enters it through an output of an inner call, saved by a hook.

        A checkpoint announces its calls itself.
        """
        begins = bytearray(own.calls)
        for call in calls.empty:
            begins[call] = 0
        goes_on = [first and more for first, more in zip(begins, own.reaches_inputs, strict=True)]
        passed_through = around(calls.events, goes_on)
        for call in around(calls.events, begins):
            unit = self.brackets[call].unit
            if not own.calls[call] and (call in passed_through or any(map(reaches, unit.nodes))):
                own.calls[call] = 1
                if self.segment_of[call] < 0 and call not in calls.empty:
                    self.unannounced.append(call)

    def _is_unsure(self, unit: Unit, call: Any) -> bool:
        """Whether the backward of ``call`` may build a graph that uses leaves of ``unit`` that seem unreached."""
        if unit not in self._is_partial:
            self._is_partial[unit] = not all(map(reaches, unit.nodes))
        return self._is_partial[unit] and call.makes_graphs()

    def _assume(self, own: Reach) -> None:
        """Count the leaves of units inside reentrant checkpoints as reached, because their graph does not exist yet."""
        start = 0
        for unit, is_assumed in zip(self.units, own.assumed, strict=True):
            for flat_param in unit.flat_params:
                for index, node in enumerate(flat_param.nodes):
                    own.leaves[start + index] |= bool(is_assumed) and node is not None and flat_param.has_elements
                start += len(flat_param.slots)

    def _own_marks(self, own: Reach) -> bytearray:
        schedule = self.schedule
        stops = bytearray(len(schedule.steps))
        for marks in (schedule.at, schedule.done):
            for call, position in marks.items():
                stops[position] = own.calls[call]
        for segment, position in schedule.recompute.items():
            stops[position] = segment in self.own_segments
        return stops

    # ---- what follows

    def _raise_for(self, verdict: Verdict, problem: Exception | None) -> None:
        """Raise on every rank if ranks have run different things, or one has a problem. **Collective** in that case."""
        if not verdict.agree:
            for model in self._models:
                model.raise_difference()
        if verdict.has_problem:
            comms = [peers.comm for peers in self._peers]
            texts = [text for comm in comms for text in comm.gather_objects("" if problem is None else str(problem))]
            raise problem or other_rank_error([text for text in texts if text])

    def _make_schedule(self, calls: Calls, agreed: Reach) -> None:
        """Build the schedule, or reuse that of the last backward if nothing has changed."""
        owed = self._note_owed(agreed.leaves)
        rules = [  # all that `_rule` looks at
            (
                unit.unshard_in_backward,
                unit.reshard_after_backward,
                unit.reshard_after_forward,
                unit.sync,
                unit.prefetch.ahead_in_backward,
                unit.rule,
            )
            for unit in self.units
        ]
        key = calls, agreed.calls, agreed.reaches_inputs, agreed.missing, owed, rules
        last = self._models[0].last
        if last.key != key:
            resident = bytes(not missing for missing in agreed.missing)
            ruled = tuple(self._rule(unit) for unit in self.units)
            pairs = zip(agreed.calls, agreed.reaches_inputs, strict=True)
            reached = [call and (call if goes_on else ENDS) for call, goes_on in pairs]
            last.schedule = build(calls.events, calls.places, reached, resident, owed, ruled)
            last.listed = frozenset(self.units[step.unit] for step in last.schedule.steps)
            last.key = key
        self.schedule = last.schedule

    def _note_owed(self, leaves: bytearray) -> bytes:
        """Record in each flat param which parameters have gradients on any rank; returns which units have any."""
        self.sends = 1 in leaves
        if 0 not in leaves:
            for unit in self.units:
                for flat_param in unit.flat_params:
                    flat_param.note_reached(None)
            return bytes([bool(unit.flat_params) for unit in self.units])
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
        numbers = None if ahead is None else tuple(self.number[other] for other in ahead if other in self.number)
        frees_between = unit.rule.keeps_across_passes or not self.model_of[unit].keeps_after_forward(unit)
        return UnitRule(
            unit.unshard_in_backward, unit.frees_in_backward, frees_between, unit.prefetch.waits_for_grads, numbers
        )

    def agree_on_leaves(self) -> bytearray:
        """Which parameters have received gradients on any rank, after the backward. **Collective.**"""
        leaves = bytearray()
        for unit in self.units:
            for flat_param in unit.flat_params:
                leaves += flat_param.contributed
        none = bytearray(len(self.units))
        found = Reach(leaves=leaves, missing=none, no_part=bytearray(none), assumed=bytearray(none))
        peers = [replace(one, calls=(), alive=()) for one in self._peers]
        agree_on(Question(found, peers, [0] * len(peers), False, [self._models[0].number], is_final=True))
        return found.leaves

    def _bucketed(self, model: Model) -> list[FlatParam]:
        """The flat params of ``model`` whose gradients are summed over ranks in a bucket, in the order of sending."""
        sends = [self.units[number] for number in self.schedule.sends]
        return [
            flat_param
            for unit in sends
            if unit.sync and self.model_of[unit] is model
            for flat_param in unit.flat_params
            if flat_param.is_owed and flat_param.hook is None and flat_param.comms.num_ranks > 1
        ]
