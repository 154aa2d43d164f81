"""The state machine of one wrapped module: when its parameters are whole, and when its gradients leave.

A backward is one or more *graph tasks* (autograd's word): a reentrant checkpoint runs its segment as a task of
its own inside the outer one. Gradients are counted per task: when the leaves that a task reaches have theirs, they
are sent. The parameters are given back when no task still needs them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fairshard.nn.data_parallel.advice import warn_opaque_outputs
from fairshard.nn.data_parallel.autograd_hooks import current_task, num_reached
from fairshard.nn.data_parallel.backward_errors import create_graph_error, unseen_error
from fairshard.nn.data_parallel.buffers import ComputeBuffers
from fairshard.nn.data_parallel.call import Call
from fairshard.nn.data_parallel.config import UnitConfig
from fairshard.nn.data_parallel.flat_param import FlatParam
from fairshard.nn.data_parallel.grad_notes import grads_of
from fairshard.nn.data_parallel.groups import UnitGroups, part_of
from fairshard.nn.data_parallel.kept_part import KeptParts
from fairshard.nn.data_parallel.listing import list_for_recomputation
from fairshard.nn.data_parallel.members import Members
from fairshard.nn.data_parallel.origin import Origin
from fairshard.nn.data_parallel.prefetch import Prefetch
from fairshard.nn.data_parallel.rows_flat_param import join_gathers
from fairshard.nn.data_parallel.saved_group import SavedGroup
from fairshard.nn.data_parallel.shard_versions import check_unchanged, versions_of
from fairshard.nn.data_parallel.state_dict_config import default_settings
from fairshard.nn.data_parallel.training_state import TrainingState
from fairshard.nn.data_parallel.tree import renamed
from fairshard.utils.before_step import num_steps
from fairshard.utils.collectives import Communicator, Communicators
from fairshard.utils.containers import apply_to_tensors, cast_inputs_to_fp16, is_transparent

if TYPE_CHECKING:
    from fairshard.nn.data_parallel.root import Root


class Unit:
    """One wrapped module, the flat params cut from it, and the phase it is in."""

    def __init__(
        self, groups: UnitGroups, flat_params: Sequence[FlatParam], config: UnitConfig, origin: Origin,
        members: Members | None = None,
    ) -> None:  # fmt: skip
        self.groups, self.origin, self.members = groups, origin, members
        self.flat_params, self.config = flat_params, config
        self.fqn = "" if members is None else members.fqn
        self.is_inner = False  # of another unit
        self.sync = True
        self.reshard_after_forward = config.reshard_after_forward
        self.reshard_after_backward = self.unshard_in_backward = True
        self.state_dict_settings = default_settings()
        self.prefetch: Prefetch[Unit] = Prefetch(config)
        self._forget_runtime()

    def _forget_runtime(self) -> None:
        self.state = TrainingState.IDLE
        self.root: Root | None = None
        self.comm: Communicator | None = None
        self._kept_at: tuple[int, list[int]] | None = None  # steps of optimizers and versions, when kept in no_sync
        self._parts: KeptParts | None = None
        self.buffers: ComputeBuffers | None = None
        self.is_gathered = self.is_stale = False
        self.versions: list[int] = []
        self._counted: dict[int, int] = {}  # graph task -> leaves that it reaches and has not come to yet
        self._open_calls: set[Call] = set()  # calls whose inputs' gradients are awaited
        self._hooks_inputs = True
        self.is_reached = False  # by the running backward
        self._owes = False  # gradients, to the reduction
        self._is_partial = False  # the running backward does not reach all leaves, as far as it is known
        self._num_arrived = self._num_closed = 0  # calls that the running backward has come to, and is through with ...
        self.num_calls = 0  # ... of those that it may come to
        self.is_pinned = False  # gathered for good: its backward could come unseen

    def __getstate__(self) -> dict[str, Any]:
        kept = ("groups", "flat_params", "config", "fqn", "is_inner", "state_dict_settings", "origin", "prefetch")
        how = ("members", "reshard_after_forward", "reshard_after_backward", "unshard_in_backward")
        return {name: getattr(self, name) for name in (*kept, *how)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.sync = True
        self._forget_runtime()

    def place(self, fqn: str) -> None:
        """Take the name that the unit has in the whole model, and give its parameters theirs."""
        if fqn != self.fqn:
            for flat_param in self.flat_params:
                flat_param.rename(partial(renamed, before=self.fqn, after=fqn))
        self.fqn = fqn

    @property
    def group(self) -> SavedGroup:
        """The ranks that the parameters are cut among."""
        return self.groups.shard

    def materialize(self, root: Root, comms: Communicators, modules: list[nn.Module]) -> None:
        """Join ``root``, and make what the first forward needs; ``modules`` are those that no inner unit owns."""
        self.root = root
        self.comm = comms.shard
        self.device = root.device
        on_grad = weakref.WeakMethod(self._on_grad)

        def tell(leaf: Tensor) -> None:
            method = on_grad()
            if method is not None:
                method(leaf)

        for flat_param in self.flat_params:
            flat_param.materialize(comms, self.config, root.transfers, tell)
        join_gathers(self.flat_params)
        part = part_of(comms.shard, self.config.reshard_after_forward, self.fqn)
        if part is not None:
            self._parts = KeptParts([flat_param.kept_line for flat_param in self.flat_params], part)
        self._input_dtype = self.config.input_dtype(is_root=self is root.units[0])
        if self.config.precision.buffer_dtype is not None:
            self.buffers = ComputeBuffers(self.origin.without_ignored(modules), self.config.precision.buffer_dtype)

    # ---- forward

    def pre_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Call | None]:
        """Gather, look ahead, cast the inputs; returns the inputs and, with grad enabled, what tracks the call."""
        root = self.root
        assert root is not None
        ahead = root.enter_forward(self)
        try:
            self.state = TrainingState.FORWARD
            self.unshard()
            for other in ahead:
                other.unshard()
            self.wait_unshard()
            if self.buffers is not None:
                self.buffers.attach()
            call = None
            if torch.is_grad_enabled():
                self.versions = versions_of(self.flat_params)
                call = Call(self)
                if self._hooks_inputs or root.order.is_later:
                    apply_to_tensors(call.watch_input, (args, kwargs))
            if self._input_dtype is not None:
                args, kwargs = cast_inputs_to_fp16(*args, dtype=self._input_dtype, **kwargs)
            return args, kwargs, call
        except BaseException:
            self.abort_forward()
            raise

    def post_forward(self, outputs: Any, call: Call | None) -> Any:
        """Hook the outputs for the backward, and reshard unless the backward wants the parameters at once."""
        root = self.root
        assert root is not None
        keep = root.keeps_gathered(self)
        try:
            if call is not None:
                outputs = apply_to_tensors(call.watch_output, outputs)
                keep = keep or call.lacks_outputs
                call.is_later = root.order.is_later and (self.config.late.keeps_across_passes or not keep)
                if not (self.is_pinned or is_transparent(outputs)):
                    self.is_pinned = True
                    warn_opaque_outputs(self.fqn, outputs)
        except BaseException:
            self.abort_forward()
            raise
        self._leave_forward(keep or self.is_pinned)
        root.exit_forward(self, completed=True)
        return outputs

    def abort_forward(self) -> None:
        """The forward raised: leave everything as if it had not been called."""
        root = self.root
        assert root is not None
        self._leave_forward(keep=root.in_backward)  # a checkpoint may stop its recomputation by raising
        root.exit_forward(self, completed=False)

    def _leave_forward(self, keep: bool) -> None:
        root = self.root
        assert root is not None
        if self.buffers is not None and not root.in_backward:
            self.buffers.detach()
        if not keep:
            if self._parts is not None:
                self._parts.end_forward(self.is_gathered and torch.is_grad_enabled())
            self.reshard()
        self.state = TrainingState.BACKWARD_PRE if root.in_backward else TrainingState.IDLE

    # ---- backward

    def pre_backward(self, call: Call, task: int) -> None:
        """The backward has come to one call's outputs: gather, look ahead, count the leaves it will reach."""
        root = self.root
        assert root is not None
        if torch.is_grad_enabled():
            raise create_graph_error(self.fqn)
        root.check_live(self, task)
        ahead = root.enter_backward(self)
        check_unchanged(self.flat_params, call.versions)
        self._reach()
        self._num_arrived += 1
        if self.unshard_in_backward:
            self.unshard()
        for other in ahead:
            if other.unshard_in_backward:
                other.unshard()
        self.wait_unshard()
        if self.buffers is not None:
            self.buffers.attach()
        list_for_recomputation(self.flat_params)
        if task not in self._counted:
            if reached := self._num_reached():
                self._counted[task] = reached
            # A leaf that is not reached is unused, or inside a reentrant segment that is still to come. Like frozen
            # parameters it may be read until the gradients of the unit's inputs are done.
            self._is_partial = reached < sum(len(flat_param.nodes) for flat_param in self.flat_params)
            self._hooks_inputs = self._is_partial or any(flat_param.has_frozen for flat_param in self.flat_params)
        if (self._hooks_inputs or call.is_later) and call.await_inputs(to_the_end=self._hooks_inputs):
            self._open_calls.add(call)

    def _on_grad(self, leaf: Tensor) -> None:
        """Autograd has accumulated one leaf's gradient."""
        task = current_task()
        root = self.root
        assert root is not None
        root.has_grads = True
        left = self._counted.get(task)
        if left is None:  # a task that began inside this unit: a reentrant segment
            if not self.is_gathered:
                raise unseen_error(self.fqn)
            root.enter_backward(self)
            self._reach()
            left = self._num_reached()
        if left > 1:
            self._counted[task] = left - 1
            return
        self._counted.pop(task, None)
        self._owes = True
        if not self._is_partial and (task == root.task or self._has_arrived):
            self.send_grads()
        self._finish_when_done()

    def _reach(self) -> None:
        if not self.is_reached:
            self.is_reached = self._owes = True
            for flat_param in self.flat_params:
                flat_param.forget_zeroed()
        self.state = TrainingState.BACKWARD_PRE

    def _num_reached(self) -> int:
        return sum(num_reached(flat_param.nodes) for flat_param in self.flat_params)

    def close_call(self, call: Call) -> None:
        """The gradients of one call's inputs are done."""
        self._open_calls.discard(call)
        if not self.is_reached:
            return
        root = self.root
        assert root is not None
        self._num_closed += 1
        if call.is_later and self._num_closed == self._num_arrived and root.order.comes_again(self):
            self._give_back(root)  # until the backward comes to an earlier forward; meanwhile gradients add up
        else:
            self._finish_when_done()

    def send_grads(self) -> None:
        """Hand the gradients to the reduction, or keep them whole under ``no_sync``."""
        root = self.root
        assert root is not None
        self.state = TrainingState.BACKWARD_POST
        self._owes = False
        if root.nan_check.is_on:
            root.nan_check.look(self)
        is_last = self._has_arrived and not self._is_partial
        for flat_param in self.flat_params:
            if flat_param.requires_grad and flat_param.shard_numel:
                if root.join is not None:
                    root.join.send(flat_param, self.sync)
                if self.sync:
                    flat_param.is_complete = is_last
                    flat_param.num_sent += 1
                    root.bucketer.reduce(flat_param)
                else:
                    flat_param.accumulate()

    def finish_backward(self, has_grads: bool) -> None:
        """The backward is over: send what was left, if there are any gradients at all; reshard, be idle."""
        if has_grads:
            if self.sync and any(flat_param.has_accumulated for flat_param in self.flat_params):
                self._reach()  # unless zeroed meanwhile, what no_sync accumulated is due, reached or not
                self._owes = any(flat_param.has_accumulated for flat_param in self.flat_params)
            if self._owes or self._counted:
                self.send_grads()
        self._rest(keep=not self.is_reached and self.root is not None and not self.root.is_last_backward)

    def reset(self) -> None:
        """Leave an interrupted pass: drop its gradients, reshard, be idle."""
        for flat_param in self.flat_params:
            flat_param.drop_grads()
        self._kept_at = None
        self._rest()

    def _rest(self, keep: bool = False) -> None:
        if self.buffers is not None:
            self.buffers.detach()
        self._counted.clear()
        self._open_calls.clear()
        self.is_reached = self._owes = self._is_partial = False
        self._num_arrived = self._num_closed = self.num_calls = 0
        if self._parts is not None and not keep:
            self._parts.forget()
        if self.is_gathered and not self.is_pinned and self._kept_at is None and not keep:
            self.reshard()
        self.state = TrainingState.IDLE

    def keep_as_it_is(self) -> None:
        """Stay gathered between passes, until the shards change."""
        self._kept_at = num_steps(), versions_of(self.flat_params)

    @property
    def is_kept_as_it_is(self) -> bool:
        """Whether what was gathered, and kept between passes, is still what the shards hold."""
        return self._kept_at == (num_steps(), versions_of(self.flat_params))

    def _finish_when_done(self) -> None:
        """Send what is owed, and reshard, once neither a leaf nor an input is awaited."""
        if self._counted or self._open_calls:
            return
        root = self.root
        assert root is not None
        if self._owes and self._has_arrived and root.has_grads:
            self.send_grads()
        self._give_back(root)

    def _give_back(self, root: Root) -> None:
        if not self.is_gathered or self.is_pinned:
            return
        if self.buffers is not None:
            self.buffers.detach()
        if (self.config.keeps_in_no_sync and not self.sync) or not self.reshard_after_backward:
            self.keep_as_it_is()
        else:
            self.reshard()
        if self.prefetch.waits_for_grads:
            for other in self.prefetch.in_backward(root.order.still_ahead(self)):
                other.unshard()

    @property
    def _has_arrived(self) -> bool:
        """Whether all calls have been come to; until then gradients add up here, and are rounded once."""
        return self._num_arrived >= self.num_calls

    @property
    def shard_grad(self) -> dict[nn.Parameter, Tensor]:
        """The gradient of each shard that has one, wherever it is kept."""
        return grads_of(self.flat_params)

    def zero_grad(self, set_to_none: bool) -> None:
        """Drop or zero the gradients of the shards, wherever they are kept."""
        for flat_param in self.flat_params:
            if flat_param.grad is not None:
                flat_param.grad.zero(set_to_none)

    # ---- parameters

    def unshard(self) -> None:
        """Start gathering; nothing to do when gathered in this pass already. **Collective.**"""
        if self.is_gathered and not self.is_stale:
            return
        root = self.root
        assert root is not None
        if root.join is not None:
            root.join.announce(self)
        stream = root.unshard_stream
        with stream.use():
            stream.wait(root.free)
            if self._parts is None or not root.in_backward:
                for flat_param in self.flat_params:
                    flat_param.unshard()
            else:
                self._parts.unshard(self.flat_params)
        self.is_gathered, self.is_stale = True, False

    def wait_unshard(self) -> None:
        """Wait until the parameters are whole, and hang them into the modules."""
        for flat_param in self.flat_params:
            flat_param.wait_unshard()

    def reshard(self) -> None:
        """Free the whole parameters; what is left is the shards."""
        for flat_param in self.flat_params:
            flat_param.reshard()
        self.is_gathered = False
        self._kept_at = None
        if self.root is not None:
            self.root.note_free()
