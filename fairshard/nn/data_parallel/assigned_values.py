"""``load_state_dict(assign=True)`` into sharded modules: values are taken, and what has memory stays the object it is.

torch puts the tensors of the state dict in the place of the module's own. Of a shard that could only be half: it lies
in memory with others, has one dtype with them, and optimizers hold it. So values are copied there, as without
``assign``; a buffer or an ignored parameter on the meta device, which nothing can be copied to, is assigned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def is_assigned(local_metadata: Any) -> bool:
    """Whether ``_load_from_state_dict`` is called, with ``local_metadata``, by a load with ``assign=True``."""
    return isinstance(local_metadata, Mapping) and bool(local_metadata.get("assign_to_params_buffers"))


@contextmanager
def own_tensors_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Meanwhile a load with ``assign=True`` copies into the parameters and buffers of ``modules``."""
    handles = [module.register_load_state_dict_pre_hook(_copy_own) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _copy_own(
    module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any, _strict: Any, *problems: list[str]
) -> None:
    transient = module._non_persistent_buffers_set
    buffers = {name: buffer for name, buffer in module._buffers.items() if name not in transient}
    for name, own in (*module._parameters.items(), *buffers.items()):
        if own is not None:
            copy_into(own, state, prefix + name, problems[-1])


@torch.no_grad()
def copy_into(own: Tensor, state: dict[str, Any], key: str, messages: list[str]) -> None:
    """Copy what ``state`` has as ``key`` into ``own``, and leave that there, which torch then assigns to itself.

    Nothing is done where torch has more to say: the shapes differ, or only ``own`` is on the meta device.
    """
    value = state.get(key)
    if not isinstance(value, Tensor):
        return
    if not own.dim() and value.shape == torch.Size([1]):  # as torch allows
        value = value[0]
    if value.shape != own.shape or (own.is_meta and not value.is_meta):
        return
    try:
        own.copy_(value)
    except Exception as error:
        messages.append(f"`{key}` could not be copied: {error}")
    state[key] = own
