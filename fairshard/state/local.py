"""Local state dicts: this rank's shards and buffers, with a description of the parameters behind the shards."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from fairshard.engine.tree import is_wrapper, unit_of, units_below, walk
from fairshard.engine.unit import Unit
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
    units = [(fqn, unit) for fqn, part in walk(module) if (unit := unit_of(part)) is not None]
    described = [_describe_as_fairscale(clean_tensor_name(fqn), unit) for fqn, unit in units]
    for name, param in _ignored(module).items():
        described[0]["params"][clean_tensor_name(name)] = _metadata([clean_tensor_name(name)], [param.shape], padding=0)
    paths: dict[int, list[str]] = {}
    for path, part in _paths(module):
        paths.setdefault(id(part), []).append(path)
    for fqn, unit in units:
        for slot in (slot for flat_param in unit.flat_params for slot in flat_param.slots):
            own = _below(fqn, unit, slot.fqn)
            names = (join(path, name) for part, name in slot.owners for path in paths.get(id(part), ()))
            others = dict.fromkeys(map(clean_tensor_name, names)).keys() - {own}
            described[0]["shared_param_info"] += [_swapped(own, other) for other in sorted(others)]
    return {
        "param_metadata": described,
        "buffer_names": [clean_tensor_name(name) for name, _ in module.named_buffers()],
    }


def _paths(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Like `walk`, but a module that has several names is there under each."""
    yield path, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _paths(child, path if name == "module" and is_wrapper(module) else join(path, name))


def _mismatch(problems: list[str]) -> RuntimeError:
    return RuntimeError(
        f"A local state dict must come from the same rank of the same wrapped model, but {'; '.join(problems)}. "
        "To load into another wrapping or world size, use a full state dict or fairshard.checkpoint."
    )


def _below(fqn: str, unit: Unit, name: str) -> str:
    """``name``, which begins with that of ``unit`` in the model, for a unit that is called ``fqn``."""
    return clean_tensor_name(join(fqn, name.removeprefix(f"{unit.fqn}.") if unit.fqn else name))


def _describe(module: nn.Module) -> dict[str, Any]:
    """Rank, world size, and the parameters behind each shard, by their names below ``module``.

    Parameters that are placed by blocks or owners have their places; others follow each other.
    """
    described: dict[str, Any] = {}
    for fqn, unit in units_below(module):
        described.setdefault("rank", unit.group.rank)
        described.setdefault("world size", unit.group.world_size)
        for flat_param in unit.flat_params:
            layout = flat_param.line.layout
            described[f"`{_below(fqn, unit, flat_param.name)}`"] = [
                f"`{_below(fqn, unit, slot.fqn)}` {tuple(slot.shape)}"
                f"{f' {layout.describe(index)}' if isinstance(layout, RaggedLayout) else ''}"
                for index, slot in enumerate(flat_param.slots)
            ]
    return described


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
            flat_param.adopt_assigned()
            is_whole = flat_param.shows.keeps_shapes and not unit.config.flatten_parameters
            own = flat_param.shows.registered[0] if is_whole else flat_param.shard
            entries[_below(fqn, unit, flat_param.name)] = own
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


def _describe_as_fairscale(path: str, unit: Unit) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for flat_param in unit.flat_params:
        if isinstance(flat_param.line.layout, RaggedLayout):
            raise ValueError(
                "Shards must hold parameters one after the other to be described in fairscale's format, but "
                f"`{flat_param.slots[0].fqn}` is placed by blocks, or on one rank. Save a full state dict, or a "
                "checkpoint."
            )
        names = [_below("", unit, slot.fqn) for slot in flat_param.slots]
        padding = flat_param.shard_numel - flat_param.line.layout.filled(flat_param.line.rank)
        params[_below("", unit, flat_param.name)] = _metadata(names, [slot.shape for slot in flat_param.slots], padding)
    return {
        "fsdp_path": path,
        "params": params,
        "no_broadcast_optim_state": unit.config.no_broadcast_optim_state,
        "shared_param_info": [],
    }


def _swapped(first: str, other: str) -> tuple[str, str]:
    """Two names of a tied weight in fairscale's form: each with the last word of the other."""
    first_owner, _, first_word = first.rpartition(".")
    other_owner, _, other_word = other.rpartition(".")
    return join(first_owner, other_word), join(other_owner, first_word)
