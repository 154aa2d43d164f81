"""Naming what is gathered ahead, and until when it is kept, for users who know better than the last pass."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fairshard.engine.tree import units_of
from fairshard.errors import TrainingStateError
from fairshard.nn.data_parallel.wrapper.attributes import UnitAttributes


class PrefetchMethods(UnitAttributes):
    """Of a wrapper: the methods that name which others are gathered ahead."""

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather ``modules``, wrappers of the same model, when this one's forward starts; an empty list undoes it.

        They take the place of the one that followed in the last pass. Ranks must name the same ones.

        Raises:
            TypeError: ``modules`` is not a list of wrappers.
        """
        self._unit.prefetch.forward = units_of(modules)
        self._settle()

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather ``modules``, wrappers of the same model, when the backward comes to this one; an empty list undoes it.

        They take the place of the one that the backward should come to next. With ``BACKWARD_POST`` they are gathered
        once this one has its gradients, else before it computes them. Ranks must name the same ones.

        Raises:
            TypeError: ``modules`` is not a list of wrappers.
        """
        self._unit.prefetch.backward = units_of(modules)
        self._settle()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False: other backwards of the same forwards follow the next one, and what it does not come to is theirs.

        What was gathered ahead of it in vain stays gathered, and the order of units remembered, until True is set.
        Gradients are reduced as ever. Called on the outermost wrapper, after its first forward.

        Raises:
            TypeError: ``is_last_backward`` is not True or False.
            TrainingStateError: there has been no forward.
        """
        if not isinstance(is_last_backward, bool):
            raise TypeError(f"`is_last_backward` must be True or False, but is {is_last_backward!r}.")
        root = self._unit.root
        if root is None:
            raise TrainingStateError(
                "`set_is_last_backward` must be called between a forward and its backward, but there has been no "
                "forward. Call it after."
            )
        root.is_last_backward = is_last_backward

    def _settle(self) -> None:
        root = self._unit.root
        if root is not None:
            self._unit.prefetch.settle(root.units)
