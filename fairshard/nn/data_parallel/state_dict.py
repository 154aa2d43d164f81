"""State dicts of a model with units in it: whole, sharded, or local to this rank.

Whole and sharded ones go unit by unit through ``nn.Module``'s own machinery: while a wrapper's part is collected or
loaded, its parameters are registered under their own names, whole or as this rank's runs of them, so that modules
with their own ``_save_to_state_dict`` or ``_load_from_state_dict``, and hooks on both, work as they do unwrapped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from fairshard.errors import FairshardError
from fairshard.nn.data_parallel.full_params import Showing, show, show_spans
from fairshard.nn.data_parallel.state_dict_config import FullStateDictConfig, StateDictConfig, StateDictType
from fairshard.nn.data_parallel.tree import join, modules_of, walk
from fairshard.nn.data_parallel.unit import Unit
from fairshard.utils.span_tensor import SpanTensor, map_spans


def takes_from_first(config: StateDictConfig) -> bool:
    """Whether whole values are on rank 0 alone."""
    return isinstance(config, FullStateDictConfig) and config.rank0_only


def module_state_dict(wrapper: nn.Module, unit: Unit, destination: Any, prefix: str, keep_vars: bool) -> Any:
    """The state of what ``wrapper`` wraps, under unwrapped names. **Collective** unless sharded.

    Unless ``keep_vars``, the tensors are the caller's own: no later step, load or reshard changes them.
    """
    before = set() if destination is None else set(destination)
    wrapped = wrapper._modules["module"]
    assert wrapped is not None
    config = unit.state_dict_settings.state_dict_config
    with _showing(unit, writeback=False):
        state = wrapped.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
    if takes_from_first(config) and unit.group.rank != 0:
        for key in state.keys() - before:
            del state[key]
        getattr(state, "_metadata", {}).clear()
    if not keep_vars:
        live = {buffer.data_ptr() for part in modules_of(wrapper) for buffer in part.buffers(recurse=False)}
        for key in state.keys() - before:
            value = state[key]
            if not isinstance(value, Tensor):
                continue
            if isinstance(value, SpanTensor):
                state[key] = value.to("cpu" if config.offload_to_cpu else value.device, copy=True)
            elif value.data_ptr() in live:
                state[key] = value.cpu().clone() if config.offload_to_cpu else value.clone()
    return state


def _showing(unit: Unit, writeback: bool) -> AbstractContextManager[None]:
    settings = unit.state_dict_settings
    if settings.state_dict_type is StateDictType.SHARDED_STATE_DICT:
        return show_spans(unit)
    config = settings.state_dict_config
    return show(unit, Showing(writeback, takes_from_first(config), config.offload_to_cpu and not writeback))


class Loading:
    """Loads a state dict into a tree of units: what the hooks of ``load_state_dict`` share.

    ``nn.Module.load_state_dict`` walks the tree itself and asks no child to load; a wrapper is told through its
    hooks before its part begins and after it ends.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._stack: ExitStack | None = None
        self._prefix = ""

    def begin(self, wrapper: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Show the unit's parameters, and name the entries of ``state`` as the wrapper's tree has them."""
        self.abandon()
        self._prefix = prefix
        settings = self._unit.state_dict_settings
        if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            raise FairshardError(
                f"A local state dict must be loaded by the wrapper itself, but a module around unit "
                f"`{self._unit.fqn or 'root'}` loads it. Call load_state_dict on the wrapper."
            )
        if takes_from_first(settings.state_dict_config) and not self._unit.is_inner:
            self._share(wrapper, state, prefix)
        inside = f"{prefix}module."
        for key in [key for key in state if key.startswith(prefix)]:
            state[inside + key[len(prefix) :]] = state.pop(key)
        self._stack = ExitStack()
        self._stack.enter_context(_showing(self._unit, writeback=True))

    def _share(self, wrapper: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Let every rank have what rank 0 has, but for sharded parameters."""
        unit = self._unit
        assert unit.comm is not None
        sharded = {join(fqn, name) for fqn, module in walk(wrapper) for name in module._parameters}
        small = {
            key: value
            for key, value in state.items()
            if key.startswith(prefix) and key[len(prefix) :] not in sharded and unit.group.rank == 0
        }
        small = unit.comm.broadcast_object({key: map_spans(value, Tensor.cpu) for key, value in small.items()})
        if unit.group.rank != 0:
            state.update(small)

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


def load_module_state_dict(
    unit: Unit, loadings: list[Loading], load: Callable[[], _IncompatibleKeys]
) -> _IncompatibleKeys:
    """``load()``, with the unwrapped names in its error, and nothing left undone by it.

    Where rank 0 alone has the values, every rank returns or raises what rank 0 does.
    """
    error: RuntimeError | None = None
    keys = _IncompatibleKeys([], [])
    try:
        keys = load()
    except RuntimeError as raised:
        if type(raised) is not RuntimeError:
            raise
        text = str(raised)
        for loading in reversed(loadings):
            text = loading.clean(text)
        error = RuntimeError(text)
    finally:
        for loading in loadings:
            loading.abandon()
    if takes_from_first(unit.state_dict_settings.state_dict_config):
        assert unit.comm is not None
        text, *found = unit.comm.broadcast_object((str(error) if error else "", *keys))
        keys = _IncompatibleKeys(*found)
        error = RuntimeError(text) if text else None
    if error is not None:
        raise error
    return keys
