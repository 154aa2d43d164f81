"""One backward: an object that is made when autograd reaches the first unit, walks the schedule, and is dropped.

Each rank walks the whole schedule in order. It stops before a mark that its own autograd has yet to pass; marks of
other ranks hold nothing up. What its own backward does not reach, a rank serves: its row of the gather, zeros in the
bucket::

    event of this rank                    the walk
    a call's outputs are reached          everything up to that AT, then what stands after it: the gathers
    a call's inputs are next              everything up to that DONE, then what stands after it: send, free
    a checkpoint runs a unit again        everything up to that RECOMPUTE, then the gathers of the whole segment
    the graph task ends                   everything that is left

Autograd runs the newest nodes first, so that every own mark before the event has passed too, whether or not a hook
told. Gradients that arrive after their unit was sent would break that: they raise.
"""

from __future__ import annotations

import hashlib
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, NoReturn, Protocol

import torch

from fairshard.engine.exec_order import Bracket, Pass, Record
from fairshard.engine.notices import create_graph_error, late_error, other_rank_error, unseen_error
from fairshard.engine.reach import Peers, Question, Reach, Verdict, agree_on
from fairshard.engine.schedule import CallPlace, Kind, Schedule, UnitRule, build
from fairshard.engine.shared import Shared
from fairshard.engine.training_state import TrainingState, assert_none_summoned
from fairshard.engine.unit import Unit
from fairshard.params.versions import check_unchanged
from fairshard.utils.autograd import at_end_of_task, reaches
from fairshard.utils.collectives import Communicator


class Model(Protocol):
    """A model that a backward goes through."""

    number: int
    units: list[Unit]
    shared: Shared
    comms: list[Communicator]
    comms_of: dict[Unit, set[Communicator | None]]
    record: Record[Unit]
    num_interrupted: int
    last_schedule: Any

    @property
    def is_common(self) -> bool:
        """Whether its backward needs all ranks."""

    def begin_backward(self, backward: Backward) -> None:
        """``backward`` goes through the model."""

    def keeps_after_forward(self, unit: Unit) -> bool:
        """Whether ``unit`` is to stay gathered from its forward to its backward."""

    def note(self, unit: Unit) -> None:
        """``unit`` is gathered or sent next."""

    def before_send(self, unit: Unit) -> None:
        """The gradients of ``unit`` leave."""

    def differ(self) -> NoReturn:
        """Raise: ranks have run different things. **Collective.**"""

    def end_backward(self, backward: Backward) -> None:
        """The backward is over."""

    def leave_backward(self) -> None:
        """It is over, and has reached no unit of the model."""


_MAX_ARRIVING = 1  # units whose gather this rank only serves, and that wait to be freed


class _Token:
    """Lives as long as the graph task that holds it."""


