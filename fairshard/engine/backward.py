"""One backward: created when autograd reaches the first unit, it executes the schedule, and is dropped at the end.

Each rank executes the whole schedule in order. It stops before a mark that its own autograd has not passed yet, and
ignores marks of other ranks. For a unit that its own backward does not reach, a rank only serves the others: it
contributes its row to the gather, and zeros to the bucket::

    event on this rank                    steps executed
    backward reaches a call's outputs     all up to its AT, then the gathers that follow
    backward reaches a call's inputs      all up to its DONE, then the free and the send that follow
    checkpoint runs a unit again          all up to its RECOMPUTE, then the gathers of the whole segment
    graph task ends                       all that remain

Autograd runs the newest nodes first, so an event implies that all earlier marks of this rank have passed, even if no
hook reported them. A gradient that arrives after its unit was sent breaks this rule, and raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from fairshard.engine.exec_order import Bracket
from fairshard.engine.model import Model, is_reached, is_split_off
from fairshard.engine.notices import check_owed, create_graph_error, late_error, split_error, unseen_error
from fairshard.engine.planner import Planner
from fairshard.engine.schedule import Kind
from fairshard.engine.task_end import at_end
from fairshard.engine.training_state import TrainingState, assert_none_summoned
from fairshard.engine.unit import Unit
from fairshard.params.listing import Listing
from fairshard.utils.autograd import NO_BACKWARD, current_task

_MAX_ONLY_SERVED = 1  # units that this rank has gathered only to serve other ranks, and has not freed yet

_LAST_MARK, _GATHER, _SEND = Kind.RECOMPUTE, Kind.GATHER, Kind.SEND


class Backward:
    """One backward through the units of ``models``, in the outermost graph task that reaches any of them.

    Attributes:
        touched: units with leaf gradients that are not sent yet.
        task: returns None once the graph task has ended; after an exception the task ends without calling `end`.
    """

    def __init__(self, first: Model, others: Callable[[], Sequence[Model]]) -> None:
        self._first = first
        self._others = others
        self._cursor = 0
        self._passed = -1
        self._recomputed: dict[int, int] = {}  # number of calls recomputed so far, by segment
        self._only_served: deque[Unit] = deque()
        self._sent: set[Unit] = set()
        self.touched: set[Unit] = set()
        self._used: set[Unit] = set()  # units that this rank has computed with since their gather
        self._listings: list[Listing] = []  # of all units passed to `_use`
        self._is_restricted = False
        self._is_serving = False  # True after an exception: no mark stops the walk
        self._is_broken = False
        self.task: Callable[[], object] = _no_task
        self._set_models([first])

    def _set_models(self, models: Sequence[Model]) -> None:
        self.models = sorted(models, key=lambda model: model.number)
        self._plan = Planner(self.models)
        self.units = self._plan.units

    # ---- beginning

    def begin(self, is_restricted: bool) -> None:
        """Agree with the other ranks on what the backward reaches, and plan it. **Collective.**

        ``is_restricted``: the backward computes only some gradients, as in ``torch.autograd.grad``.
        """
        self.task = at_end(self.end, self._listings)
        self._is_restricted = is_restricted
        self._first.begin_backward(self)
        self._add([model.number for model in self._others() if is_reached(model)])
        self._make_plan(self._problem(begins=True))

    def follow(self) -> None:
        """Serve the whole backward on a rank that computes nothing, and send only the gradients that it has kept."""
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
        """The error that prevents this rank from starting, or None; drops kept gradients that the user has zeroed."""
        try:
            for model in self.models:
                assert_none_summoned(model.units, "backward")
                for unit in model.units:
                    unit.listing.following.follow()
                    for flat_param in unit.flat_params:
                        flat_param.forget_zeroed()
            if begins and torch.is_grad_enabled():
                raise create_graph_error(self._first.units[0].fqn)
            if begins and is_split_off(self._first):
                raise split_error(self._first.units[0].fqn)
        except Exception as error:
            return error
        return None

    def _make_plan(self, problem: Exception | None) -> None:
        numbers = [model.number for model in self.models]
        self._is_broken = True  # an error here is raised on all ranks, before any unit communicates
        models = self._plan.plan(numbers, problem, self._is_restricted, is_final=False)
        if models:
            self._add(models)
            problem = problem or self._problem(begins=False)
            self._plan.plan([model.number for model in self.models], problem, self._is_restricted, is_final=True)
        self._is_broken = False

    def _add(self, numbers: Collection[int]) -> None:
        """Add the models with these ``numbers``, which some rank reaches, to the backward."""
        others = [model for model in self._others() if model.number in numbers]
        for model in others:
            model.begin_backward(self)
        if others:
            self._set_models([*self.models, *others])

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
            for other in plan.take_entered(self._passed) if plan.unannounced else ():
                other.unit.versions.check_unchanged(other.versions)
                self._use(other.unit)
        elif unit in self._used:
            return
        elif unit in self._sent and not unit.is_whole:
            raise late_error(unit.fqn)
        unit.versions.check_unchanged(call.versions)
        self._use(unit)

    def finish(self, call: Any) -> None:
        """Autograd has finished ``call`` and continues past one of its inputs."""
        bracket = call.bracket
        plan = self._plan
        position = plan.schedule.done.get(bracket.index, -1) if bracket.plan is plan.mark else -1
        if position > self._passed:
            self._walk(self._until_recomputed(bracket, position))

    def recompute(self, unit: Unit) -> Bracket[Unit] | None:
        """A checkpoint runs a call of ``unit`` again; returns that call, or None if it is not in the schedule."""
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
        """The gradient of a leaf of ``unit`` is ready."""
        if unit in self._sent:
            raise late_error(unit.fqn)
        check_owed(unit.flat_params)
        if unit.unshard_in_backward and not (unit.is_gathered or unit.is_held):
            raise unseen_error(unit.fqn)
        self.touched.add(unit)
        unit.state = TrainingState.BACKWARD_PRE

    def _until_recomputed(self, bracket: Bracket[Unit], position: int) -> int:
        """``position``, or that of RECOMPUTE if the checkpoint around the call has not recomputed anything yet."""
        segment = self._plan.segment_of[bracket.index]
        if segment in self._plan.own_segments and not self._recomputed.get(segment):
            return self._plan.schedule.recompute[segment]
        return position

    def _use(self, unit: Unit) -> None:
        """Compute with ``unit`` on this rank from now on; gather it first if the schedule did not."""
        self._used.add(unit)
        unit.listing.following.follow()  # a hook may have frozen it meanwhile
        if unit.unshard_in_backward and (not (unit.is_gathered or unit.is_held) or unit in self._only_served):
            self._gather(unit, is_listed=False)
        unit.wait_unshard(attach=not unit.is_whole)  # gives leaves their shapes even if they have no memory
        unit.begin_backward()
        self._listings.append(unit.listing)

    # ---- the walk

    def _walk(self, position: int) -> None:
        """Execute all steps up to the mark at ``position``, then those after it up to this rank's next mark."""
        if position > self._passed:
            self._passed = position
        plan, passed = self._plan, self._passed
        steps, stops = plan.schedule.steps, plan.stops
        num_steps, is_serving = len(steps), self._is_serving
        is_broken, self._is_broken = self._is_broken, True
        while self._cursor < num_steps:
            cursor = self._cursor
            kind, number, _ = steps[cursor]
            if kind <= _LAST_MARK and cursor > passed and stops[cursor] and not is_serving:
                break
            self._cursor = cursor + 1
            if kind <= _LAST_MARK:
                continue
            unit = self.units[number]
            if kind is _GATHER:
                self._gather(unit, from_part=plan.from_parts[number])
                bucketer = plan.model_of[unit].shared.bucketer
                if bucketer.due is not None:
                    bucketer.send_due()
            elif kind is _SEND:
                self._send(unit, cursor in plan.schedule.yields)
            else:
                self._free(unit)
        self._is_broken = is_broken

    def _gather(self, unit: Unit, from_part: bool = True, is_listed: bool = True) -> None:
        if self._only_served:
            self._forget_arriving(unit)
            while len(self._only_served) > _MAX_ONLY_SERVED:
                self._only_served.popleft().reshard()
        self._plan.model_of[unit].note(unit)
        unit.unshard(in_backward=True, from_part=from_part, force=is_listed)

    def _forget_arriving(self, unit: Unit) -> None:
        if unit in self._only_served:
            self._only_served.remove(unit)
            unit.reshard()

    def _send(self, unit: Unit, yields: bool) -> None:
        self._sent.add(unit)
        self.touched.discard(unit)
        model = self._plan.model_of[unit]
        model.note(unit)
        unit.state = TrainingState.BACKWARD_POST
        if model.shared.is_asynchronous:
            with model.shared.at_home():
                self._hand_over(unit, model, yields)
        else:
            self._hand_over(unit, model, yields)

    def _hand_over(self, unit: Unit, model: Model, yields: bool) -> None:
        if model.nan_check.is_on and not self._is_serving:
            model.nan_check.look(unit)
        unit.send_grads(model.shared.bucketer, yields)

    def _free(self, unit: Unit) -> None:
        if not unit.frees_in_backward:
            unit.finish_pass_whole()
        elif unit in self._used or not unit.is_under_way:
            unit.finish_pass()
        else:
            self._only_served.append(unit)  # only served: freed after its gather has arrived
        self._used.discard(unit)

    # ---- the end

    def end(self) -> None:
        """The graph task is over: execute the remaining steps, wait for all transfers, and become idle."""
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
        self._listings.clear()  # see `is_over`: the task may end later, and must hide nothing of the next pass

    def _retract(self, leaves: bytearray) -> None:
        """Remove the zero gradients of parameters that no rank has reached after all."""
        start = 0
        for unit in self.units:
            for flat_param in unit.flat_params:
                stop = start + len(flat_param.slots)
                if flat_param.is_owed and unit.sync:
                    flat_param.grad.retract(leaves[start:stop])
                start = stop

    def _finish(self) -> None:
        while self._only_served:
            self._only_served.popleft().reshard()

    def lists(self, unit: Unit) -> bool:
        """Whether ``unit`` is in the schedule, or was reached outside of it."""
        return unit in self._plan.listed or unit in self._used

    @property
    def is_over(self) -> bool:
        """Whether the graph task has ended.

        After an exception, autograd's thread for a device may hold the task longer than the call of the backward takes.
        The thread of the forward, if it is in no backward, knows that it is over.
        """
        return self.task() is None or (current_task() == NO_BACKWARD and self._first.shared.is_on_its_thread)

    def abandon(self) -> None:
        """After an exception: issue the remaining collectives, and drop their results. **Collective.**

        Ranks may have raised at different steps, or not at all: afterwards all have issued the same collectives.
        """
        while self._listings:
            self._listings.pop().hide()
        for model in self.models:
            model.shared.reduce_stream.record().wait()  # it may still add to the gradients that are read next
        for unit in self.units:
            for flat_param in unit.flat_params:
                flat_param.abandon_grads()
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
        self._only_served.clear()


def _no_task() -> None:
    """Stand-in for a weak reference to a graph task that has ended."""
