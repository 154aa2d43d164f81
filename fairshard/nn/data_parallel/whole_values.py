"""Loading whole tensors, and DTensors placed otherwise, into modules that have DTensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fairshard.nn.data_parallel.assigned_values import copy_into, is_assigned
from fairshard.utils.dtensors import placed_as


def accept_whole_values(modules: Iterable[nn.Module]) -> None:
    """Let ``load_state_dict`` into ``modules`` take whole tensors, as well as DTensors.

    Of a whole tensor each rank takes its part, without communication. With ``assign=True`` values are copied all the
    same, into parameters that are left whole as well: optimizers hold the parameters that there are, and shards lie
    side by side in memory of their own.
    """
    for module in modules:
        module.register_load_state_dict_pre_hook(_take_parts)


@torch.no_grad()
def _take_parts(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, _strict: Any, *problems: list[str]
) -> None:
    """Copy what ``state`` has for DTensors of ``module``, and leave themselves there, which torch then keeps."""
    messages = problems[-1]  # after names that are missing and unexpected
    for name, param in module._parameters.items():
        key = prefix + name
        value = state.get(key)
        if isinstance(param, nn.Parameter) and not isinstance(param, DTensor) and is_assigned(metadata):
            copy_into(param, state, key, messages)
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
