"""Local state dicts: this rank's shards and buffers, with a description of the parameters behind the shards."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from fairshard.engine.tree import unit_of, units_below, walk
from fairshard.engine.unit import Unit
from fairshard.params.flat_param import FlatParam
from fairshard.utils.names import clean_tensor_name, join
from fairshard.utils.placed_layout import RaggedLayout

LAYOUT_KEY = "_fairshard_layout"


def local_state_dict(module: nn.Module, offload_to_cpu: bool = False) -> dict[str, Tensor]:
    """Copies of this rank's shards and persistent buffers below ``module``. No communication.

    The description of the parameters behind the shards is in the attribute ``_metadata``, where torch keeps the
    versions of modules: ``torch.save``, pickle and deepcopy keep it, a new dict of the same items lacks it.
    """
    state: dict[str, Tensor] = OrderedDict()
    for name, value in _local_entries(module).items():
        state[name] = value.detach().to("cpu" if offload_to_cpu else value.device, copy=True)
    note_layout(state, "", json.dumps(_describe(module)))
    return state


def add_local_state_dict(module: nn.Module, destination: Any, prefix: str, offload_to_cpu: bool) -> Any:
    """Add `local_state_dict` to ``destination``, a new dict if None, with ``prefix`` before the names."""
    state = OrderedDict() if destination is None else destination
    local = local_state_dict(module, offload_to_cpu)
    state.update({f"{prefix}{name}": value for name, value in local.items()})
    note_layout(state, prefix, layout_of(local))
    return state


def note_layout(shards: Any, prefix: str, layout: Any) -> None:
    """Record ``layout``, JSON, as the description of those of ``shards`` whose names begin with ``prefix``.

    A plain dict has no attributes, and stays as it is.
    """
    if not hasattr(shards, "_metadata") and hasattr(shards, "__dict__"):
        shards._metadata = OrderedDict()
    if hasattr(shards, "_metadata"):
        shards._metadata[prefix[:-1]] = {LAYOUT_KEY: layout}


def layout_of(shards: Mapping[str, Any]) -> Any:
    """The description of ``shards``, JSON: in the metadata, or the entry of earlier versions; None if there is none."""
    if LAYOUT_KEY in shards:
        return bytes(shards[LAYOUT_KEY].tolist())
    return getattr(shards, "_metadata", {}).get("", {}).get(LAYOUT_KEY)


def layout_bytes(module: nn.Module) -> Tensor:
    """Description of the parameters behind this rank's shards below ``module``: JSON as ``uint8``."""
    return torch.tensor(list(json.dumps(_describe(module)).encode()), dtype=torch.uint8, device="cpu")


