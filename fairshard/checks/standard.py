"""The observers that every model has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fairshard.checks.nan_check import NanCheck
from fairshard.checks.order_check import OrderCheck
from fairshard.checks.profile_regions import ProfileStart
from fairshard.checks.usage import UsageCheck
from fairshard.checks.values_check import ValuesCheck
from fairshard.engine.observer import Observer
from fairshard.engine.unit import Unit
from fairshard.utils.collectives import Communicator
from fairshard.utils.groups import communicator


def standard_observers(units: list[Unit], comms: Sequence[Communicator]) -> list[Observer]:
    """Those of a new model of ``units``, the outermost first, which communicate in ``comms``."""
    return [
        UsageCheck(units),
        ValuesCheck(units),
        OrderCheck(units, comms),
        NanCheck(units, [*comms, *_comms_of_dtensors(units)]),
        ProfileStart(units),
    ]


def _comms_of_dtensors(units: Iterable[Unit]) -> list[Communicator]:
    """With ``nan_check``, communicators of the meshes of parameters that were DTensors: their ranks must raise too."""
    slots: list[Any] = [
        slot
        for unit in units
        if unit.config.nan_check
        for flat_param in unit.flat_params
        for slot in flat_param.slots
        if slot.has_mesh
    ]
    meshes = dict.fromkeys(slot.spec.mesh for slot in slots)
    return list(dict.fromkeys(communicator(mesh.get_group(dim)) for mesh in meshes for dim in range(mesh.ndim)))