class Backward:
    """One backward through the units of ``models``, in the outermost graph task that reaches any of them.

    Attributes:
        sends: whether any gradient is sent or kept.
    """

    def __init__(self, first: Model, others: Callable[[], Sequence[Model]]) -> None:
        self._first = first
        self._others = others
        self.schedule = Schedule()
        self.sends = False
        self._brackets: list[Bracket[Unit]] = []
        self._cursor = 0
        self._passed = -1
        self._is_own: Sequence[int] = ()  # calls that this rank's autograd reaches
        self._own_segments: set[int] = set()
        self._recomputed: dict[int, int] = {}  # calls of each segment that have been recomputed
        self._arriving: deque[Unit] = deque()
        self._sent: set[Unit] = set()
        self._listed: set[Unit] = set()
        self._touched: set[Unit] = set()  # units some of whose leaves have gradients
        self._from_parts: list[bool] = []
        self._is_assumed = False
        self._is_partial: dict[Unit, bool] = {}  # some of its leaves are not reached, as far as the graph shows
        self._peers: list[Peers] = []
        self._used: set[Unit] = set()  # units that this rank computes with since they were gathered
        self._is_serving = False  # after an exception
        self._is_broken = False
        self._alive: weakref.ref[_Token] = lambda: None  # type: ignore[assignment]
        self._go_through([first])

    def _go_through(self, models: Sequence[Model]) -> None:
        self.models = sorted(models, key=lambda model: model.number)
        self.units = [unit for model in self.models for unit in model.units]
        self._model_of = {unit: model for model in self.models for unit in model.units}
        self._number = {unit: number for number, unit in enumerate(self.units)}

    # ---- beginning

    def begin(self) -> None:
        """Agree with the other ranks on what the backward reaches, and plan it. **Collective.**"""
        self._alive = _at_end(self.end)
        self._first.begin_backward(self)
        problem: Exception | None = None
        try:
            self._check()
            if torch.is_grad_enabled():
                raise create_graph_error(self._first.units[0].fqn)
        except Exception as error:
            problem = error
        self._plan(problem)

    def follow(self) -> None:
        """Do a rank's part in the whole of it: it computes nothing, but gives the gradients that it has kept."""
        self._check()
        self._plan(None)
        self._walk(len(self.schedule.steps))
        self._finish()
        if self._is_assumed:
            self._agree_on_leaves()
        for unit in self.units:
            unit.end_backward(keep=False)

    @property
    def is_alive(self) -> bool:
        """Whether its graph task still runs; it ends without a word when something raises."""
        return self._alive() is not None

    def _check(self) -> None:
        for model in self.models:
            assert_none_summoned(model.units, "backward")
            for unit in model.units:
                for flat_param in unit.flat_params:
                    flat_param.forget_zeroed()

    def _plan(self, problem: Exception | None) -> None:
        others = [model for model in self._others() if _is_reached(model)]
        numbers = [self._first.number, *(model.number for model in others)]
        if others and not self._first.is_common:
            self._add(set(numbers))
        models = self._plan_for(numbers, problem, is_final=False)
        if models - {self._first.number}:
            self._add(models)
            self._plan_for([model.number for model in self.models], problem, is_final=True)

    def _add(self, numbers: Collection[int]) -> None:
        """Go through the models with these ``numbers``, which some rank reaches, in one schedule."""
        others = [model for model in self._others() if model.number in numbers]
        for model in others:
            model.begin_backward(self)
        self._go_through([self._first, *others])

    def _plan_for(self, numbers: Sequence[int], problem: Exception | None, is_final: bool) -> frozenset[int]:
        """Make the schedule, unless other ranks reach other models; returns those that any reaches."""
        passes = [one for model in self.models for one in model.record.passes]
        passes.sort(key=lambda one: one.number)
        self._brackets = [bracket for one in passes for bracket in one.brackets]
        events: list[int] = []
        places: list[CallPlace] = []
        num_segments = 0
        lives = bytearray(len(passes))  # an unseen call, whose end nothing shows, awaits one backward
        for forward, one in enumerate(passes):
            start = len(places)
            events += [event + start if event >= 0 else event - start for event in one.events]
            last = -1
            for bracket in one.brackets:
                lives[forward] |= bracket.is_unseen and bracket.index < 0
                bracket.index = len(places)
                last = max(last, bracket.segment)
                segment = bracket.segment + num_segments if bracket.segment >= 0 else -1
                places.append(CallPlace(self._number[bracket.unit], forward, segment))
            num_segments += last + 1
        own = self._own_reach(passes, lives)
        self._is_own = bytes(own.calls)
        self._own_segments = {place.segment for place, mine in zip(places, own.calls, strict=True) if mine} - {-1}
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
        self._listed = {self.units[step.unit] for step in self.schedule.steps}
        self._is_assumed = any(agreed.assumed)
        self._from_parts = [not uncut for uncut in agreed.uncut]
        for model in self.models:
            model.record.keep([one for one, lives in zip(passes, agreed.alive, strict=True) if lives])
            sends = [self.units[number] for number in self.schedule.sends]
            model.shared.bucketer.plan(_bucketed(unit for unit in sends if self._model_of[unit] is model))
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
        model = self._first
        resident = bytes(not missing for missing in agreed.missing)
        key = (tuple(events), tuple(places), bytes(agreed.calls), resident, owed, rules)
        if model.last_schedule is None or model.last_schedule[0] != key:
            model.last_schedule = key, build(events, places, agreed.calls, resident, owed, rules)
        schedule: Schedule = model.last_schedule[1]
        return schedule

    def _own_reach(self, passes: list[Pass[Unit]], lives: bytearray) -> Reach:
        own = Reach(alive=lives)
        for unit in self.units:
            for flat_param in unit.flat_params:
                own.leaves += flat_param.reach()
            own.missing.append(not unit.is_resident)
            own.uncut.append(not unit.has_parts)
            own.assumed.append(0)
        unseen = {bracket.unit for bracket in self._brackets if bracket.is_unseen}
        reached = {unit for unit in unseen if any(map(reaches, unit.nodes))}
        for forward, one in enumerate(passes):
            for bracket in one.brackets:
                call = None if bracket.call is None else bracket.call()
                node = None if bracket.node is None else bracket.node()
                lives[forward] |= call is not None or node is not None
                is_reached = (call is not None and call.is_reached()) or (node is not None and reaches(node))
                own.calls.append(is_reached or (bracket.is_unseen and bracket.unit in reached))
                if own.calls[-1] and (node is not None or (call is not None and self._is_unsure(bracket.unit, call))):
                    own.assumed[self._number[bracket.unit]] = 1
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
            self._is_broken = True
            for model in self.models:
                model.differ()
        if verdict.has_problem:
            self._is_broken = True
            comms = [peers.comm for peers in self._peers]
            told = [text for comm in comms for text in comm.gather_objects("" if problem is None else str(problem))]
            raise problem or other_rank_error([text for text in told if text])

    def _all_peers(self, passes: list[Pass[Unit]], places: list[CallPlace]) -> list[Peers]:
        comms = [comm for model in self.models if model.is_common for comm in model.comms]
        comms = [comm for comm in dict.fromkeys(comms) if comm.world_size > 1 and comm.is_real]
        return [self._peers_of(comm, passes, places) for comm in comms]

    def _peers_of(self, comm: Communicator, passes: list[Pass[Unit]], places: list[CallPlace]) -> Peers:
        talking = [comm in self._model_of[unit].comms_of[unit] and unit.has_shards for unit in self.units]
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
        numbers += [model.num_interrupted for model in self.models]
        forwards: dict[int, int] = {}
        for event in events:
            call = event if event >= 0 else ~event
            if call in counted:
                place = places[call]
                forward = forwards.setdefault(place.forward, len(forwards))
                numbers += [place.unit if event >= 0 else ~place.unit, self._brackets[call].segment, forward]
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
        numbers = None if ahead is None else tuple(self._number[other] for other in ahead if other in self._number)
        frees_between = unit.config.late.keeps_across_passes or not self._model_of[unit].keeps_after_forward(unit)
        return UnitRule(
            unit.unshard_in_backward, unit.frees_in_backward, frees_between, unit.prefetch.waits_for_grads, numbers
        )

    # ---- events

    def reach(self, call: Any) -> None:
        """Autograd has reached an output of ``call``."""
        bracket = call.bracket
        unit = bracket.unit
        position = self.schedule.at.get(bracket.index) if self._is_of_this(bracket) else None
        is_first = position is not None and position > self._passed
        if is_first:
            assert position is not None
            self._walk(position)
        elif unit in self._used:
            return
        elif unit in self._sent and not unit.is_whole:
            raise late_error(unit.fqn)
        check_unchanged(unit.flat_params, call.versions)
        self._use(unit)

    def finish(self, call: Any) -> None:
        """Autograd goes on before an input of ``call``."""
        bracket = call.bracket
        position = self.schedule.done.get(bracket.index) if self._is_of_this(bracket) else None
        if position is not None and position > self._passed:
            self._walk(position)

    def recompute(self, unit: Unit) -> Bracket[Unit] | None:
        """A checkpoint runs a call of ``unit`` again; returns the call that it is, if that is in the schedule."""
        schedule = self.schedule
        for segment, position in schedule.recompute.items():
            calls = schedule.segments[segment]
            if segment not in self._own_segments or schedule.done[calls[0]] <= self._passed:
                continue
            following = self._recomputed.get(segment, 0)
            for place in range(following, len(calls)):
                bracket = self._brackets[calls[place]]
                if bracket.unit is unit:
                    self._recomputed[segment] = place + 1
                    if position > self._passed:
                        self._walk(position)
                    self._use(unit)
                    return bracket
        self._use(unit)
        return None

    def accumulate(self, unit: Unit) -> None:
        """A leaf of ``unit`` has its gradient."""
        if unit in self._sent:
            raise late_error(unit.fqn)
        if not unit.is_whole:
            raise unseen_error(unit.fqn)
        self._touched.add(unit)
        unit.state = TrainingState.BACKWARD_PRE

    def _is_of_this(self, bracket: Bracket[Unit]) -> bool:
        index = bracket.index
        return 0 <= index < len(self._brackets) and self._brackets[index] is bracket

    def _use(self, unit: Unit) -> None:
        """This rank computes with ``unit`` now, which is gathered, or is on its way, unless no schedule foresaw it."""
        self._used.add(unit)
        if unit.unshard_in_backward:
            if not unit.is_whole or unit in self._arriving:
                self._forget_arriving(unit)
                self._gather(unit, is_listed=False)
            unit.wait_unshard()
        unit.begin_backward()

    # ---- the walk

    def _walk(self, position: int) -> None:
        """Execute every step up to the mark at ``position``, and those after it up to the next own mark."""
        self._passed = max(self._passed, position)
        steps = self.schedule.steps
        is_broken, self._is_broken = self._is_broken, True
        while self._cursor < len(steps):
            kind, number, call = steps[self._cursor]
            if kind <= Kind.RECOMPUTE:
                if self._cursor > self._passed and self._is_mine(kind, call):
                    break
                self._cursor += 1
                continue
            self._cursor += 1
            unit = self.units[number]
            if kind is Kind.GATHER:
                self._gather(unit, from_part=self._from_parts[number])
            elif kind is Kind.SEND:
                self._send(unit)
            else:
                self._free(unit)
        self._is_broken = is_broken

    def _is_mine(self, kind: Kind, call: int) -> bool:
        if self._is_serving:
            return False
        if kind is Kind.RECOMPUTE:
            return bool(self._own_segments) and any(
                segment in self._own_segments and self.schedule.recompute[segment] == self._cursor
                for segment in self.schedule.recompute
            )
        return bool(self._is_own[call])

    def _gather(self, unit: Unit, from_part: bool = True, is_listed: bool = True) -> None:
        self._forget_arriving(unit)
        while len(self._arriving) > _MAX_ARRIVING:
            self._arriving.popleft().reshard()
        self._model_of[unit].note(unit)
        unit.unshard(in_backward=True, from_part=from_part, anew=is_listed)

    def _forget_arriving(self, unit: Unit) -> None:
        if unit in self._arriving:
            self._arriving.remove(unit)
            unit.reshard()

    def _send(self, unit: Unit) -> None:
        self._sent.add(unit)
        model = self._model_of[unit]
        model.note(unit)
        unit.state = TrainingState.BACKWARD_POST
        if not self._is_serving:
            model.before_send(unit)
        unit.send_grads(model.shared.bucketer)

    def _free(self, unit: Unit) -> None:
        if not unit.frees_in_backward:
            unit.rest_whole()
        elif unit in self._used or not unit.is_under_way:
            unit.rest()
        else:
            self._arriving.append(unit)  # served: it is freed when it has arrived
        self._used.discard(unit)

    # ---- the end

    def end(self) -> None:
        """The graph task is over: do what is left, let everything arrive, be idle."""
        self._walk(len(self.schedule.steps))
        self._finish()
        found = self._agree_on_leaves() if self._is_assumed else None
        for model in self.models:
            if model is self._first or any(map(self.lists, model.units)):
                model.end_backward(self)
            else:
                model.leave_backward()
        if found is not None:
            self._retract(found)

    def _agree_on_leaves(self) -> bytearray:
        """Which parameters any rank had gradients of in the end. **Collective.**"""
        leaves = bytearray()
        for unit in self.units:
            for flat_param in unit.flat_params:
                leaves += flat_param.contributed
        none = bytearray(len(self.units))
        found = Reach(leaves=leaves, missing=none, uncut=bytearray(none), assumed=bytearray(none))
        peers = [replace(one, calls=(), alive=()) for one in self._peers]
        agree_on(Question(found, peers, [0] * len(peers), False, [self._first.number], is_final=True))
        return found.leaves

    def _retract(self, leaves: bytearray) -> None:
        """Take away the gradients of zeros that were given to parameters which no rank has reached after all."""
        start = 0
        for unit in self.units:
            for flat_param in unit.flat_params:
                stop = start + len(flat_param.slots)
                if flat_param.is_owed and unit.sync:
                    flat_param.grad.retract(leaves[start:stop])
                start = stop

    def _finish(self) -> None:
        while self._arriving:
            self._arriving.popleft().reshard()

    def lists(self, unit: Unit) -> bool:
        """Whether ``unit`` is in the schedule, or was reached outside of it."""
        return unit in self._listed or unit in self._used

    def abandon(self) -> None:
        """It raised on this rank: issue what is left, so that no other rank waits for it; the values count nowhere."""
        for unit in self.units:
            for flat_param in unit.flat_params:
                flat_param.abandon_grads(unit in self._touched)
        if not self._is_broken:
            self._is_serving = True
            bucketers = [model.shared.bucketer for model in self.models]
            for bucketer in bucketers:
                bucketer.drops = True
            try:
                self._walk(len(self.schedule.steps))
            finally:
                for bucketer in bucketers:
                    bucketer.drain()
                    bucketer.drops = False
        self._arriving.clear()


def _at_end(end: Callable[[], None]) -> weakref.ref[_Token]:
    """Call ``end`` when the graph task ends; what is returned is dead when the task is over, however it ends."""
    token = _Token()

    def call(_held: _Token = token) -> None:
        end()

    at_end_of_task(call)
    return weakref.ref(token)


def _is_reached(model: Model) -> bool:
    """Whether the running graph task reaches a call of ``model`` that is recorded."""
    for bracket in model.record:
        call = None if bracket.call is None else bracket.call()
        node = None if bracket.node is None else bracket.node()
        if (call is not None and call.is_reached()) or (node is not None and reaches(node)):
            return True
    return False


def _bucketed(units: Any) -> list[Any]:
    """The flat params of ``units`` whose gradients are summed over ranks in a bucket, in this order."""
    return [
        flat_param
        for unit in units
        if unit.sync
        for flat_param in unit.flat_params
        if flat_param.is_owed and flat_param.comms.num_ranks > 1 and flat_param.hook is None
    ]

