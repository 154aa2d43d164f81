"""The passes of a model: where they begin and end, and what runs in between."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NoReturn

import torch
from torch import Tensor

from fairshard.engine.adopt import adopt_changes
from fairshard.engine.backward import Backward
from fairshard.engine.call import Call, Probe
from fairshard.engine.exec_order import Bracket, ForwardOrder, Pass, Record
from fairshard.engine.listener import GradListener, JoinListener, OrderListener
from fairshard.engine.notices import warn_autocast, warn_of_hooks, warn_opaque_outputs
from fairshard.engine.planner import Last
from fairshard.engine.segments import current_segment
from fairshard.engine.shared import Shared
from fairshard.engine.training_state import TrainingState, assert_none_summoned
from fairshard.engine.unit import Unit
from fairshard.errors import TrainingStateError
from fairshard.utils.autograd import newest_node
from fairshard.utils.collectives import Communicator, Communicators
from fairshard.utils.nested import apply_to_all, cast_inputs_to_fp16, plain_objects
from fairshard.utils.streams import is_asynchronous

_DONE_ALONE = ("no_sync", "pickle or deepcopy", "clip_grad_norm_")

roots: weakref.WeakSet[Root] = weakref.WeakSet()  # of this process


class Root:
    """All units of one model, and the running pass.

    The unit that is called first, normally the outermost, begins a *pass* through the model, which a backward may
    follow. Invariant: outside of passes no gather or reduction is under way, and after the last backward nothing is
    gathered.

    Attributes:
        is_last_backward: if False, units that the next backward does not reach stay gathered for the one after it.
        number: number of the model among those with the same ``comms``; equal on all ranks.
        num_interrupted: number of backwards that raised; if ranks differ in it, the next backward raises.
    """

    def __init__(
        self, number: int, units: list[Unit], shared: Shared, comms: Sequence[Communicator],
        comms_of: dict[Unit, Communicators], order_check: OrderListener, nan_check: GradListener,
    ) -> None:  # fmt: skip
        self.number = number
        self.units, self.shared, self.comms = units, shared, list(comms)
        self.comms_of = {unit: {own.shard, own.replicas} for unit, own in comms_of.items()}
        self.order_check, self.nan_check = order_check, nan_check
        self.join: JoinListener | None = None
        self.order: ForwardOrder[Unit] = ForwardOrder()
        self.record: Record[Unit] = Record()
        self.last = Last()
        self.backward: Backward | None = None
        self.on_backward: Callable[[Root], None] | None = None  # called before a backward begins
        self.has_begun, self.is_compared, self.is_last_backward = False, False, True
        self.num_interrupted = 0
        self._is_cut = any(own.shard.world_size > 1 for own in comms_of.values())
        self._reads_host_memory = any(fp.on_cpu for unit in units for fp in unit.flat_params)
        self._ahead: set[Unit] = set()
        self._is_trained = False
        self._warned_autocast = self._warned_hooks = False
        self._turns = count()
        self._last_output: Callable[[], Tensor | None] = _none
        self.note: Callable[[Unit], None] = order_check.note  # called before a unit runs, is gathered or sent
        roots.add(self)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.shared.device

    @property
    def in_backward(self) -> bool:
        """Whether a backward is running, or has raised and `reset` has not cleaned up yet."""
        return self.backward is not None

    @property
    def is_common(self) -> bool:
        """Whether a pass needs all ranks; under ``no_sync`` with unsharded parameters, ranks may run any passes."""
        return self._is_cut or any(unit.sync for unit in self.units)

    # ---- forward

    def pre_forward(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Call | None]:
        """Gather, prefetch, and cast the inputs; returns the inputs and, with grad enabled, the `Call`."""
        if self.shared.depth == 0 and (self.backward is None or self.backward.is_over):
            self._begin_pass(unit)
        self.shared.depth += 1
        if self.shared.is_asynchronous:
            self.shared.note_stream()
        try:
            unit.state = TrainingState.FORWARD
            is_grad_enabled = torch.is_grad_enabled()
            if self.backward is not None:
                bracket = self.backward.recompute(unit)
                unit.state = TrainingState.FORWARD
            else:
                bracket = self._enter(unit, is_grad_enabled)
            if unit.buffers is not None:
                unit.buffers.attach()
            call = None
            if is_grad_enabled:
                assert unit.stamp is not None
                call = Call(self, unit.stamp[1], Bracket(unit) if bracket is None else bracket)
                if bracket is not None and self.backward is None:
                    bracket.call, bracket.versions, bracket.began = weakref.ref(call), call.versions, newest_node()
                call.watch_inputs(args, kwargs, self._last_output())
            if unit.input_dtype is not None:
                args, kwargs = cast_inputs_to_fp16(*args, dtype=unit.input_dtype, **kwargs)
            return args, kwargs, call
        except BaseException:
            self.abort_forward(unit, unit.listing.is_computing)
            raise

    def post_forward(self, unit: Unit, outputs: Any, call: Call | None, is_nested: bool) -> Any:
        """Attach the backward's hooks to the outputs, and reshard unless the unit stays gathered.

        ``is_nested``: the unit was already computing before the call, in an enclosing call or in a backward.
        """
        try:
            if type(outputs) is Tensor:
                is_seen = True
                outputs = unit.copied_out(outputs)
                if call is not None:
                    outputs = call.watch_output(outputs)
            else:
                objects = [] if unit.is_pinned else plain_objects(outputs)
                is_seen = objects is not None
                outputs = apply_to_all(unit.copied_out, outputs, objects)
                if call is not None:
                    outputs = apply_to_all(call.watch_output, outputs, objects)
            if call is not None:
                is_unseen = call.end() or (not call.probes and any(fp.requires_grad for fp in unit.flat_params))
                if is_unseen or not is_seen:
                    call.bracket.is_unseen = True
                    unit.hold(for_good=not is_seen)
                if not is_seen:
                    warn_opaque_outputs(unit.fqn, outputs)
                self._last_output = weakref.ref(outputs) if type(outputs) is Tensor else _none
        except BaseException:
            self.abort_forward(unit, is_nested)
            raise
        self._leave(unit, self._keeps_gathered(unit), is_nested, completed=True)
        return outputs

    def abort_forward(self, unit: Unit, is_nested: bool) -> None:
        """Clean up after a forward that raised, as if it had not been called."""
        self._leave(unit, self.backward is not None, is_nested, completed=False)  # a checkpoint may raise to stop early

    def _enter(self, unit: Unit, is_grad_enabled: bool) -> Bracket[Unit] | None:
        bracket = self.record.enter(unit, current_segment(is_grad_enabled) if self._is_trained else None)
        self.note(unit)
        self._ahead.discard(unit)
        adopt_changes(unit, self.order_check)
        self._unshard(unit)
        for other in unit.prefetch.in_forward(self.order.enter(unit)):
            if not other.is_gathered:
                self._ahead.add(other)
            self._unshard(other)
        unit.wait_unshard(attach=False)
        return bracket

    def _unshard(self, unit: Unit) -> None:
        if not unit.is_gathered or unit.stamp is None:
            if self.join is not None:
                self.join.announce(unit)
            else:
                self.order_check.gather(unit)
            unit.unshard()

    def _keeps_gathered(self, unit: Unit) -> bool:
        """Whether ``unit`` stays gathered after the call that is ending."""
        awaited = unit.members is not None and unit.members.has_uncalled
        return self.backward is not None or awaited or self.keeps_after_forward(unit)

    def keeps_after_forward(self, unit: Unit) -> bool:
        """Whether ``unit`` stays gathered for its backward, as the outermost does by default: its backward is first."""
        first = unit is self.units[0] and not unit.rule.reshard_root
        return first or not unit.reshard_after_forward

    def _leave(self, unit: Unit, keep: bool, is_nested: bool, completed: bool) -> None:
        if unit.buffers is not None and self.backward is None and not is_nested:
            unit.buffers.detach()
        unit.leave_forward(keep, torch.is_grad_enabled(), is_nested)
        if self.backward is not None:
            unit.state = TrainingState.BACKWARD_PRE
        elif not is_nested:
            unit.state = TrainingState.IDLE
        self.shared.depth -= 1
        if self.backward is not None:
            return
        self.record.leave(completed)
        if not self.shared.depth:
            self._end_pass(completed)

    def _begin_pass(self, unit: Unit) -> None:
        """A pass begins at ``unit``."""
        if self.backward is not None:  # it raised, and has not ended properly
            self.reset()
        is_inner = unit is not self.units[0] and not torch.is_grad_enabled()  # then the outermost may be summoned
        assert_none_summoned(self.units[is_inner:], "forward")
        if self.join is not None:
            self.join.begin_pass()
        self._warned_hooks = self._warned_hooks or warn_of_hooks(self.units, next(self._turns))
        self.has_begun = True
        with self.shared.at_home():
            for each in self.units:
                each.begin_pass()
        self._is_trained = torch.is_grad_enabled()
        self.order.begin(self._is_trained)
        if self._is_trained:
            self.record.begin(self.is_common)
        self.order_check.begin_forward(self._is_trained and self.is_common and self.join is None)
        self.shared.await_step()
        self.shared.after_step = None
        self._warned_autocast = self._warned_autocast or warn_autocast(self.units, self.device)

    def _end_pass(self, completed: bool) -> None:
        self._last_output = _none
        self.shared.end_forward()
        self._wait_for_reads()
        backward_follows = completed and torch.is_grad_enabled()
        self.record.end(backward_follows)
        for unit in self._ahead if backward_follows else self.units:
            if unit.is_gathered:
                unit.reshard()
        self._ahead.clear()
        if self.join is not None:
            self.join.end_pass()
        self.order_check.end_forward(completed)

    # ---- backward

    def accumulate(self, unit: Unit) -> None:
        """The gradient of a leaf of ``unit`` is ready."""
        backward = self.backward
        if backward is None or backward.task() is None:
            backward = self._start_backward(None)
        backward.accumulate(unit)

    def reach(self, probe: Probe) -> None:
        """Autograd has reached the output that ``probe`` is attached to."""
        backward = self.backward
        if backward is None or backward.task() is None:
            backward = self._start_backward(probe)
        backward.reach(probe.call)

    def finish(self, call: Call) -> None:
        """Autograd has finished ``call`` and continues past one of its inputs."""
        if self.backward is not None and self.backward.task() is not None:
            self.backward.finish(call)

    def _start_backward(self, probe: Probe | None) -> Backward:
        """Begin a backward, at ``probe`` if not None."""
        if self.on_backward is not None:
            self.on_backward(self)
        if self.backward is not None:  # it raised, and has not ended properly
            self.reset()
        if self.join is not None:
            self.join.begin_backward(self.record.passes)
        backward = Backward(self, self._others)
        backward.begin(is_restricted=probe is not None and probe.is_restricted())
        return backward

    def _others(self) -> list[Root]:
        """The other models of this process that a backward could reach."""
        if self.join is not None:
            return []
        others = (root for root in roots if root is not self and root.record.passes and root.join is None)
        return [root for root in others if root.backward is None and root.comms == self.comms]

    def begin_backward(self, backward: Backward) -> None:
        """``backward`` goes through this model."""
        self.backward = backward
        self.order_check.begin_backward()

    def follow_backward(self, passes: list[Pass[Unit]]) -> None:
        """Serve a whole backward of ``passes`` that other ranks compute and this one does not."""
        before, self.record.passes = self.record.passes, passes
        try:
            Backward(self, self._others).follow()
        finally:
            self.record.passes = before

    def end_backward(self, backward: Backward) -> None:
        """The running backward is over."""
        ends_step = backward.sends and any(unit.sync for unit in self.units)
        for unit in self.units:
            unit.end_backward(keep=not self.is_last_backward and not backward.lists(unit))
        self.backward = None
        try:
            is_common = self.join is None or self.join.end_backward(ends_step)
            if self.join is None:
                self.finish_grads()
        except BaseException:  # of a user's hook on gradients
            self.backward = backward  # so that `reset` follows
            raise
        self.order_check.end_backward(ends_step, is_common)
        if ends_step and self.nan_check.is_on:
            self.nan_check.end_backward()

    def leave_backward(self) -> None:
        """The running backward is over, and has reached no unit of this model."""
        self.backward = None
        self.order_check.end_backward(False, True)

    @property
    def state(self) -> dict[str, str]:
        """In words, what must be the same on all ranks between passes."""
        unsynced = [f"`{unit.fqn or 'root'}`" for unit in self.units if not unit.sync][:3] or ["none"]
        raised = str(self.num_interrupted)
        return {"backwards that have raised": raised, "units under no_sync": ", ".join(unsynced)}

    def raise_difference(self) -> NoReturn:
        """Raise, because ranks have run different things. **Collective.**"""
        self.order_check.raise_difference(self.state)

    def history(self, comm: Communicator) -> tuple[int, ...]:
        """Numbers that are equal on all ranks of ``comm`` if these have run the same things so far."""
        return self.num_interrupted, *self.order_check.history(comm, self.join is not None, self.backward is not None)

    def finish_grads(self) -> None:
        """Send the gradients that wait in buckets, wait for all sums, and write them to the shards."""
        with self.shared.at_home(returns=True):
            self.shared.bucketer.drain()
        if self.shared.transfers.listener is None:  # otherwise each lands just before its optimizer step
            for grad in (each.grad for unit in self.units for each in unit.flat_params if each.grad.flights):
                grad.land()
        self._wait_for_reads()

    def reset(self) -> None:
        """Clean up after a pass that raised, in all models that it went through. **Collective** after a backward."""
        backward = self.backward
        reached = [self] if backward is None else [root for root in roots if root.backward is backward]
        with self.shared.at_home(returns=True):
            if backward is not None:
                backward.abandon()
            for root in reached:
                root._drop_pass(backward)

    def drop_interrupted(self) -> None:
        """Call `reset` if a backward has raised and was not cleaned up yet; called only in uses of this model."""
        if self.backward is not None and self.backward.is_over:
            self.reset()

    def _drop_pass(self, backward: Backward | None) -> None:
        self.backward = None
        self.num_interrupted += backward is not None
        self.shared.depth = 0
        self.shared.bucketer.reset()
        for flat_param in (each for unit in self.units for each in unit.flat_params):
            flat_param.grad.discard_flights()
        self._wait_for_reads()
        for unit in self.units:
            unit.reset()
        self.order_check.forget()
        self.nan_check.forget()

    # ---- memory, state

    def _wait_for_reads(self) -> None:
        """Make the host wait until the device has read the shards in host memory; after that they may change."""
        if self._reads_host_memory and is_asynchronous(self.device):
            self.shared.transfers.wait(self.shared.unshard_stream.record())

    @property
    def is_between_passes(self) -> bool:
        """Whether no forward and no backward is running."""
        return not self.shared.depth and self.backward is None

    def assert_idle(self, what: str, units: list[Unit] | None = None) -> None:
        """Raise if a pass is running in one of ``units``; None: all units.

        Raises:
            TrainingStateError: a pass is running.
        """
        self.drop_interrupted()
        for unit in self.units if units is None else units:
            if unit.state is not TrainingState.IDLE:
                raise TrainingStateError(
                    f"`{what}` must be called between passes, in state IDLE, but unit `{unit.fqn or 'root'}` is in "
                    f"{unit.state.name}. Call it after the backward has returned."
                )
        if self.join is not None and what not in _DONE_ALONE:
            self.join.check_all_compute(what)


def _none() -> None:
    """Stand-in for a weak reference to nothing."""
