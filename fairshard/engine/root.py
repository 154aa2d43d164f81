"""The passes of models: where they begin and end, and what runs in between.

One `Engine` serves all models of the same ranks: a backward through several models is one list.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import count
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fairshard.engine.backward import Backward
from fairshard.engine.call_hooks import CallHooks, Probe
from fairshard.engine.observer import Observer, passing_on
from fairshard.engine.plan import Known, Plan, agree_on_plan
from fairshard.engine.record import CallRecord, Checkpoints, ForwardOrder, Pass, Record, Sight, Token
from fairshard.engine.residency import Event, State
from fairshard.engine.shared import Shared
from fairshard.engine.training_state import TrainingState
from fairshard.engine.unit import Unit
from fairshard.errors import RanksDisagreeError, TrainingStateError
from fairshard.utils.autograd import NO_BACKWARD, current_checkpoint, current_task, is_recorded_later
from fairshard.utils.collectives import Communicator
from fairshard.utils.nested import apply_to_all, plain_objects


class _Running:
    """The pass that is running.

    Attributes:
        root: the model that was called first; ``roots``: all that were called.
        open: the calls that have not ended, innermost last; None for a call to which no backward leads.
    """

    def __init__(self, root: Root, is_trained: bool) -> None:
        self.root, self.is_trained = root, is_trained
        self.roots: list[Root] = []
        self.token = Token()
        self.record: Pass[Unit] = Pass(self.token, root.is_common)
        self.open: list[CallRecord[Unit] | None] = []

    def cut(self) -> Pass[Unit]:
        """The calls that have ended, because a backward begins."""
        ended, self.token = self.record, Token()
        self.record = ended.cut(self.token)
        return ended


class Engine:
    """The passes of all models whose units communicate among the same ranks, on one device.

    The unit that is called first begins a *pass*, which a backward may follow. Invariant: outside of passes no gather
    or reduction is under way, and after the last backward nothing is gathered, except what the user or a setting keeps.

    Attributes:
        roots: the models, which keep their passes.
    """

    _running: _Running | None = None
    _thread = 0  # that runs a pass, or ran the last one

    def __init__(self) -> None:
        self.roots: weakref.WeakSet[Root] = weakref.WeakSet()
        self._backward: Callable[[], Backward | None] = _NONE
        self._places, self._checkpoints = count(), Checkpoints()

    @property
    def is_between_passes(self) -> bool:
        """Whether no forward and no backward is running."""
        return self._running is None and self.backward is None

    @property
    def backward(self) -> Backward | None:
        """The running backward."""
        backward = self._backward()
        return None if backward is None or self.is_over(backward) else backward

    @property
    def passes(self) -> list[Pass[Unit]]:
        """The passes that await a backward, in order."""
        return sorted((one for root in self.roots for one in root.record.passes), key=_PLACE)

    def _keep(self, one: Pass[Unit]) -> None:
        if one.calls:
            one.calls[0].unit.root.record.add(one, next(self._places))

    # ---- forward

    def call(self, unit: Unit, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``function(*args, **kwargs)`` as a forward of ``unit``. **Collective.**

        Gathers, prefetches, and registers the leaves while ``function`` computes.
        """
        hooks = self.enter(unit, args, kwargs)
        try:
            unit.open()
            outputs = function(*args, **kwargs)
        except BaseException:
            self.abort(unit)
            raise
        return self.leave(unit, outputs, hooks)

    def enter(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallHooks | None:
        """Begin a call; returns its hooks, if it has a graph."""
        self._take_thread(unit)
        self.drop_interrupted(unit.root)
        backward, hooks = self._backward(), None
        if backward is not None and self.runs_again(unit):
            backward.recompute(unit)
        else:
            if self._running is None:
                self._running = _Running(unit.root, torch.is_grad_enabled())
            try:
                hooks = self._record(self._running, unit)
                if hooks is not None:
                    hooks.see_inputs(args, kwargs)
            except BaseException:
                self._end_call(unit, completed=False)
                raise
        unit.state = TrainingState.FORWARD
        return hooks

    def runs_again(self, unit: Unit) -> bool:
        """Whether a call of ``unit`` that begins or ends now belongs to the running backward."""
        backward = self._backward()
        return backward is not None and current_task() != NO_BACKWARD and unit.root in backward.roots

    def _record(self, running: _Running, unit: Unit) -> CallHooks | None:
        record, is_grad_enabled = None, torch.is_grad_enabled()
        running.open.append(None)
        if unit.root not in running.roots:
            running.roots.append(unit.root)
            unit.root.begin_pass(unit, running.is_trained)
        if running.is_trained:
            checkpoint = current_checkpoint()
            if is_grad_enabled or checkpoint is not None:
                segment = -1 if checkpoint is None else self._checkpoints.number_of(checkpoint)
                record = running.open[-1] = running.record.enter(unit, segment)
                if not is_grad_enabled and is_recorded_later():
                    record.sight = Sight.LATER
        ahead, predicted = unit.ahead_in_forward, unit.root.order.enter(unit)
        unit.root.told.call_enters(unit)
        unit.on(Event.ENTER)
        if predicted is not None and unit.predicts_forward and not ahead:
            ahead = (predicted,)
        for other in ahead:
            if other.root in running.roots:
                other.on(Event.ENTER)
        unit.wait_unshard()
        if record is not None:
            record.versions = unit.stamp
        if record is None or not is_grad_enabled:
            return None
        return CallHooks(self, record, running.token)

    def leave(self, unit: Unit, outputs: Any, hooks: CallHooks | None) -> Any:
        """The call has returned ``outputs``: attach the hooks of the backward, and free what is to be freed."""
        try:
            outputs = _prepare(unit, outputs, hooks)
            again = self.runs_again(unit)
            if not again:
                self._tell_call_leaves(unit, completed=True)
        except BaseException:
            self.abort(unit)
            raise
        self._close(unit, again, completed=True)
        return outputs

    def abort(self, unit: Unit) -> None:
        """Clean up after a call that raised."""
        self._close(unit, self.runs_again(unit), completed=False)

    def _close(self, unit: Unit, again: bool, completed: bool) -> None:
        unit.close()
        if again:  # a checkpoint may raise to stop early
            unit.begin_backward()
            return
        if not unit.open_calls:
            unit.state = TrainingState.IDLE
        self._end_call(unit, completed)

    def _end_call(self, unit: Unit, completed: bool) -> None:
        running = self._running
        assert running is not None
        if not completed:
            self._tell_call_leaves(unit, completed=False)
        if running.open.pop() is not None:
            running.record.leave()
        if not unit.awaits_members:
            unit.on(Event.LEAVE, recorded=torch.is_grad_enabled())
        if not running.open:
            self._end_pass(running, completed)

    def _tell_call_leaves(self, unit: Unit, completed: bool) -> None:
        assert self._running is not None
        unit.root.told.call_leaves(unit, completed, len(self._running.open) == 1)

    def _end_pass(self, running: _Running, completed: bool) -> None:
        self._running = None
        recorded = completed and running.is_trained
        for root in running.roots:
            root.wait_for_reads()
            for unit in root.units:
                if unit.memory is not State.SHARDED:
                    unit.on(Event.PASS_ENDS, recorded=recorded)
        self._checkpoints.end_pass()
        if recorded:
            self._keep(running.record)

    # ---- backward

    def reach(self, probe: Probe) -> None:
        """Autograd has reached the output that ``probe`` is attached to."""
        call = probe.hooks.record
        backward = self._backward()
        if (
            backward is None
            or backward.task() is None
            or (not backward.covers(call) and any(call in one.calls for one in self.passes))  # of a forward inside
        ):
            backward = self._start_backward(call.unit.root, is_restricted=probe.is_restricted())
        backward.reach(call)

    def reach_leaf(self, unit: Unit) -> None:
        """The gradient of a leaf of ``unit`` is ready, and the backward has not reached the unit through an output."""
        backward = self.backward
        if backward is None:
            try:
                backward = self._start_backward(unit.root, is_restricted=False)
            except BaseException:
                for flat_param in unit.flat_params:
                    flat_param.drop_grads()
                raise
        backward.reach_leaf(unit)

    def _start_backward(self, first: Root, is_restricted: bool) -> Backward:
        """Begin a backward, which has reached the model ``first``."""
        self.drop_interrupted(first)
        if self._running is not None:  # inside of a forward
            self._keep(self._running.cut())
        kept = [one for one in self.passes if first.join is None or one.goes_only_through(first.units)]
        passes = [one for one in kept if one.is_alive]
        plan = agree_on_plan(passes, kept, first, is_restricted, begin=lambda: first.told.backward_begins(passes))
        backward = Backward(plan, self.backward, self._end_backward)
        self._set_backward(backward, plan)
        for root in plan.reached[1:]:
            root.told.backward_begins(passes)
        return backward

    def _end_backward(self) -> None:
        """The graph task of the running backward is over."""
        backward = self._backward()
        assert backward is not None
        backward.finish()
        self._release(backward)
        for root in backward.plan.reached:
            is_reached = any(map(backward.lists, root.units))
            reduces = is_reached and bool(backward.plan.schedule.sends) and any(unit.sync for unit in root.units)
            root.told.backward_ends(is_reached, reduces)

    def is_over(self, backward: Backward) -> bool:
        """Whether the graph task of ``backward`` has ended.

        After an exception, autograd's thread for a device may hold the task longer than the call of the backward takes.
        The thread of the forward, if it is in no backward, knows that it is over.
        """
        return backward.task() is None or (current_task() == NO_BACKWARD and self._thread == threading.get_ident())

    def follow(self, root: Root, passes: list[Pass[Unit]], resident: bytes = b"") -> None:
        """Serve a whole backward of ``passes`` through ``root`` that other ranks compute and this one does not.

        ``resident``: for each unit, whether the ranks that compute hold it gathered.
        """
        plan = agree_on_plan(passes, passes, root, resident=resident)
        backward = Backward(plan)
        self._set_backward(backward, plan)
        try:
            backward.finish()
        finally:
            self._release(backward)

    def _set_backward(self, backward: Backward, plan: Plan) -> None:
        self._backward = weakref.ref(backward)
        for root in backward.roots:
            root.backward = backward
        for root in self.roots:
            root.record.passes = [one for one in root.record.passes if one not in plan.ended]

    def _release(self, backward: Backward) -> None:
        """``backward`` is over: the one around it goes on, and another one may reach its passes."""
        outer = backward.outer
        if self._backward() is backward:
            self._backward = _NONE if outer is None else weakref.ref(outer)
        for one in backward.passes:
            one.calls[0].unit.root.record.passes.append(one)
        for root in backward.roots:
            root.backward = outer if outer is not None and root in outer.roots else None

    # ---- exceptions

    def drop_interrupted(self, root: Root) -> None:
        """Clean up after a backward through ``root`` that has raised. **Collective** if there was one.

        One that went only through other models waits until these are used, because other ranks may have dropped them.
        """
        if root.backward is not None and self.is_over(root.backward):
            self._abandon(root.backward)

    def _abandon(self, backward: Backward | None) -> None:
        """Clean up after ``backward`` and those around it."""
        roots: dict[Root, None] = {}
        while backward is not None:
            roots |= dict.fromkeys(backward.roots)
            self._release(backward)
            backward.abandon()
            backward = backward.outer
        for root in roots:
            root.drop_pass(in_backward=True)

    def reset(self, root: Root) -> None:
        """Clean up after a pass of ``root`` that raised, in all models that it went through.

        **Collective** after a backward.
        """
        running, self._running = self._running, None
        self._abandon(root.backward)
        for each in [root] if running is None else running.roots:
            each.drop_pass(in_backward=False)

    def _take_thread(self, unit: Unit) -> None:
        """Raise if another thread is in a pass: one of the two would free units under the other.

        Raises:
            TrainingStateError: another thread is in a pass.
        """
        own = threading.get_ident()
        if self._thread == own or current_task() != NO_BACKWARD:
            return  # a backward may recompute units on a thread of its own
        if not self.is_between_passes:
            raise TrainingStateError(
                "A sharded model must run on one thread at a time, because ranks gather its units in one order, but "
                f"unit `{unit.fqn or 'root'}` was called on thread {threading.current_thread().name} while another "
                "thread is in a forward or backward of the model. Call the model from one thread."
            )
        self._thread = own


def _prepare(unit: Unit, outputs: Any, hooks: CallHooks | None) -> Any:
    """The ``outputs`` of a call for its caller: none in memory that is freed, and all that carry a graph with hooks."""
    prepare = unit.copied_out if hooks is None else hooks.watch_output
    if type(outputs) is Tensor:
        outputs = prepare(outputs)
    else:
        objects = plain_objects(outputs)
        outputs = apply_to_all(prepare, outputs, objects)
        unit.is_hidden = unit.is_hidden or (hooks is not None and objects is None)
    if hooks is not None:
        hooks.end()
    return outputs


_PLACE = attrgetter("place")
_NONE: Callable[[], Any] = weakref.ref(Token())  # to nothing


def engine_of(comms: Sequence[Communicator], device: torch.device) -> Engine:
    """The only engine of these groups of ranks, for ``device``.

    It lives as long as the first group.
    """
    key = *map(id, comms[1:]), device
    if key not in comms[0].engines:
        comms[0].engines[key] = Engine()
    engine: Engine = comms[0].engines[key]
    return engine


class Root:
    """The units of one model, outermost first, and who listens to its passes.

    Attributes:
        number: number of the model among those of its `engine`; equal on all ranks.
        observers: hear every event; ``told`` passes it on to them.
        comms: the groups in which the units communicate.
        order: what its passes have called last; ``kept``: what its backwards have planned last.
        record: the passes that it has begun.
        backward: the innermost that goes through it, running or interrupted.
        is_last_backward: if False, units that the next backward does not reach stay gathered for the one after it.
        join: lets ranks that have run out of batches take part; set by those who offer it. Backwards then go through no
            other model, because these ranks know none.
    """

    def __init__(
        self, number: int, units: list[Unit], shared: Shared, comms: Sequence[Communicator],
        observers: Sequence[Observer],
    ) -> None:  # fmt: skip
        self.number, self.units, self.shared, self.comms = number, units, shared, list(comms)
        self.tell(observers)
        self.order: ForwardOrder[Unit] = ForwardOrder()
        self.kept: list[Known] = []
        self.record: Record[Unit] = Record()
        self.backward: Backward | None = None
        self.engine = engine_of(comms, shared.device)
        self._on_host = [each for unit in units for each in unit.flat_params if each.shows.on_cpu]
        self.engine.roots.add(self)
        self.is_last_backward = True
        self.join: Any = None

    def __del__(self) -> None:
        if self.backward is not None:  # it has raised
            self.shared.drop()

    @property
    def is_common(self) -> bool:
        """Whether a pass needs all ranks; under ``no_sync`` with unsharded parameters, ranks may run any passes."""
        return any(unit.sync or unit.comm.world_size > 1 for unit in self.units)

    def tell(self, observers: Sequence[Observer]) -> None:
        """Tell ``observers`` of every event from now on."""
        self.observers, self.told = list(observers), passing_on(observers)

    # ---- passes

    def begin_pass(self, unit: Unit, is_trained: bool) -> None:
        """The first call of a pass through the model begins, at ``unit``."""
        self.told.pass_begins(unit, is_trained)
        for each in self.units:
            each.begin_pass()
        self.shared.await_step()
        self.order.begin(is_trained)

    def finish_grads(self) -> None:
        """Send the gradients that wait in buckets, wait for all sums, and write them to the shards."""
        self.shared.bucketer.drain()
        if self.shared.transfers.listener is None:  # otherwise each lands just before its optimizer step
            for grad in (each.grad for unit in self.units for each in unit.flat_params if each.grad.flights):
                grad.land()
        self.wait_for_reads()

    def drop_pass(self, in_backward: bool) -> None:
        """A pass, or a backward, has raised: become idle."""
        self.shared.bucketer.reset()
        for flat_param in (each for unit in self.units for each in unit.flat_params):
            flat_param.grad.discard_flights()
        self.wait_for_reads()
        for unit in self.units:
            unit.reset()
        self.order.forget()
        self.told.interrupted(in_backward)

    def wait_for_reads(self) -> None:
        """Make the host wait until the device has read the shards in host memory; after that they may change."""
        if self._on_host:
            self.shared.transfers.wait(self.shared.unshard_stream.record())

    # ---- what ranks compare

    def history(self, comm: Communicator) -> tuple[int, ...]:
        """Numbers that are equal on all ranks of ``comm`` if these have run the same things so far."""
        return tuple(number for each in self.observers for number in each.facts(comm))

    def difference(self) -> RanksDisagreeError:
        """The error for ranks that have run different things, unless an observer raises one. **Collective.**"""
        for observer in self.observers:
            observer.ranks_differ()
        return RanksDisagreeError("Every rank must run the same units in the same order, but they differ.")
