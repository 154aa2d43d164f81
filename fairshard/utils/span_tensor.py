"""A tensor of which this process holds one run of elements; sharded state dicts hold such tensors.

It has the shape of the whole and the memory of the run. ``torch.distributed.checkpoint`` saves and loads it through
the three methods at the end: each rank writes its run as boxes, and reads the saved pieces that overlap them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fairshard.errors import ParameterShardedError
from fairshard.utils.span import Span, overlap, part

if TYPE_CHECKING:  # at run time imported where it is used: it is slow to import, and few programs need it
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

__all__ = ["SpanTensor"]


class SpanTensor(torch.Tensor):
    """The elements ``[start, start + len(run))`` of a flattened tensor of ``shape``.

    ``run`` ``[n]`` is contiguous and may be a view: copies into the span tensor write to it. Operators that need
    elements of other ranks raise `ParameterShardedError`.

    >>> import torch
    >>> half = SpanTensor(torch.zeros(3), 3, (2, 3))  # the second row of two
    >>> _ = half.copy_(torch.arange(6.0).view(2, 3))
    >>> half.run
    tensor([3., 4., 5.])
    """

    run: Tensor
    start: int

    @staticmethod
    def __new__(cls, run: Tensor, start: int, shape: Sequence[int]) -> SpanTensor:
        """Wrap ``run``, without a copy."""
        span: SpanTensor = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=run.dtype, device=run.device
        )
        return span

    def __init__(self, run: Tensor, start: int, shape: Sequence[int]) -> None:
        self.run = run
        self.start = start

    @property
    def span(self) -> Span:
        """The elements of the flattened tensor that this process holds."""
        return Span(self.start, self.start + self.run.numel())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SpanTensor({self.run}, start={self.start}, shape={tuple(self.shape)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return SpanTensor, (self.run.clone(), self.start, tuple(self.shape))

    def __deepcopy__(self, memo: dict[int, Any]) -> SpanTensor:
        return self._with(self.run.clone())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run operators that need no elements of other ranks."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in ("detach", "alias"):  # not through `func`: its result would have its own version counter
            return args[0]._with(args[0].run)
        if name in _ON_VALUES:
            span = args[0]
            return span._with(func(span.run, *args[1:], **kwargs))
        if name == "new_empty" and tuple(args[1]) == tuple(args[0].shape):  # torch's staging of asynchronous saves
            span = args[0]
            return span._with(func(span.run, span.run.shape, **kwargs))
        if name == "copy_":
            return _copy(args[0], args[1])
        raise ParameterShardedError(  # TypeError would become "unsupported operand" in arithmetic
            f"A sharded value can be copied, saved and loaded, but not used in computation (`{name}`): other ranks "
            "hold the rest of it. Use a full state dict or `summon_full_params` for whole values."
        )

    def _with(self, run: Tensor) -> SpanTensor:
        return SpanTensor(run, self.start, tuple(self.shape))

    def _boxes(self) -> list[Box]:
        return boxes_of(self.shape, self.span)

    def _part(self, box: Box) -> Tensor:
        return self.run[box.span.start : box.span.stop].view(box.sizes)

    # ---- torch.distributed.checkpoint

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        """Write items of this rank."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.run)
        return [
            WriteItem(
                index=MetadataIndex(fqn, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=self.shape),
            )
            for box in self._boxes()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Chunks that this rank reads."""
        return [_chunk(box) for box in self._boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The memory of one box."""
        return next(self._part(box) for box in self._boxes() if torch.Size(box.offsets) == index.offset)


torch.serialization.add_safe_globals([SpanTensor])  # allowed by torch.load(weights_only=True)

# Operators that return the run of the result when applied to the run.
_ON_VALUES = {"clone", "_to_copy", "zeros_like", "empty_like", "alias", "zero_", "_pin_memory"}


def _chunk(box: Box) -> ChunkStorageMetadata:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def _copy(target: Any, source: Any) -> Any:
    if not isinstance(target, SpanTensor):
        raise TypeError(
            f"A sharded value of shape {tuple(source.shape)} cannot be copied into a whole tensor: this rank has "
            f"elements {source.span.start} to {source.span.stop} of it. Use a full state dict."
        )
    if source.shape != target.shape:
        raise ValueError(f"Shapes must be equal, but {tuple(source.shape)} would go into {tuple(target.shape)}.")
    if isinstance(source, DTensor):
        source = source.full_tensor()
    if isinstance(source, SpanTensor):
        wanted = target.span.shift(-source.start)
        if wanted.numel and (wanted.start < 0 or wanted.stop > source.run.numel()):
            raise ValueError(
                f"A sharded value must hold the elements that this rank owns, {target.span.start} to "
                f"{target.span.stop}, but holds {source.span.start} to {source.span.stop}: it comes from another "
                "wrapping or world size. Load through torch.distributed.checkpoint or fairshard.checkpoint, which "
                "read the elements needed."
            )
        target.run.copy_(source.run[wanted.start : wanted.stop] if wanted.numel else target.run)
    else:
        target.run.copy_(source.reshape(-1)[target.span.start : target.span.stop])
    return target


@dataclass(frozen=True)
class Box:
    """A contiguous box of a tensor: its offsets, its sizes, and the elements of the run that it holds.

    A flat span is rarely one box, but at most ``2n - 1`` boxes: the end of a row, whole rows, the beginning of a row,
    and so on inward. For shape ``(4, 5)`` and the span ``[3, 17)``::

        . . . a a      a: offsets (0, 3), sizes (1, 2), elements  0..2  of the span
        b b b b b      b: offsets (1, 0), sizes (2, 5), elements  2..12
        b b b b b
        c c . . .      c: offsets (3, 0), sizes (1, 2), elements 12..14
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    span: Span


def boxes_of(shape: Sequence[int], span: Span) -> list[Box]:
    """The boxes that together hold the elements ``span`` of a flattened tensor of ``shape``, in order.

    ``span`` of each box counts from the start of the run. An empty tensor has one empty box, so that it is saved; an
    empty run of a non-empty tensor has no boxes.
    """
    if not prod(shape):
        return [Box((0,) * len(shape), tuple(shape), Span(0, 0))]
    return [Box(box.offsets, box.sizes, box.span.shift(-span.start)) for box in _boxes(tuple(shape), span, 0)]


def _boxes(shape: tuple[int, ...], span: Span, origin: int) -> list[Box]:
    """Like `boxes_of`, for a tensor whose first element is at ``origin`` on the line of the spans."""
    if not span.numel:
        return []
    if not shape:
        return [Box((), (), span)]
    inner = prod(shape[1:])
    first, last = (span.start - origin) // inner, -(-(span.stop - origin) // inner)
    rows = Span(origin + first * inner, origin + last * inner)
    whole = Span(first + (rows.start < span.start), last - (span.stop < rows.stop))
    if whole.numel < 0:  # begins and ends inside one row
        return _row(shape, span, origin, first)
    found = _row(shape, span, origin, first) if whole.start > first else []
    if whole.numel:
        elements = Span(origin + whole.start * inner, origin + whole.stop * inner)
        found.append(Box((whole.start, *(0 for _ in shape[1:])), (whole.numel, *shape[1:]), elements))
    if whole.stop < last:
        found += _row(shape, span, origin, last - 1)
    return found


def _row(shape: tuple[int, ...], span: Span, origin: int, row: int) -> list[Box]:
    elements = part(row, prod(shape[1:])).shift(origin)
    inner = _boxes(shape[1:], overlap(span, elements), elements.start)
    return [Box((row, *box.offsets), (1, *box.sizes), box.span) for box in inner]
