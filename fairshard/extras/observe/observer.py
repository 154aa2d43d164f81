"""Unit events for users: when parameters are gathered and freed, gradients reduced, and units compute.

An observation wraps methods of individual objects, and unwraps them when it ends. The engine does not depend on it: a
model that is not observed runs the same code as without this file.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fairshard.checks.method_tap import Around, tap
from fairshard.engine.root import Root
from fairshard.engine.unit import Unit
from fairshard.extras.observe.unit_event import END, Phase, UnitEvent
from fairshard.params.rule import GradHome
from fairshard.setup.arguments import units_to
from fairshard.utils.buckets import Bucket, GradSource
from fairshard.utils.hook_bucket import HookKind
from fairshard.utils.transfers import Transfer


def observe(model: nn.Module, fn: Callable[[UnitEvent], object]) -> Observation:
    """Call ``fn(event)`` for each event of the units of ``model`` on this rank, until the observation is removed.

    ==================  ================================================================================================
    event               when
    ==================  ================================================================================================
    ``unshard``         an all-gather of the unit's parameters is issued; no event if they are already gathered
    ``reshard``         they have been freed; no event if the forward keeps them
    ``post_backward``   all gradients of the unit from this backward are in their bucket, and the unit is freed if it
                        reshards; at the end of the backward for a unit that it has not reached. In the backward of
                        several forwards, also when the unit is freed until the backward reaches an earlier forward
    ``forward``         until ``forward_end`` the unit computes, including units inside it
    ``backward``        until ``backward_end`` the unit computes its gradients
    ``unshard_wait``    until ``unshard_wait_end`` compute waits for the all-gather
    ``write_grads``     until ``write_grads_end`` the unit's gradients are copied to their bucket or kept (``no_sync``)
    ``reduce``          until ``reduce_end`` a bucket is summed over ranks
    ``reduce_wait``     until ``reduce_wait_end`` the sum is waited for and delivered to the shards
    ``copy_to_host``    until ``copy_to_host_end`` the copy of a reduced gradient to host memory is issued
    ``copy_wait``       until ``copy_wait_end`` that copy is waited for
    ``optimizer_step``  until ``optimizer_step_end`` an optimizer of these parameters steps
    ==================  ================================================================================================

    Times are host times: on a GPU the moments at which work is queued. ``fn`` runs inside a pass, so it should only
    record events; its exceptions propagate out of the pass. Units wrapped later are not observed.

    >>> import torch
    >>> from fairshard.nn import FullyShardedDataParallel as FSDP, observe
    >>> model = FSDP(torch.nn.Sequential(FSDP(torch.nn.Linear(4, 4)), torch.nn.Linear(4, 1)))
    >>> events = []
    >>> with observe(model, events.append):
    ...     model(torch.ones(2, 4)).sum().backward()
    >>> [(event.event, event.fqn) for event in events if event.event in ("unshard", "post_backward")]
    [('unshard', ''), ('unshard', '0'), ('unshard', '0'), ('post_backward', '0'), ('post_backward', '')]

    Raises:
        TypeError: ``model`` is no module, or ``fn`` cannot be called.
        ValueError: ``model`` contains no unit.
    """
    if not callable(fn):
        raise TypeError(f"`fn` must be a function of one event, but is a {type(fn).__name__}.")
    return Observation(units_to("to be observed", model, "Shard it first."), fn)


class Observation:
    """Handle of `observe`: ``remove()``, or the end of its ``with`` block, ends the observation."""

    def __init__(self, units: Sequence[Unit], fn: Callable[[UnitEvent], object]) -> None:
        self._fn = fn
        self._unit_of: dict[Any, Unit] = {flat_param: unit for unit in units for flat_param in unit.flat_params}
        self._undo: list[Callable[[], None]] = []
        self._units = set(units)
        self._roots: list[Root] = []
        self._in_forward: list[Unit] = []
        self._in_backward: set[Unit] = set()
        self._reported: set[Unit] = set()  # units with a post_backward event in this backward
        self._stepping: Optimizer | None = None
        for unit in units:
            self._watch(unit)
        self._watch_optimizers()

    def remove(self) -> None:
        """Stop reporting events; the model then runs as if it had never been observed."""
        undo, self._undo = self._undo, []
        for function in undo:
            function()

    def __enter__(self) -> Observation:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    # ---- taps

    def _watch(self, unit: Unit) -> None:
        names: dict[str, Around] = {
            "materialize": self._on_materialize,
            "begin_backward": self._on_begin_backward,
            "end_backward": self._on_end_backward,
            "reset": self._on_reset,
        }
        if unit.flat_params:
            names |= {
                "unshard": self._on_unshard,
                "wait_unshard": self._on_wait_unshard,
                "reshard": self._on_reshard,
                "send_grads": self._on_send_grads,
                "finish_pass": self._on_finish_pass,
            }
        for name, around in names.items():
            self._tap(unit, name, around, unit)
        if unit.root is not None:
            self._watch_made(unit, unit.root)

    def _watch_made(self, unit: Unit, root: Root) -> None:
        """Watch the objects that a unit owns or shares, and that do not exist before it is ready to run."""
        for flat_param in unit.flat_params:
            if flat_param.grad.home is GradHome.HOST:
                self._tap(flat_param.grad, "add", self._on_interval, unit, "copy_to_host")
                self._tap(flat_param.grad, "land", self._on_interval, unit, "copy_wait")
        if root not in self._roots:
            self._roots.append(root)
            if all(other.engine is not root.engine for other in self._roots[:-1]):
                self._tap_weakly(root.engine, "enter", self._on_enter)
                self._tap_weakly(root.engine, "leave", self._on_leave)
                self._tap_weakly(root.engine, "abort", self._on_abort)
            bucketer = root.shared.bucketer
            self._tap(bucketer, "launch", self._on_launch)
            self._tap(bucketer, "deliver", self._on_deliver)
            self._tap(bucketer, "reduce", self._on_reduce)

    def _tap(self, owner: Any, name: str, around: Around, *first: Any) -> None:
        self._undo.append(tap(owner, name, lambda method, *args, **kwargs: around(method, *first, *args, **kwargs)))

    def _tap_weakly(self, owner: Any, name: str, around: Around) -> None:
        """Like `_tap`, for an ``owner`` that outlives the model: it does not keep a dropped observation alive."""
        known = weakref.WeakMethod(around, lambda _: undo())

        def call(method: Any, *args: Any) -> Any:
            own = known()
            return method(*args) if own is None else own(method, *args)

        undo = tap(owner, name, call)
        self._undo.append(undo)

    def _watch_optimizers(self) -> None:
        """Watch all optimizers, because torch only has global hooks; they do not keep a dropped observation alive."""
        before, after = weakref.WeakMethod(self._on_step), weakref.WeakMethod(self._on_stepped)

        def call(reference: weakref.WeakMethod[Any], optimizer: Optimizer, *_: Any) -> None:
            method = reference()
            if method is not None:
                method(optimizer)

        hooks = [
            register_optimizer_step_pre_hook(partial(call, before)),
            register_optimizer_step_post_hook(partial(call, after)),
        ]
        self._undo += [hook.remove for hook in hooks]
        for hook in hooks:
            weakref.finalize(self, hook.remove)

    # ---- events of a unit

    def _report(self, fqn: str, event: str, phase: Phase) -> None:
        self._fn(UnitEvent(fqn, event, phase, time.perf_counter()))

    def _on_interval(self, method: Any, unit: Unit, event: str, *args: Any, **kwargs: Any) -> Any:
        self._report(unit.fqn, event, Phase.POST_BACKWARD)
        try:
            return method(*args, **kwargs)
        finally:
            self._report(unit.fqn, event + END, Phase.POST_BACKWARD)

    def _on_materialize(self, method: Any, unit: Unit, root: Root, *args: Any) -> None:
        method(root, *args)
        self._watch_made(unit, root)

    def _on_enter(self, method: Any, unit: Unit, *args: Any) -> Any:
        made = method(unit, *args)
        if unit in self._units:
            self._in_forward.append(unit)
            self._report(unit.fqn, "forward", _before(unit))
        return made

    def _on_leave(self, method: Any, unit: Unit, *args: Any) -> Any:
        self._end_forward(unit)
        return method(unit, *args)

    def _on_abort(self, method: Any, unit: Unit) -> None:
        self._end_forward(unit)
        method(unit)

    def _end_forward(self, unit: Unit) -> None:
        if self._in_forward and self._in_forward[-1] is unit:
            self._in_forward.pop()
            self._report(unit.fqn, "forward" + END, _before(unit))

    def _on_begin_backward(self, method: Any, unit: Unit) -> None:
        method()
        if unit not in self._in_backward:
            self._in_backward.add(unit)
            self._report(unit.fqn, "backward", Phase.PRE_BACKWARD)

    def _end_backward(self, unit: Unit) -> None:
        if unit in self._in_backward:
            self._in_backward.remove(unit)
            self._report(unit.fqn, "backward" + END, Phase.POST_BACKWARD)

    def _on_unshard(self, method: Any, unit: Unit, *args: Any) -> None:
        self._report(unit.fqn, "unshard", _before(unit))
        method(*args)

    def _on_wait_unshard(self, method: Any, unit: Unit) -> None:
        self._report(unit.fqn, "unshard_wait", _before(unit))
        method()
        self._report(unit.fqn, "unshard_wait" + END, _before(unit))

    def _on_reshard(self, method: Any, unit: Unit) -> None:
        method()
        self._report(unit.fqn, "reshard", Phase.POST_BACKWARD if _is_in_backward(unit) else Phase.FORWARD)

    def _on_send_grads(self, method: Any, unit: Unit, *args: Any) -> None:
        self._on_interval(method, unit, "write_grads", *args)

    def _on_finish_pass(self, method: Any, unit: Unit) -> None:
        method()
        self._report_post_backward(unit)

    def _report_post_backward(self, unit: Unit) -> None:
        self._end_backward(unit)
        self._reported.add(unit)
        self._report(unit.fqn, "post_backward", Phase.POST_BACKWARD)

    def _on_end_backward(self, method: Any, unit: Unit, **kwargs: Any) -> None:
        method(**kwargs)
        if unit.flat_params and unit not in self._reported:
            self._report_post_backward(unit)
        self._end_backward(unit)
        self._forget(unit)

    def _on_reset(self, method: Any, unit: Unit) -> None:
        self._forget(unit)
        method()

    def _forget(self, unit: Unit) -> None:
        for units in (self._in_backward, self._reported):
            units.discard(unit)

    # ---- events of shared objects

    def _on_launch(self, method: Any, bucket: Bucket, *written: Any) -> None:
        self._report_of(bucket.sources, "reduce")
        method(bucket, *written)

    def _on_deliver(self, method: Any, bucket: Bucket, transfer: Transfer) -> None:
        self._report_of(bucket.sources, "reduce_wait")
        method(bucket, transfer)
        self._report_of(bucket.sources, "reduce_wait" + END)
        self._report_of(bucket.sources, "reduce" + END)

    def _on_reduce(self, method: Any, source: GradSource, *yields: Any) -> None:
        hooked = [source] if isinstance(source.bucket_kind, HookKind) else []  # reduced by this call
        self._report_of(hooked, "reduce")
        method(source, *yields)
        self._report_of(hooked, "reduce" + END)

    def _report_of(self, sources: Sequence[Any], event: str) -> None:
        units = dict.fromkeys(self._unit_of[source] for source in sources if source in self._unit_of)
        if units:
            self._report(", ".join(unit.fqn for unit in units), event, Phase.POST_BACKWARD)

    def _on_step(self, optimizer: Optimizer) -> None:
        if self._stepping in (None, optimizer) and self._is_ours(optimizer):  # its step may call those of others
            self._stepping = optimizer
            self._report("", "optimizer_step", Phase.STEP)

    def _on_stepped(self, optimizer: Optimizer) -> None:
        if self._stepping is optimizer:
            self._stepping = None
            self._report("", "optimizer_step" + END, Phase.STEP)

    def _is_ours(self, optimizer: Optimizer) -> bool:
        shards: set[Tensor] = {stepped.shard for flat_param in self._unit_of for stepped in flat_param.stepped}
        return any(param in shards for group in optimizer.param_groups for param in group["params"])


def _is_in_backward(unit: Unit) -> bool:
    return unit.root is not None and unit.root.backward is not None


def _before(unit: Unit) -> Phase:
    return Phase.PRE_BACKWARD if _is_in_backward(unit) else Phase.FORWARD
