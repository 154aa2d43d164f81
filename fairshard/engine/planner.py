"""Planning a backward: what this rank reaches, what all ranks agree on, and the schedule that follows from it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from fairshard.engine.exec_order import Bracket, Pass
from fairshard.engine.model import Model
from fairshard.engine.notices import other_rank_error
from fairshard.engine.reach import Peers, Question, Reach, Verdict, agree_on
from fairshard.engine.schedule import CallPlace, Schedule, UnitRule, build
from fairshard.engine.unit import Unit
from fairshard.params.flat_param import FlatParam
from fairshard.utils.autograd import reaches
from fairshard.utils.collectives import Communicator


class Planner:
    """The plan of one backward through ``models``, ordered by number.

    Attributes:
        number: the place of each of ``units``, as `Schedule` counts them.
        brackets: the calls, as `Schedule` counts them.
        is_own: for each call, whether this rank's autograd reaches it, or another one in the same checkpoint.
        segment_of: for each call, the checkpoint that it is in.
        own_segments: the checkpoints that it recomputes.
        from_parts: for each unit, whether it is gathered from parts that few ranks have kept.
        is_assumed: whether some leaves count as reached that may not be; see `Reach`.
        sends: whether any gradient is sent or kept.
    """

    def __init__(self, models: Sequence[Model]) -> None:
        self._models = models
        self.units = [unit for model in models for unit in model.units]
        self.model_of = {unit: model for model in models for unit in model.units}
        self.number = {unit: number for number, unit in enumerate(self.units)}
        self.schedule = Schedule()
        self.brackets: list[Bracket[Unit]] = []
        self.is_own: Sequence[int] = ()
        self.own_segments: set[int] = set()
        self.segment_of: list[int] = []
        self.listed: set[Unit] = set()
        self.from_parts: list[bool] = []
        self.is_assumed = self.sends = False
        self._is_partial: dict[Unit, bool] = {}  # some of its leaves are not reached, as far as the graph shows
        self._peers: list[Peers] = []

    def plan(self, numbers: Sequence[int], problem: Exception | None, is_final: bool) -> frozenset[int]:
        """Agree and make the schedule, unless other ranks reach other models; returns those that any reaches.

        ``numbers``: those of the models that this rank reaches. ``problem``: why this rank cannot begin.

        **Collective.**

        Raises:
            RanksDisagreeError: on every rank, if they have run different things.
            FairshardError: on every rank, if any has a problem.
        """
        passes = [one for model in self._models for one in model.record.passes]
        passes.sort(key=lambda one: one.number)
        self.brackets = [bracket for one in passes for bracket in one.brackets]
        events: list[int] = []
        places: list[CallPlace] = []
        num_segments = 0
        lives = bytearray(len(passes))  # an unseen call, whose end nothing shows, awaits one backward
        for forward, one in enumerate(passes):
            start = len(places)
            events += [event + start if event >= 0 else event - start for event in one.events]
            last = -1
            for bracket in one.brackets:
                lives[forward] |= bracket.is_unseen and (bracket.index < 0 or is_final)
                bracket.index = len(places)
                last = max(last, bracket.segment)
                segment = bracket.segment + num_segments if bracket.segment >= 0 else -1
                places.append(CallPlace(self.number[bracket.unit], forward, segment))
            num_segments += last + 1
        if len(self._models) > 1:  # a model may be called inside of another one
            moments = [moment for one in passes for moment in one.moments]
            events = [event for _, event in sorted(zip(moments, events, strict=True))]
        own = self._own_reach(passes, lives)
        self.own_segments = {place.segment for place, mine in zip(places, own.calls, strict=True) if mine} - {-1}
        self.segment_of = [place.segment for place in places]
        self.is_own = bytes(
            mine or segment in self.own_segments for segment, mine in zip(self.segment_of, own.calls, strict=True)
        )
        agreed = deepcopy(own)
        self._peers = self._all_peers(passes, places)
        hashes = [self._hash(one, events, places) for one in self._peers]
        verdict = agree_on(Question(agreed, self._peers, hashes, problem is not None, numbers, is_final))
        self._raise_for(verdict, problem)
        if len(verdict.models) > 1 and not is_final:
            return verdict.models
        owed = self._note_owed(agreed.leaves)
        rules = tuple(self._rule(unit) for unit in self.units)
        self.schedule = self._built(events, places, agreed, owed, rules)
        self.listed = {self.units[step.unit] for step in self.schedule.steps}
        self.is_assumed = any(agreed.assumed)
        self.from_parts = [not uncut for uncut in agreed.uncut]
        for model in self._models:
            model.record.keep([one for one, lives in zip(passes, agreed.alive, strict=True) if lives])
            sends = [self.units[number] for number in self.schedule.sends]
            model.shared.bucketer.plan(_bucketed(unit for unit in sends if self.model_of[unit] is model))
        return verdict.models

    def _built(
        self,
        events: list[int],
        places: list[CallPlace],
        agreed: Reach,
        owed: bytes,
        rules: tuple[UnitRule, ...],
    ) -> Schedule:
        """The schedule; that of the last backward where nothing has changed."""
        model = self._models[0]
        resident = bytes(not missing for missing in agreed.missing)
        key = (tuple(events), tuple(places), bytes(agreed.calls), resident, owed, rules)
        if model.last_schedule is None or model.last_schedule[0] != key:
            model.last_schedule = key, build(events, places, agreed.calls, resident, owed, rules)
        schedule: Schedule = model.last_schedule[1]
        return schedule

    def _own_reach(self, passes: list[Pass[Unit]], lives: bytearray) -> Reach:
        own = Reach(alive=lives)
        unsure: set[Unit] = set()
        for unit in self.units:
            for flat_param in unit.flat_params:
                which = flat_param.reach()
                if 0 in which:
                    unsure.add(unit)
                own.leaves += which
            own.missing.append(not unit.is_resident)
            own.uncut.append(not unit.has_parts)
            own.assumed.append(0)
        unseen = {bracket.unit for bracket in self.brackets if bracket.is_unseen}
        reached = {unit for unit in unseen if any(map(reaches, unit.nodes))}
        for forward, one in enumerate(passes):
            for bracket in one.brackets:
                call = None if bracket.call is None else bracket.call()
                node = None if bracket.node is None else bracket.node()
                lives[forward] |= call is not None or node is not None
                is_reached = (call is not None and call.is_reached()) or (node is not None and reaches(node))
                own.calls.append(is_reached or (bracket.is_unseen and bracket.unit in reached))
                unit = bracket.unit
                if is_reached and (node is not None or (unit in unsure and self._is_unsure(unit, call))):
                    own.assumed[self.number[bracket.unit]] = 1
        if any(own.assumed):
            self._assume(own)
        return own

    def _is_unsure(self, unit: Unit, call: Any) -> bool:
        """Whether leaves of ``unit`` that seem unreached may be used in a graph that ``call`` is yet to make."""
        if unit not in self._is_partial:
            self._is_partial[unit] = not all(map(reaches, unit.nodes))
        return self._is_partial[unit] and call.makes_graphs()

    def _assume(self, own: Reach) -> None:
        """Count the leaves of units inside reentrant checkpoints as reached: their graph is yet to be made."""
        start = 0
        for unit, is_assumed in zip(self.units, own.assumed, strict=True):
            for flat_param in unit.flat_params:
                for index, node in enumerate(flat_param.nodes):
                    own.leaves[start + index] |= bool(is_assumed) and node is not None and flat_param.shard_numel > 0
                start += len(flat_param.slots)

    def _raise_for(self, verdict: Verdict, problem: Exception | None) -> None:
        """Raise on every rank where they have run different things, or one has a problem. **Collective** then."""
        if not verdict.agree:
            for model in self._models:
                model.differ()
        if verdict.has_problem:
            comms = [peers.comm for peers in self._peers]
            told = [text for comm in comms for text in comm.gather_objects("" if problem is None else str(problem))]
            raise problem or other_rank_error([text for text in told if text])

    def _all_peers(self, passes: list[Pass[Unit]], places: list[CallPlace]) -> list[Peers]:
        comms = [comm for model in self._models if model.is_common for comm in model.comms]
        comms = [comm for comm in dict.fromkeys(comms) if comm.world_size > 1 and comm.is_real]
        return [self._peers_of(comm, passes, places) for comm in comms]

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

    def _hash(self, peers: Peers, events: list[int], places: list[CallPlace]) -> int:
        """Of what all ranks must have done alike: calls, checkpoints, ``no_sync``, backwards that raised."""
        counted = set(peers.calls)
        numbers = [len(peers.units), *(self.units[number].sync for number in peers.units)]
        numbers += [model.num_interrupted for model in self._models]
        forwards: dict[int, int] = {}
        for event in events:
            call = event if event >= 0 else ~event
            if call in counted:
                place = places[call]
                forward = forwards.setdefault(place.forward, len(forwards))
                numbers += [place.unit if event >= 0 else ~place.unit, self.brackets[call].segment, forward]
        digest = hashlib.blake2b(array("q", numbers).tobytes(), digest_size=7).digest()
        return int.from_bytes(digest, "big")

    def _note_owed(self, leaves: bytearray) -> bytes:
        """Tell each flat param which of its parameters any rank has gradients of; returns which units have some."""
        owed = bytearray()
        start = 0
        for unit in self.units:
            before = start
            for flat_param in unit.flat_params:
                stop = start + len(flat_param.slots)
                flat_param.note_reached(leaves[start:stop])
                start = stop
            owed.append(any(leaves[before:start]))
        self.sends = any(owed)
        return bytes(owed)

    def _rule(self, unit: Unit) -> UnitRule:
        ahead = unit.prefetch.ahead_in_backward
        numbers = None if ahead is None else tuple(self.number[other] for other in ahead if other in self.number)
        frees_between = unit.config.late.keeps_across_passes or not self.model_of[unit].keeps_after_forward(unit)
        return UnitRule(
            unit.unshard_in_backward, unit.frees_in_backward, frees_between, unit.prefetch.waits_for_grads, numbers
        )

    def agree_on_leaves(self) -> bytearray:
        """Which parameters any rank had gradients of in the end. **Collective.**"""
        leaves = bytearray()
        for unit in self.units:
            for flat_param in unit.flat_params:
                leaves += flat_param.contributed
        none = bytearray(len(self.units))
        found = Reach(leaves=leaves, missing=none, uncut=bytearray(none), assumed=bytearray(none))
        peers = [replace(one, calls=(), alive=()) for one in self._peers]
        agree_on(Question(found, peers, [0] * len(peers), False, [self._models[0].number], is_final=True))
        return found.leaves


def _bucketed(units: Iterable[Unit]) -> list[FlatParam]:
    """The flat params of ``units`` whose gradients are summed over ranks in a bucket, in this order."""
    return [
        flat_param
        for unit in units
        if unit.sync
        for flat_param in unit.flat_params
        if flat_param.is_owed and flat_param.comms.num_ranks > 1 and flat_param.hook is None
    ]
