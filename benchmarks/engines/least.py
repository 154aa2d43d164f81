"""A floor: the least that a ZeRO-3 engine in Python does, with transfers like fairshard's. Not an engine to train with.

It gathers, frees and reduce-scatters what the wrapper does, and decides nothing: every unit runs once a pass, in the
order of the model, every parameter gets a gradient, all is fp32, and nothing is checked, also not after an exception.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from engines.engine import Engine, Options

BUCKET_NUMEL = 25 * 2**18
"""Elements of a bucket that small units share, 25 MiB of fp32; a unit with a fourth of that has one of its own."""
_GATHER = "all_gather_single" if hasattr(dist.ProcessGroup, "all_gather_single") else "_allgather_base"
_SCATTER = "reduce_scatter_single" if hasattr(dist.ProcessGroup, "reduce_scatter_single") else "_reduce_scatter_base"
_FIRST_TAG = 1 << 16  # of sums; gathers have the numbers of their units


def build(model: nn.Module, units: nn.Module, options: Options) -> Engine:
    if options.bf16 or options.device.type != "cpu":
        raise ValueError("`least` computes in fp32 on the CPU only. Leave it out of --engines.")
    sums = _Sums(_Comm())
    inner = [_Unit(unit, sums, number) for number, unit in enumerate(units.children(), 1)]
    root = _Root(model, sums, inner)
    shards = [unit.shard for unit in (*inner, *([] if root.unit is None else [root.unit]))]
    return Engine(model, options, torch.optim.AdamW(shards, lr=1e-3, fused=True))


class _Unit:
    """The parameters of ``module``, end to end on a line ``[W, S]``, of which this rank keeps a row."""

    before: _Unit | None = None
    after: _Unit | None = None

    def __init__(self, module: nn.Module, sums: _Sums, number: int):
        places = [
            (owner._parameters, name, param)
            for owner in module.modules()
            for name, param in owner._parameters.items()
            if param is not None and param not in sums.leaves
        ]
        numel = sum(param.numel() for _, _, param in places)
        self.width = -(-numel // sums.comm.world_size)
        self.line = torch.zeros(sums.comm.world_size, self.width)
        self.spans = [(0, 0)]
        self.leaves = []
        for params, name, param in places:
            start = self.spans[-1][1]
            self.spans.append((start, start + param.numel()))
            view = self.line.view(-1)[start : start + param.numel()].view(param.shape)
            view.copy_(param.detach())
            params[name] = leaf = nn.Parameter(view.data)  # `.data`: the line is refilled behind autograd's back
            self.leaves.append(leaf)
        del self.spans[0]
        sums.leaves.update(self.leaves)
        self.row = self.line[sums.comm.rank]
        self.shard = nn.Parameter(self.row.clone())
        self.storage, self.nbytes = self.line.untyped_storage(), self.line.nbytes
        self.storage.resize_(0)
        self.sums, self.number = sums, number
        self.works: list[Any] = []
        self.module, self.forward = module, module.forward

    def start(self) -> None:
        """Start gathering."""
        self.storage.resize_(self.nbytes)
        self.row.copy_(self.shard.detach())
        self.works = self.sums.comm.gather(self.line, self.number)

    def wait(self) -> None:
        """Wait until the parameters are whole."""
        for work in self.works:
            work.wait()
        self.works = []

    def free(self) -> None:
        """Free the whole parameters."""
        self.storage.resize_(0)

    def run(self, x: Tensor) -> Tensor:
        """The forward of ``module``."""
        self.wait()
        if self.after is not None:
            self.after.start()
        x = self.forward(x)
        if self.after is not None:  # the last unit is needed again at once
            self.free()
        x.register_hook(self.begin_backward)
        return x

    def begin_backward(self, _grad: Tensor) -> None:
        """Autograd is about to compute with the unit, and has finished with the one after it."""
        if self.after is None:
            Variable._execution_engine.queue_callback(self.sums.end)
        else:
            self.wait()
            self.after.free()
        if self.before is not None:
            self.before.start()
        if self.after is not None:
            self.sums.send(self.after)


class _Root:
    """The whole model: its own parameters stay gathered for the whole pass."""

    def __init__(self, model: nn.Module, sums: _Sums, inner: list[_Unit]):
        for unit, after in itertools.pairwise(inner):
            unit.after, after.before = after, unit
        for unit in inner:
            unit.module.forward = unit.run
        own = _Unit(model, sums, 0)
        self.unit = own if own.leaves else None
        self.first, self.forward = inner[0], model.forward
        model.forward = self.run
        sums.root = self

    def run(self, x: Tensor) -> Any:
        """The forward of the model."""
        if self.unit is not None:
            self.unit.start()
        self.first.start()
        if self.unit is not None:
            self.unit.wait()
        return self.forward(x)


class _Comm:
    """All ranks: rows are exchanged directly on gloo, among few ranks, and otherwise by torch's collectives."""

    def __init__(self) -> None:
        group = dist.group.WORLD
        assert group is not None
        self.group, self.rank, self.world_size = group, group.rank(), group.size()
        self.others = [other for other in range(self.world_size) if other != self.rank]
        self.exchanges = dist.get_backend() == "gloo"

    def gather(self, line: Tensor, tag: int) -> list[Any]:
        """Start filling the rows of ``line`` ``[W, S]``; this rank's own is written already."""
        if not self.exchanges:
            return [getattr(self.group, _GATHER)(line.view(-1), line[self.rank])]
        own = [line[self.rank]]
        works = [self.group.recv([line[other]], other, tag) for other in self.others]
        return works + [self.group.send(own, other, tag) for other in self.others]

    def scatter(self, bucket: Tensor, tag: int) -> tuple[list[Any], list[Tensor]]:
        """Start to sum ``bucket`` ``[W, S]``; returns the works, and the rows to add up."""
        if not self.exchanges:
            reduced = bucket.new_empty(bucket.shape[1])
            return [getattr(self.group, _SCATTER)(reduced, bucket.view(-1))], [reduced]
        rows = [bucket.new_empty(bucket.shape[1]) for _ in self.others]
        works = [self.group.recv([row], other, tag) for row, other in zip(rows, self.others, strict=True)]
        works += [self.group.send([bucket[other]], other, tag) for other in self.others]
        return works, [*rows, bucket[self.rank]]


