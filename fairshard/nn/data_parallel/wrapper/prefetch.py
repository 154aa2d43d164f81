"""Explicit prefetching: users name the units that are gathered ahead, in place of the recorded order."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fairshard.errors import TrainingStateError
from fairshard.nn.data_parallel.wrapper.attributes import UnitAttributes
from fairshard.setup.arguments import units_of


class PrefetchMethods(UnitAttributes):
    """Methods of a wrapper that name the wrappers to gather ahead."""

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather ``modules``, wrappers of the same model, when this one's forward starts; an empty list undoes it.

        They replace the unit that followed in the last pass. All ranks must name the same modules.

        Raises:
            TypeError: ``modules`` is not a list of wrappers.
        """
        self._unit.ahead_in_forward = units_of(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather ``modules``, wrappers of the same model, when the backward reaches this one; an empty list undoes it.

        They replace the unit that the backward would reach next. They are gathered before this one computes its
        gradients, or after it with ``BACKWARD_POST``. All ranks must name the same modules.

        Raises:
            TypeError: ``modules`` is not a list of wrappers.
        """
        self._unit.ahead_in_backward = units_of(modules)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False: more backwards of the same forwards follow the next one, and may reach units that it does not.

        Units gathered ahead but not reached stay gathered, and the recorded order is kept, until True is set. Gradients
        are reduced as usual. Call it on the outermost wrapper, after its first forward.

        Raises:
            TypeError: ``is_last_backward`` is not True or False.
            TrainingStateError: no forward has run.
        """
        if not isinstance(is_last_backward, bool):
            raise TypeError(f"`is_last_backward` must be True or False, but is {is_last_backward!r}.")
        root = self._unit.root
        if root is None:
            raise TrainingStateError(
                "`set_is_last_backward` must be called between a forward and its backward, but no forward has "
                "run. Call it after a forward."
            )
        root.is_last_backward = is_last_backward
