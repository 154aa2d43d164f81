"""An optimizer that steps shards in host memory with fused kernels, overlapped with copies and the backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fairshard.checks.nan_check import NanCheck
from fairshard.checks.optimizer_check import (
    allow_held_gradients,
    check_cpu_steps,
    check_gradients,
    finds_parts,
)
from fairshard.checks.shards import stepped_of
from fairshard.checks.usage import assert_idle
from fairshard.engine.root import Root
from fairshard.engine.tree import unit_of, units_below
from fairshard.errors import FairshardError
from fairshard.optim.cpu_arguments import (
    check_arguments,
    check_classes,
    check_optimizer_keywords,
    check_quantised,
    check_steps_together,
    with_fused,
)
from fairshard.optim.cpu_worker import CPUWorker, GradStaging, cpu_threads, default_num_threads
from fairshard.optim.early_steps import EarlySteps
from fairshard.optim.grad_norm import clip_grad_norm_
from fairshard.optim.shard_step import LocalParts, Twin, is_moment
from fairshard.params.flat_param import FlatParam
from fairshard.params.rule import GradHome
from fairshard.setup.claim import claim


class CPUOptimizer(Optimizer):
    """Steps a sharded model with any elementwise torch optimizer; shards in host memory are stepped on the CPU.

    >>> import torch
    >>> from fairshard.nn import FullyShardedDataParallel as FSDP
    >>> from fairshard.optim import CPUOptimizer
    >>> model = FSDP(torch.nn.Linear(8, 1), cpu_offload=True)
    >>> optimizer = CPUOptimizer(model, torch.optim.AdamW, lr=1e-3, clip_grad_norm=1.0)
    >>> model(torch.ones(4, 8)).mean().backward()
    >>> optimizer.step()
    >>> optimizer.zero_grad()

    Gradients that stay on the compute device (``cpu_offload=True, move_grads_to_cpu=False``) are fetched while earlier
    shards are stepped. Results equal those of the plain optimizer over the same shards, bit for bit.

    With ``overlap=True``, a backward inside ``with optimizer.last_backward():`` steps each shard as soon as its
    gradient is complete; `step` then steps the rest. Hyperparameters and gradients must not change in between.

    Args:
        model: a sharded model, or a module that contains sharded ones.
        optimizer_class: a class with torch's interface; its fused kernel is used if it has one.
        params: parameters or param groups, as for any optimizer; all of ``model`` if None.
        clip_grad_norm: clip the norm of all gradients to this in every step, as ``model.clip_grad_norm_`` does.
        clip_mode: only ``"wait"``: step when the norm is known.
        overlap: step during the backward; not with ``clip_grad_norm``.
        state_dtype: torch.bfloat16 halves the moments of shards stepped on the CPU, with stochastic rounding; None
            keeps them fp32.
        offload_fraction: the fraction of the parameters, unit by unit, that is stepped on the CPU; the rest stays,
            with its state, on the compute device. Must be chosen before the first forward.
        num_threads: CPU threads of a step; this rank's share of the host's CPUs if None.

    Raises:
        ShardOptimizerError: ``optimizer_class`` cannot step 1-D shards.
        ValueError: the arguments contradict each other.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: type[Optimizer],
        *,
        params: Iterable[Any] | None = None,
        clip_grad_norm: float | None = None,
        clip_mode: str = "wait",
        overlap: bool = False,
        state_dtype: torch.dtype | None = None,
        offload_fraction: float = 1.0,
        num_threads: int | None = None,
        **optimizer_kwargs: Any,
    ) -> None:
        check_classes(model, optimizer_class)
        check_optimizer_keywords(optimizer_class, optimizer_kwargs)
        check_arguments(clip_grad_norm, clip_mode, overlap, state_dtype)
        if num_threads is not None and num_threads < 1:
            raise ValueError(f"`num_threads` must be at least 1, or None for this rank's part, but is {num_threads}.")
        self._model = weakref.ref(model)
        self._lines = [flat_param for _, unit in units_below(model) for flat_param in unit.flat_params]
        self._flat_params = {stepped.shard: stepped for flat_param in self._lines for stepped in flat_param.stepped}
        if not self._flat_params:
            raise ValueError(
                f"`model` must be sharded or contain FullyShardedDataParallel units, but this {type(model).__name__} "
                "has no units. Wrap or shard it first, then build the optimizer."
            )
        check_cpu_steps(optimizer_class, [unit for _, unit in units_below(model)])
        self._steps_together = finds_parts(optimizer_class)
        if self._steps_together:
            check_steps_together(optimizer_class, overlap, state_dtype)
        _keep_on_device(self._lines, offload_fraction)
        groups = list(model.parameters() if params is None else params)
        self._template = optimizer_class(groups, **with_fused(optimizer_class, optimizer_kwargs))
        super().__init__(self._template.param_groups, self._template.defaults)
        check_quantised(self._template, state_dtype)
        self.state.update(self._template.state)  # some classes create state when built
        self._template.state.clear()
        self.clip_grad_norm = clip_grad_norm
        self.overlap = overlap
        self.state_dtype = state_dtype
        self._worker = CPUWorker(default_num_threads(overlap) if num_threads is None else num_threads)
        self._staging = GradStaging(self._worker)
        self._parts = LocalParts({} if self._steps_together else self._flat_params)
        self._twin = Twin(self._template, self, self._parts)
        self._worker_twin = Twin(self._template, self, self._parts, state_dtype)  # steps while `_twin` does
        self._early: EarlySteps | None = None
        self._broken = ""
        allow_held_gradients(self)

    # ---- the interface of torch optimizers

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all shards with a gradient, except those stepped by `last_backward`. **Collective** if it clips.

        Raises:
            FairshardError: a step on the worker thread failed, or gradients or hyperparameters of an overlapped step
                have changed.
        """
        self._assert_whole()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_gradients(self)
        early, self._early = self._early, None
        if early is not None:
            self._finish(early)
        else:
            self._clip()
            self._step_all()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group; its shards must belong to this optimizer's model."""
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            stepped = stepped_of(param)
            if stepped is not None and param not in self._flat_params:
                self.param_groups.pop()
                raise ValueError(
                    f"The shards of a CPUOptimizer must belong to its `model`, but `{stepped.name}` belongs to "
                    "another. Build an optimizer for each model."
                )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero the gradients of all parameters, including those that units hold on the compute device."""
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for param in group["params"]:
                flat_param = self._flat_params.get(param)
                if flat_param is not None and flat_param.grad is not None:
                    flat_param.grad.zero(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`; also allows steps again after an interrupted overlapped backward."""
        super().load_state_dict(state_dict)
        if self.state_dtype is not None:
            for param, state in self.state.items():
                for name, value in state.items():
                    if param.device.type == "cpu" and is_moment(value, param):
                        state[name] = value.to(self.state_dtype)
        self._worker.clear()
        self._broken = ""
        self._early = None

    # ---- overlap

    @contextmanager
    def last_backward(self, scaler: Any = None) -> Iterator[None]:
        """Step each shard as soon as its gradient is complete; run the last backward before `step` inside.

        The forward may also run inside. ``scaler`` must be disabled, if given.

        Raises:
            ValueError: ``overlap`` is off, ``nan_check`` is on, or there is a scaler or a norm to clip to, which decide
                after the backward.
        """
        self._assert_whole()
        if not self.overlap:
            raise ValueError("`last_backward` needs CPUOptimizer(..., overlap=True), but `overlap` is False.")
        check_arguments(self.clip_grad_norm, "wait", self.overlap, self.state_dtype)
        if scaler is not None and scaler.is_enabled():
            raise ValueError(
                "`last_backward` must not be used with a scaler that is enabled: an overflow is known only after the "
                "backward, when shards have already been stepped. Step after the backward, or train in bf16."
            )
        if self._early is not None:
            raise FairshardError("`last_backward` was entered twice without a step in between. Call optimizer.step().")
        root = self._root()
        assert_idle(root, "last_backward")
        if NanCheck.of(root).is_on:
            raise ValueError(
                "`last_backward` must not be used on a model with `nan_check=True`, which checks gradients after the "
                "backward, when shards have already been stepped. Step after the backward while you look for NaN."
            )
        transfers = root.shared.transfers
        early = EarlySteps(self.param_groups, self._worker_twin.step_one, self._worker)
        transfers.listener = early.take
        try:
            yield
            transfers.listener = None
            self._worker.wait_idle()
            flat_params = [flat_param for unit in root.units for flat_param in unit.flat_params]
            for flat_param in flat_params:
                flat_param.grad.land()
            check_gradients(self)
            early.complete(flat_params)
        except BaseException:
            transfers.listener = None
            self._broken = early.abandon()
            raise
        self._early = early

    # ---- for the scaler

    def gradients(self) -> list[Tensor]:
        """All gradients to unscale, on parameters or held by units.

        Raises:
            FairshardError: `last_backward` has stepped shards: a scaler would unscale their gradients too late.
        """
        if self._early is not None:
            raise FairshardError(
                "Gradients must be unscaled before a step, but last_backward() has already stepped shards with scaled "
                "ones. With a scaler, step after the backward: run it outside of last_backward()."
            )
        grads = [self._grad_of(param) for group in self.param_groups for param in group["params"]]
        return [grad for grad in grads if grad is not None]

    # ---- private

    def _grad_of(self, param: nn.Parameter) -> Tensor | None:
        """The gradient of one parameter, whether on the parameter or held by its unit."""
        flat_param = self._flat_params.get(param)
        return param.grad if flat_param is None or flat_param.grad is None else flat_param.grad.value

    def _step_all(self, done: Collection[nn.Parameter] = ()) -> None:
        """Step all except ``done``: together if their gradients are on them, otherwise while the next is fetched."""
        groups = []
        for group in self.param_groups:
            beside = []
            for param in group["params"]:
                grad = self._grad_of(param)
                if self._steps_together:
                    beside.append(param)
                    continue
                if grad is None or param in done:
                    continue
                flat_param = self._flat_params.get(param)
                kept = None if flat_param is None else flat_param.grad
                is_held = kept is not None and kept.home is GradHome.HELD
                is_narrow = self.state_dtype is not None and param.device.type == "cpu"
                if not is_held and not is_narrow:
                    beside.append(param)
                    continue
                what = "a parameter outside of all units" if flat_param is None else f"`{flat_param.name}`"
                fetched = self._staging.fetch(flat_param, grad)
                self._worker.submit(what, partial(self._step_fetched, param, group, fetched))
            groups.append({**group, "params": beside})
        try:
            with cpu_threads(self._worker.num_threads):
                self._twin.step(groups)
            self._worker.join()
        except BaseException as error:
            self._worker.clear()
            self._broken = f"{error}."
            raise
        for group, stepped in zip(self.param_groups, groups, strict=True):
            group.update({name: value for name, value in stepped.items() if name != "params"})

    def _step_fetched(self, param: nn.Parameter, group: dict[str, Any], fetched: Callable[[], Tensor]) -> None:
        self._worker_twin.step_one(param, group, fetched())

    def _clip(self) -> None:
        if self.clip_grad_norm is not None:
            clip_grad_norm_(self._root().units, self.clip_grad_norm, 2.0)

    def _finish(self, early: EarlySteps) -> None:
        try:
            self._worker.join()
            check_arguments(self.clip_grad_norm, "wait", self.overlap, self.state_dtype)
            early.check_unchanged(self._grad_of)
        except (FairshardError, ValueError) as error:
            self._broken = early.abandon() and str(error)
            raise
        self._step_all(done=early.stepped())

    def _root(self) -> Root:
        model = self._model()
        unit = None if model is None else unit_of(model)
        if model is None or unit is None or unit.is_inner:
            raise ValueError(
                "Clipping and `last_backward` need the outermost sharded module as `model`, but it is "
                f"{type(model).__name__}{' inside another' if unit else ''}. Pass that one to CPUOptimizer."
            )
        return unit.root or claim(model)

    def _assert_whole(self) -> None:
        if self._broken:
            raise FairshardError(
                f"All shards must be stepped, but only some were: {self._broken} Load model and optimizer from a "
                "checkpoint."
            )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("CPUOptimizer must not be pickled or copied: build a new one and use load_state_dict().")


def _keep_on_device(flat_params: list[FlatParam], fraction: float) -> None:
    """Keep the first units on the compute device: their gradients arrive last, with no backward left to overlap."""
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"`offload_fraction` must be between 0 and 1, but is {fraction}.")
    if fraction == 1.0:
        return
    offloaded = [flat_param for flat_param in flat_params if flat_param.shows.on_cpu]
    if any(flat_param.comm is not None for flat_param in offloaded):
        raise ValueError("`offload_fraction` must be chosen before the first forward. Build the optimizer earlier.")
    total = sum(flat_param.line.layout.shard_numel for flat_param in offloaded)
    kept = 0
    for flat_param in offloaded:
        if kept + flat_param.line.layout.shard_numel > (1.0 - fraction) * total:
            break
        kept += flat_param.line.layout.shard_numel
        flat_param.shows.on_cpu = False
        flat_param.shows.move_to(flat_param.slots[0].leaf.device)
