"""Reassemble parameters from the shards and metadata of fairscale's FullyShardedDataParallel.

`local_metadata_dict` lists every unit with its backing parameters, and for each the original names, shapes and this
rank's padding::

    unit "layers.0"   flat_param_0   names  fc.weight (2, 3)   fc.bias (2,)         8 elements on 3 ranks
        rank 0  | w w w |    the shard ``layers.0.flat_param_0`` of each rank has 3 elements,
        rank 1  | w w w |    of which the last ``padding`` (here 0, 0, 1) belong to no parameter
        rank 2  | b b . |

A unit that every rank holds whole (its process group had one rank) is read once, if all ranks agree.

Source: the format is that of fairscale 0.4.13, `local_metadata_dict`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from fairshard.errors import CheckpointError
from fairshard.state.local import LAYOUT_KEY
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


@dataclass(frozen=True)
class Shard:
    """One rank's weights and metadata; ``source`` is its file, or its index in a list, for messages.

    ``rank`` is known for our own shards if there is more than one rank; None otherwise.
    """

    source: str
    weights: dict[str, Tensor]
    params: tuple[BackingParam, ...]
    buffers: tuple[str, ...]
    aliases: dict[str, str]
    rank: int | None

    @property
    def paddings(self) -> tuple[int, ...]:
        """Padding of each backing parameter; it never shrinks from one rank to the next."""
        return tuple(param.padding for param in self.params)

    def values(self, param: int) -> Tensor:
        """The shard of a backing parameter without its padding; 1-D."""
        values = self.weights[self.params[param].key].reshape(-1)
        return values[: values.numel() - self.params[param].padding]


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
    shards = in_order_of_ranks(
        [
            parse(f"shard_weights[{rank}]", {"shard_weights": weights, "shard_metadata": metadata}, strict)
            for rank, (weights, metadata) in enumerate(zip(shard_weights, shard_metadata, strict=True))
        ]
    )
    values = whole_values(shards, _allocate)
    aliases = tied(shards[0], values)
    return {**values, **{name: values[first] for name, first in aliases.items()}}, shards[0].buffers


def _allocate(like: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.empty_like(value, device="cpu") for name, value in like.items()}


def parse(source: str, found: Mapping[str, Any], strict: bool = True) -> Shard:
    """Parse one rank's weights and metadata; unless ``strict``, weights that the metadata describe may be missing.

    Raises:
        CheckpointError: they are not in fairscale's format.
    """
    try:
        return _parse(source, found["shard_weights"], found["shard_metadata"], strict)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        what = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(
            f'{source} must hold {{"shard_weights": local_state_dict(), "shard_metadata": local_metadata_dict()}} of '
            f"fairscale, but {what}."
        ) from error


def _parse(source: str, weights: Mapping[str, Any], metadata: Mapping[str, Any], strict: bool) -> Shard:
    tensors = {_clean(name): value for name, value in weights.items() if isinstance(value, Tensor)}
    layout = tensors.pop(LAYOUT_KEY, None)  # our own description
    own = {} if layout is None else json.loads(bytes(layout.tolist()))
    params, aliases = [], {}
    for unit in metadata["param_metadata"]:
        prefix = _clean(unit["fsdp_path"])
        found = [_parse_param(prefix, name, param) for name, param in unit["params"].items()]
        params += [param for param in found if strict or param.key in tensors]
    names = {name for param in params for name in param.names}
    for unit in metadata["param_metadata"]:
        prefix = _clean(unit["fsdp_path"])
        for first, other in unit.get("shared_param_info", ()):
            aliases.update(_parse_alias(_below(prefix, first), _below(prefix, other), names, strict))
    for param in params:
        if param.key not in tensors:
            raise ValueError(f"its metadata describe `{param.key}`, which is missing from its weights")
        if not 0 <= param.padding <= tensors[param.key].numel():
            raise ValueError(f"`{param.key}` has {param.padding} elements of padding in {tensors[param.key].numel()}")
    all_names = [name for param in params for name in param.names]
    if len(set(all_names)) != len(all_names):
        raise ValueError("two parameters in it have one name")
    # a non-persistent buffer has a name here but no value
    buffers = tuple(name for name in map(_clean, metadata["buffer_names"]) if name in tensors)
    rank = own["rank"] if own.get("world size", 1) > 1 else None
    return Shard(source, tensors, tuple(params), buffers, aliases, rank)


def _parse_param(prefix: str, name: str, param: Mapping[str, Any]) -> BackingParam:
    names = tuple(_below(prefix, name) for name in param["names"])
    shapes = tuple(tuple(map(int, shape)) for shape in param["shapes"])
    found = BackingParam(_below(prefix, name), names, shapes, int(param["padding"]))
    if len(names) != len(shapes) or found.numels != list(map(int, param["numels"])):
        raise ValueError(f"the names, shapes and sizes of `{found.key}` do not fit together")
    return found


def _parse_alias(first: str, other: str, names: set[str], strict: bool) -> dict[str, str]:
    """{other name of a tied weight: first name}.

    fairscale writes the two names in this order, but with their last words swapped: ``emb.kernel`` and ``head.weight``
    for ``emb.weight`` and ``head.kernel``. The swap matters only if the last words differ.
    """
    first_owner, _, other_word = first.rpartition(".")
    other_owner, _, first_word = other.rpartition(".")
    right = _below(first_owner, first_word)
    if right in names:
        return {_below(other_owner, other_word): right}
    if first not in names and not strict:
        return {}
    if first not in names:
        raise ValueError(f"`{other}` is tied to `{first}`, which is not one of its parameters")
    return {other: first}


def in_order_of_ranks(shards: Sequence[Shard]) -> list[Shard]:
    """The shards sorted by rank, if their ranks or paddings are known and distinct; otherwise in the given order.

    Raises:
        CheckpointError: they are from several models, one is repeated, or numbers in file names contradict the order.
    """
    first = shards[0]
    for shard in shards[1:]:
        if (shard.params, shard.aliases) != (first.params, first.aliases):
            raise CheckpointError(
                f"Shards must be of one model, but {shard.source} describes other parameters than {first.source}."
            )
    if len({os.path.realpath(shard.source) for shard in shards}) < len(shards):
        raise CheckpointError(f"Each shard must be given once, but {_repeated(shards)} is given twice.")
    ranks = [shard.rank for shard in shards if shard.rank is not None]
    if len(ranks) == len(shards):
        if len(set(ranks)) < len(ranks):
            raise CheckpointError(f"Each shard must be given once, but the given shards are of ranks {ranks}.")
        return [shard for _, shard in sorted(zip(ranks, shards, strict=True), key=lambda pair: pair[0])]
    if len({shard.paddings for shard in shards}) == len(shards):
        return sorted(shards, key=lambda shard: shard.paddings)
    for one, other in pairwise(shards):
        if _numbers_fall(one.source, other.source):
            raise CheckpointError(
                f"Shards must be given in the order of ranks, but {one.source} comes before {other.source}. Sort them "
                "by number, as `ls -v` does; if the numbers are not ranks, rename the files."
            )
    return list(shards)


def _numbers_fall(one: str, other: str) -> bool:
    """Whether two paths differ only in one number, which is smaller in ``other``."""
    ones, others = re.split(r"(\d+)", one), re.split(r"(\d+)", other)
    if len(ones) != len(others):
        return False
    differ = [i for i, pair in enumerate(zip(ones, others, strict=True)) if pair[0] != pair[1]]
    return len(differ) == 1 and differ[0] % 2 == 1 and int(ones[differ[0]]) > int(others[differ[0]])


def _repeated(shards: Sequence[Shard]) -> str:
    paths = [os.path.realpath(shard.source) for shard in shards]
    return next(shard.source for shard, path in zip(shards, paths, strict=True) if paths.count(path) > 1)


def whole_values(shards: Sequence[Shard], allocate: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Any:
    """Whole parameters and buffers by name, in memory that ``allocate`` returns for meta tensors of their shapes.

    Raises:
        CheckpointError: the shards are not those of all ranks, in order.
    """
    first = shards[0]
    like = {
        name: torch.empty(shape, dtype=first.weights[param.key].dtype, device="meta")
        for param in first.params
        for name, shape in zip(param.names, param.shapes, strict=True)
    }
    like |= {name: first.weights[name] for name in first.buffers}
    values = allocate(like)
    for index, param in enumerate(first.params):
        targets = [values[name].view(-1) for name in param.names]
        if _is_whole_everywhere(shards, index):
            _check_agree(shards, index)
            for target, source in zip(targets, first.values(index).split(param.numels), strict=True):
                target.copy_(source)
        else:
            layout = FlatLayout(param.numels, len(shards))
            _check_shards(shards, index, layout)
            for piece in layout.pieces:
                source = shards[piece.row].values(index)
                targets[piece.index][slice(*piece.source)] = source[slice(*piece.target)]
    for name in first.buffers:
        values[name].copy_(first.weights[name])
    return values


def _is_whole_everywhere(shards: Sequence[Shard], index: int) -> bool:
    whole = sum(shards[0].params[index].numels)
    return all(shard.values(index).numel() == whole for shard in shards)


def _check_agree(shards: Sequence[Shard], index: int) -> None:
    for shard in shards[1:]:
        if not torch.equal(shard.values(index), shards[0].values(index)):
            raise CheckpointError(
                f"`{shard.params[index].key}` is whole in every shard, and must be equal in all, but {shard.source} "
                f"has other values than {shards[0].source}. Parameters that differ on each rank (experts) cannot be "
                "combined."
            )


def _check_shards(shards: Sequence[Shard], index: int, layout: FlatLayout) -> None:
    """Check that ``shards``, in this order, hold a parameter cut over as many ranks."""
    key = shards[0].params[index].key
    numels = [shard.values(index).numel() for shard in shards]
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


def tied(shard: Shard, values: Mapping[str, Tensor]) -> dict[str, str]:
    """{other name: first name} of tied weights, from the metadata and from weights that share memory.

    The metadata have only one name of a tied weight that was not flattened; its other name shares the memory.

    Raises:
        CheckpointError: a weight is neither described nor tied to a described one.
    """
    aliases = dict(shard.aliases)
    first_name = {_memory(shard.weights[param.key]): param.names[0] for param in shard.params if len(param.names) == 1}
    described = {param.key for param in shard.params} | values.keys() | aliases.keys()
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
