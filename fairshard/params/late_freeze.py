"""Gradients of parameters that a hook freezes after the backward has begun with their unit."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fairshard.errors import BackwardOrderError
from fairshard.utils.dynamo import not_traced


def heeding_flag(leaves: Any, index: int) -> Callable[[Tensor], None]:
    """``leaves._on_grad`` for the leaf of parameter ``index``, whose gradient is dropped first if it is frozen by now.

    As in autograd, which asks for the flag when it accumulates: but users set that of the registered parameter. Its
    references are weak, because the garbage collector cannot see hooks.
    """
    registered, on_grad = leaves.registered, leaves._on_grad
    known = weakref.ref(registered[index if len(registered) > 1 else 0])
    owner = weakref.ref(leaves)

    @not_traced
    def on_grad_of(leaf: Tensor) -> None:
        param = known()
        if param is not None and not param.requires_grad:
            _drop(owner(), index, leaf)
        on_grad(leaf)

    return on_grad_of


def _drop(leaves: Any, index: int, leaf: Tensor) -> None:
    """Drop what ``leaf`` has just been given, if it was trained when its unit was last gathered.

    Raises:
        BackwardOrderError: it was added to what `no_sync` keeps.
    """
    if leaves is None or not leaves.trained[index]:
        return
    if leaves._kept[index] and leaves._accumulated is None:
        raise BackwardOrderError(
            f"`{leaves.slots[index].fqn}` must not be frozen by a hook while the backward computes its unit and "
            "gradients of no_sync wait in it: what this backward has added cannot be taken away again. Freeze it "
            "before the backward."
        )
    leaf.grad = None