def check_layout(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Check that ``state`` was made from the same shards as those below ``module``.

    Raises:
        RuntimeError: they differ; the message names the first difference.
    """
    if problems := _differences(module, state):
        raise _mismatch(problems)


@torch.no_grad()
def load_local_state_dict(module: nn.Module, state: Mapping[str, Tensor], strict: bool) -> _IncompatibleKeys:
    """Copy the result of `local_state_dict` back into the shards and buffers. No communication.

    Raises:
        RuntimeError: ``state`` is from another rank or wrapping, or with ``strict`` a name is missing or unexpected;
            nothing has changed.
    """
    entries = _local_entries(module)
    missing = [name for name in entries if name not in state]
    unexpected = [name for name in state if name not in entries and name != LAYOUT_KEY]
    problems = _differences(module, state)
    state = {name: _shaped_as(entries.get(name), value) for name, value in state.items()}
    problems += [
        f"`{name}` must have shape {tuple(entry.shape)}, but has {tuple(state[name].shape)}"
        for name, entry in entries.items()
        if name in state and state[name].shape != entry.shape
    ]
    if strict:
        problems += [f"`{name}` is missing" for name in missing] + [f"`{name}` is unexpected" for name in unexpected]
    if problems:
        raise _mismatch(problems)
    for name, entry in entries.items():
        if name in state:
            entry.copy_(state[name])
    return _IncompatibleKeys(missing, unexpected)


def _shaped_as(entry: Tensor | None, value: Tensor) -> Tensor:
    """``value`` in the shape of the parameter ``entry`` if it is 1-D, as earlier versions saved it on one rank."""
    is_flat = isinstance(entry, nn.Parameter) and value.dim() == 1 and value.numel() == entry.numel()
    return value.view(entry.shape) if is_flat and entry is not None else value


def local_metadata(module: nn.Module) -> dict[str, Any]:
    """Description of this rank's shards below ``module``, in fairscale's format. No communication.

    Raises:
        ValueError: a parameter is placed by blocks.
    """
    units = [(fqn, unit, part) for fqn, part in walk(module) if (unit := unit_of(part)) is not None]
    described = [_describe_as_fairscale(clean_tensor_name(fqn), unit, part) for fqn, unit, part in units]
    described[0]["shared_param_info"] += _shared_beside(module, units)
    for name, param in _ignored(module).items():
        described[0]["params"][clean_tensor_name(name)] = _metadata([clean_tensor_name(name)], [param.shape], padding=0)
    return {
        "param_metadata": described,
        "buffer_names": [clean_tensor_name(name) for name, _ in module.named_buffers()],
    }


def _mismatch(problems: list[str]) -> RuntimeError:
    return RuntimeError(
        f"A local state dict must come from the same rank of the same wrapped model, but {'; '.join(problems)}. "
        "To load into another wrapping or world size, use a full state dict or fairshard.checkpoint."
    )


def _describe(module: nn.Module) -> dict[str, Any]:
    """Rank, world size, and the parameters behind each shard, by their names below ``module``."""
    described: dict[str, Any] = {}
    for fqn, unit in units_below(module):
        described.setdefault("rank", unit.group.rank)
        described.setdefault("world size", unit.group.world_size)
        for flat_param in unit.flat_params:
            own = f"{unit.fqn}." if unit.fqn else ""
            described[f"`{clean_tensor_name(join(fqn, flat_param.name.removeprefix(own)))}`"] = [
                f"`{clean_tensor_name(join(fqn, slot.fqn.removeprefix(own)))}` {tuple(slot.shape)}{place}"
                for slot, place in zip(flat_param.slots, _places(flat_param), strict=True)
            ]
    return described


def _places(flat_param: FlatParam) -> list[str]:
    """Where parameters that are placed by blocks or owners lie; empty for others, which follow each other."""
    layout = flat_param.line.layout
    if not isinstance(layout, RaggedLayout):
        return [""] * len(flat_param.slots)
    return [f" {layout.describe(index)}" for index in range(len(flat_param.slots))]


def _differences(module: nn.Module, state: Mapping[str, Any]) -> list[str]:
    """The first difference between the shards of ``state`` and of ``module``; empty if they match."""
    layout = layout_of(state)
    if layout is None:
        return []
    try:
        theirs = json.loads(layout)
        assert isinstance(theirs, dict)
    except (ValueError, AssertionError):
        return [f"its `{LAYOUT_KEY}` cannot be read"]
    ours = _describe(module)
    for name in {**ours, **theirs}:
        there, here = theirs.get(name, "absent"), ours.get(name, "absent")
        if there != here:
            if isinstance(there, list) and isinstance(here, list):
                there, here = next(
                    (a, b) for a, b in zip([*there, "nothing more"], [*here, "nothing more"], strict=False) if a != b
                )
            return [f"its {name} is {there} while this model's is {here}"]
    return []


def _local_entries(module: nn.Module) -> dict[str, Tensor]:
    entries: dict[str, Tensor] = OrderedDict()
    for fqn, unit in units_below(module):
        for flat_param in unit.flat_params:
            name = flat_param.name.removeprefix(f"{unit.fqn}.") if unit.fqn else flat_param.name
            flat_param.adopt_assigned()
            is_whole = flat_param.shows.keeps_shapes and not unit.config.flatten_parameters
            entries[join(fqn, name)] = flat_param.shows.registered[0] if is_whole else flat_param.shard
    for fqn, part in walk(module):
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                entries[join(fqn, name)] = buffer
    entries.update(_ignored(module))
    return {clean_tensor_name(name): value for name, value in entries.items()}


def _ignored(module: nn.Module) -> dict[str, Tensor]:
    """Parameters that no unit has sharded, under all their names."""
    sharded = {one.shard for _, unit in units_below(module) for fp in unit.flat_params for one in fp.stepped}
    return {
        join(fqn, name): param
        for fqn, part in walk(module)
        for name, param in part._parameters.items()
        if param is not None and param not in sharded
    }


def _metadata(names: list[str], shapes: list[torch.Size], padding: int) -> dict[str, Any]:
    return {"names": names, "shapes": shapes, "numels": [shape.numel() for shape in shapes], "padding": padding}


def _describe_as_fairscale(path: str, unit: Unit, wrapper: nn.Module) -> dict[str, Any]:
    def own(name: str) -> str:
        return clean_tensor_name(name.removeprefix(f"{unit.fqn}.") if unit.fqn else name)

    params: dict[str, Any] = {}
    shared: list[tuple[str, str]] = []
    wrapped = wrapper._modules["module"]
    assert wrapped is not None
    paths: dict[int, list[str]] = {}
    for name, part in wrapped.named_modules(remove_duplicate=False):
        paths.setdefault(id(part), []).append(name)
    for flat_param in unit.flat_params:
        if isinstance(flat_param.line.layout, RaggedLayout):
            raise ValueError(
                "Shards must hold parameters one after the other to be described in fairscale's format, but "
                f"`{flat_param.slots[0].fqn}` is placed by blocks, or on one rank. Save a full state dict, or a "
                "checkpoint."
            )
        names = [own(slot.fqn) for slot in flat_param.slots]
        padding = flat_param.shard_numel - flat_param.line.layout.filled(flat_param.line.rank)
        params[own(flat_param.name)] = _metadata(names, [slot.shape for slot in flat_param.slots], padding)
        for slot in flat_param.slots:
            places = [(place, name) for part, name in slot.owners for place in paths.get(id(part), [])]
            aliases = dict.fromkeys(clean_tensor_name(join(place, name)) for place, name in places)
            shared += [_swapped(own(slot.fqn), name) for name in aliases if name != own(slot.fqn)]
    return {
        "fsdp_path": path,
        "params": params,
        "no_broadcast_optim_state": unit.config.no_broadcast_optim_state,
        "shared_param_info": shared,
    }


def _shared_beside(module: nn.Module, units: list[tuple[str, Unit, nn.Module]]) -> list[tuple[str, str]]:
    """Pairs of names, below ``module``, of a unit's parameters that modules outside it share."""
    fqns = {id(part): fqn for fqn, part in walk(module)}
    shared = []
    for fqn, unit, wrapper in units:
        inside = {id(part) for part in wrapper.modules()}
        for slot in (slot for flat_param in unit.flat_params for slot in flat_param.slots):
            own = join(fqn, slot.fqn.removeprefix(f"{unit.fqn}.") if unit.fqn else slot.fqn)
            outside = [pair for pair in slot.owners if id(pair[0]) in fqns.keys() - inside]
            names = [clean_tensor_name(join(fqns[id(part)], name)) for part, name in outside]
            shared += [_swapped(clean_tensor_name(own), name) for name in names]
    return shared


def _swapped(first: str, other: str) -> tuple[str, str]:
    """Two names of a tied weight in fairscale's form: each with the last word of the other."""
    first_owner, _, first_word = first.rpartition(".")
    other_owner, _, other_word = other.rpartition(".")
    return join(first_owner, other_word), join(other_owner, first_word)
