"""What the units of one model share: streams, bucketer, order; where a pass begins and where it ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fairshard.checks.nan_check import NanCheck
from fairshard.checks.order_check import OrderCheck
from fairshard.engine.bucket_plan import planned
from fairshard.engine.exec_order import ExecOrder
from fairshard.engine.notices import warn_autocast
from fairshard.engine.training_state import TrainingState, assert_none_summoned
from fairshard.engine.unit import Unit
from fairshard.errors import TrainingStateError
from fairshard.join.join import Join
from fairshard.params.shard_grad import GradTransfers
from fairshard.params.versions import versions_of
from fairshard.utils.autograd import NO_BACKWARD, at_end_of_task, current_task
from fairshard.utils.before_step import num_steps
from fairshard.utils.collectives import Communicator
from fairshard.utils.device import Event, Stream, now
from fairshard.utils.reduce_scatter_bucketer import ReduceScatterBucketer
from fairshard.utils.watchdog import watch

_DONE_ALONE = ("no_sync", "pickle or deepcopy", "clip_grad_norm_")


class Root:
    """The outermost unit's view of all units.

    A *pass* through the model is opened by whichever unit is called first, normally the outermost, and may be
    followed by a backward. Invariant: outside of passes nothing is under way, and after the last backward nothing is
    gathered.

    Attributes:
        is_last_backward: else what the next backward does not come to stays gathered and foreseen for the one after it.
    """

    def __init__(self, units: list[Unit], device: torch.device, comms: Sequence[Communicator]) -> None:
        self.units = units
        self.device = device
        self.order: ExecOrder[Unit] = ExecOrder()
        self.order_check = OrderCheck(units, comms, device)
        self.nan_check = NanCheck(units, comms)
        self.unshard_stream = Stream(device, priority=-1)
        self.reduce_stream = Stream(device, priority=-1)
        self.transfers = GradTransfers(device)
        self._reads_host_memory = any(fp.on_cpu for unit in units for fp in unit.flat_params)
        self.bucketer = ReduceScatterBucketer(units[0].config.bucket_cap_mb, self.reduce_stream)
        self.free = now(device)
        self.after_step: Event | None = None  # what the next pass's gathers wait for, instead of its beginning
        self.in_backward = False
        self.task = NO_BACKWARD
        self.has_grads = False  # from the running backward, which may be an autograd.grad() that makes none
        self._depth = 0
        self._ahead: set[Unit] = set()
        self._warned_autocast = False
        self.has_begun = False
        self.is_last_backward = True
        self._num_steps = 0  # of optimizers, when the last pass began
        self.join: Join | None = None

    # ---- forward

    def enter_forward(self, unit: Unit) -> Sequence[Unit]:
        """``unit`` is called; returns what to gather ahead."""
        if self._depth == 0 and not (self.in_backward and current_task() != NO_BACKWARD):
            self._begin_pass(unit)
        self._depth += 1
        if self.in_backward:  # a checkpoint recomputes: the order was recorded the first time
            return ()
        self.order_check.entered.append(unit)
        self._ahead.discard(unit)
        ahead = unit.prefetch.in_forward(self.order.enter(unit))
        for other in ahead:
            if not other.is_gathered:
                self._ahead.add(other)
        return ahead

    def exit_forward(self, unit: Unit, completed: bool) -> None:
        """The forward of ``unit`` is over, ``completed`` unless it raised."""
        self._depth -= 1
        if completed and not self.in_backward:
            self.order.exited.append(unit)
        if self._depth or self.in_backward:
            return
        self._wait_for_reads()
        backward_follows = completed and torch.is_grad_enabled()
        self.order.end_forward(backward_follows)
        for unit in self._ahead if backward_follows else self.units:
            if unit.is_gathered and not unit.is_pinned:
                unit.reshard()
        self._ahead.clear()
        if self.join is not None:
            self.join.end_pass()
        self.order_check.end_forward(completed)

    def keeps_gathered(self, unit: Unit) -> bool:
        """Whether ``unit`` stays gathered after its forward; the outermost does, whose backward comes first."""
        first = unit is self.units[0] and unit.config.late.disable_reshard_on_root
        awaited = unit.members is not None and unit.members.are_awaited
        return self.in_backward or first or awaited or not unit.reshard_after_forward

    def _begin_pass(self, unit: Unit) -> None:
        if self.in_backward:  # its end never came: it raised
            self.reset()
        assert_none_summoned(self.units, "forward")
        if self.join is not None:
            self.join.begin_pass()
        self.has_begun = True
        is_same_step, self._num_steps = num_steps() == self._num_steps, num_steps()
        for other in self.units:
            for flat_param in other.flat_params:
                flat_param.begin_pass()
            serves = other.config.late.keeps_across_passes and is_same_step and not other.is_stale
            is_kept = (serves and versions_of(other.flat_params) == other.versions) or other.is_kept_as_it_is
            other.is_stale = other.is_gathered and not is_kept
            if other.members is not None:
                other.members.begin_pass()
        self.order.begin_forward()
        self.order_check.begin_forward(self.join is not None)
        watch(self.order_check)
        stepped, self.after_step = self.after_step, None
        self.unshard_stream.wait(stepped or now(self.device))  # the optimizer's step
        self._warned_autocast = self._warned_autocast or warn_autocast(self.units, self.device)

    # ---- backward

    def enter_backward(self, unit: Unit) -> Sequence[Unit]:
        """The backward has come to ``unit``; returns what to gather ahead, before its gradients are computed."""
        if not self.in_backward:
            assert_none_summoned(self.units, "backward")
            self.in_backward = True
            self.task = current_task()
            at_end_of_task(self._end_backward)
            self.order_check.begin_backward()
            expected = self.order.begin_backward()
            for other, num_calls in expected.items():
                other.num_calls = num_calls
            flat_params = planned(expected)
            if self.join is not None:
                self.join.begin_backward(flat_params)
            self.bucketer.plan(flat_params)
        self.order_check.entered.append(unit)
        foreseen = self.order.reenter(unit)
        return () if unit.prefetch.waits_for_grads else unit.prefetch.in_backward(foreseen)

    def check_live(self, unit: Unit, task: int) -> None:
        """Drop a backward that raised, now that ``task`` comes to the outputs of ``unit``."""
        if self.in_backward and unit is self.units[0] and unit.is_reached and task != self.task:
            self.reset()  # the outermost unit's outputs are reached by one task only: the other one is over

    def _end_backward(self) -> None:
        for unit in self.units:
            unit.finish_backward(self.has_grads)
        ends_step = self.has_grads and any(unit.sync for unit in self.units)
        is_common = True
        if self.join is None:
            self.settle()
        else:
            is_common = self.join.end_backward(ends_step)
        self.has_grads = False
        self.order.end_backward(self.is_last_backward)
        self.in_backward = False
        self.order_check.end_backward(ends_step, is_common)
        if ends_step and self.nan_check.is_on:
            self.nan_check.end_backward()

    def settle(self) -> None:
        """Send the gradients that wait, and let all that are under way arrive."""
        self.bucketer.flush()
        if self.transfers.listener is None:  # else they land when they are stepped
            self._land_grads()
        self._wait_for_reads()

    def reset(self) -> None:
        """Drop what a pass left behind that ended in an exception."""
        self.bucketer.reset()
        for unit in self.units:
            for flat_param in unit.flat_params:
                flat_param.grad.discard_flights()
        self._wait_for_reads()
        for unit in self.units:
            unit.reset()
        self.order_check.forget()
        self.nan_check.forget()
        self.order.end_backward()
        self.in_backward = self.has_grads = False
        self._depth = 0

    # ---- memory, state

    def _land_grads(self) -> None:
        for unit in self.units:
            for flat_param in unit.flat_params:
                flat_param.grad.land()

    def _wait_for_reads(self) -> None:
        """Let the host wait until the GPU has read the shards in host memory: from now on they may change."""
        if self._reads_host_memory and self.device.type == "cuda":
            self.transfers.wait(self.unshard_stream.record())

    def note_free(self) -> None:
        """A unit has given its memory back: gathers from now on wait until compute has passed this moment."""
        if self.device.type == "cuda":
            self.free = now(self.device)
        if self._depth and torch.is_autocast_enabled(self.device.type):
            torch.clear_autocast_cache()  # it is keyed by tensor: the leaf would be taken for unchanged

    @property
    def is_between_passes(self) -> bool:
        """Whether neither a forward nor a backward is under way."""
        return not self._depth and not self.in_backward

    def assert_idle(self, what: str, units: list[Unit] | None = None) -> None:
        """Raise unless no pass is under way in ``units``, all if None.

        Raises:
            TrainingStateError: one is.
        """
        if self.in_backward and current_task() == NO_BACKWARD:  # it raised, and nobody has cleaned up yet
            self.reset()
        for unit in self.units if units is None else units:
            if unit.state is not TrainingState.IDLE:
                raise TrainingStateError(
                    f"`{what}` must be called between passes, in state IDLE, but unit `{unit.fqn or 'root'}` is in "
                    f"{unit.state.name}. Call it after the backward has returned."
                )
        if self.join is not None and what not in _DONE_ALONE:
            self.join.check_all_compute(what)
