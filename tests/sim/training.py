"""Training on the simulated accelerator, in the way that a cell says.

No loop here waits for the device by accident: batches are on the device before the first step, and losses are read
after the last.
"""

import contextlib
import copy
import functools
import hashlib
import math
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fairshard.checkpoint import Checkpointer
from fairshard.nn import (
    AllGather,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    Owned,
    ReduceScatter,
    RowBlocks,
    ShardingStrategy,
    fully_shard,
)
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn.comm_hooks import DefaultState, allreduce_hook, reduce_scatter_hook
from fairshard.nn.data_parallel import FullStateDictConfig, StateDictType
from fairshard.optim import CPUOptimizer, Muon, ShardedGradScaler
from fairshard.params import shard_grad
from fairshard.utils.messages import gather_scalars
from fairshard.utils.reduce_scatter_bucketer import ReduceScatterBucketer
from tests import subclass_weights
from tests.doors.fully_shard import parallel
from tests.kit import rank_device
from tests.models import Block

DIM, NUM_STEPS = 6, 3
SMALL_MB = 300 / 2**20  # less than one block
MEDIUM_MB = 1400 / 2**20  # two blocks, of 672 bytes each on two ranks


class Net(nn.Module):
    """Residual blocks between two Linears; ``checkpoints`` recomputes the blocks in the backward.

    If it ``writes``, it writes to each block just before it calls it.
    """

    writes = False

    def __init__(self, checkpoints=False, num_blocks=3):
        super().__init__()
        self.checkpoints = checkpoints
        self.first = nn.Linear(4, DIM)
        self.blocks = nn.ModuleList(Block(DIM) for _ in range(num_blocks))
        self.last = nn.Linear(DIM, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            if self.writes:
                with torch.no_grad():
                    for param in block.parameters():
                        _own(param).mul_(0.99)
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.last(x)


class OwnGather(AllGather):
    """torch's all-gather."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=True)


class OwnReduce(ReduceScatter):
    """torch's reduce-scatter."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group=group, async_op=True)


def build(cell):
    """The sharded net of ``cell`` on this rank's device, the same on every rank."""
    torch.manual_seed(0)
    if "tensor_parallel" in cell.ways:
        mesh = init_device_mesh(rank_device().type, (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
        net = parallel.parallelized(mesh, device=rank_device())
        return parallel.sharded(fully_shard, net, mesh["dp"])
    num_blocks = 4 if "medium_buckets" in cell.ways else 3
    net = Net("checkpoints" in cell.ways, num_blocks).to(rank_device())
    net.writes = "writes_in_forward" in cell.ways
    if "subclass" in cell.ways:
        blocks = [subclass_weights.Block(DIM, DIM, seed, kinds=(subclass_weights.Half,)) for seed in range(3)]
        net.blocks = nn.ModuleList(blocks).to(rank_device())
    if "mixed_dtypes" in cell.ways:
        for block in net.blocks:
            block.norm.requires_grad_(False)
    return _fully_sharded(net, cell) if cell.door == "fully_shard" else _wrapped(net, cell)


WAYS = {
    "small_buckets": {"bucket_cap_mb": SMALL_MB},
    "medium_buckets": {"bucket_cap_mb": MEDIUM_MB},
    "no_shard": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "keeps_gathered": {"reshard_after_forward": False},
    "writes_in_forward": {"forward_prefetch": False},
    "nan_check": {"nan_check": True},
}
"""The arguments of a way that needs nothing else."""
PLACEMENTS = {
    "device": {},
    "offload": {"cpu_offload": True},
    "master": {"move_grads_to_cpu": True},
    "held": {"cpu_offload": True, "move_grads_to_cpu": False},
}


def _options(cell):
    options = {name: value for way in cell.ways & WAYS.keys() for name, value in WAYS[way].items()}
    return options | ({"reshard_after_forward": max(dist.get_world_size() // 2, 1)} if "few" in cell.ways else {})


def _wrapped(net, cell):
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(cell.precision)
    options = _options(cell) | PLACEMENTS[cell.placement]
    options |= {"mixed_precision": True, "compute_dtype": low} if low else {}
    options |= {"device_id": torch.accelerator.current_device_index()} if rank_device().type != "cpu" else {}
    options |= {"use_orig_params": True} if cell.door == "orig" else {}
    options |= {"placement_fn": lambda _param: Owned()} if "owned" in cell.ways else {}
    if "hybrid" in cell.ways:
        options |= {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh_of(cell)}
    for index, block in enumerate(net.blocks):
        net.blocks[index] = FSDP(block, **options)
    model = FSDP(net, ignored_modules=[net.last] if "ignored" in cell.ways else None, **options)
    if "hook" in cell.ways:
        model.register_comm_hook(_HookState(), allreduce_hook if "no_shard" in cell.ways else _reduce)
    return model


def _fully_sharded(net, cell):
    options = {"mesh": mesh_of(cell), **_options(cell)}
    if cell.precision == "bf16":
        reduce = torch.float32 if "mixed_dtypes" in cell.ways else None
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    if cell.placement == "offload":
        options["offload_policy"] = CPUOffloadPolicy()
    if "blocks" in cell.ways:
        options["shard_placement_fn"] = lambda _param: RowBlocks(1)
    if "owned" in cell.ways:
        options["shard_placement_fn"] = lambda _param: Owned()
    for block in net.blocks:
        fully_shard(block, **options)
    model = fully_shard(net, **options)
    units = [*net.blocks, model]
    for unit in units:
        if "own_comms" in cell.ways:
            unit.set_custom_all_gather(OwnGather())
            unit.set_custom_reduce_scatter(OwnReduce())
        if "reduce_hook" in cell.ways:
            _set_hook(cell, unit, _halve)
    if "reduce_group" in cell.ways:
        model.set_separate_reduce_scatter_group()
    return model


def _halve(mean):
    mean.mul_(0.5)


class _HookState(DefaultState):
    """State of `_reduce`, which raises an error while ``raises``."""

    raises = False


def _reduce(state, grad, output):
    reduce_scatter_hook(state, grad, output)
    if state.raises:
        raise InterruptedError


def mesh_of(cell):
    """The mesh of all ranks; with replicas two rows, or one row on one rank."""
    size = dist.get_world_size()
    shape = (min(size, 2), max(size // 2, 1)) if "hybrid" in cell.ways else (size,)
    return init_device_mesh(rank_device().type, shape)


def optimizer_of(cell, model):
    """The optimizer of ``cell``; steps on the host are SGD's, whose bits do not depend on where tensors lie."""
    settings = {"lr": 0.1, "momentum": 0.9, "foreach": False}
    if cell.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), **settings)
    if cell.optimizer == "muon":
        return Muon(model.parameters(), ns_steps=1)
    extra = {
        "cpu": {},
        "clip": {"clip_grad_norm": 0.5},
        "overlap": {"overlap": True},
    }[cell.optimizer]
    return CPUOptimizer(model, torch.optim.SGD, num_threads=1, **extra, **settings)


def batches(cell, num_batches):
    """``(inputs, targets)`` of this rank, on its device."""
    generator = torch.Generator("cpu").manual_seed(100 + dist.get_rank())
    if "tensor_parallel" in cell.ways:
        tokens = [torch.arange(8, device="cpu").view(2, 4).add(turn) % parallel.VOCAB for turn in range(num_batches)]
        drawn = [[each, torch.full((2, 4, parallel.VOCAB), 0.5, device="cpu")] for each in tokens]
    else:
        sizes = [(5, 4), (5, 3)] * num_batches
        numbers = [torch.randn(size, generator=generator, device="cpu") for size in sizes]
        drawn = list(zip(numbers[::2], numbers[1::2], strict=True))
    return [[tensor.to(rank_device()) for tensor in pair] for pair in drawn]


def train(cell, folder=None):
    """Train ``NUM_STEPS`` steps in the way of ``cell``; returns this rank's parts of the weights, and the losses."""
    model = build(cell)
    optimizer = optimizer_of(cell, model)
    scaler_class = torch.amp.GradScaler if "torch_scaler" in cell.ways else ShardedGradScaler
    scaler = scaler_class(rank_device().type, init_scale=1024.0, enabled=bool({"scaler", "torch_scaler"} & cell.ways))
    data = batches(cell, 2 * NUM_STEPS)
    results, kept = [], contextlib.ExitStack()
    stream = torch.Stream(rank_device()) if "own_stream" in cell.ways else torch.accelerator.current_stream()
    stream.wait_stream(torch.accelerator.current_stream())
    with stream, torch.no_grad():
        model(data[0][0])  # what is built at the first pass waits for the device; the steps must not
    with kept:
        if "few_kept" in cell.ways:
            kept.enter_context(mock.patch.object(shard_grad, "MAX_KEPT_NBYTES", 0))
        checkpointer = kept.enter_context(Checkpointer(folder)) if "save" in cell.ways else None
        if "join" in cell.ways:
            kept.enter_context(model.join())
            data = data[: len(data) - 2 * dist.get_rank()]
        for step in range(len(data) // 2):
            with stream:
                results += _step(cell, model, optimizer, scaler, data[2 * step : 2 * step + 2])
            if checkpointer is not None:
                checkpointer.save(step + 1, model, optimizer)
        torch.accelerator.current_stream().wait_stream(stream)
    if "save" in cell.ways:
        Checkpointer(folder).load_step(1, model, optimizer)  # written while training went on
    if "state" in cell.ways:
        state = model.state_dict()
        results += [_own(value).clone() for value in state.values()]
        model.load_state_dict({name: value * 2 for name, value in state.items()})
        results.append(model(data[0][0]))
    if "state_rank0" in cell.ways:
        config = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            results += [value.clone() for value in model.state_dict().values()]
    if "whole" in cell.ways:
        results += [param.detach().full_tensor() for param in model.parameters()]
        same = [torch.equal(param, param.detach().clone()) for param in model.parameters()]
        results.append(torch.tensor(same, device="cpu"))
    if "scalars" in cell.ways:
        total = sum(param.detach().sum() for param in model.parameters())
        results.append(torch.tensor(gather_scalars([total, 1.0], device=rank_device()), device="cpu"))
    if "summon" in cell.ways:
        with FSDP.summon_full_params(model):
            results += [param.detach().clone() for param in model.parameters()]
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.5)
        results.append(model(data[0][0]))
    return [_own(param).detach() for param in model.parameters()] + [_own(result).detach() for result in results]


def _step(cell, model, optimizer, scaler, pairs):
    ways, results = cell.ways, []
    if "accumulate" in ways:
        results.append(_backward(model, scaler, pairs[1]))
    if "no_sync" in ways:
        with model.no_sync():
            results.append(_backward(model, scaler, pairs[1]))
    if "replicas_later" in ways:
        model.set_requires_all_reduce(False)
        results.append(_backward(model, scaler, pairs[1]))
        model.set_requires_all_reduce(True)
    if "explicit" in ways:
        model.unshard()
        results += [_own(param).square().sum() for param in model.first.parameters()]
        shards = [_own(param) for block in model.blocks for param in block.parameters()]
        for block in model.blocks:
            block.unshard(async_op=True)
        if "changed" in ways:  # so that the forward gathers again
            model._fairshard_unit.shared.unshard_stream.record().wait()  # own shards are read; the gather goes on
            with torch.no_grad():
                for shard in shards:
                    shard.mul_(0.99)
        if "freed" in ways:
            for block in model.blocks:
                block.reshard()
    if "raises_in_hook" in ways:
        _raise_in_hook(cell, model, pairs[1])
        optimizer.zero_grad()
    if "raises_in_forward" in ways:
        _raise_in_forward(model, pairs[1])
    if "raises" in ways:
        _raise_in_backward(model, pairs[1])
        optimizer.zero_grad()
    if "eval" in ways or "write" in ways:
        model.eval()
        with torch.no_grad():
            results.append(model(pairs[1][0]))
        model.train()
    if "write" in ways:  # to shards, which the forward has just read
        with torch.no_grad():
            for param in model.parameters():
                _own(param).mul_(0.99)
    early = cell.optimizer == "overlap"
    with optimizer.last_backward() if early else contextlib.nullcontext():
        results.append(_backward(model, scaler, pairs[0]))
    if "clip" in ways or "clip_inf" in ways:
        power = 2.0 if "clip" in ways else math.inf
        clip = functools.partial(nn.utils.clip_grad_norm_, model.parameters())
        norm = (model.clip_grad_norm_ if isinstance(model, FSDP) else clip)(0.5, power)
        results.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    if "summon_grads" in ways:
        with FSDP.summon_full_params(model, with_grads=True):
            results += [param.grad.clone() for param in model.parameters() if param.grad is not None]
    if "bucketer" in ways:
        bucketer = ReduceScatterBucketer()
        parts = [torch.full((4,), float(rank)) for rank in range(dist.get_world_size())]
        bucketer.reduce_scatter_async(parts, dist.group.WORLD, results.append)
        bucketer.flush()
    if scaler.is_enabled():
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    if "event" in ways:
        model.set_post_optim_event(torch.accelerator.current_stream().record_event())
    optimizer.zero_grad()
    return results


def _backward(model, scaler, pair):
    inputs, targets = pair
    loss = (model(inputs) - targets).square().mean()
    scaler.scale(loss).backward()
    return loss


class _Raise(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(_context, x):
        return x.clone()

    @staticmethod
    def backward(_context, _grad):
        raise InterruptedError


def _raise_in_backward(model, pair):
    first = (model.module if isinstance(model, FSDP) else model).blocks[0]
    hook = first.register_forward_hook(lambda _module, _args, output: _Raise.apply(output))
    with contextlib.suppress(InterruptedError):
        (model(pair[0]) - pair[1]).square().mean().backward()
    hook.remove()
    with torch.no_grad():
        model(pair[0])  # cleans up, before the gradients are dropped


def _raise_in_forward(model, pair):
    """Raise in the first block, when the second is already being gathered."""

    def raises(_module, _args):
        raise InterruptedError

    handle = model.module.blocks[0].register_forward_pre_hook(raises)
    with contextlib.suppress(InterruptedError):
        model(pair[0])
    handle.remove()


def _raise_in_hook(cell, model, pair):
    """Raise in a hook, behind work that it has queued, and use the memory that this frees."""

    def raises(mean):
        _halve(mean)
        raise InterruptedError

    if cell.door == "fully_shard":
        _set_hook(cell, model.blocks[1], raises)
    with mock.patch.object(_HookState, "raises", True), contextlib.suppress(InterruptedError):
        (model(pair[0]) - pair[1]).square().mean().backward()
    _used = [torch.zeros_like(param) for param in model.parameters() for _ in range(4)]
    if cell.door == "fully_shard":
        _set_hook(cell, model.blocks[1], _halve)


def _set_hook(cell, unit, hook):
    unit.set_all_reduce_hook(hook, stream=torch.Stream(rank_device()) if "hook_stream" in cell.ways else None)


def _own(value):
    """This rank's elements of a DTensor, those inside a tensor subclass included."""
    value = value.to_local() if hasattr(value, "to_local") else value
    return value.whole() if hasattr(value, "whole") else value


def digest(tensors):
    """A short text that is equal if and only if all bits are."""
    line = hashlib.sha256()
    for tensor in tensors:
        line.update(copy.copy(tensor).cpu().float().contiguous().numpy().tobytes())
    return line.hexdigest()[:12]
