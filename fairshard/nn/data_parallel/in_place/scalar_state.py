"""Optimizer state of parameters without dimensions: loaded as plain values by torch, stepped as DTensors.

torch takes a value without dimensions for one that is no tensor's: ``set_optimizer_state_dict`` leaves the moments of
such a parameter plain, and the next step would mix them with DTensors, which torch refuses.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fairshard.state.optim_loading import SCALARS
from fairshard.utils.dtensors import part_of

# How many parameters an optimizer had when it was looked at, and those of them that are DTensors without dimensions.
_found: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[DTensor]]] = weakref.WeakKeyDictionary()
_is_installed = False


def watch_scalars(params: Iterable[Tensor]) -> None:
    """If some of ``params`` are without dimensions, let optimizers find their state as DTensors from now on."""
    global _is_installed
    if not _is_installed and any(not param.dim() for param in params):
        register_optimizer_step_pre_hook(_before_step)
        _is_installed = True


def _before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    num_params = sum(len(group["params"]) for group in optimizer.param_groups)
    num_before, scalars = _found.get(optimizer, (-1, []))
    if num_before != num_params:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        scalars = [param for param in params if isinstance(param, DTensor) and not param.dim()]
        _found[optimizer] = num_params, scalars
    for param in scalars:
        state = optimizer.state.get(param, {})
        for name, value in state.items():
            is_plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
            if is_plain and value.shape == param.shape and name not in SCALARS:
                state[name] = part_of(value.to(param.device, copy=True), param)
