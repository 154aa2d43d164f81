"""Finds parameters that share memory, which sharding would tear apart."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fairshard.params.slot import ParamSlot


def check_memory(slots: Sequence[ParamSlot]) -> None:
    """Check that no trained parameter shares elements with another one, as after ``b.weight.data = a.weight.data``.

    Raises:
        ValueError: two do; the message names them.
    """
    last: ParamSlot | None = None
    stop = 0
    for slot in sorted(filter(_is_dense, slots), key=_start):
        if last is not None and _start(slot) < stop and (last.leaf.requires_grad or slot.leaf.requires_grad):
            raise ValueError(
                f"Parameters must have memory of their own, but `{slot.fqn}` shares that of `{last.fqn}`. Each would "
                "get its own shard, and they would differ after the first step. Tie the modules by one parameter "
                "(`b.weight = a.weight`), or copy it (`nn.Parameter(a.weight.detach().clone())`)."
            )
        if _start(slot) + slot.leaf.nbytes > stop:
            last, stop = slot, _start(slot) + slot.leaf.nbytes


def _start(slot: ParamSlot) -> int:
    return slot.leaf.data_ptr()


def _is_dense(slot: ParamSlot) -> bool:
    """Whether the parameter is plain, has memory, and fills a run of it."""
    leaf: Tensor = slot.leaf
    if type(leaf) is not nn.Parameter or leaf.is_meta or not leaf.numel() or not leaf.untyped_storage().nbytes():
        return False
    return 1 + sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True)) == leaf.numel()
