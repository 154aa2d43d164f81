"""Targets of a load: the entries to read from a checkpoint, and the memory to read them into.

Keys may be ours, or those of torch's tools for FSDP2 and plain modules, with or without a prefix.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from fairshard.checkpoint.contents import model_keys, whole_entry
from fairshard.checkpoint.entries import unwrapped
from fairshard.errors import CheckpointError
from fairshard.state.full_params import spans_of
from fairshard.state.optim_loading import is_elementwise, zeros_like_shard
from fairshard.state.optim_params import NamedParam, OptimParams
from fairshard.utils.span_tensor import SpanTensor
from fairshard.utils.subclasses import is_wrapper
from fairshard.views.orig_param import Stepped

_MOST_NAMES = 4


@dataclass
class ModelTarget:
    """The model's part: the key of each name in its state dict, and the values to read into, by key.

    ``parts``: of an object that was saved in parts, such as a dict of ``get_extra_state``, the path in it of each key.
    ``saved``: the names in the checkpoint, in its order, each with whether the model has it on this rank.
    """

    keys: dict[str, str]
    values: dict[str, Any]
    parts: dict[str, dict[str, tuple[Any, ...]]] = field(default_factory=dict)
    saved: dict[str, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: str, state: Mapping[str, Any], metadata: Metadata, params: OptimParams) -> ModelTarget:
        """Target of a model whose sharded state dict is ``state``.

        Raises:
            CheckpointError: the checkpoint was saved from a different model.
        """
        known = metadata.state_dict_metadata
        there = model_keys(metadata)
        prefix = next((key[: len(key) - len(name)] for name, key in there.items()), "")
        keys: dict[str, str] = {}
        values: dict[str, Any] = {}
        parts: dict[str, dict[str, tuple[Any, ...]]] = {}
        problems: list[str] = []
        for name, value in state.items():
            key = next((there.get(n) or prefix + n for n in _names_of(name, params) if prefix + n in known), None)
            own = {} if key is not None or isinstance(value, Tensor) else _parts_of(name, prefix, metadata)
            if own or (key is None and value == {}):  # an empty dict has no parts
                parts[name] = own
                values.update({part: _room_for(known[part], None, None) for part in own})
                continue
            if key is None:
                problems.append(f"`{name}` is missing")
                continue
            entry = known[key]
            size = whole_entry(folder, metadata, key).size if isinstance(entry, TensorStorageMetadata) else None
            if (size is not None) != isinstance(value, Tensor):
                problems.append(f"`{name}` is {'an object' if size is None else 'a tensor'}")
            elif size is not None and size != value.shape:
                problems.append(f"`{name}` has shape {tuple(size)} instead of {tuple(value.shape)}")
            keys[name] = key
            values[key] = _room_like(value) if isinstance(value, Tensor) else value
        saved = {name: key in values for name, key in there.items()}
        if problems:
            problems += [_not_in_model(name) for name, is_here in saved.items() if not is_here]
            raise _other_model(folder, problems)
        return cls(keys, values, parts, saved)

    @property
    def missing(self) -> bytes:
        """Of the names in `saved`, in order, a bit for each that the model does not have on this rank."""
        return np.packbits([not is_here for is_here in self.saved.values()]).tobytes()

    def check_used(self, folder: str, missing: Sequence[bytes]) -> None:
        """Check that each saved name is in the model of some rank; ``missing``: that of each rank.

        Raises:
            CheckpointError: on every rank, if some are in none.
        """
        nowhere = np.bitwise_and.reduce([np.frombuffer(one, np.uint8) for one in missing])
        names = [name for name, bit in zip(self.saved, np.unpackbits(nowhere), strict=False) if bit]
        if names:
            raise _other_model(folder, [_not_in_model(name) for name in names])

    def state_dict(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The model's state dict, from the ``values`` read."""
        state = {name: unwrapped(values[key]) for name, key in self.keys.items()}
        for name, own in self.parts.items():
            found: dict[str, Any] = {"": {}} if not own else {}
            for key, path in own.items():
                set_element(found, ("", *path), values[key])
            state[name] = found[""]
        return state


