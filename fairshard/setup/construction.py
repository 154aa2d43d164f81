"""Prepares a module for sharding: its device, memory and initial values, the same on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fairshard.checks.agreement import check_same, raise_together
from fairshard.checks.leaf_writes import LeafWrites
from fairshard.checks.nan_check import NanCheck
from fairshard.checks.order_check import OrderCheck
from fairshard.checks.profile_regions import ProfileStart
from fairshard.checks.usage import UsageCheck
from fairshard.checks.values_check import ValuesCheck
from fairshard.checks.watchdog import watch
from fairshard.engine.observer import Observer
from fairshard.engine.unit import Unit
from fairshard.errors import FairshardError
from fairshard.settings.check import FLAG, Check, require
from fairshard.setup.materialize import OwnTensors
from fairshard.setup.origin import Ignored, Origin
from fairshard.setup.survey import Survey
from fairshard.utils.collectives import Communicator
from fairshard.utils.device import check_supported, current_device, default_device_type, device_count
from fairshard.utils.dtensors import memory_of
from fairshard.utils.groups import communicates, communicator
from fairshard.utils.messages import broadcast_tensors
from fairshard.utils.parallel import validate_process_group
from fairshard.utils.streams import is_asynchronous
from fairshard.utils.subclasses import inner_tensors
from fairshard.utils.user_line import level_of_user

_BUCKET_NBYTES = 250 * 2**20
_RUN_NUMEL = 2**14  # its elements are copied to int64

_INIT = Check(
    lambda value: value is None or callable(value),
    "a function of a module",
    ValueError,
    "It gives memory and values to the module's own parameters and buffers.",
)
_DEVICE = Check(
    lambda value: isinstance(value, (int, str, torch.device)) and not isinstance(value, bool),
    "the number of an accelerator, a torch.device or its name",
)


@dataclass(frozen=True)
class Construction:
    """Arguments of a wrapper for preparing its module; ``device`` None leaves the module where it is.

    ``leaves_meta``: parameters on the meta device stay there until they have been cut.
    """

    param_init_fn: Callable[[nn.Module], Any] | None
    device: torch.device | None
    moves_inputs: bool
    sync_module_states: bool
    leaves_meta: bool = False


def resolve_construction(
    param_init_fn: Any, device_id: Any, compute_device: Any, sync_module_states: Any
) -> Construction:
    """Check the arguments.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: ``param_init_fn`` is not callable, or the device does not exist.
    """
    _INIT("param_init_fn", param_init_fn)
    FLAG("sync_module_states", sync_module_states)
    device = _device_of("device_id", device_id)
    other = _device_of("compute_device", compute_device)
    require(
        None in (device, other) or device == other,
        f"`device_id` and `compute_device` must not differ, but are {device} and {other}. Pass one.",
    )
    return Construction(param_init_fn, device or other, device is not None, sync_module_states)


def make_ready(survey: Survey, how: Construction, ignored: Ignored, groups: list[ProcessGroup]) -> Origin:
    """Give the module of ``survey`` memory and values, on all ranks of ``groups``, one group after the other.

    Parameters with values stay where they are, so that a module larger than the device can be cut on the host.
    **Collective** with ``sync_module_states``; an error on one rank is then raised on all.

    Raises:
        ValueError: the module is not on the requested device, or cannot be initialised.
        TypeError: this rank is in none of the groups.
        FairshardError: its parameters are on several devices.
        RanksDisagreeError: tensors to broadcast do not have the same names and shapes on all ranks.
    """
    watch()  # every rank builds a model; later only some may call a collective
    own = OwnTensors(survey, ignored)
    sums: dict[str, Tensor] = {}
    if how.sync_module_states:
        device = _sync(own, how, groups)
        unsynced = next((fqn for fqn, unit in survey.units if unit.origin.sums), None)
        if unsynced is not None:
            warnings.warn(
                f"`sync_module_states=True` has no effect on the inner unit `{unsynced}`, which was already cut from "
                "each rank's own values. Pass it to every wrapper.",
                stacklevel=level_of_user(),
            )
    else:
        device = _initialize(own, how, groups, has_values=True)
        if any(group.size() > 1 for group in groups):
            sums = {fqn: _checksum(param) for fqn, param in own.params.items() if not param.is_meta}
    if how.device is not None and not own.on_meta:
        own.move_buffers(device)
    places = _places_of(own.ignored, survey)
    return Origin(device, own.ignored, how.device is not None, how.moves_inputs, sums, _observers, places)


def _places_of(ignored: Ignored, survey: Survey) -> list[tuple[nn.Module, str]]:
    """Where ignored parameters are held, and modules that are ignored or whose parameters all are."""
    ids = ignored.ids

    def is_ignored(item: nn.Module) -> bool:
        params = [id(param) for param in item.parameters()]
        return id(item) in ids or (bool(params) and ids.issuperset(params))

    found = []
    for _, part in survey.parts if ids else ():
        found += [(part, name) for name, param in part._parameters.items() if id(param) in ids]
        found += [(part, name) for name, inner in part._modules.items() if inner is not None and is_ignored(inner)]
    return found


def _initialize(own: OwnTensors, how: Construction, groups: list[ProcessGroup], has_values: bool) -> torch.device:
    device = _home(own, how.device, groups[0])
    for group in groups:
        validate_process_group(device, group)
    if not how.leaves_meta:
        own.materialize(how.param_init_fn, device, has_values)
    return device


def _sync(own: OwnTensors, how: Construction, groups: list[ProcessGroup]) -> torch.device:
    """Initialise on the first rank of all groups, and broadcast everything from there."""
    device, error = torch.device("cpu"), None
    comms = [communicator(group) for group in groups]
    try:
        device = _initialize(own, how, groups, has_values=all(comm.rank == 0 for comm in comms))
    except Exception as raised:
        error = raised
    raise_together(comms, error)
    tensors = own.tensors
    for comm in comms:
        check_same(comm, [f"`{fqn}` {tuple(value.shape)} {value.dtype}" for fqn, value in tensors.items()], device)
        broadcast_tensors(list(tensors.values()), device, _BUCKET_NBYTES, comm.group)
    return device


def _checksum(param: nn.Parameter) -> Tensor:
    """0-d int64: the sum of the bit patterns, each times its place, so that their order counts."""
    total = torch.zeros((), dtype=torch.int64, device=param.device)
    for tensor in inner_tensors(memory_of(param.detach())):
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64)
        line = tensor.detach().contiguous().view(-1).view(integer)
        places = torch.arange(1, min(_RUN_NUMEL, len(line)) + 1, device=param.device)
        for run in line.split(_RUN_NUMEL):
            total = total * 31 + (run * places[: len(run)]).sum()  # wraps around
    return total


def _device_of(name: str, given: Any) -> torch.device | None:
    if given is None:
        return None
    _DEVICE(name, given)
    try:
        device = torch.device(default_device_type(), given) if isinstance(given, int) else torch.device(given)
    except RuntimeError as error:
        raise ValueError(
            f'`{name}` must name a device, but is {given!r}. Pass "cpu", "cuda:0", a torch.device or the number of an '
            "accelerator."
        ) from error
    require(device.type != "meta", f"`{name}` must be a device with memory, but is {device}.")
    check_supported(device)
    is_numbered, count = isinstance(given, int), device_count(device.type)
    require(
        (device.index or 0) < count or not (is_numbered or is_asynchronous(device)),
        f"`{name}` must be an existing device, but is {given}, and this process sees {count} accelerators"
        f"{'' if is_numbered else f' of type {device.type}'}. Leave it out to compute on the CPU.",
    )
    if is_asynchronous(device) and device.index is None:
        device = current_device()
        warnings.warn(
            f"`{name}` is an accelerator without a number, so the current one is used, {device}. Pass "
            "its number to avoid this warning.",
            stacklevel=level_of_user(),
        )
    return device


def _home(own: OwnTensors, wanted: torch.device | None, group: ProcessGroup) -> torch.device:
    """The device where the unit computes: the requested one, or that of its parameters, or a default."""
    devices: dict[torch.device, str] = {}
    for fqn, param in own.params.items():
        if not param.is_meta:
            devices.setdefault(param.device, fqn)
    for device in devices:
        check_supported(device)
    cpu = torch.device("cpu")
    if wanted is not None:
        for device, fqn in devices.items():
            require(
                device in (cpu, wanted),
                f"A module must be on the CPU or on the requested device, {wanted}, but `{fqn}` is on {device}. Move "
                "it there, or pass that device; `fully_shard` computes on the current one, which "
                "`torch.accelerator.set_device_index` chooses.",
            )
        return wanted
    require(
        len(devices) <= 1,
        "The parameters of a unit must be on one device, but there are "
        f"{' and '.join(f'`{fqn}` on {device}' for device, fqn in list(devices.items())[:2])}. Move the module, or "
        "pass `device_id` to move it.",
        FairshardError,
    )
    inner: list[torch.device] = [unit.origin.device for _, unit in own.survey.units]
    if devices or inner:
        return next(iter([*devices, *inner]))
    if own.on_meta and default_device_type() != "cpu" and communicates(group, current_device()):
        return current_device()
    return next((param.device for param in own.ignored.params if not param.is_meta), cpu)


def _observers(units: list[Unit], comms: Sequence[Communicator]) -> list[Observer]:
    """The observers of a new model of ``units``, the outermost first, which communicate in ``comms``."""
    return [
        LeafWrites(units),  # first: what it raises ends the call before others are told
        UsageCheck(units),
        ValuesCheck(units),
        OrderCheck(units, comms),
        NanCheck(units, comms),
        ProfileStart(units),
    ]
