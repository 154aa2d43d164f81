"""Unit events for users: when parameters are gathered and freed, gradients reduced, and units compute.

An observation wraps methods of individual objects, and unwraps them when it ends. The engine does not depend on it: a
model that is not observed runs the same code as without this file.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fairshard.checks.method_tap import tap
from fairshard.engine.root import Root
from fairshard.engine.unit import Unit
from fairshard.extras.observe.unit_event import END, Phase, UnitEvent
from fairshard.params.rule import GradHome
from fairshard.setup.arguments import units_to
from fairshard.utils.buckets import GradSource
from fairshard.utils.hook_bucket import HookKind

POST = Phase.POST_BACKWARD
Told = Callable[..., object] | None


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
        """Watch a unit; what it owns or shares exists once it is ready to run."""
        self._tap(unit, "materialize", after=lambda root, *_: self._watch_made(unit, root))
        self._tap(unit, "begin_backward", after=lambda: self._begin_backward(unit))
        self._tap(unit, "end_backward", after=lambda **_: self._finish(unit))
        self._tap(unit, "reset", before=lambda: self._forget(unit))
        if unit.flat_params:
            self._tap(unit, "unshard", before=lambda *_: self._report(unit.fqn, "unshard", _before(unit)))
            self._during(unit, "wait_unshard", unit, "unshard_wait", _before)
            self._tap(unit, "reshard", after=lambda: self._report(unit.fqn, "reshard", _after(unit)))
            self._during(unit, "send_grads", unit, "write_grads")
            self._tap(unit, "finish_pass", after=lambda: self._report_post_backward(unit))
        if unit.root is not None:
            self._watch_made(unit, unit.root)

    def _watch_made(self, unit: Unit, root: Root) -> None:
        for flat_param in unit.flat_params:
            if flat_param.grad.home is GradHome.HOST:
                self._during(flat_param.grad, "add", unit, "copy_to_host")
                self._during(flat_param.grad, "land", unit, "copy_wait")
        if root in self._roots:
            return
        if all(other.engine is not root.engine for other in self._roots):
            self._watch_engine(root.engine)
        self._roots.append(root)
        bucketer = root.shared.bucketer
        self._tap(bucketer, "launch", before=lambda bucket, *_: self._report_of(bucket.sources, "reduce"))
        self._tap(
            bucketer,
            "deliver",
            before=lambda bucket, _: self._report_of(bucket.sources, "reduce_wait"),
            after=lambda bucket, _: self._report_of(bucket.sources, "reduce_wait" + END, "reduce" + END),
        )
        self._tap(
            bucketer,
            "reduce",
            before=lambda source, *_: self._report_of(_hooked(source), "reduce"),
            after=lambda source, *_: self._report_of(_hooked(source), "reduce" + END),
        )

    def _watch_engine(self, engine: Any) -> None:
        begin, end = self._weakly("_begin_forward"), self._weakly("_end_forward")
        self._undo_at_the_end(
            _tapped(engine, "enter", None, begin),
            _tapped(engine, "leave", end, None),
            _tapped(engine, "abort", end, None),
        )

    def _watch_optimizers(self) -> None:
        """Watch all optimizers, because torch only has global hooks."""
        self._undo_at_the_end(
            register_optimizer_step_pre_hook(self._weakly("_on_step")).remove,
            register_optimizer_step_post_hook(self._weakly("_on_stepped")).remove,
        )

    def _weakly(self, name: str) -> Callable[..., None]:
        """A call of a method by what outlives the model: it does not keep a dropped observation alive."""
        known = weakref.ref(self)

        def call(first: Any, *_: Any) -> None:
            own = known()
            if own is not None:
                getattr(own, name)(first)

        return call

    def _undo_at_the_end(self, *undo: Callable[[], None]) -> None:
        self._undo += undo
        for function in undo:
            weakref.finalize(self, function)

    def _tap(self, owner: Any, name: str, before: Told = None, after: Told = None) -> None:
        self._undo.append(_tapped(owner, name, before, after))

    def _during(
        self, owner: Any, name: str, unit: Unit, event: str, phase: Callable[[Unit], Phase] = lambda _: POST
    ) -> None:
        """Report ``event`` of ``unit`` before a call of the method, and its end after it, also if it raises."""

        def around(method: Any, *args: Any, **kwargs: Any) -> Any:
            self._report(unit.fqn, event, phase(unit))
            try:
                return method(*args, **kwargs)
            finally:
                self._report(unit.fqn, event + END, phase(unit))

        self._undo.append(tap(owner, name, around))

    # ---- events

    def _report(self, fqn: str, event: str, phase: Phase) -> None:
        self._fn(UnitEvent(fqn, event, phase, time.perf_counter()))

    def _report_of(self, sources: Sequence[Any], *events: str) -> None:
        units = dict.fromkeys(self._unit_of[source] for source in sources if source in self._unit_of)
        for event in events if units else ():
            self._report(", ".join(unit.fqn for unit in units), event, POST)

    def _begin_forward(self, unit: Unit) -> None:
        if unit in self._units:
            self._in_forward.append(unit)
            self._report(unit.fqn, "forward", _before(unit))

    def _end_forward(self, unit: Unit) -> None:
        if self._in_forward and self._in_forward[-1] is unit:
            self._in_forward.pop()
            self._report(unit.fqn, "forward" + END, _before(unit))

    def _begin_backward(self, unit: Unit) -> None:
        if unit not in self._in_backward:
            self._in_backward.add(unit)
            self._report(unit.fqn, "backward", Phase.PRE_BACKWARD)

    def _report_post_backward(self, unit: Unit) -> None:
        self._end_backward(unit)
        self._reported.add(unit)
        self._report(unit.fqn, "post_backward", POST)

    def _end_backward(self, unit: Unit) -> None:
        if unit in self._in_backward:
            self._in_backward.remove(unit)
            self._report(unit.fqn, "backward" + END, POST)

    def _finish(self, unit: Unit) -> None:
        """The whole backward is over."""
        if unit.flat_params and unit not in self._reported:
            self._report_post_backward(unit)
        self._end_backward(unit)
        self._forget(unit)

    def _forget(self, unit: Unit) -> None:
        self._in_backward.discard(unit)
        self._reported.discard(unit)

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


def _tapped(owner: Any, name: str, before: Told, after: Told) -> Callable[[], None]:
    """Call ``before`` and ``after`` with the arguments of each call of a method that returns; what undoes it."""

    def around(method: Any, *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        found = method(*args, **kwargs)
        if after is not None:
            after(*args, **kwargs)
        return found

    return tap(owner, name, around)


def _hooked(source: GradSource) -> list[GradSource]:
    """``source`` if a communication hook reduces it, which `reduce` calls; no bucket is launched for it."""
    return [source] if isinstance(source.bucket_kind, HookKind) else []


def _before(unit: Unit) -> Phase:
    return Phase.FORWARD if _after(unit) is Phase.FORWARD else Phase.PRE_BACKWARD


def _after(unit: Unit) -> Phase:
    return Phase.FORWARD if unit.root is None or unit.root.backward is None else POST
