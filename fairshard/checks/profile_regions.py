"""Regions of profiles: what each unit does, by name, while a profiler of torch runs.

While no profiler runs, nothing is wrapped: `run` asks once per call of a unit whether one runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch.autograd import profiler
from torch.profiler import record_function

from fairshard.checks.method_tap import tap
from fairshard.engine.call_hooks import Probe
from fairshard.engine.observer import Observer
from fairshard.engine.root import Root
from fairshard.engine.unit import Unit
from fairshard.utils.buckets import Bucket, GradSource
from fairshard.utils.transfers import Transfer

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
            for name, around in (
                ("enter", _pre_forward),
                ("leave", _post_forward),
                ("reach", _reach),
                ("_end_backward", _end_backward),
            ):
                self._undo.append(tap(root.engine, name, around))
        for unit in root.units:
            if unit.flat_params:
                self._watch(unit)
        bucketer = root.shared.bucketer
        self._undo.append(tap(bucketer, "launch", self._launch))
        self._undo.append(tap(bucketer, "deliver", self._deliver))
        self._undo.append(tap(bucketer, "reduce", self._reduce))

    def remove(self) -> None:
        """Show no more regions."""
        undo, self._undo = self._undo, []
        for function in undo:
            function()

    def _watch(self, unit: Unit) -> None:
        def unshard(method: Any, *args: Any, **kwargs: Any) -> None:
            with _region("all_gather", unit):
                method(*args, **kwargs)

        self._undo.append(tap(unit, "unshard", unshard))
        for name, phase in _PHASES.items():
            self._undo.append(tap(unit, name, _around(phase, unit)))

    def _launch(self, method: Any, bucket: Bucket, *written: Any) -> None:
        with self._bucket_region("reduce_scatter", bucket.sources):
            method(bucket, *written)

    def _deliver(self, method: Any, bucket: Bucket, transfer: Transfer) -> None:
        with self._bucket_region("reduce_scatter_wait", bucket.sources):
            method(bucket, transfer)

    def _reduce(self, method: Any, source: GradSource, *yields: Any) -> None:
        is_hooked = not isinstance(source.bucket_kind, type)  # a user's hook reduces it now; other kinds are classes
        with self._bucket_region("reduce_scatter", [source]) if is_hooked else nullcontext():
            method(source, *yields)

    def _bucket_region(self, phase: str, sources: Sequence[Any]) -> record_function:
        units = dict.fromkeys(self._unit_of[source] for source in sources if source in self._unit_of)
        return record_function(f"fairshard::{phase} ({', '.join(unit.fqn or 'root' for unit in units)})")


_PHASES = {"wait_unshard": "all_gather_wait", "reshard": "reshard", "send_grads": "post_backward"}


def _region(phase: str, unit: Unit) -> record_function:
    return record_function(f"fairshard::{phase} ({unit.fqn or 'root'})")


def _around(phase: str, unit: Unit) -> Callable[..., None]:
    def around(method: Any, *args: Any, **kwargs: Any) -> None:
        with _region(phase, unit):
            method(*args, **kwargs)

    return around


def _pre_forward(method: Any, unit: Unit, *args: Any) -> Any:
    with _region("pre_forward", unit):
        return method(unit, *args)


def _post_forward(method: Any, unit: Unit, *args: Any) -> Any:
    with _region("post_forward", unit):
        return method(unit, *args)


def _reach(method: Any, probe: Probe) -> None:
    with _region("pre_backward", probe.hooks.record.unit):
        method(probe)


def _end_backward(method: Any, *args: Any) -> None:
    with record_function("fairshard::end_backward"):
        method(*args)
