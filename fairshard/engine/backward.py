"""One backward: created when autograd reaches the first unit, it executes the schedule, and is dropped at the end.

Each rank executes the whole schedule in order. It stops before a mark that its own autograd has not passed yet
(`Plan.stops`), and ignores marks of other ranks. For a unit that its own backward does not reach, a rank only serves
the others: it contributes its row to the gather, and zeros to the bucket::

    event on this rank                    steps executed
    backward reaches a call's outputs     all up to its AT, or to its RECOMPUTE, then those up to the next mark
    checkpoint runs a unit again          all up to its RECOMPUTE, then the gathers of the whole segment
    graph task ends                       all that remain

Autograd runs the newest nodes first, so an event implies that all earlier marks of this rank have passed: DONE of a
call is proved by the next event. A gradient that arrives after its unit was sent breaks this rule, and raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from fairshard.engine.exchange import ASSUMED
from fairshard.engine.plan import Plan
from fairshard.engine.record import CallRecord
from fairshard.engine.residency import Event
from fairshard.engine.schedule import Kind
from fairshard.engine.training_state import TrainingState
from fairshard.engine.unit import Unit
from fairshard.errors import BackwardOrderError, ParameterShardedError
from fairshard.params.shard_grad import unexpected_error
from fairshard.utils.autograd import at_end_of_task
from fairshard.utils.dynamo import not_traced, set_tracer

_AT, _GATHER, _SEND, _FREE = Kind.AT, Kind.GATHER, Kind.SEND, Kind.FREE


class Backward:
    """One backward by a ``plan``, in the outermost graph task that reaches any of its models.

    Attributes:
        plan: what the ranks have agreed on.
        roots: its models; ``units``: theirs.
        passes: those of the plan, which a later backward may reach, too.
        used: units that this rank has computed with, since their last free.
        outer: the backward inside of which this one began, if any.
        task: returns None once the graph task is over, also after an exception, which does not call ``on_end``.
    """

    _cursor: int | None = 0  # position of the next step; None while one communicates, and if that has raised
    _passed = -1  # position of the last mark that this rank has passed

    def __init__(self, plan: Plan, outer: Backward | None = None, on_end: Callable[[], None] | None = None) -> None:
        self.plan, self.outer = plan, outer
        self.roots, self.units, self.passes = plan.roots, plan.units, plan.passes
        schedule = plan.schedule
        self._to_run = {  # by checkpoint, in the order of the backward: units that it has still to run again
            segment: [plan.calls[call].unit for call in schedule.segments[segment]]
            for segment in schedule.recompute
            if segment in plan.segments
        }
        self.used: set[Unit] = set()
        self._sent: set[Unit] = set()
        self.task: Callable[[], object] = (lambda: None) if on_end is None else _hold(self.used, on_end)

    def lists(self, unit: Unit) -> bool:
        """Whether ``unit`` is in the schedule, or was reached outside of it."""
        return unit in self.plan.listed or unit in self.used

    def covers(self, call: CallRecord[Unit]) -> bool:
        """Whether the plan contains ``call``."""
        calls = self.plan.calls
        return 0 <= call.index < len(calls) and calls[call.index] is call

    # ---- events

    def reach(self, call: CallRecord[Unit]) -> None:
        """Autograd has reached an output of ``call``."""
        unit, schedule = call.unit, self.plan.schedule
        position = schedule.at.get(call.index, -1) if self.covers(call) else -1
        if position > self._passed:
            segment = self.plan.known.places[call.index].segment
            if segment in self._to_run and len(self._to_run[segment]) == len(schedule.segments[segment]):
                position = schedule.recompute[segment]  # AT follows when it has run again
            self._walk(position)
        elif unit not in self.used and unit in self._sent and unit.unshard_in_backward:
            raise late_error(unit.fqn)
        if unit not in self.used:
            self._arrive(call)

    def _arrive(self, call: CallRecord[Unit]) -> None:
        """This rank's backward is at the outputs of ``call``, or of a call inside of it."""
        call.unit.check_unchanged(call.versions)
        if call.unit not in self.used:
            self._use(call.unit)

    def reach_leaf(self, unit: Unit) -> None:
        """The gradient of a leaf of ``unit``, with which nothing has shown yet that this rank computes, is ready."""
        if unit in self._sent:
            raise late_error(unit.fqn)
        if unit.unshard_in_backward and not unit.is_gathered:
            raise ParameterShardedError(
                f"A backward reached the parameters of unit `{unit.fqn or 'root'}` while they were sharded, through a "
                "tensor that the unit did not return. Return every tensor that the loss depends on."
            )
        self.used.add(unit)
        unit.state = TrainingState.BACKWARD_PRE

    def recompute(self, unit: Unit) -> None:
        """A checkpoint runs a call of ``unit`` again."""
        schedule = self.plan.schedule
        for segment, units in self._to_run.items():
            if unit in units and schedule.done[schedule.segments[segment][0]] > self._passed:
                del units[: units.index(unit) + 1]
                self._walk(schedule.recompute[segment])
                break
        self._use(unit)

    def _use(self, unit: Unit) -> None:
        """Compute with ``unit`` on this rank from now on."""
        if not unit.is_gathered and unit.unshard_in_backward and unit.has_shards:
            raise ParameterShardedError(
                f"A backward must reach unit `{unit.fqn or 'root'}` through the outputs of its calls, or through "
                "torch.utils.checkpoint, but computes with it while it is sharded. Return every tensor that the loss "
                "depends on, recompute with torch.utils.checkpoint, and call the model outside of hooks. If a "
                "checkpoint is around several sharded modules that are in no other, pass `use_reentrant=False`, or "
                "shard the whole model, too."
            )
        self.used.add(unit)
        unit.begin_backward()

    # ---- the walk

    def _walk(self, position: int) -> None:
        """Execute all steps up to the mark at ``position``, then those after it up to this rank's next mark."""
        self._passed = max(self._passed, position)
        plan, passed, cursor = self.plan, self._passed, self._cursor
        steps = plan.schedule.steps
        end = len(steps)
        while cursor is not None and cursor < end and (cursor <= passed or cursor not in plan.stops):
            self._cursor = None
            kind, number, call = steps[cursor]
            unit, is_own = self.units[number], cursor in plan.stops
            if kind is _GATHER:
                self._gather(unit)
            elif kind is _SEND:
                self._send(unit, number in plan.schedule.yields)
            self._cursor = cursor = cursor + 1  # if what follows raises, other ranks are served all the same
            if kind is _FREE:
                self.used.discard(unit)
                unit.finish_pass()
            elif kind is _AT and is_own:
                self._arrive(plan.calls[call])

    def _gather(self, unit: Unit) -> None:
        unit.on(Event.NEEDED)
        if unit in self.plan.unseen:
            unit.wait_unshard()  # no hook will tell when autograd gets there
        if unit.root.shared.bucketer.due:
            unit.root.shared.bucketer.send_due()

    def _send(self, unit: Unit, yields: bool) -> None:
        bucketer = unit.root.shared.bucketer
        if not bucketer.drops:
            unit.root.told.grads_sent(unit)
        self._sent.add(unit)
        unit.state = TrainingState.BACKWARD_POST
        unit.send_grads(bucketer, yields)

    # ---- the end

    def finish(self) -> None:
        """The graph task is over: execute the remaining steps, and write all gradients. **Collective.**

        May raise what a user's hook on gradients raises.
        """
        self._walk(len(self.plan.schedule.steps))
        error = self._late_grads()
        found = self.plan.agree_on_leaves() if self.plan.flags & ASSUMED else None  # other ranks wait for that
        if error is not None:
            raise error
        for root in self.roots:
            if any(map(self.lists, root.units)):
                for unit in root.units:
                    unit.end_backward(awaited=not root.is_last_backward and not self.lists(unit))
            root.finish_grads()
        if found is not None:
            for _, flat_param, part in self.plan.leaves:
                if 1 in flat_param.reached:
                    flat_param.grad.retract(found[part])  # zeros of parameters that no rank has reached after all

    def _late_grads(self) -> Exception | None:
        """The error for a gradient that came too late to be sent, if any; drops those of empty flat params."""
        for unit, flat_param, _ in self.plan.leaves:
            if not flat_param.line.numel:
                flat_param.drop_grads()
            elif flat_param.has_leaf_grads:
                if 1 not in flat_param.reached:
                    return unexpected_error(flat_param.name)
                if unit.sync:
                    return late_error(unit.fqn)
        return None

    def abandon(self) -> None:
        """After an exception: issue the remaining collectives, and drop their results. **Collective.**

        Ranks may have raised at different steps, or not at all: afterwards all have issued the same collectives, unless
        a collective itself has raised.
        """
        for root in self.roots:
            root.shared.reduce_stream.record().wait()  # it may still add to the gradients that are read next
        for unit in self.units:
            unit.stop_computing()
            for flat_param in unit.flat_params:
                flat_param.drop_grads()
                flat_param.grad.abandon(len(flat_param.slots))
        if self._cursor is None:
            return
        self.plan.stops.clear()  # this rank computes with no unit
        for root in self.roots:
            root.shared.bucketer.drops = True
        try:
            self._walk(len(self.plan.schedule.steps))
        finally:
            for root in self.roots:
                root.shared.bucketer.drain()
                root.shared.bucketer.drops = False


def _hold(units: set[Unit], on_end: Callable[[], None]) -> Callable[[], object]:
    """Call ``on_end`` at the end of the running graph task; returns a reference to what the task holds until then.

    Once the task is gone, even after an exception, ``units`` no longer compute.
    """

    @not_traced
    def end() -> None:
        tracer = set_tracer(None)
        try:
            on_end()
        finally:
            set_tracer(tracer)

    @not_traced
    def gone(_task: object) -> None:
        tracer = set_tracer(None)
        for unit in units:
            unit.stop_computing()
        set_tracer(tracer)

    at_end_of_task(end)
    return weakref.ref(end, gone)


def late_error(fqn: str) -> BackwardOrderError:
    """Error for gradients of unit ``fqn`` that arrive after the backward has finished all calls of the unit."""
    return BackwardOrderError(
        f"The backward must finish unit `{fqn or 'root'}` before it reaches earlier computations, but gradients of "
        "the unit arrived later. Its calls must run on one thread, and on one device, in the order in which their "
        "results are used. If a checkpoint is around several sharded modules that are in no other, shard the whole "
        "model, too. If checkpoints are nested, pass `use_reentrant=False` to all of them."
    )
