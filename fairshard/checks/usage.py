"""What is refused when a pass or a backward begins, and warnings about what costs memory or has no effect."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

import torch
from torch import nn

from fairshard.engine.observer import Observer
from fairshard.engine.record import Sight
from fairshard.engine.root import Root
from fairshard.engine.training_state import TrainingState
from fairshard.engine.unit import Unit
from fairshard.errors import FairshardError, GradRequiresGradError, TrainingStateError
from fairshard.utils.autograd import NO_BACKWARD, current_task, reaches
from fairshard.utils.streams import current_stream, is_asynchronous
from fairshard.utils.user_line import level_of_user


class UsageCheck(Observer):
    """Warns once of each kind, for the model of ``units``."""

    def __init__(self, units: list[Unit]) -> None:
        self._units = units
        self._turns = count()
        self._warned_autocast = self._warned_hooks = False
        self._with_hidden: set[Unit] = set()  # that the user knows of
        self._stream: Any = None  # of the first pass

    def pass_begins(self, unit: Any, is_trained: bool) -> None:
        """Look at autocast, and at one parameter of each flat param, another one in each pass (host time).

        Raises:
            TrainingStateError: a unit is summoned, or the current stream is not that of the first pass.
        """
        is_inner = unit is not self._units[0] and not torch.is_grad_enabled()  # then the outermost may be summoned
        assert_none_summoned(self._units[is_inner:], "forward")
        if is_asynchronous(unit.device):
            self._check_stream(unit, current_stream(unit.device))
        if not self._warned_autocast and torch.is_autocast_enabled(unit.device.type):
            self._warned_autocast = _warn_autocast(self._units)
        turn = next(self._turns)
        if not self._warned_hooks and (name := self._hooked(turn)) is not None:
            self._warned_hooks = True
            warnings.warn(
                f"A hook that `register_hook` put on `{name}` is never called, because autograd does not reach shards. "
                "Use `register_post_accumulate_grad_hook`, which sees the reduced gradient, or put the hook on the "
                "original parameter before sharding, where it sees this rank's whole gradient.",
                stacklevel=level_of_user(),
            )

    def _check_stream(self, unit: Unit, stream: Any) -> None:
        self._stream = self._stream or stream
        if stream != self._stream:
            raise TrainingStateError(
                f"A sharded model must run on one stream, {self._stream}, that of its first forward, but unit "
                f"`{unit.fqn or 'root'}` was called on another one, {stream}. Enter the stream before the first "
                "forward."
            )

    def call_leaves(self, unit: Unit, completed: bool, is_last: bool) -> None:
        """Warn of outputs that hide tensors."""
        if unit.is_hidden and unit not in self._with_hidden:
            self._with_hidden.add(unit)
            warnings.warn(
                f"Unit `{unit.fqn or 'root'}` returned objects that fairshard cannot look into. It stays gathered "
                "until the next forward, because a backward through them would be noticed too late. Return tensors in "
                "tuples, lists, dicts, dataclasses or objects of Python classes without `__slots__`.",
                stacklevel=level_of_user(),
            )

    def backward_begins(self, passes: Sequence[Any]) -> None:
        """Refuse what a backward cannot compute.

        Raises:
            TrainingStateError: a unit that ``passes`` have called is summoned.
            GradRequiresGradError: gradients would have a graph of their own.
            FairshardError: parameters would get no gradients.
        """
        called = [call.unit for one in passes for call in one.calls]
        assert_none_summoned({*self._units, *called}, "backward")
        if torch.is_grad_enabled() and current_task() != NO_BACKWARD:
            raise GradRequiresGradError(
                "Gradients of a sharded unit must not require grad, but the backward of "
                f"`{self._units[0].fqn or 'the root'}` was started with create_graph=True. Sharded gradients cannot "
                "be differentiated again; compute such terms on a module that is not sharded."
            )
        self._refuse_split(passes)

    def _refuse_split(self, passes: Sequence[Any]) -> None:
        """Raise if the graph task computes gradients of inputs alone, as a pipeline schedule that splits backwards.

        Only if the schedule has set the model up for one of several backwards, in which gradients are kept.
        """
        root = self._units[0].root
        if root.is_last_backward or any(unit.sync or unit.reshard_after_backward for unit in self._units):
            return
        if any(call.sight is Sight.LATER for one in passes for call in one.calls):
            return  # leaves inside reentrant checkpoints show only later
        nodes = [node for unit in self._units for node in unit.nodes]
        if nodes and not any(map(reaches, nodes)):
            raise FairshardError(
                "A pipeline schedule must compute gradients of inputs and of parameters in one backward, but this one "
                f"splits them: its backward of `{self._units[0].fqn or 'the root'}` computes gradients of inputs "
                "alone, and parameters would get none. Use ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B or "
                "ScheduleLoopedBFS."
            )

    def _hooked(self, turn: int) -> str | None:
        """The name of a shard with a hook of ``register_hook``; turn 0 looks at all."""
        for flat_param in (flat_param for unit in self._units for flat_param in unit.flat_params):
            registered: tuple[nn.Parameter, ...] = flat_param.shows.registered
            for param in (registered[turn % len(registered)],) if turn else registered:
                if param._backward_hooks:
                    return str(next(one.name for one in flat_param.stepped if one.shard is param))
        return None


def assert_none_summoned(units: Iterable[Unit], what: str) -> None:
    """Raise if the parameters of one of ``units`` are summoned when a ``what`` begins.

    Raises:
        TrainingStateError: a unit is summoned.
    """
    for unit in units:
        if unit.state is TrainingState.SUMMON_FULL_PARAMS:
            raise TrainingStateError(
                f"A {what} must not run inside summon_full_params, but unit `{unit.fqn or 'root'}` is summoned. "
                "Leave the `with` block first. Only a forward under `torch.no_grad()`, such as that of `generate`, may "
                "run inside, if all units or the outermost alone (`recurse=False`) are summoned, on all ranks."
            )


def assert_idle(root: Root, what: str, units: Sequence[Unit] | None = None) -> None:
    """Raise if a pass is running in one of ``units`` of ``root``, when ``what`` is called; None: in any.

    Raises:
        TrainingStateError: a pass is running.
    """
    root.engine.drop_interrupted(root)
    for unit in root.units if units is None else units:
        if unit.state is not TrainingState.IDLE:
            raise TrainingStateError(
                f"`{what}` must be called between passes, in state IDLE, but unit `{unit.fqn or 'root'}` is in "
                f"{unit.state.name}. Call it after the backward has returned."
            )
    for observer in root.observers:
        observer.needs_all(what)


def _warn_autocast(units: list[Unit]) -> bool:
    if not any(fp.compute_dtype == torch.float32 for unit in units for fp in unit.flat_params):
        return False
    warnings.warn(
        "Under autocast, parameters gathered in torch.float32 are cast once more, and the backward keeps a "
        "low-precision copy of every weight alive. Gathering in torch.bfloat16 sends half the bytes and keeps no such "
        "copy: `FullyShardedDataParallel(module, mixed_precision=True, compute_dtype=torch.bfloat16)`, or "
        "`fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))`.",
        stacklevel=level_of_user(),
    )
    return True
