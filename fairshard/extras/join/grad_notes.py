"""Records which gradients of shards were zeroed, so that ranks that have run out of batches zero the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fairshard.params.flat_param import FlatParam

_NONE, _ZEROED, _KEPT = range(3)


class GradNotes:
    """The gradients of ``flat_params`` on this rank, parameter by parameter as optimizers see them."""

    def __init__(self, flat_params: Sequence[FlatParam]) -> None:
        self._flat_params = flat_params
        self._noted: list[tuple[Tensor | None, int]] = []
        self.note()

    def note(self) -> None:
        """Record the current gradients; a later change to zeros counts as zeroed."""
        self._noted = [(grad, 0 if grad is None else grad._version) for grad in self._grads()]

    def states(self) -> list[int]:
        """State of each gradient: missing, zeroed since `note`, or kept."""
        return [self._state(grad, *noted) for grad, noted in zip(self._grads(), self._noted, strict=True)]

    def follow(self, reported: Sequence[Sequence[int]]) -> None:
        """Drop or zero gradients like the ranks that have ``reported`` states; a gradient kept on any rank is kept."""
        states = iter([max(every) for every in zip(*reported, strict=True)])
        for flat_param in self._flat_params:
            for one in flat_param.stepped:
                state = next(states)
                grad: Any = one.grad
                (shown,) = grad.shown
                if state == _KEPT and shown is not None:
                    continue
                if state != _NONE and shown is None:
                    flat_param.grad.value_or_zeros()
                grad.zero(set_to_none=state == _NONE)
            flat_param.drop_zeroed()

    def _grads(self) -> list[Tensor | None]:
        return [grad for flat_param in self._flat_params for one in flat_param.stepped for grad in one.grad.shown]

    @staticmethod
    def _state(grad: Tensor | None, noted: Tensor | None, version: int) -> int:
        if grad is None:
            return _NONE
        is_as_noted = grad is noted and grad._version == version
        return _KEPT if is_as_noted or grad.any() else _ZEROED
