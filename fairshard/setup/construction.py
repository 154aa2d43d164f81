"""Prepares a module for sharding: its device, memory and initial values, the same on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakIdKeyDictionary

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
from fairshard.setup.origin import Ignored, Origin
from fairshard.setup.survey import Survey
from fairshard.utils.collectives import Communicator
from fairshard.utils.device import check_supported, current_device, default_device_type, device_count
from fairshard.utils.dtensors import memory_of
from fairshard.utils.groups import communicates, communicator
from fairshard.utils.messages import broadcast_tensors
from fairshard.utils.names import join
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


# ---- tensors on the meta device

# Meta tensors that have been replaced, and the names of their replacements: another module that shares the parameter
# may still hold the meta tensor.
_gone: WeakIdKeyDictionary = WeakIdKeyDictionary()

_UNWRITTEN = 0xA5  # value of each byte that `reset_parameters` has not written


class _Held(NamedTuple):
    """A parameter or buffer ``value``: ``name`` of module ``part``, called ``fqn`` in the model."""

    fqn: str
    part: nn.Module
    name: str
    value: Tensor


class OwnTensors:
    """The parameters and buffers of a surveyed module that are neither in a unit nor in ``ignored``.

    Invariant: a parameter with several owners is one object, before and after `materialize`.
    """

    def __init__(self, survey: Survey, ignored: Ignored) -> None:
        self.survey, self.ignored = survey, ignored
        self._modules = survey.own({id(part) for part in ignored.modules})

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Each parameter and buffer once, under its first name."""
        found: dict[int, _Held] = {}
        for held in self._held():
            found.setdefault(id(held.value), held)
        ignored = self.ignored.ids
        return {held.fqn: held.value for key, held in found.items() if key not in ignored}

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """Each parameter once, under its first name."""
        return {fqn: value for fqn, value in self.tensors.items() if isinstance(value, nn.Parameter)}

    @property
    def on_meta(self) -> list[str]:
        """The names of tensors without memory."""
        return [fqn for fqn, value in self.tensors.items() if value.is_meta]

    def move_buffers(self, device: torch.device) -> None:
        """Move buffers to ``device``; a buffer that several modules share stays one object."""
        moved: dict[int, Tensor] = {}
        for _, part in self._modules:
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.device != device:
                    part._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))

    def materialize(self, init: Callable[[nn.Module], Any] | None, device: torch.device, has_values: bool) -> None:
        """Allocate meta tensors on ``device``, and initialise them with ``init`` or ``reset_parameters``.

        Without ``has_values`` the values arrive later, from another rank.

        Raises:
            ValueError: a module has no ``reset_parameters``, or it left a tensor unwritten; ``init`` left a tensor on
                the meta device; or a module shares a parameter with a unit that was also on the meta device.
        """
        ignored, every = self.ignored.ids, self._held()
        for held in every:
            if held.value.is_meta and held.value in _gone:
                raise ValueError(
                    f"A parameter must belong to one unit, but `{held.fqn}` is shared with `{_gone[held.value]}` of a "
                    "unit that is sharded already. Make the two modules one unit, or make neither a unit of its own."
                )
        due = {id(held.value) for held in every if held.value.is_meta and id(held.value) not in ignored}
        if not due:
            return
        owners: dict[int, list[_Held]] = {}
        for held in every:
            owners.setdefault(id(held.value), []).append(held)
        waiting = [(fqn, part) for fqn, part in self._modules if not due.isdisjoint(map(id, _values(part)))]
        with torch.no_grad():
            if init is not None:
                for _, part in sorted(waiting, key=_depth):  # outer ones first: they may empty their children
                    init(part)
                self._tie(owners)
                self.survey.look()
            else:
                self._reset(waiting, due, device, owners, has_values)
        left = self.on_meta
        require(
            not left,
            "`param_init_fn` must give memory to all parameters and buffers of the module it is called with, but "
            f"`{next(iter(left), '')}` is still on the meta device. Let it begin with "
            "`module.to_empty(device=..., recurse=False)`.",
        )

    # ---- private

    def _held(self) -> list[_Held]:
        """Every parameter and buffer of every module, ignored ones too."""
        every = [(fqn, part, *item) for fqn, part in self._modules for item in _named(part).items()]
        return [_Held(join(fqn, name), part, name, value) for fqn, part, name, value in every]

    def _reset(
        self,
        waiting: list[tuple[str, nn.Module]],
        due: set[int],
        device: torch.device,
        owners: dict[int, list[_Held]],
        has_values: bool,
    ) -> None:
        """Empty the modules ``waiting``, and call their ``reset_parameters`` if their values do not arrive later."""
        names = {id(part): f"`{fqn or 'the module that is wrapped'}` ({type(part).__name__})" for fqn, part in waiting}
        for _, part in waiting if has_values else ():
            require(
                callable(getattr(part, "reset_parameters", None)),
                f"A module on the meta device must have `reset_parameters()` to be initialised, but {names[id(part)]} "
                "has none. Pass `param_init_fn`, or wrap a module that has values.",
            )
        for _, part in waiting:
            _empty(part, due, device)
        self._tie(owners)
        for _, part in waiting if has_values else ():
            part.reset_parameters()  # type: ignore[operator]
        for _, part in waiting if has_values else ():
            left = next((name for name, value in _named(part).items() if _is_unwritten(value)), None)
            require(
                left is None,
                "`reset_parameters()` must give values to all parameters and buffers of a module on the meta device, "
                f"but that of {names[id(part)]} has not written `{left}`. Initialize it there as well, or pass "
                "`param_init_fn`.",
            )

    def _tie(self, owners: dict[int, list[_Held]]) -> None:
        """Share tensors among modules as before, and record the tensors that were replaced."""
        new: dict[int, nn.Parameter] = {}
        for key, (first, *others) in owners.items():
            value = getattr(first.part, first.name)
            for other in others:
                if getattr(other.part, other.name) is not value:
                    setattr(other.part, other.name, value)
            if value is not first.value and isinstance(first.value, nn.Parameter):
                new[key] = value
                _gone[first.value] = first.fqn
        self.ignored = self.ignored.replaced(new)


def _named(part: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of ``part`` itself."""
    every = {**part._parameters, **part._buffers}
    return {name: value for name, value in every.items() if value is not None}


def _values(part: nn.Module) -> list[Tensor]:
    return list(_named(part).values())


def _empty(part: nn.Module, due: set[int], device: torch.device) -> None:
    """Like ``part.to_empty``, but only for the tensors ``due``; marks the new memory as unwritten."""
    kept = {name: value for name, value in _named(part).items() if id(value) not in due}
    for name in kept:
        setattr(part, name, None)
    part.to_empty(device=device, recurse=False)
    for value in _values(part):
        _bytes_of(value).fill_(_UNWRITTEN)
    for name, value in kept.items():
        setattr(part, name, value)


def _bytes_of(value: Tensor) -> Tensor:
    """The memory of ``value`` as 1-D uint8; empty for tensors that are not strided."""
    line = torch.empty(0, dtype=torch.uint8, device=value.device)
    return line.set_(value.untyped_storage()) if value.layout is torch.strided else line


def _is_unwritten(value: Tensor) -> bool:
    line = None if value.is_meta else _bytes_of(value)
    return line is not None and all(len(run) and bool((run == _UNWRITTEN).all()) for run in (line[:64], line))


def _depth(named: tuple[str, nn.Module]) -> int:
    return len(named[0].split(".")) if named[0] else 0
