"""State dicts of modules with DTensors; whole tensors, and DTensors with other placements, load into them.

Also converts optimizer state of 0-dim parameters: torch's ``set_optimizer_state_dict`` treats 0-dim values as plain
numbers, and leaves the moments of such a parameter as plain tensors. The next step would mix them with DTensors, and
torch would raise.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fairshard.checks.shards import stepped_of
from fairshard.engine.unit import Unit
from fairshard.state.assigned_values import copy_into, is_assigned
from fairshard.state.optim_loading import SCALARS
from fairshard.utils.dtensors import cut_whole_values, part_of, placed_as
from fairshard.utils.graph_breaks import untraced


class _ShardsShown:
    """Hook before a state dict of a module is made or loaded: registers DTensors if ``unit`` shows whole parameters."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def __call__(self, *_: Any) -> None:
        if not self._unit.open_calls:
            self._unit.registered.swap(to_leaves=False)


def _refuse_assigned(module: nn.Module, *_: Any) -> None:
    """Hook before a state dict of ``module`` is made: raises if a tensor was assigned to ``.data`` of its DTensors."""
    for param in module._parameters.values():
        stepped = stepped_of(param) if isinstance(param, DTensor) else None
        if stepped is not None:
            stepped.check_not_assigned()


def serve_state_dicts(unit: Unit, modules: Iterable[nn.Module]) -> None:
    """Make state dicts of ``modules`` of ``unit`` hold DTensors, and load whole tensors as well as DTensors.

    Each rank copies its part of a whole tensor, without communication. Values are copied even with ``assign=True``,
    including those of ignored parameters, because optimizers hold the existing parameters, and shards share one buffer.
    """
    cut_whole_values()
    shards_shown = _ShardsShown(unit)
    for module in modules:
        module.register_state_dict_pre_hook(shards_shown)
        module.register_state_dict_pre_hook(_refuse_assigned)
        module.register_load_state_dict_pre_hook(shards_shown)
        module.register_load_state_dict_pre_hook(_take_parts)


@torch.no_grad()
def _take_parts(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, _strict: Any, *problems: list[str]
) -> None:
    """Copy values of ``state`` into DTensors of ``module``, and put the DTensors in ``state`` for torch to keep."""
    messages = problems[-1]  # follows the lists of missing and unexpected names
    for name, param in module._parameters.items():
        key = prefix + name
        value = state.get(key)
        if isinstance(param, nn.Parameter) and not isinstance(param, DTensor) and is_assigned(metadata):
            copy_into(param, state, key, messages)
        if not isinstance(param, DTensor) or not isinstance(value, Tensor):
            continue
        if not param.dim() and value.shape == torch.Size([1]):  # torch also allows this
            value = value[0]
        if value.shape != param.shape:  # torch reports this
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
        if not param.is_meta:
            param.copy_(part)
        elif is_assigned(metadata):
            torch.utils.swap_tensors(param, nn.Parameter(part.clone(), requires_grad=param.requires_grad))
        else:
            state[key] = part  # torch says that nothing is copied


# By optimizer: its number of parameters at the last check, and its 0-dim DTensor parameters.
_found: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[DTensor]]] = weakref.WeakKeyDictionary()


def watch_scalars(params: Iterable[Tensor]) -> None:
    """If any of ``params`` is 0-dim, convert optimizer state of such parameters to DTensors before each step."""
    if any(not param.dim() for param in params):
        _install()


@functools.cache
def _install() -> None:
    register_optimizer_step_pre_hook(_before_step)


@untraced
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
