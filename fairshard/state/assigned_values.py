"""``load_state_dict(assign=True)`` into sharded modules: values are copied, and parameters stay the same objects.

torch replaces the module's tensors with those of the state dict. A shard cannot be replaced: it shares its memory and
its dtype with others, and optimizers hold it. So values are copied, as without ``assign``. Only a buffer or an ignored
parameter on the meta device, which has no memory to copy to, is replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def is_assigned(local_metadata: Any) -> bool:
    """Whether ``local_metadata``, passed to ``_load_from_state_dict``, is from a load with ``assign=True``."""
    return isinstance(local_metadata, Mapping) and bool(local_metadata.get("assign_to_params_buffers"))


@contextmanager
def own_tensors_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside the ``with`` block, a load with ``assign=True`` copies into the parameters and buffers of ``modules``."""
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
    """Copy ``state[key]`` into ``own``, and set ``state[key]`` to ``own``, so that torch assigns it to itself.

    Does nothing if the shapes differ, which torch reports, or if only ``own`` is on the meta device.
    """
    value = state.get(key)
    if not isinstance(value, Tensor):
        return
    if not own.dim() and value.shape == torch.Size([1]):  # torch also allows this
        value = value[0]
    if value.shape != own.shape or (own.is_meta and not value.is_meta):
        return
    try:
        own.copy_(value)
    except Exception as error:
        messages.append(f"`{key}` could not be copied: {error}")
    state[key] = own