@dataclass
class OptimizerTarget:
    """The optimizer's part: keys by parameter and state name, and the values to read into, by key.

    ``group_paths`` maps a key of the param groups to its path in their list.
    """

    keys: dict[str, dict[str, str]] = field(default_factory=dict)
    group_paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, folder: str, metadata: Metadata, keys: Collection[str], params: OptimParams, held: set[nn.Parameter]
    ) -> OptimizerTarget:
        """Target of an optimizer that steps ``held``, saved under ``keys``; allocates elementwise state by shards.

        Raises:
            CheckpointError: the checkpoint holds no optimizer.
        """
        known = metadata.state_dict_metadata
        others = [key for key in known if key in keys]
        prefix = _optimizer_prefix(others, params)
        if prefix is None:
            raise CheckpointError(
                f"{folder} must hold an optimizer of this model to load one, but has none. Leave `optimizer` out."
            )
        target = cls()
        found: dict[str, dict[str, str]] = {}
        for key in others:
            if key.startswith(f"{prefix}state."):
                name, _, state = key[len(prefix) + len("state.") :].rpartition(".")
                found.setdefault(name, {})[state] = key
                if isinstance(known[key], TensorStorageMetadata):
                    whole_entry(folder, metadata, key)
        for named in params:
            if named.param in held:
                target._make_room(named, found, known)
        target._add_groups(f"{prefix}param_groups", others, metadata)
        return target

    def _make_room(self, named: NamedParam, found: Mapping[str, dict[str, str]], known: Mapping[str, Any]) -> None:
        """Allocate the state of one parameter or shard."""
        own = [next((found[name] for name in names if name in found), {}) for names in named.names]
        for state in dict.fromkeys(state for keys in own for state in keys):
            entries = [known[keys[state]] if state in keys else None for keys in own]
            tensors = [entry for entry in entries if isinstance(entry, TensorStorageMetadata)]
            spans: list[Any] = [None] * len(own)
            flat_param = named.flat_param
            if flat_param is not None and tensors and is_elementwise(named, state, [e.size for e in tensors]):
                dtype = tensors[0].properties.dtype
                spans = _spans_to_fill(flat_param, dtype, fills_all=len(tensors) == len(own))
            for name, keys, entry, span in zip(named.first_names, own, entries, spans, strict=True):
                if entry is not None:
                    self.keys.setdefault(name, {})[state] = keys[state]
                    self.values[keys[state]] = _room_for(entry, span, named)

    def _add_groups(self, prefix: str, keys: Iterable[str], metadata: Metadata) -> None:
        paths = metadata.planner_data or {}
        for key in keys:
            if key == prefix:
                self.group_paths[key] = ()
            elif key.startswith(f"{prefix}."):
                path = tuple(paths.get(key, ()))
                if "param_groups" in path:
                    self.group_paths[key] = path[path.index("param_groups") + 1 :]
                else:  # one entry for each parameter and setting
                    name, _, setting = key[len(prefix) + 1 :].rpartition(".")
                    self.group_paths[key] = (name, setting)
            else:
                continue
            self.values[key] = _room_for(metadata.state_dict_metadata[key], None, None)

    def state_dict(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Optimizer state by name, from the ``values`` read."""
        state = {name: {own: values[key] for own, key in keys.items()} for name, keys in self.keys.items()}
        groups = self._groups(values)
        return {"state": state, "param_groups": groups} if groups else {"state": state}

    def _groups(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        by_number: dict[Any, dict[str, Any]] = {}
        for key, path in self.group_paths.items():
            if not path:
                return list(values[key])
            number, setting = path[0], ".".join(map(str, path[1:]))
            by_number.setdefault(number, {} if isinstance(number, int) else {"params": [number]})[setting] = values[key]
        return list(by_number.values())


def _not_in_model(name: str) -> str:
    return f"`{name}` is not in the model"


def _other_model(folder: str, problems: Sequence[str]) -> CheckpointError:
    more = f", and {len(problems) - _MOST_NAMES} more" if len(problems) > _MOST_NAMES else ""
    return CheckpointError(
        f"{folder} must be a checkpoint of this model, but: {', '.join(problems[:_MOST_NAMES])}{more}. Build the model "
        "that was saved, or choose another checkpoint."
    )


def _parts_of(name: str, prefix: str, metadata: Metadata) -> dict[str, tuple[Any, ...]]:
    """Keys of the parts of object ``name``, which torch's planner has flattened, and their paths in it."""
    start, paths = f"{prefix}{name}.", metadata.planner_data or {}
    found: dict[str, tuple[Any, ...]] = {}
    for key in metadata.state_dict_metadata:
        if key.startswith(start):
            path = tuple(paths.get(key, ()))
            found[key] = path[path.index(name) + 1 :] if name in path else tuple(key[len(start) :].split("."))
    return found


def _room_like(value: Tensor) -> Tensor:
    """New memory in the form of ``value``, all of which a load fills."""
    value = value.detach()
    local = value._local_tensor if isinstance(value, DTensor) else value
    only_the_class_knows = is_wrapper(local) and not isinstance(local, SpanTensor)
    return value.clone() if only_the_class_knows else torch.empty_like(value)


def _spans_to_fill(flat_param: Stepped, dtype: torch.dtype, fills_all: bool) -> list[Any]:
    """This rank's runs of a new shard. Only what a load does not fill is set to zero: padding, or all of it."""
    if not fills_all:
        return list(spans_of(flat_param, zeros_like_shard(flat_param, dtype)))
    shard = torch.empty_like(flat_param.shard.detach(), dtype=dtype, memory_format=torch.contiguous_format)
    spans = list(spans_of(flat_param, shard))
    if isinstance(shard, DTensor):  # no padding
        return spans
    line, place = shard.view(-1), 0
    for run in [span.run for span in spans if isinstance(span, SpanTensor) and span.run.numel()]:
        start = int(run.storage_offset())
        line[place:start] = 0
        place = start + run.numel()
    line[place:] = 0
    return spans


def _room_for(entry: Any, span: Any, named: NamedParam | None) -> Any:
    if not isinstance(entry, TensorStorageMetadata):
        return None
    if span is not None and entry.size == span.shape:
        return span
    on_device = named is not None and named.flat_param is None and len(entry.size)
    device = named.param.device if named is not None and on_device else "cpu"
    return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)


def _names_of(name: str, params: OptimParams) -> Iterator[str]:
    """``name``, then the names of weights tied to it."""
    yield name
    named = params.find(name)
    for names in named.names if named is not None else ():
        if name in names:
            yield from names


def _optimizer_prefix(keys: Iterable[str], params: OptimParams) -> str | None:
    """Prefix of ``state.`` and ``param_groups`` in the keys of an optimizer of these parameters."""
    counts: dict[str, int] = {}
    for key in keys:
        parts = key.split(".")
        for index, part in enumerate(parts):
            prefix = "".join(f"{earlier}." for earlier in parts[:index])
            if part == "param_groups" or (part == "state" and params.find(".".join(parts[index + 1 : -1])) is not None):
                counts[prefix] = counts.get(prefix, 0) + 1
    return max(counts, key=lambda prefix: (counts[prefix], -len(prefix)), default=None)
