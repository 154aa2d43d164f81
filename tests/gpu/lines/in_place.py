"""Lines about ``fully_shard``: copies out of the gathered buffer, blocks of gradients, custom communication."""


import torch
import torch.distributed as dist
from torch import nn

from fairshard.nn import fully_shard
from fairshard.utils.testing import rank_device
from tests.gpu.check import Missed, on_ranks
from tests.gpu.delays import UNSHARD
from tests.gpu.lines.construction import peak_of, require_at_most
from tests.gpu.training import Way, batches, build, digest, median_ms, own_part, same_when_late
from tests.sim.comms import OwnGather, OwnReduce


@on_ranks("copy-out")
def copy_out(is_small):
    """With a late unshard stream weights stay the same; the peak is two lines and one buffer beside the shards."""
    same_when_late(UNSHARD, Way("fully_shard"), Way("fully_shard", torch.bfloat16))
    dim, num_units = (64, 6) if is_small else (4096, 8)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(dim, dim, device=rank_device()) for _ in range(num_units)])
    for unit in model:
        fully_shard(unit)
    fully_shard(model)
    x = torch.ones(1, dim, device=rank_device())

    def forward():
        with torch.no_grad():
            model(x)

    forward()
    _, nbytes = peak_of(forward)
    return require_at_most(nbytes, 3 * 4 * dim * (dim + 1), "peak of a forward")


@on_ranks("block-copy")
def block_copy(is_small):
    """Gradients of 8 ranks' rows to a bucket: one ``_foreach_copy_`` of strided blocks, and torch._chunk_cat, in ms."""
    rows, width, number, ranks = (16, 4, 3, 8) if is_small else (4096, 1024, 16, 8)
    grads = [torch.full((rows, width), float(index), device=rank_device()) for index in range(number)]
    part = rows // ranks * width
    bucket = torch.empty(ranks, number * part, device=rank_device())
    views = [column.view(ranks, rows // ranks, width) for column in bucket.split(part, dim=1)]
    blocks = [grad.view(ranks, rows // ranks, width) for grad in grads]
    theirs = torch.empty_like(bucket)
    ways = {
        "_foreach_copy_ ms": lambda: torch._foreach_copy_(views, blocks),
        "_chunk_cat ms": lambda: torch._chunk_cat(grads, dim=0, num_chunks=ranks, out=theirs),
    }
    figures = {}
    for name, act in ways.items():
        figures[name] = round(median_ms(act), 3)
    if not torch.equal(bucket, theirs):
        raise Missed("the two ways write other bytes", figures)
    return figures


class _CountedGather(OwnGather):
    calls = 0

    def __call__(self, *args, **kwargs):
        _CountedGather.calls += 1
        return super().__call__(*args, **kwargs)


def _trained(prepare):
    """Digest of the weights after three steps of a model on which ``prepare(unit)`` was called for each unit."""
    model = build(Way("fully_shard"))
    for unit in (*model.blocks, model):
        prepare(unit)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for each in batches(3):
        model(each).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return digest(own_part(param) for param in model.parameters())


@on_ranks("custom-comms", 2, alone=True)
def custom_comms(is_small):
    """Custom gathers and reductions, and memory of the group's allocator where it has one, change no bit."""
    plain = _trained(lambda unit: None)
    _CountedGather.calls = 0
    own = _trained(
        lambda unit: (unit.set_custom_all_gather(_CountedGather()), unit.set_custom_reduce_scatter(OwnReduce()))
    )
    if own != plain or (dist.get_world_size() > 1 and not _CountedGather.calls):
        raise Missed(f"weights differ, or none of the {_CountedGather.calls} custom gathers ran", {})
    try:
        grouped = _trained(lambda unit: unit.set_allocate_memory_from_process_group_for_comm(True))
    except ValueError as error:  # NCCL's allocator needs multicast
        return {"custom gathers": _CountedGather.calls, "memory of the group": str(error)}
    if grouped != plain:
        raise Missed("weights differ in memory of the process group", {})
    return {"custom gathers": _CountedGather.calls}
