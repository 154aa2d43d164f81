"""Loss scaling when every rank sees only its shards of the gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fairshard.checks.optimizer_check import check_gradients, needs_all
from fairshard.optim.cpu_optimizer import CPUOptimizer
from fairshard.utils.device import default_device_type
from fairshard.utils.groups import communicator, default_group


class ShardedGradScaler(GradScaler):
    """torch's ``GradScaler`` with one decision for all ranks: a step is skipped on all of them or on none.

    Gradients may be on the CPU, on a GPU, or on both. `unscale_` and `step` are **collective**.

    >>> from fairshard.optim import ShardedGradScaler
    >>> scaler = ShardedGradScaler(init_scale=2.0**10)

    Args:
        device: type of the device that computes the loss; if None, CUDA if there is a GPU.
        init_scale: factor of the first loss.
        backoff_factor: factor of the scale after an overflow.
        growth_factor: factor of the scale after ``growth_interval`` steps without overflow.
        growth_interval: number of such steps.
        enabled: False turns scaling off.
        process_group: the ranks that shard the model; the default group if None.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            device or default_device_type(),
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self._group = process_group

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step with unscaled gradients, unless gradients of any rank overflowed; returns the result of the step.

        **Collective.**

        Raises:
            RuntimeError: called twice without `update`, or with a closure.
        """
        if not self._enabled:
            result: float | None = optimizer.step(*args, **kwargs)
            return result
        if "closure" in kwargs or args:
            raise RuntimeError(
                "An optimizer must not be given a closure under a gradient scaler: whether to step is known only after "
                "the backward. Compute the loss before scaler.step(optimizer)."
            )
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("scaler.step() must be followed by scaler.update() before it is called again.")
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        overflowed = any(found.item() for found in state["found_inf_per_device"].values())
        result = None
        if not overflowed:
            result = optimizer.step(**kwargs)
        state["stage"] = OptState.STEPPED
        return result

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Multiply all gradients by ``inv_scale``; returns whether gradients of any rank overflowed."""
        needs_all(optimizer, "ShardedGradScaler.unscale_")
        check_gradients(optimizer)
        if isinstance(optimizer, CPUOptimizer):
            grads = optimizer.gradients()
        else:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            grads = [param.grad for param in params if param.grad is not None]
        shown = [grad for grad in grads if isinstance(grad, DTensor)]
        # Check local elements: a rank may have no elements, and an operator on DTensors could wait for other ranks.
        grads = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
        overflowed = found_inf.clone()
        for device, dtype in dict.fromkeys((grad.device, grad.dtype) for grad in grads):
            found = torch.zeros((), dtype=torch.float32, device=device)
            own = [grad for grad in grads if (grad.device, grad.dtype) == (device, dtype)]
            torch._amp_foreach_non_finite_check_and_unscale_(own, found, inv_scale.to(device))
            overflowed.copy_(torch.maximum(overflowed, found.to(overflowed.device)))
        for grad in shown:
            increment_version(grad)
        communicator(self._group or default_group()).all_reduce(overflowed, "max").wait()
        return {overflowed.device: overflowed}

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["_group"] = None  # process groups cannot be pickled; the default one is used
        return state
