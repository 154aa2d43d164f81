"""Gathers rows of which ranks have unequal numbers, for use between steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fairshard.errors import RanksDisagreeError
from fairshard.utils.agree import agree
from fairshard.utils.collectives import Communicator
from fairshard.utils.messages import broadcast
from fairshard.utils.span import Span


def gather_rows(local: Tensor, spans: Sequence[Span], shape: torch.Size, comm: Communicator) -> Tensor:
    """A new tensor of ``shape``; rank ``r`` has its rows ``spans[r]``, which are ``local`` on this one. **Collective.**

    If few ranks have rows, each of them broadcasts its own; otherwise all ranks exchange as many as the largest has.

    Raises:
        RanksDisagreeError: on all ranks, if they have other spans or shapes.
    """
    place = (*shape, *(number for span in spans for number in (span.start, span.stop)))
    if not agree(comm, hash(place) & (1 << 62) - 1, local.device):
        raise RanksDisagreeError(
            f"All ranks must place a tensor alike to gather it, but one of {tuple(shape)} has rows "
            f"{spans[comm.rank].start} to {spans[comm.rank].stop} here (rank {comm.rank}), and other ranks count "
            "otherwise. Shard the same model on every rank, with a placement function that depends on the parameter "
            "alone."
        )
    width = shape[1:].numel()
    whole: Tensor = local.new_empty(shape)
    flat = whole.view(-1)
    runs = [flat[span.start * width : span.stop * width] for span in spans]
    runs[comm.rank].copy_(local.reshape(-1))
    holders = [rank for rank, run in enumerate(runs) if run.numel()]
    if 2 * len(holders) <= comm.world_size:
        for rank in holders:
            broadcast(runs[rank], rank, comm.group)
    elif comm.world_size > 1:
        rows = local.new_empty(comm.world_size, max(run.numel() for run in runs))
        rows[comm.rank, : local.numel()] = local.reshape(-1)
        comm.gather_messages(rows).wait()
        torch._foreach_copy_(runs, [row[: run.numel()] for row, run in zip(rows, runs, strict=True)])
    return whole
