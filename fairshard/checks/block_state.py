"""Optimizers that quantise their state in blocks, torchao's 8-bit, 4-bit and fp8 Adams, over shards.

Each rank quantises the tensors that it has. The bits are those of one process if every block of a part is a block of
the whole parameter; otherwise a warning names the parameter, and the placement that keeps its blocks whole.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from math import gcd, prod
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fairshard.utils.layout import Piece
from fairshard.utils.ragged_tensor import RaggedTensor, ragged_like
from fairshard.utils.span import Span
from fairshard.utils.user_line import level_of_user
from fairshard.views.orig_param import OrigParam
from fairshard.views.rows import is_ordered

_LEAST = 4096  # torchao keeps the state of smaller tensors in the dtype of the parameter
_NEW_BUFFER = "_new_buffer"
_NUM_NAMED = 3
_adapted: set[type] = set()


def check_blocks(optimizer: Optimizer, stepped: Iterable[Any]) -> None:
    """Warn if ``optimizer`` quantises parts of the parameters ``stepped`` otherwise than the whole ones.

    ``stepped`` are flat params or `OrigParam` objects. Also makes the optimizer create state for tensors placed by
    blocks. Does nothing for optimizers other than torchao's.
    """
    numel = block_numel_of(optimizer)
    if not numel:
        return
    _adapt(type(optimizer))
    found = [each for one in stepped if one.shard.requires_grad for each in _differences(one, numel)]
    if found:
        more = f", and {len(found) - _NUM_NAMED} more" if len(found) > _NUM_NAMED else ""
        warnings.warn(
            f"{type(optimizer).__name__} quantises its state in blocks of {numel} elements, if a tensor has at least "
            f"{_LEAST} and whole blocks. Weights will not be those of one process, because ranks have other blocks "
            f"than the whole parameter: {'; '.join(found[:_NUM_NAMED])}{more}. Place them by fairshard.nn.RowBlocks "
            "with these rows: `shard_placement_fn=` of fully_shard, or `placement_fn=` of the wrapper with "
            "`use_orig_params=True`.",
            stacklevel=level_of_user(),
        )


def block_numel_of(optimizer: Optimizer) -> int:
    """Number of elements that ``optimizer`` quantises together; 0 for optimizers other than torchao's."""
    size = getattr(optimizer, "block_size", None)
    is_known = any(base.__module__.startswith("torchao.") for base in type(optimizer).__mro__)
    return size if is_known and isinstance(size, int) else 0  # infinity: no quantisation


def rows_for_blocks(shape: Sequence[int], block_numel: int) -> int:
    """The fewest rows of a parameter of ``shape`` such that blocks of them are quantised as in the whole parameter.

    Blocks of that many rows have whole blocks of ``block_numel`` elements and are not too small, the last one too. All
    rows, if there is no smaller number: then one rank has the whole parameter.
    """
    num_rows, row_numel = shape[0], prod(shape[1:])
    if not _is_quantised(num_rows * row_numel, block_numel):
        return num_rows
    step = block_numel // gcd(row_numel, block_numel)
    first = -(-_LEAST // (step * row_numel)) * step
    for rows in range(first, num_rows, step):
        rest = num_rows % rows * row_numel
        if not rest or rest >= _LEAST:
            return rows
    return num_rows


def _is_quantised(numel: int, block_numel: int) -> bool:
    return numel >= _LEAST and numel % block_numel == 0


def _differences(stepped: Any, block_numel: int) -> list[str]:
    """For each parameter that is quantised otherwise: name, reason and cure."""
    found = []
    for index, slot in enumerate(stepped.slots):
        pieces = [piece for piece in stepped.line.layout.pieces if piece.index == index and piece.source.numel]
        reason = next(filter(None, (_difference(stepped, slot.shape, piece, block_numel) for piece in pieces)), "")
        if reason:
            rows = rows_for_blocks(slot.shape, block_numel)
            found.append(f"`{slot.fqn}` {tuple(slot.shape)}, {reason} (RowBlocks(rows={rows}))")
    return found


def _difference(stepped: Any, shape: Sequence[int], piece: Piece, block_numel: int) -> str:
    """Why the blocks of a rank's ``piece`` of a parameter of ``shape`` are not those of the whole one; empty if so."""
    numel, own = prod(shape), piece.source
    is_flat = not isinstance(stepped, OrigParam)
    tensor_numel = stepped.shard_numel if is_flat else own.numel
    where = f"of which rank {piece.row} has {own.numel} elements from {own.start} on"
    if is_flat:
        where += f", at {piece.target.start} of a flat shard of {tensor_numel}"
    whole, part = _is_quantised(numel, block_numel), _is_quantised(tensor_numel, block_numel)
    if whole != part:
        return f"{where}: {'' if part else 'not '}quantised, but {'' if whole else 'not '}as a whole"
    if whole and any(at % block_numel for at in _cuts(stepped, shape, own, piece.target)):
        return f"{where}: blocks are cut"
    return ""


def _cuts(stepped: Any, shape: Sequence[int], own: Span, target: Span) -> tuple[int, ...]:
    """Positions between which a rank has consecutive elements of a parameter of ``shape``."""
    is_single = isinstance(stepped, OrigParam)
    place, line = (stepped.index, stepped.line.whole) if is_single else (0, stepped.line)
    if is_ordered(line, place):
        return own.start, own.stop, target.start
    dim = stepped.shows.dims[place]
    return (own.numel // prod(shape[:dim]),)


def _adapt(optimizer_class: type) -> None:
    """Make torchao's optimizers create state that is placed like the parameter, if that is placed by blocks.

    They would wrap it in a plain DTensor, for which torch's operators assume even chunks.
    """
    for base in optimizer_class.__mro__:
        if _NEW_BUFFER in vars(base) and base not in _adapted:
            _adapted.add(base)
            setattr(base, _NEW_BUFFER, _placed(vars(base)[_NEW_BUFFER]))


def _placed(new_buffer: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(new_buffer)
    def create(optimizer: Optimizer, param: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(param, RaggedTensor):
            return new_buffer(optimizer, param, *args, **kwargs)
        return ragged_like(new_buffer(optimizer, param.to_local(), *args, **kwargs), param)

    return create
