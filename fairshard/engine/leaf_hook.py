"""The hook on the leaves of a unit, which reports that a backward gives the unit gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from fairshard.utils.dynamo import not_traced, set_tracer


class Accumulates(Protocol):
    """Is notified of gradients; ``backward`` is the running backward, or None."""

    backward: Any

    def accumulate(self, unit: Any) -> None:
        """The gradient of a leaf of ``unit`` is ready."""


def leaf_hook(root: Accumulates, unit: Any) -> Callable[[Tensor], None]:
    """The hook for leaves of ``unit``: tells ``root`` of the first gradient that the unit has not sent yet.

    Its references are weak, because the garbage collector cannot see hooks.
    """
    known_root, known_unit = weakref.ref(root), weakref.ref(unit)

    @not_traced
    def on_grad(_leaf: Tensor) -> None:
        own, owner = known_root(), known_unit()
        if own is None or owner is None:
            return
        backward = own.backward
        if backward is None or backward.task() is None or owner not in backward.touched:
            tracer = set_tracer(None)
            try:
                own.accumulate(owner)
            finally:
                set_tracer(tracer)

    return on_grad