class _Sums:
    """The gradients on their way."""

    root: _Root

    def __init__(self, comm: _Comm):
        self.comm = comm
        self.leaves: set[nn.Parameter] = set()
        self.bucket: Tensor | None = None
        self.used = 0
        self.members: list[_Unit] = []
        self.under_way: tuple[list[Any], list[Tensor], Tensor, list[_Unit]] | None = None
        self.number = _FIRST_TAG

    def send(self, unit: _Unit) -> None:
        """Hand over the gradients of ``unit``."""
        grads = [leaf.grad for leaf in unit.leaves if leaf.grad is not None]
        for leaf in unit.leaves:
            leaf.grad = None
        world_size = self.comm.world_size
        if unit.width * world_size * 4 >= BUCKET_NUMEL:
            bucket = torch.empty(world_size, unit.width)
            line = bucket.view(-1)
            torch._foreach_copy_([line[a:b].view(g.shape) for (a, b), g in zip(unit.spans, grads, strict=True)], grads)
            line[unit.spans[-1][1] :].zero_()
            self._reduce(bucket, [unit])
            return
        if self.bucket is None or self.used + unit.width > self.bucket.shape[1]:
            self.flush()
            self.bucket = torch.empty(world_size, BUCKET_NUMEL // world_size)
        line = torch.cat([grad.view(-1) for grad in grads])
        if line.numel() < unit.width * world_size:
            line = torch.nn.functional.pad(line, (0, unit.width * world_size - line.numel()))
        self.bucket[:, self.used : self.used + unit.width].copy_(line.view(world_size, unit.width))
        self.used += unit.width
        self.members.append(unit)

    def flush(self) -> None:
        """Reduce what has been handed over."""
        if self.bucket is not None:
            self._reduce(self.bucket[:, : self.used].contiguous(), self.members)
        self.bucket, self.members = None, []
        self.used = 0

    def end(self) -> None:
        """The backward is over."""
        first = self.root.first
        first.free()
        self.send(first)
        if self.root.unit is not None:
            self.root.unit.free()
            self.send(self.root.unit)
        self.flush()
        self._land()

    def _reduce(self, bucket: Tensor, members: list[_Unit]) -> None:
        self._land()
        self.number += 1
        self.under_way = *self.comm.scatter(bucket, self.number), bucket, members

    def _land(self) -> None:
        if self.under_way is not None:
            (works, rows, _, members), self.under_way = self.under_way, None
            for work in works:
                work.wait()
            reduced, *others = rows
            for row in others:
                reduced.add_(row)
            reduced.div_(self.comm.world_size)
            for unit, grad in zip(members, reduced.split([unit.width for unit in members]), strict=True):
                unit.shard.grad = grad
