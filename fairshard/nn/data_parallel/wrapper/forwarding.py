"""A wrapper that can be used like the module in it."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from fairshard.nn.data_parallel.guards import check_other_door

_NOTHING = object()


class Forwarding(nn.Module):
    """Forwards attributes, items, length and truth value to its ``module``."""

    def __getattr__(self, name: str) -> Any:
        """Look up attributes that the wrapper does not have on the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        try:
            return self._find_inside(name)
        except AttributeError:
            check_other_door(name)
            raise

    def _find_inside(self, name: str) -> Any:
        """The module's attribute ``name``, or its replacement."""
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set data or a submodule on the wrapped module, where its forward reads it, if only that has it.

        Methods, parameters, and names that begin with an underscore are set on the wrapper.
        """
        holder = None if isinstance(value, nn.Parameter) else _holder_of(self, name)
        if holder is None or holder is self:
            super().__setattr__(name, value)
        else:
            setattr(holder, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete the attribute where `__setattr__` sets it."""
        holder = _holder_of(self, name)
        if holder is None or holder is self:
            super().__delattr__(name)
        else:
            delattr(holder, name)

    def __getitem__(self, key: Any) -> Any:
        """Index the wrapped module."""
        return self.module[key]

    def __len__(self) -> int:
        """Length of the wrapped module."""
        return len(self.module)

    def __bool__(self) -> bool:
        """Truth value of the wrapped module, which need not have a length."""
        return bool(self.module)


def _holder_of(wrapper: Forwarding, name: str) -> nn.Module | None:
    """The outermost of ``wrapper`` and the modules that it wraps that has ``name``, if that is data or a submodule."""
    module: nn.Module | None = None if name.startswith("_") else wrapper
    while module is not None:
        own = module.__dict__
        if name in own or any(name in own.get(kind, ()) for kind in ("_buffers", "_parameters", "_modules")):
            return None if name in module._parameters else module
        inherited = inspect.getattr_static(type(module), name, _NOTHING)
        if inherited is not _NOTHING:
            is_set = isinstance(inherited, property) and inherited.fset is not None
            is_data = is_set or not (callable(inherited) or hasattr(inherited, "__get__"))
            return module if is_data else None
        key = "module" if isinstance(module, Forwarding) else "_orig_mod"  # of what torch.compile has made
        module = own.get("_modules", {}).get(key)
    return None
