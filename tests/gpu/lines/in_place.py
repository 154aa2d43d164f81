"""Lines about ``fully_shard``: copies out of the gathered buffer, blocks of gradients, custom communication."""

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as Theirs
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import MixedPrecision, MixedPrecisionPolicy, fully_shard
from fairshard.views import copied_out, rows
from tests.gpu.check import Missed, on_ranks
from tests.gpu.delays import UNSHARD
from tests.gpu.lines.construction import peak_of, require_at_most
from tests.gpu.training import Way, batches, build, digest, median_ms, own_part, same_when_late
from tests.kit import rank_device
from tests.sim.comms import OwnGather, OwnReduce

BF16 = torch.bfloat16


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


class _Scaled(nn.Module):
    """A scalar before two matrices: both begin at an odd element of a line."""

    def __init__(self, dim):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.up, self.down = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x))) * self.scale


def _scaled_step(engine, dim):
    """The median milliseconds of a forward and a backward of four units, and the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(*[_Scaled(dim) for _ in range(4)])
    if engine == "wrapper":
        for index in range(4):
            model[index] = FSDP(model[index], mixed_precision=MixedPrecision(BF16))
        model = FSDP(model, mixed_precision=MixedPrecision(BF16))
    else:
        shard, policy = (fully_shard, MixedPrecisionPolicy) if engine == "fully_shard" else (torch_fully_shard, Theirs)
        for unit in (*model, model):
            shard(unit, mp_policy=policy(param_dtype=BF16))
    x = torch.randn(dim, dim, device=rank_device()).to(BF16)
    losses = []

    def step():
        losses.append(model(x).float().square().mean())
        losses[-1].backward()
        model.zero_grad()

    step()
    return round(median_ms(step), 2), losses[0].item()


@on_ranks("alignment", 2, alone=True)
def alignment(is_small):
    """16-bit matrices behind a scalar compute as fast as FSDP2's, to 1.1, with its bits; times without copies, too."""
    dim, never = (64 if is_small else 4096), (lambda *_: False)
    figures, least = {}, (1 if is_small else copied_out._LEAST_NUMEL)
    theirs, loss = _scaled_step("fsdp2", dim) if rank_device().type == "cuda" else (None, None)
    for engine in ("wrapper", "fully_shard"):
        with mock.patch.object(copied_out, "is_to_align", never), mock.patch.object(rows, "is_to_align", never):
            figures[f"{engine} as they lie, ms"], _ = _scaled_step(engine, dim)
        with mock.patch.object(copied_out, "_LEAST_NUMEL", least):
            own, found = _scaled_step(engine, dim)
        figures[f"{engine} aligned, ms"] = own
        if theirs is not None and (found != loss or own > 1.1 * theirs):
            raise Missed(f"{engine}: {own} ms and loss {found}, FSDP2: {theirs} ms and loss {loss}", figures)
    return {"FSDP2, ms": theirs, **figures}


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
