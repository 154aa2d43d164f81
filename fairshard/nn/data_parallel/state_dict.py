"""Whole and local state dicts of a model with units in it.

Whole ones go unit by unit through ``nn.Module``'s own machinery: while a wrapper's part is collected or loaded, its
parameters are registered whole under their own names, so that modules with their own ``_save_to_state_dict`` or
``_load_from_state_dict``, and hooks on both, work as they do unwrapped.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from fairshard.nn.data_parallel.full_params import show
from fairshard.nn.data_parallel.tree import join, modules_of, units_below, walk
from fairshard.nn.data_parallel.unit import Unit


def full_state_dict(wrapper: nn.Module, unit: Unit, destination: Any, prefix: str, keep_vars: bool) -> Any:
    """The state of what ``wrapper`` wraps, under unwrapped names, parameters whole. **Collective.**

    Unless ``keep_vars``, the tensors are the caller's own: no later step, load or reshard changes them.
    """
    before = set() if destination is None else set(destination)
    wrapped = wrapper._modules["module"]
    assert wrapped is not None
    with show(unit, writeback=False):
        state = wrapped.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
    if not keep_vars:
        live = {buffer.data_ptr() for part in modules_of(wrapper) for buffer in part.buffers(recurse=False)}
        for key in state.keys() - before:
            value = state[key]
            if isinstance(value, Tensor) and value.data_ptr() in live:
                state[key] = value.clone()
    return state


class Loading:
    """Loads a whole state dict into a tree of units: what the hooks of ``load_state_dict`` share.

    ``nn.Module.load_state_dict`` walks the tree itself and asks no child to load; a wrapper is told through its
    hooks before its part begins and after it ends.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._stack: ExitStack | None = None
        self._prefix = ""

    def begin(self, state: dict[str, Any], prefix: str) -> None:
        """Show the unit's parameters whole, and name the entries of ``state`` as the wrapper's tree has them."""
        self.abandon()
        self._prefix = prefix
        inside = f"{prefix}module."
        for key in [key for key in state if key.startswith(prefix)]:
            state[inside + key[len(prefix) :]] = state.pop(key)
        self._stack = ExitStack()
        self._stack.enter_context(show(self._unit, writeback=True))

    def end(self, keys: _IncompatibleKeys) -> None:
        """Write the loaded values into the shards; name what was missing or unexpected without the wrapper."""
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()
        inside = f"{self._prefix}module."
        for names in keys:
            names[:] = [self._prefix + n[len(inside) :] if n.startswith(inside) else n for n in names]

    def abandon(self) -> None:
        """Undo `begin` after a load that raised in between; the shards stay as they were."""
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.__exit__(RuntimeError, RuntimeError("the load was interrupted"), None)

    def clean(self, text: str) -> str:
        """``text`` with the names of this part as they are without the wrapper."""
        return re.sub(rf"(?<![\w.]){re.escape(self._prefix)}module\.", self._prefix, text)

    def __getstate__(self) -> dict[str, Any]:
        return {"_unit": self._unit, "_stack": None, "_prefix": ""}


def load_full_state_dict(loadings: list[Loading], load: Callable[[], _IncompatibleKeys]) -> _IncompatibleKeys:
    """``load()``, with the unwrapped names in its error, and nothing left undone by it."""
    try:
        return load()
    except RuntimeError as error:
        if type(error) is not RuntimeError:
            raise
        text = str(error)
        for loading in reversed(loadings):
            text = loading.clean(text)
        raise RuntimeError(text) from None
    finally:
        for loading in loadings:
            loading.abandon()


def local_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """This rank's shards and the persistent buffers below ``module``, copied. No communication."""
    state: dict[str, Tensor] = OrderedDict()
    for name, value in _local_entries(module).items():
        state[name] = value.detach().clone()
    return state


@torch.no_grad()
def load_local_state_dict(module: nn.Module, state: Mapping[str, Tensor], strict: bool) -> _IncompatibleKeys:
    """Copy what `local_state_dict` returned back into the shards and buffers. No communication.

    Raises:
        RuntimeError: a shape differs, or with ``strict`` a name is missing or unexpected; nothing is changed then.
    """
    entries = _local_entries(module)
    missing = [name for name in entries if name not in state]
    unexpected = [name for name in state if name not in entries]
    problems = [
        f"`{name}` must have shape {tuple(entry.shape)}, but has {tuple(state[name].shape)}"
        for name, entry in entries.items()
        if name in state and state[name].shape != entry.shape
    ]
    if strict:
        problems += [f"`{name}` is missing" for name in missing] + [f"`{name}` is unexpected" for name in unexpected]
    if problems:
        raise RuntimeError(
            f"A local state dict must come from the same rank of the same wrapped model, but {'; '.join(problems)}. "
            "To load into another wrapping or world size, use state_dict() and load_state_dict()."
        )
    for name, entry in entries.items():
        if name in state:
            entry.copy_(state[name])
    return _IncompatibleKeys(missing, unexpected)


def _local_entries(module: nn.Module) -> dict[str, Tensor]:
    entries: dict[str, Tensor] = OrderedDict()
    for fqn, unit in units_below(module):
        for flat_param in unit.flat_params:
            name = flat_param.name.removeprefix(f"{unit.fqn}.") if unit.fqn else flat_param.name
            entries[join(fqn, name)] = flat_param.shard
    for fqn, part in walk(module):
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                entries[join(fqn, name)] = buffer
        for name, param in part._parameters.items():
            if param is not None and not any(param is shard for shard in entries.values()):
                entries[join(fqn, name)] = param
    return entries
