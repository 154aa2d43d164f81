"""Lines about state dicts and checkpoints."""

import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn

from fairshard.checkpoint import Checkpointer
from fairshard.nn import FSDP, FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from fairshard.nn import FullyShardedDataParallel as Wrapper
from fairshard.utils.device import accelerator_rng_state
from tests.gpu.check import Missed, on_ranks
from tests.gpu.lines.construction import peak_of, require_at_most
from tests.gpu.training import Way, batches, build, optimizer_of
from tests.kit import rank_device


def stack(dim, num_units):
    """Equal Linears, each a unit, on the device."""
    torch.manual_seed(0)
    units = [Wrapper(nn.Linear(dim, dim, device=rank_device())) for _ in range(num_units)]
    return Wrapper(nn.Sequential(*units))


@on_ranks("gather-scatter", 2, timeout=120.0)
def gather_scatter(is_small):
    """Rank-0 state dicts, whose rows go by gather and scatter of the backend, load back bit for bit."""
    model = stack(64, 1)
    config = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, config, FullOptimStateDictConfig(rank0_only=True))
    before = [shard.detach().clone() for shard in model.parameters()]
    state = model.state_dict()
    with torch.no_grad():
        for shard in model.parameters():
            shard.zero_()
    model.load_state_dict(state if dist.get_rank() == 0 else {})
    if not all(torch.equal(shard, old) for shard, old in zip(model.parameters(), before, strict=True)):
        raise Missed("shards differ after a save to rank 0 and a load from it", {})
    return {"tensors on rank 0": len(state)}


@on_ranks("offload-to-cpu")
def offload_to_cpu(is_small):
    """With ``offload_to_cpu`` a state dict is in host memory; the peak on the device is one unit."""
    dim, num_units = (64, 6) if is_small else (4096, 8)
    model = stack(dim, num_units)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True)):
        state, nbytes = peak_of(model.state_dict)
    kinds = {value.device.type for value in state.values()}
    if kinds != {"cpu"}:
        raise Missed(f"values are on {kinds}", {})
    return require_at_most(nbytes, 2 * 4 * dim * (dim + 1), "peak of a state dict")


@on_ranks("background-save")
def background_save(is_small):
    """A background save stalls for the copy to pinned memory; later steps do not change what it saves."""
    dim, num_units = (64, 4) if is_small else (4096, 8)
    model = stack(dim, num_units)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.ones(1, dim, device=rank_device())
    module = torch.get_device_module(rank_device().type)

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    saved = [shard.detach().clone() for shard in model.parameters()]
    nbytes = sum(shard.nbytes for shard in saved) * 2  # weights and momentum
    stalls = []
    with tempfile.TemporaryDirectory() as folder:
        with Checkpointer(folder, keep_last=1) as checkpointer:
            for number in (1, 2):  # the second reuses the memory of the first
                module.synchronize()
                begin = time.perf_counter()
                checkpointer.save(number, model, optimizer)
                stalls.append(time.perf_counter() - begin)
                if number == 2:
                    step()
                checkpointer.wait()
            checkpointer.load_latest(model, optimizer)
    if not all(torch.equal(shard, old) for shard, old in zip(model.parameters(), saved, strict=True)):
        raise Missed("a step after the save has changed what was saved", {})
    return {
        "first stall ms": round(1e3 * stalls[0], 1),
        "next stall ms": round(1e3 * stalls[1], 1),
        "copied, bytes": nbytes,
    }


@on_ranks("rng-resume")
def rng_resume(is_small):
    """After a resume the device's random numbers continue as if nothing had happened."""
    way = Way()
    model = build(way)
    optimizer = optimizer_of(way, model)
    model(batches(1)[0]).square().mean().backward()
    optimizer.step()
    with tempfile.TemporaryDirectory() as folder, Checkpointer(folder) as checkpointer:
        checkpointer.save(1, model, optimizer)
        checkpointer.wait()
        state = accelerator_rng_state()
        expected = torch.rand(16, device=rank_device())
        torch.rand(1000, device=rank_device())
        checkpointer.load_latest(model, optimizer)
        found = torch.rand(16, device=rank_device())
    if not torch.equal(expected, found):
        raise Missed("random numbers after a resume are others", {})
    return {"state, bytes": state.nbytes}
