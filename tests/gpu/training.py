"""Short trainings whose bits can be compared: one run on time, one with a late stream."""

import contextlib
import hashlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from fairshard.nn import CPUOffloadPolicy, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.optim import CPUOptimizer
from tests.gpu.delays import SIMULATED, late
from tests.kit import rank_device
from tests.models import Block

DIM, HIDDEN = 32, 96
PLACEMENTS = {
    "device": {},
    "offload": {"cpu_offload": True},
    "master": {"move_grads_to_cpu": True},
    "held": {"cpu_offload": True, "move_grads_to_cpu": False},
}


@dataclass(frozen=True)
class Way:
    """How a training shards, computes and steps."""

    door: str = "wrapper"  # or orig, fully_shard
    low: torch.dtype | None = None
    placement: str = "device"
    optimizer: str = "sgd"  # or cpu, overlap: `CPUOptimizer` after or during the backward
    strategy: str = "FULL_SHARD"
    bucket_cap_mb: float = 0.02  # a bucket for each block
    unshards: bool = False  # each step begins with `FSDPModule.unshard`
    gives_event: bool = False  # each step ends with `set_post_optim_event`
    writes: bool = False  # each step ends with a forward without gradients, and a write to the shards


class Net(nn.Module):
    """Blocks between two Linears: no operator whose sums depend on timing."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block(DIM, HIDDEN) for _ in range(4))
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def build(way):
    """The sharded net of ``way``, the same on every rank."""
    torch.manual_seed(0)
    net = Net().to(rank_device())
    if way.door == "fully_shard":
        options = {"mp_policy": MixedPrecisionPolicy(param_dtype=way.low), "bucket_cap_mb": way.bucket_cap_mb}
        if way.placement == "offload":
            options["offload_policy"] = CPUOffloadPolicy()
        for block in net.blocks:
            fully_shard(block, **options)
        return fully_shard(net, **options)
    options = {"bucket_cap_mb": way.bucket_cap_mb, "sharding_strategy": ShardingStrategy[way.strategy]}
    options |= {"mixed_precision": True, "compute_dtype": way.low} if way.low else {}
    options |= {"use_orig_params": True} if way.door == "orig" else {}
    options |= PLACEMENTS[way.placement]
    for index, block in enumerate(net.blocks):
        net.blocks[index] = FSDP(block, **options)
    return FSDP(net, **options)


def batches(number):
    """This rank's inputs, on its device before the first step: copying them later would wait for the device."""
    generator = torch.Generator("cpu").manual_seed(100 + dist.get_rank())
    drawn = [torch.randn(16, DIM, generator=generator, device="cpu") for _ in range(number)]
    return [each.to(rank_device()) for each in drawn]


def optimizer_of(way, model):
    """SGD with momentum, by torch or by `CPUOptimizer`."""
    settings = {"lr": 0.1, "momentum": 0.9, "foreach": False}
    if way.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), **settings)
    return CPUOptimizer(model, torch.optim.SGD, overlap=way.optimizer == "overlap", num_threads=1, **settings)


def train(way, num_steps=4):
    """This rank's parts of the weights after some steps, and the losses; nothing here waits for the device."""
    model = build(way)
    optimizer = optimizer_of(way, model)
    inputs = batches(num_steps)
    losses = []
    for each in inputs:
        if way.unshards:
            model.unshard()
        loss = model(each).square().mean()
        with optimizer.last_backward() if way.optimizer == "overlap" else contextlib.nullcontext():
            loss.backward()
        optimizer.step()
        if way.gives_event:
            model.set_post_optim_event(torch.accelerator.current_stream().record_event())
        optimizer.zero_grad()
        losses.append(loss.detach())
        if way.writes:
            with torch.no_grad():
                losses.append(model(each).square().mean())
                for param in model.parameters():
                    param.mul_(0.5)
    return [own_part(param).detach() for param in model.parameters()] + losses


def own_part(tensor):
    """The elements of ``tensor`` on this rank."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def digest(tensors):
    """A text that is equal if all bits of ``tensors`` are."""
    line = hashlib.sha256()
    for tensor in tensors:
        line.update(tensor.detach().cpu().float().contiguous().numpy().tobytes())
    return line.hexdigest()[:16]


def check_when_late(role, *ways):
    """Each of ``ways`` gives the same bits when work on the stream of ``role`` is late."""
    for way in ways:
        expected = digest(train(way))
        with late(role):
            assert digest(train(way)) == expected, f"a late {role} stream changes the weights of {way}"


def is_small():
    """Whether sizes are small because times and memory are simulated."""
    return rank_device().type == SIMULATED


def peak_of(function):
    """``(result, bytes)``: the most bytes that ``function`` held on the device beyond those held before."""
    module = torch.get_device_module(rank_device().type)
    module.synchronize()
    before = module.memory_allocated()
    module.reset_peak_memory_stats()
    result = function()
    module.synchronize()
    return result, module.max_memory_allocated() - before
