"""Messages between the ranks of a group outside of training: objects, numbers, rows for rank 0."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fairshard.utils.collectives import GATHER
from fairshard.utils.failures import explained
from fairshard.utils.groups import default_group, gloo_twin


@explained
def broadcast_object(value: Any, group: ProcessGroup) -> Any:
    """``value`` of rank 0, pickled. **Collective.**"""
    if group.size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


@explained
def broadcast(tensor: Tensor, source: int, group: ProcessGroup) -> None:
    """Fill ``tensor``, which is contiguous, with that of rank ``source``. **Collective.**"""
    if group.size() > 1 and tensor.numel():
        dist.broadcast(tensor, group=group, group_src=source)


@explained
def scatter_rows(row: Tensor, line: Tensor | None, group: ProcessGroup) -> None:
    """Fill ``row`` with this rank's row of ``line`` ``[world_size, *row.shape]`` on rank 0. **Collective.**"""
    if group.size() == 1:
        assert line is not None
        row.copy_(line[0])
    elif row.numel():
        dist.scatter(row, None if line is None else list(line), group=group, group_src=0)


def send_to_first(runs: list[Tensor], group: ProcessGroup) -> None:
    """Send ``runs`` to rank 0, which calls `receive_on_first`."""
    _exchange([dist.P2POp(dist.isend, run, None, group, tag, 0) for tag, run in enumerate(runs)])


def receive_on_first(runs: list[Tensor], targets: list[list[Tensor]], group: ProcessGroup) -> None:
    """Fill ``targets``, by rank, with the other ranks' runs and this rank's own, without extra memory."""
    for target, run in zip(targets[0], runs, strict=True):
        target.copy_(run)
    _exchange(
        [
            dist.P2POp(dist.irecv, target, None, group, tag, rank)
            for rank in range(1, group.size())
            for tag, target in enumerate(targets[rank])
        ]
    )


@explained
def _exchange(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()


@explained
@torch.no_grad()
def broadcast_tensors(tensors: Sequence[Tensor], device: torch.device, cap_nbytes: int, group: ProcessGroup) -> None:
    """Broadcast rank 0's ``tensors``, which have equal shapes and dtypes on all ranks. **Collective.**

    They may be on any device, and are sent as bytes through one bucket of at most ``cap_nbytes`` on ``device``.
    """
    values = [tensor for tensor in tensors if tensor.numel()]
    lines = [value.detach().contiguous() for value in values]
    nbytes = sum(line.nbytes for line in lines)
    if group.size() == 1 or not nbytes:
        return
    bucket = torch.empty(min(cap_nbytes, nbytes), dtype=torch.uint8, device=device)
    for start in range(0, nbytes, cap_nbytes):
        part = bucket[: nbytes - start]
        pairs = _pairs(part, lines, start)
        if group.rank() == 0:
            for slot, run in pairs:
                slot.copy_(run)
        dist.broadcast(part, group=group, group_src=0)
        if group.rank() != 0:
            for slot, run in pairs:
                run.copy_(slot)
    for value, line in zip(values, lines, strict=True):
        if group.rank() == 0 or value.is_contiguous():
            continue
        if 0 in value.stride():  # expanded: it has fewer stored elements than numel
            value.data = line
        else:
            value.copy_(line)


@explained
def exchange_parts(line: Tensor, to: Sequence[int], of: Sequence[int], group: ProcessGroup) -> tuple[Tensor, Any]:
    """Send consecutive parts of ``line``, of ``to[r]`` elements to rank ``r``. **Collective.**

    Returns new memory for the parts received, of ``of[r]`` elements from rank ``r``, and the work to wait for,
    until which the caller keeps ``line``. All ranks must know all sizes. Elements are sent as bytes.
    """
    received, width = line.new_empty(sum(of)), line.element_size()
    target, source = received.view(torch.uint8), line.view(torch.uint8)
    num_in, num_out = ([width * numel for numel in each] for each in (of, to))
    return received, dist.all_to_all_single(target, source, num_in, num_out, group, async_op=True)


class Poll:
    """Asks all ranks a question of one bit in the background, over a group of its own. **Collective** to create.

    Ranks call `ask` and `answer` in turn.
    """

    def __init__(self) -> None:
        self._group = gloo_twin(default_group())
        self._bit = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self._work: Any = None

    @property
    def is_asked(self) -> bool:
        """Whether `answer` comes next."""
        return self._work is not None

    def ask(self, is_true: bool) -> None:
        """Send this rank's answer, without waiting. **Collective.**"""
        self._bit.fill_(is_true)
        self._work = dist.all_reduce(self._bit, dist.ReduceOp.MAX, self._group, async_op=True)

    @explained
    def answer(self) -> bool:
        """Whether it is true on any rank, once all ranks have sent theirs. **Collective.**"""
        work, self._work = self._work, None
        work.wait()
        return bool(self._bit.item())


@explained
def gather_scalars(
    values: Sequence[float], group: ProcessGroup | None = None, device: torch.device | None = None
) -> list[list[float]]:
    """``values`` of every rank, by rank, in fp64. **Collective**; not counted, meant for logs."""
    group = group or default_group()
    own = torch.tensor(list(values), dtype=torch.float64, device=device)
    every = own.new_empty(dist.get_world_size(group) * own.numel())
    getattr(group, GATHER)(every, own).wait()
    return every.view(-1, max(own.numel(), 1)).tolist()


def _pairs(bucket: Tensor, lines: list[Tensor], start: int) -> list[tuple[Tensor, Tensor]]:
    """Pairs of a run of ``bucket`` and its bytes in ``lines``, laid end to end and counted from byte ``start``."""
    pairs = []
    offset = -start  # of a line, from the bucket's start
    for line in lines:
        first, last = max(offset, 0), min(offset + line.nbytes, len(bucket))
        if first < last:
            pairs.append((bucket[first:last], line.view(-1).view(torch.uint8)[first - offset : last - offset]))
        offset += line.nbytes
    return pairs
