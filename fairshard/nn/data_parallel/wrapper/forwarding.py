"""A wrapper that can be used like the module in it."""

from __future__ import annotations

from typing import Any

from torch import nn


class Forwarding(nn.Module):
    """Forwards attributes, items, length and truth value to its ``module``."""

    def __getattr__(self, name: str) -> Any:
        """Look up attributes that the wrapper does not have on the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        return self._find_inside(name)

    def _find_inside(self, name: str) -> Any:
        """The module's attribute ``name``, or its replacement."""
        return getattr(self.module, name)

    def __getitem__(self, key: Any) -> Any:
        """Index the wrapped module."""
        return self.module[key]

    def __len__(self) -> int:
        """Length of the wrapped module."""
        return len(self.module)

    def __bool__(self) -> bool:
        """Truth value of the wrapped module, which need not have a length."""
        return bool(self.module)
