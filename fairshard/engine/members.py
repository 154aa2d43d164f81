"""The modules that are one unit in place: where it has no wrapper, they are what is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn


class Members:
    """The ``modules`` that share a unit, which stays gathered from the first call of one to the last of all.

    ``output_dtype``: what their floating outputs are cast to.
    """

    def __init__(self, modules: Sequence[nn.Module], output_dtype: torch.dtype | None) -> None:
        self.modules = tuple(modules)
        self.output_dtype = output_dtype
        self._left: set[int] = set()

    @property
    def fqn(self) -> str:
        """Names of the modules before the model has given them some."""
        return ", ".join(str(index) for index in range(len(self.modules))) if len(self.modules) > 1 else ""

    def in_order(self, names: Mapping[int, str]) -> list[str]:
        """Those of ``names``, by ``id`` of their modules, that belong to members, in the members' order."""
        return [names[id(module)] for module in self.modules if id(module) in names]

    def enter(self, module: nn.Module) -> None:
        """``module`` is called."""
        if len(self.modules) == 1:
            return
        if not self._left:
            self._left = set(range(len(self.modules)))
        self._left.discard(self.modules.index(module))

    def begin_pass(self) -> None:
        """A pass begins, in which no member has been called yet."""
        self._left = set()

    @property
    def are_awaited(self) -> bool:
        """Whether some members have still to be called; the unit stays gathered for them."""
        return bool(self._left)
