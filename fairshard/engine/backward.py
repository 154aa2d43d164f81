"""One backward: an object that is made when autograd reaches the first unit, walks the schedule, and is dropped.

Each rank walks the whole schedule in order. It stops before a mark that its own autograd has yet to pass; marks of
other ranks hold nothing up. What its own backward does not reach, a rank serves: its row of the gather, zeros in the
bucket::

    event of this rank                    the walk
    a call's outputs are reached          everything up to that AT, then what stands after it: the gathers
    a call's inputs are next              everything up to that DONE, then what stands after it: send, free
    a checkpoint runs a unit again        everything up to that RECOMPUTE, then the gathers of the whole segment
    the graph task ends                   everything that is left

Autograd runs the newest nodes first, so every own mark before the event has passed as well, even if no hook reported
it. A gradient that arrives after its unit was sent would break this rule, and raises.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from fairshard.engine.exec_order import Bracket
from fairshard.engine.model import Model, is_reached
from fairshard.engine.notices import create_graph_error, late_error, unseen_error
from fairshard.engine.planner import Planner
from fairshard.engine.schedule import Kind
from fairshard.engine.training_state import TrainingState, assert_none_summoned
from fairshard.engine.unit import Unit
from fairshard.params.listing import Listing
from fairshard.params.versions import check_unchanged
from fairshard.utils.autograd import at_end_of_task

_MAX_ARRIVING = 1  # units whose gather this rank only serves, and that wait to be freed


_LAST_MARK, _GATHER, _SEND = Kind.RECOMPUTE, Kind.GATHER, Kind.SEND


class _Token:
    """Lives as long as the graph task that holds it; turns ``listings`` off at its end, even after an exception."""

    def __init__(self, listings: list[Listing]) -> None:
        self.listings = listings

    def __del__(self) -> None:
        for listing in self.listings:
            listing.hide()


class Backward:
    """One backward through the units of ``models``, in the outermost graph task that reaches any of them.

    Attributes:
        touched: units some of whose leaves have gradients that are not sent yet.
        task: returns None once its graph task has ended; after an exception it ends without calling `end`.
    """

    def __init__(self, first: Model, others: Callable[[], Sequence[Model]]) -> None:
        self._first = first
        self._others = others
        self._cursor = 0
        self._passed = -1
        self._recomputed: dict[int, int] = {}  # calls of each segment that have been recomputed
        self._arriving: deque[Unit] = deque()
        self._sent: set[Unit] = set()
        self.touched: set[Unit] = set()
        self._used: set[Unit] = set()  # units that this rank computes with since they were gathered
        self._listings: list[Listing] = []  # those of `_used`
        self._is_restricted = False
        self._is_serving = False  # after an exception
        self._is_broken = False
        self.task: Callable[[], object] = _no_task
        self._go_through([first])

    def _go_through(self, models: Sequence[Model]) -> None:
        self.models = sorted(models, key=lambda model: model.number)
        self._plan = Planner(self.models)
        self.units = self._plan.units

    # ---- beginning

    def begin(self, is_restricted: bool) -> None:
        """Agree with the other ranks on what the backward reaches, and plan it. **Collective.**

        ``is_restricted``: it was asked for some gradients only, as by ``torch.autograd.grad``.
        """
        self.task = _at_end(self.end, self._listings)
        self._is_restricted = is_restricted
        self._first.begin_backward(self)
        self._add([model.number for model in self._others() if is_reached(model)])
        self._make_plan(self._problem(begins=True))

    def follow(self) -> None:
        """Serve the whole backward on a rank that computes nothing; it sends only the gradients that it has kept."""
        self._make_plan(self._problem(begins=False))
        self._walk(len(self._plan.schedule.steps))
        self._finish()
        if self._plan.is_assumed:
            self._plan.agree_on_leaves()
        for unit in self.units:
            unit.end_backward(keep=False)

    @property
    def sends(self) -> bool:
        """Whether any gradient is sent or kept."""
        return self._plan.sends

    def _problem(self, begins: bool) -> Exception | None:
        """The error that keeps this rank from beginning, or None; drops gradients that the user has zeroed."""
        try:
            for model in self.models:
                assert_none_summoned(model.units, "backward")
                for unit in model.units:
                    for flat_param in unit.flat_params:
                        flat_param.forget_zeroed()
            if begins and torch.is_grad_enabled():
                raise create_graph_error(self._first.units[0].fqn)
        except Exception as error:
            return error
        return None

    def _make_plan(self, problem: Exception | None) -> None:
        numbers = [model.number for model in self.models]
        self._is_broken = True  # an error here is raised on all ranks, before anything is issued
        models = self._plan.plan(numbers, problem, self._is_restricted, is_final=False)
        if models:
            self._add(models)
            problem = problem or self._problem(begins=False)
            self._plan.plan([model.number for model in self.models], problem, self._is_restricted, is_final=True)
        self._is_broken = False

    def _add(self, numbers: Collection[int]) -> None:
        """Go through the models with these ``numbers``, which some rank reaches, in one schedule."""
        others = [model for model in self._others() if model.number in numbers]
        for model in others:
            model.begin_backward(self)
        if others:
            self._go_through([*self.models, *others])

    # ---- events

    def reach(self, call: Any) -> None:
        """Autograd has reached an output of ``call``."""
        bracket = call.bracket
        unit = bracket.unit
        plan = self._plan
        at = plan.schedule.at
        position = at[bracket.index] if bracket.plan is plan.mark and bracket.index in at else -1
        if position > self._passed:
            self._walk(self._until_recomputed(bracket, position) if plan.own_segments else position)
        elif unit in self._used:
            return
        elif unit in self._sent and not unit.is_whole:
            raise late_error(unit.fqn)
        check_unchanged(unit.flat_params, call.versions)
        self._use(unit)

    def finish(self, call: Any) -> None:
        """Autograd goes on before an input of ``call``."""
        bracket = call.bracket
        plan = self._plan
        position = plan.schedule.done.get(bracket.index, -1) if bracket.plan is plan.mark else -1
        if position > self._passed:
            self._walk(self._until_recomputed(bracket, position))

    def recompute(self, unit: Unit) -> Bracket[Unit] | None:
        """A checkpoint runs a call of ``unit`` again; returns the call that it is, if that is in the schedule."""
        schedule = self._plan.schedule
        for segment, position in schedule.recompute.items():
            calls = schedule.segments[segment]
            if segment not in self._plan.own_segments or schedule.done[calls[0]] <= self._passed:
                continue
            following = self._recomputed.get(segment, 0)
            for place in range(following, len(calls)):
                bracket = self._plan.brackets[calls[place]]
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
        if unit.unshard_in_backward and not (unit.is_gathered or unit.is_held):
            raise unseen_error(unit.fqn)
        self.touched.add(unit)
        unit.state = TrainingState.BACKWARD_PRE

    def _until_recomputed(self, bracket: Bracket[Unit], position: int) -> int:
        """``position``, or that of RECOMPUTE while the checkpoint around the call has not recomputed anything yet."""
        segment = self._plan.segment_of[bracket.index]
        if segment in self._plan.own_segments and not self._recomputed.get(segment):
            return self._plan.schedule.recompute[segment]
        return position

    def _use(self, unit: Unit) -> None:
        """Compute with ``unit`` on this rank from now on; gather it first if the schedule did not."""
        self._used.add(unit)
        if unit.unshard_in_backward and (not (unit.is_gathered or unit.is_held) or unit in self._arriving):
            self._gather(unit, is_listed=False)
        unit.wait_unshard(attach=not unit.is_whole)  # leaves have their shapes then, even without memory
        unit.begin_backward()
        self._listings.append(unit.listing)

    # ---- the walk

    def _walk(self, position: int) -> None:
        """Execute every step up to the mark at ``position``, and those after it up to the next own mark."""
        if position > self._passed:
            self._passed = position
        plan, passed = self._plan, self._passed
        steps, stops = plan.schedule.steps, plan.stops
        num_steps, is_serving = len(steps), self._is_serving
        is_broken, self._is_broken = self._is_broken, True
        while self._cursor < num_steps:
            cursor = self._cursor
            kind, number, _ = steps[cursor]
            if kind <= _LAST_MARK:
                if cursor > passed and stops[cursor] and not is_serving:
                    break
                self._cursor = cursor + 1
                continue
            self._cursor = cursor + 1
            unit = self.units[number]
            if kind is _GATHER:
                self._gather(unit, from_part=plan.from_parts[number])
            elif kind is _SEND:
                self._send(unit)
            else:
                self._free(unit)
        self._is_broken = is_broken

    def _gather(self, unit: Unit, from_part: bool = True, is_listed: bool = True) -> None:
        if self._arriving:
            self._forget_arriving(unit)
            while len(self._arriving) > _MAX_ARRIVING:
                self._arriving.popleft().reshard()
        self._plan.model_of[unit].note(unit)
        unit.unshard(in_backward=True, from_part=from_part, force=is_listed)

    def _forget_arriving(self, unit: Unit) -> None:
        if unit in self._arriving:
            self._arriving.remove(unit)
            unit.reshard()

    def _send(self, unit: Unit) -> None:
        self._sent.add(unit)
        self.touched.discard(unit)
        model = self._plan.model_of[unit]
        model.note(unit)
        unit.state = TrainingState.BACKWARD_POST
        if not self._is_serving:
            model.before_send(unit)
        unit.send_grads(model.shared.bucketer)

    def _free(self, unit: Unit) -> None:
        if not unit.frees_in_backward:
            unit.finish_pass_whole()
        elif unit in self._used or not unit.is_under_way:
            unit.finish_pass()
        else:
            self._arriving.append(unit)  # only served: it is freed on arrival
        self._used.discard(unit)

    # ---- the end

    def end(self) -> None:
        """The graph task is over: walk the rest of the schedule, wait for what is under way, become idle."""
        self._walk(len(self._plan.schedule.steps))
        self._finish()
        found = self._plan.agree_on_leaves() if self._plan.is_assumed else None
        for model in self.models:
            if model is self._first or any(map(self.lists, model.units)):
                model.end_backward(self)
            else:
                model.leave_backward()
        if found is not None:
            self._retract(found)

    def _retract(self, leaves: bytearray) -> None:
        """Remove the gradients of zeros of parameters that turned out to be reached by no rank."""
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
        return unit in self._plan.listed or unit in self._used

    def abandon(self) -> None:
        """After an exception: issue the collectives that are left, so that no other rank waits; drop their results."""
        # A shard without elements, or with a gradient of zeros, does not show whether the user has zeroed it.
        seen = {flat_param.keeps_sum for unit in self.units for flat_param in unit.flat_params} - {None}
        keeps_sums = True in seen or not seen
        for unit in self.units:
            for flat_param in unit.flat_params:
                flat_param.abandon_grads(unit in self.touched, keeps_sums)
        if not self._is_broken:
            self._is_serving = True
            bucketers = [model.shared.bucketer for model in self.models]
            for bucketer in bucketers:
                bucketer.drops = True
            try:
                self._walk(len(self._plan.schedule.steps))
            finally:
                for bucketer in bucketers:
                    bucketer.drain()
                    bucketer.drops = False
        self._arriving.clear()


def _no_task() -> None:
    """What a weak reference to a graph task that has ended returns."""


def _at_end(end: Callable[[], None], listings: list[Listing]) -> weakref.ref[_Token]:
    """Call ``end`` when the graph task ends; what is returned is dead when the task is over, however it ends."""
    token = _Token(listings)

    def call(_held: _Token = token) -> None:
        end()

    at_end_of_task(call)
    return weakref.ref(token)
