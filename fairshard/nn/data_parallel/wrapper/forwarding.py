"""A wrapper that can be used as the module in it."""

from __future__ import annotations

from typing import Any

from torch import nn


class Forwarding(nn.Module):
    """Has the attributes, items, length and truth of its ``module`` beside its own."""

    def __getattr__(self, name: str) -> Any:
        """What is no attribute of the wrapper is one of the module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        return self._find_inside(name)

    def _find_inside(self, name: str) -> Any:
        """The module's attribute ``name``, or what stands for it."""
        return getattr(self.module, name)

    def __getitem__(self, key: Any) -> Any:
        """Index the wrapped module."""
        return self.module[key]

    def __len__(self) -> int:
        """Length of the wrapped module."""
        return len(self.module)

    def __bool__(self) -> bool:
        """As of the wrapped module, which need not have a length."""
        return bool(self.module)
