"""The modules of a unit that has no wrapper: calls of these modules are the calls of the unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from fairshard.utils.dynamo import not_traced


class Members:
    """The ``modules`` of one unit, which stays gathered from the first call of any until all have been called.

    ``output_dtype``: the dtype to which their floating-point outputs are cast.
    """

    def __init__(self, modules: Sequence[nn.Module], output_dtype: torch.dtype | None) -> None:
        self.modules = tuple(modules)
        self.output_dtype = output_dtype
        self._left: set[int] = set()

    @property
    def fqn(self) -> str:
        """Name of the unit until the modules have names: their indexes, or empty for a single module."""
        return ", ".join(str(index) for index in range(len(self.modules))) if len(self.modules) > 1 else ""

    def in_order(self, names: Mapping[int, str]) -> list[str]:
        """Names of the modules, in their order; skips modules whose ``id`` is not in ``names``."""
        return [names[id(module)] for module in self.modules if id(module) in names]

    @not_traced
    def enter(self, module: nn.Module) -> None:
        """``module`` is called."""
        if len(self.modules) == 1:
            return
        if not self._left:
            self._left = set(range(len(self.modules)))
        self._left.discard(self.modules.index(module))

    def begin_pass(self) -> None:
        """A pass begins: no module has been called yet."""
        self._left = set()

    @property
    def has_uncalled(self) -> bool:
        """Whether some, but not all, modules have been called: the unit stays gathered for the others."""
        return bool(self._left)
