"""Reassemble parameters from the shards and metadata of fairscale's FullyShardedDataParallel.

`local_metadata_dict` lists every unit with its backing parameters, and for each the original names, shapes and this
rank's padding::

    unit "layers.0"   flat_param_0   names  fc.weight (2, 3)   fc.bias (2,)         8 elements on 3 ranks
        rank 0  | w w w |    the shard ``layers.0.flat_param_0`` of each rank has 3 elements,
        rank 1  | w w w |    of which the last ``padding`` (here 0, 0, 1) belong to no parameter
        rank 2  | b b . |

A unit that only some ranks hold (an expert under a name of its own) is put together from these. A unit of a smaller
process group, of which the ranks hold several copies, is read once, if all copies agree.

Source: the format is that of fairscale 0.4.13, `local_metadata_dict`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from math import prod
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from fairshard.errors import CheckpointError
from fairshard.state.local import LAYOUT_KEY, layout_of
from fairshard.utils.layout import FlatLayout

_WRAPPER = re.compile(r"(^|\.)_(fsdp_wrapped|fpw)_module(?=\.|$)")


@dataclass(frozen=True)
class BackingParam:
    """A parameter that a unit registered in place of original parameters, or an original parameter itself.

    Equal on every rank except for ``padding``, the number of elements at the end of this rank's shard that belong to
    no original parameter.
    """

    key: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    padding: int = field(compare=False)

    @property
    def numels(self) -> list[int]:
        """Number of elements of each original parameter."""
        return [prod(shape) for shape in self.shapes]


@dataclass(frozen=True, eq=False)
class Shard:
    """One rank's weights and metadata; ``source`` is its file, or its index in a list, for messages.

    ``rank`` is known for our own shards if there is more than one rank; None otherwise. ``aliases`` maps the other
    names of tied weights to their first ones.
    """

    source: str
    weights: dict[str, Tensor]
    params: dict[str, BackingParam]
    buffers: tuple[str, ...]
    aliases: dict[str, str]
    rank: int | None

    def values(self, key: str) -> Tensor:
        """The shard of a backing parameter without its padding; 1-D."""
        values = self.weights[key].reshape(-1)
        return values[: values.numel() - self.params[key].padding]


def consolidate(
    shard_weights: Sequence[Mapping[str, Tensor]], shard_metadata: Sequence[Mapping[str, Any]], strict: bool = True
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Whole parameters and buffers, in host memory, from the shards of all ranks; and the names of the buffers.

    Raises:
        ValueError: there are no shards, or the numbers of weights and descriptions differ.
        CheckpointError: they are not the shards of all ranks of one model; unless ``strict``, parameters may be
            missing.
    """
    if len(shard_weights) != len(shard_metadata) or not shard_weights:
        raise ValueError(
            f"Weights and metadata must be given for every rank, but there are weights of {len(shard_weights)} and "
            f"metadata of {len(shard_metadata)} ranks."
        )
    both = enumerate(zip(shard_weights, shard_metadata, strict=True))
    shards = in_order_of_ranks(
        [
            parse(f"shard_weights[{rank}]", {"shard_weights": weights, "shard_metadata": metadata}, strict)
            for rank, (weights, metadata) in both
        ]
    )
    values = whole_values(shards, lambda like: {name: torch.empty_like(t, device="cpu") for name, t in like.items()})
    aliases = tied(shards, values)
    return {**values, **{name: values[first] for name, first in aliases.items()}}, buffers_of(shards)


def parse(source: str, found: Mapping[str, Any], strict: bool = True) -> Shard:
    """Parse one rank's weights and metadata; unless ``strict``, weights that the metadata describe may be missing.

    Raises:
        CheckpointError: they are not in fairscale's format.
    """
    try:
        return _parse(source, found["shard_weights"], found["shard_metadata"], strict)
    except Exception as error:  # damaged values can raise anything
        what = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(
            f'{source} must hold {{"shard_weights": local_state_dict(), "shard_metadata": local_metadata_dict()}} of '
            f"fairscale, but {what}."
        ) from error


def _parse(source: str, weights: Mapping[str, Any], metadata: Mapping[str, Any], strict: bool) -> Shard:
    tensors = {_clean(name): value for name, value in weights.items() if isinstance(value, Tensor)}
    tensors.pop(LAYOUT_KEY, None)  # our own description, in shards of earlier versions
    layout = json.loads(layout_of(weights) or "{}")
    units = [(_clean(unit["fsdp_path"]), unit) for unit in metadata["param_metadata"]]
    described = [_parse_param(path, name, param) for path, unit in units for name, param in unit["params"].items()]
    params = {param.key: param for param in described if strict or param.key in tensors}
    for key, param in params.items():
        if key not in tensors:
            raise ValueError(f"its metadata describe `{key}`, which is missing from its weights")
        if not 0 <= param.padding <= tensors[key].numel():
            raise ValueError(f"`{key}` has {param.padding} elements of padding in {tensors[key].numel()}")
    names = {name for param in params.values() for name in param.names}
    aliases: dict[str, str] = {}
    for path, unit in units:
        for pair in unit.get("shared_param_info", ()):
            other, first = _parse_alias(_below(path, pair[0]), _below(path, pair[1]), names)
            if first in names:
                aliases[other] = first
            elif strict:
                raise ValueError(f"`{other}` is tied to `{first}`, which is not one of its parameters")
    # a non-persistent buffer has a name here but no value
    buffers = tuple(name for name in map(_clean, metadata["buffer_names"]) if name in tensors)
    return Shard(source, tensors, params, buffers, aliases, layout["rank"] if layout.get("world size", 1) > 1 else None)


