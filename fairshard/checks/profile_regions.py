"""Regions of profiles: what each unit does, by name, while a profiler of torch runs.

While no profiler runs, nothing is wrapped: `run` asks once per call of a unit whether one runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.autograd import profiler
from torch.profiler import record_function

from fairshard.checks.method_tap import tap
from fairshard.engine.observer import Observer
from fairshard.engine.root import Root
from fairshard.engine.unit import Unit
from fairshard.utils.buckets import GradSource

open_regions: list[ProfileRegions] = []
"""Of the models that ran while the last profiler did."""


def follow_profiler(root: Root) -> None:
    """While a profiler runs, show regions for ``root``, the model that runs next; otherwise stop for all models."""
    if not profiler._is_profiler_enabled:
        while open_regions:
            open_regions.pop().remove()
    elif all(regions.root() is not root for regions in open_regions):
        open_regions.append(ProfileRegions(root))


class ProfileStart(Observer):
    """Follows the profiler when a backward begins, which may be profiled alone."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._unit = weakref.ref(units[0])

    def backward_begins(self, passes: Sequence[Any]) -> None:
        """Open the regions before the first unit of the backward, or close them."""
        unit = self._unit()
        if unit is not None and (profiler._is_profiler_enabled or open_regions):
            follow_profiler(unit.root)


class ProfileRegions:
    """Regions ``fairshard::<phase> (<unit>)`` for the units of ``root``, until `remove`.

    ========================  ==========================================================================================
    phase                     what the host does
    ========================  ==========================================================================================
    ``pre_forward``           gathers the unit, and the next one ahead; casts inputs
    ``post_forward``          attaches the hooks of the backward, and frees the parameters
    ``pre_backward``          gathers the unit, and the one that the backward reaches next
    ``post_backward``         copies the gradients to their bucket, or keeps them (``no_sync``)
    ``all_gather``            starts the all-gather of the unit's parameters
    ``all_gather_wait``       waits for it
    ``reshard``               frees the parameters
    ``reduce_scatter``        starts the reduction of a bucket; with the names of all units in the bucket
    ``reduce_scatter_wait``   waits for the reduction, and writes the sums to the shards
    ``end_backward``          sends and waits for what is left; without a name
    ========================  ==========================================================================================

    On a GPU these are the times at which work is queued.

    Source: PyTorch's FSDP2, for the idea and most phases.
    """

    def __init__(self, root: Root) -> None:
        self.root, self.engine = weakref.ref(root), weakref.ref(root.engine)
        self._unit_of: dict[Any, Unit] = {flat_param: unit for unit in root.units for flat_param in unit.flat_params}
        self._undo: list[Callable[[], None]] = []
        if all(regions.engine() is not root.engine for regions in open_regions):  # models may share an engine
            self._tap(root.engine, "enter", "pre_forward", lambda unit, *_: [unit])
            self._tap(root.engine, "leave", "post_forward", lambda unit, *_: [unit])
            self._tap(root.engine, "reach", "pre_backward", lambda probe: [probe.hooks.record.unit])
            self._tap(root.engine, "_end_backward", "end_backward", lambda *_: [])
        for unit in root.units:
            for name, phase in _PHASES.items() if unit.flat_params else ():
                self._tap(unit, name, phase, _always(unit))
        bucketer = root.shared.bucketer
        self._tap(bucketer, "launch", "reduce_scatter", lambda bucket, *_: self._units_of(bucket.sources))
        self._tap(bucketer, "deliver", "reduce_scatter_wait", lambda bucket, _: self._units_of(bucket.sources))
        self._tap(bucketer, "reduce", "reduce_scatter", self._hooked)

    def remove(self) -> None:
        """Show no more regions."""
        undo, self._undo = self._undo, []
        for function in undo:
            function()

    def _tap(self, owner: Any, name: str, phase: str, units_of: Callable[..., Iterable[Unit] | None]) -> None:
        """Open a region around each call of ``owner.name(...)``, for ``units_of(...)``, unless that is None."""

        def around(method: Any, *args: Any, **kwargs: Any) -> Any:
            units = units_of(*args)
            if units is None:
                return method(*args, **kwargs)
            names = ", ".join(unit.fqn or "root" for unit in units)
            with record_function(f"fairshard::{phase} ({names})" if names else f"fairshard::{phase}"):
                return method(*args, **kwargs)

        self._undo.append(tap(owner, name, around))

    def _units_of(self, sources: Iterable[Any]) -> Iterable[Unit]:
        return dict.fromkeys(self._unit_of[source] for source in sources if source in self._unit_of)

    def _hooked(self, source: GradSource, *_: Any) -> Iterable[Unit] | None:
        """A user's hook reduces ``source`` in this call; those that a bucket reduces have a class as their kind."""
        return None if isinstance(source.bucket_kind, type) else self._units_of([source])


_PHASES = {
    "unshard": "all_gather",
    "wait_unshard": "all_gather_wait",
    "reshard": "reshard",
    "send_grads": "post_backward",
}


def _always(unit: Unit) -> Callable[..., list[Unit]]:
    return lambda *_: [unit]
