"""Loading whole tensors, and DTensors placed otherwise, into modules that have DTensors.

Also optimizer state of parameters without dimensions: loaded as plain values by torch, stepped as DTensors. torch takes
a value without dimensions for one that is no tensor's: ``set_optimizer_state_dict`` leaves the moments of such a
parameter plain, and the next step would mix them with DTensors, which torch refuses.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fairshard.state.optim_loading import SCALARS
from fairshard.utils.dtensors import part_of, placed_as


def accept_whole_values(modules: Iterable[nn.Module]) -> None:
    """Let ``load_state_dict`` into ``modules`` take whole tensors, as well as DTensors.

    Of a whole tensor each rank takes its part, without communication. With ``assign=True`` values are copied all the
    same: optimizers hold the parameters that there are, and shards lie side by side in memory of their own.
    """
    for module in modules:
        module.register_load_state_dict_pre_hook(_take_parts)


@torch.no_grad()
def _take_parts(
    module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any, _strict: Any, *problems: list[str]
) -> None:
    """Copy what ``state`` has for DTensors of ``module``, and leave themselves there, which torch then keeps."""
    messages = problems[-1]  # after names that are missing and unexpected
    for name, param in module._parameters.items():
        key = prefix + name
        value = state.get(key)
        if not isinstance(param, DTensor) or not isinstance(value, Tensor):
            continue
        if not param.dim() and value.shape == torch.Size([1]):  # as torch allows
            value = value[0]
        if value.shape != param.shape:  # torch says so
            continue
        state[key] = param
        if value.is_meta:
            messages.append(f"`{key}` must have values to be loaded, but is on the meta device.")
            continue
        try:
            part = placed_as(value, param)
        except ValueError as error:
            messages.append(f"`{key}`: {error}")
            continue
        if param.is_meta:  # what torch assigns is memory of its own
            state[key] = part.clone()
        else:
            param.copy_(part)


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