def _parse_param(path: str, name: str, param: Mapping[str, Any]) -> BackingParam:
    shapes = tuple(tuple(map(int, shape)) for shape in param["shapes"])
    names = tuple(_below(path, own) for own in param["names"])
    found = BackingParam(_below(path, name), names, shapes, int(param["padding"]))
    is_negative = any(size < 0 for shape in shapes for size in shape)
    if is_negative or len(names) != len(shapes) or found.numels != list(map(int, param["numels"])):
        raise ValueError(f"the names, shapes and sizes of `{found.key}` do not fit together")
    return found


def _parse_alias(first: str, other: str, names: Collection[str]) -> tuple[str, str]:
    """The other and the first name of a tied weight.

    fairscale writes the first name before the other, but with their last words swapped: ``emb.kernel`` and
    ``head.weight`` for ``emb.weight`` and ``head.kernel``. The swap matters only if the last words differ.
    """
    first_owner, _, other_word = first.rpartition(".")
    other_owner, _, first_word = other.rpartition(".")
    right = _below(first_owner, first_word)
    return (_below(other_owner, other_word), right) if right in names else (other, first)


def in_order_of_ranks(shards: Sequence[Shard]) -> list[Shard]:
    """The shards sorted by rank, if their ranks are known; otherwise in the given order.

    Raises:
        CheckpointError: they are from several models, one is repeated, or numbers in file names contradict the order.
    """
    _check_one_model(shards)
    paths = [os.path.realpath(shard.source) for shard in shards]
    repeated = next((shard.source for shard, path in zip(shards, paths, strict=True) if paths.count(path) > 1), None)
    ranks = [shard.rank for shard in shards if shard.rank is not None]
    if repeated or len(set(ranks)) < len(ranks):
        what = f"{repeated} is given twice" if repeated else f"the given shards are of ranks {ranks}"
        raise CheckpointError(f"Each shard must be given once, but {what}.")
    if len(ranks) == len(shards):
        return [shard for _, shard in sorted(zip(ranks, shards, strict=True), key=itemgetter(0))]
    for one, other in pairwise(shards):
        if _numbers_fall(one.source, other.source):
            raise CheckpointError(
                f"Shards must be given in the order of ranks, but {one.source} comes before {other.source}. Sort them "
                "by number, as `ls -v` does; if the numbers are not ranks, rename the files."
            )
    return list(shards)


def _check_one_model(shards: Sequence[Shard]) -> None:
    """Check that parameters and ties that several ``shards`` have are the same.

    Raises:
        CheckpointError: one differs, two have one name, or a shard has none of the first one's.
    """
    known: dict[str, Any] = {}
    for shard in shards:
        own = {**shard.params, **{f"tie {name}": first for name, first in shard.aliases.items()}}
        is_same = all(known.setdefault(key, one) == one for key, one in own.items())
        names = [name for param in known.values() if isinstance(param, BackingParam) for name in param.names]
        is_foreign = bool(shards[0].params) and shards[0].params.keys().isdisjoint(shard.params)
        if not is_same or is_foreign or len(set(names)) < len(names):
            raise CheckpointError(
                f"Shards must be of one model, but {shard.source} describes other parameters than {shards[0].source}."
            )


def _numbers_fall(one: str, other: str) -> bool:
    """Whether two paths differ only in one number, which is smaller in ``other``."""
    ones, others = re.split(r"(\d+)", one), re.split(r"(\d+)", other)
    differ = [i for i, pair in enumerate(zip_longest(ones, others)) if pair[0] != pair[1]]
    return len(differ) == 1 and differ[0] % 2 == 1 and int(ones[differ[0]]) > int(others[differ[0]])


def whole_values(shards: Sequence[Shard], allocate: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Any:
    """Whole parameters and buffers by name, in memory that ``allocate`` returns for meta tensors of their shapes.

    Raises:
        CheckpointError: the shards are not those of all ranks, in order.
    """
    params = {key: param for shard in reversed(shards) for key, param in shard.params.items()}
    buffers = {name: shard.weights[name] for shard in reversed(shards) for name in shard.buffers}
    like: dict[str, Tensor] = {}
    copies = {}  # checked before memory is taken for what shapes claim
    for key, param in params.items():
        copies[key] = _copies(key, [shard for shard in shards if key in shard.params])
        dtype = copies[key][0][0].weights[key].dtype
        like |= {
            name: torch.empty(shape, dtype=dtype, device="meta")
            for name, shape in zip(param.names, param.shapes, strict=True)
        }
    values = allocate(like | {name: buffers[name] for name in buffers_of(shards)})
    for key, (first, *others) in copies.items():
        for one, same in ((one, same) for other in others for one, same in zip(first, other, strict=True)):
            if not torch.equal(one.values(key), same.values(key)):
                raise _several_copies(key, (one, same), f"{same.source} has other values than {one.source}")
        targets = [values[name].view(-1) for name in params[key].names]
        for piece in FlatLayout(params[key].numels, len(first)).pieces:
            source = first[piece.row].values(key)
            targets[piece.index][slice(*piece.source)] = source[slice(*piece.target)]
    for name, value in buffers.items():
        values[name].copy_(value)
    return values


def buffers_of(shards: Sequence[Shard]) -> tuple[str, ...]:
    """The names of all buffers."""
    return tuple(dict.fromkeys(name for shard in shards for name in shard.buffers))


def _copies(key: str, holders: Sequence[Shard]) -> list[Sequence[Shard]]:
    """The ``holders`` of a parameter, in groups of consecutive ranks that together hold it once.

    Raises:
        CheckpointError: there are no such groups.
    """
    whole = sum(holders[0].params[key].numels)
    held = sum(shard.values(key).numel() for shard in holders)
    num_copies = max(held // whole, 1) if whole and held % whole == 0 else 1
    if len(holders) % num_copies:
        raise _several_copies(key, holders, f"there are {num_copies} copies on groups of different sizes")
    size = len(holders) // num_copies
    copies = [holders[start : start + size] for start in range(0, len(holders), size)]
    for copy in copies:
        _check_shards(key, copy)
    return copies


def _several_copies(key: str, shards: Sequence[Shard], problem: str) -> CheckpointError:
    is_whole = all(shard.values(key).numel() == sum(shard.params[key].numels) for shard in shards)
    what = "whole in every shard" if is_whole else "held more than once"
    return CheckpointError(
        f"`{key}` is {what}, and must be equal in all, but {problem}. Parameters that differ on each rank or group of "
        "ranks (experts) can be combined only under different names: build the model so that each expert has its own "
        "(`experts.3`), or keep the local state dicts."
    )


def _check_shards(key: str, shards: Sequence[Shard]) -> None:
    """Check that ``shards``, in this order, hold a parameter cut over as many ranks."""
    layout = FlatLayout(shards[0].params[key].numels, len(shards))
    numels = [shard.values(key).numel() for shard in shards]
    if sum(numels) != layout.numel:
        what = "at least one is missing" if sum(numels) < layout.numel else "there are too many"
        raise CheckpointError(
            f"The shards of all ranks must be given, but the {len(shards)} files from {shards[0].source} to "
            f"{shards[-1].source} hold {sum(numels)} elements of `{key}`, which has {layout.numel}: {what}."
        )
    for rank, shard in enumerate(shards):
        if numels[rank] != layout.filled(rank):
            raise CheckpointError(
                f"Shards must be given in the order of ranks, but {shard.source} is in the place of rank {rank} and "
                f"has {numels[rank]} elements of `{key}`, not {layout.filled(rank)}."
            )
        if shard.weights[key].dtype != shards[0].weights[key].dtype:
            raise CheckpointError(f"`{key}` must have one dtype, but {shard.source} has another.")


def tied(shards: Sequence[Shard], values: Mapping[str, Tensor]) -> dict[str, str]:
    """{other name: first name} of tied weights, from the metadata and from weights that share memory.

    The metadata have only one name of a tied weight that was not flattened; its other name shares the memory.

    Raises:
        CheckpointError: a weight is neither described nor tied to a described one.
    """
    aliases: dict[str, str] = {}
    for shard in shards:
        aliases.update(shard.aliases)
        described = {*shard.params, *values, *aliases}
        singles = [param for param in shard.params.values() if len(param.names) == 1]
        first_name = {_memory(shard.weights[param.key]): param.names[0] for param in singles}
        for name in shard.weights.keys() - described:
            if (first := first_name.get(_memory(shard.weights[name]))) is None:
                raise CheckpointError(f"{shard.source} holds `{name}`, but its metadata do not describe it.")
            aliases[name] = first
    return dict(sorted(aliases.items()))


def _memory(tensor: Tensor) -> tuple[int, int, int]:
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()), tensor.numel()


def _clean(name: str) -> str:
    return _WRAPPER.sub("", name).removeprefix(".")


def _below(prefix: str, name: str) -> str:
    return _clean(f"{prefix}.{name}" if prefix else name)
