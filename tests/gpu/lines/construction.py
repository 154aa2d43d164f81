"""Lines about construction: devices, memory, random numbers."""

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import checkpoint_wrapper
from tests.gpu.check import Missed, on_ranks
from tests.gpu.delays import must_not_wait
from tests.kit import rank_device

HEADROOM = 1.05  # the caching allocator rounds blocks up


def peak_of(function):
    """``(result, bytes)``: the most bytes that ``function`` held on the device beyond those held before."""
    module = torch.get_device_module(rank_device().type)
    module.synchronize()
    before = module.memory_allocated()
    module.reset_peak_memory_stats()
    result = function()
    module.synchronize()
    return result, module.max_memory_allocated() - before


def on_host(*shape):
    """A Linear in host memory: ranks of an accelerator create new tensors on it by default."""
    with torch.device("cpu"):
        return nn.Linear(*shape)


def require_at_most(nbytes, bound, what):
    """Raise `Missed` if ``nbytes`` is more than ``bound``, with some headroom; returns both as figures."""
    figures = {f"{what}, bytes": nbytes, "bound, bytes": bound}
    if nbytes > HEADROOM * bound:
        raise Missed(f"{what} must be at most {bound} bytes, but is {nbytes}", figures)
    return figures


@on_ranks("device-id")
def device_id(is_small):
    """A module on the host, larger than the device may hold, is wrapped with ``device_id``; tied buffers stay tied."""
    dim, num_units = (64, 4) if is_small else (8192, 12)
    unit_nbytes = 4 * dim * (dim + 1)
    units = [on_host(dim, dim) for _ in range(num_units)]
    units[0].register_buffer("scale", torch.ones(4, device="cpu"))
    units[0].register_buffer("twin", units[0].scale)
    if rank_device().type == "cuda":  # room for six units and the libraries, not for twelve
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.empty_cache()  # what other checks have left
        torch.cuda.set_per_process_memory_fraction((6 * unit_nbytes + (1 << 30)) / total)
    here = torch.device(rank_device().type, 0)

    def wrap():
        wrapped = [FSDP(unit, device_id=here, cpu_offload=True) for unit in units]
        return FSDP(nn.Sequential(*wrapped), cpu_offload=True)

    try:
        model, nbytes = peak_of(wrap)
        model(torch.ones(1, dim, device=here)).sum().backward()
    finally:
        if rank_device().type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)
    buffers = list(model.buffers())  # without duplicates
    if [buffer.device.type for buffer in buffers] != [here.type]:
        raise Missed(f"tied buffers must stay one tensor on the device, but are {len(buffers)}", {})
    return require_at_most(nbytes, 2 * unit_nbytes, "peak of wrapping")


@on_ranks("device-id-memory")
def device_id_memory(is_small):
    """Without offload, wrapping a module on the host takes the memory of shards, buffers and one unit on its way."""
    dim, num_units = (64, 6) if is_small else (4096, 8)
    here, unit_nbytes = torch.device(rank_device().type, 0), 4 * dim * (dim + 1)
    units = [on_host(dim, dim) for _ in range(num_units)]
    _model, nbytes = peak_of(lambda: FSDP(nn.Sequential(*[FSDP(unit, device_id=here) for unit in units])))
    ranks = torch.distributed.get_world_size()
    return require_at_most(nbytes, unit_nbytes * num_units // ranks + 2 * unit_nbytes, "peak of wrapping")


@on_ranks("sync-states", 2)
def sync_states(is_small):
    """Modules in host memory are sent over the device's backend, in buckets of at most 250 MB on the device."""
    dim, num_units = (64, 4) if is_small else (4096, 8)
    torch.manual_seed(torch.distributed.get_rank())
    units = nn.Sequential(*[on_host(dim, dim) for _ in range(num_units)])
    here = torch.device(rank_device().type, torch.get_device_module(rank_device().type).current_device())
    model, nbytes = peak_of(lambda: FSDP(units, device_id=here, sync_module_states=True))
    sums = torch.stack([value.double().sum() for value in model.state_dict().values()]).to(here)
    first = sums.clone()
    torch.distributed.broadcast(first, 0)
    if not torch.equal(first, sums):
        raise Missed("ranks have different values after sync_module_states", {})
    whole = 4 * dim * (dim + 1) * num_units
    return require_at_most(nbytes, 2 * whole + 250 * 2**20, "peak of wrapping")


@on_ranks("meta-init")
def meta_init(is_small):
    """Meta modules are materialised on the current device; the peak is the shards and one unit."""
    dim, num_units = (64, 6) if is_small else (4096, 8)
    with torch.device("meta"):
        units = [nn.Linear(dim, dim) for _ in range(num_units)]
    unit_nbytes = 4 * dim * (dim + 1)
    model, nbytes = peak_of(lambda: FSDP(nn.Sequential(*[FSDP(unit) for unit in units])))
    model(torch.ones(1, dim, device=rank_device())).sum().backward()
    kinds = {param.device.type for param in model.parameters()}
    if kinds != {rank_device().type}:
        raise Missed(f"parameters are on {kinds}", {})
    ranks = torch.distributed.get_world_size()
    return require_at_most(nbytes, unit_nbytes * num_units // ranks + 2 * unit_nbytes, "peak of wrapping")


class _Nested(nn.Module):
    """A module whose inputs are nested in dicts and lists."""

    def __init__(self, dim):
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, batch):
        self.seen = {leaf.device.type for leaf in tree_leaves(batch) if torch.is_tensor(leaf)}
        return self.linear(batch["x"][0] + batch["x"][1]["y"])


@on_ranks("pinned-inputs")
def pinned_inputs(is_small):
    """Nested inputs in pinned memory move to the device while the host continues."""
    dim = 64
    here = torch.device(rank_device().type, 0)
    model = FSDP(_Nested(dim).to(here), device_id=here)
    given = [torch.ones(dim, dim, device="cpu").pin_memory() for _ in range(2)]
    batch = {"x": [given[0], {"y": given[1]}]}
    model(batch).sum().backward()
    output = must_not_wait(lambda: model(batch))
    if model.module.seen != {here.type} or output.device.type != here.type:
        raise Missed(f"inputs were on {model.module.seen}", {})
    return {}


@on_ranks("checkpoint-random")
def checkpoint_random(is_small):
    """A checkpointed unit with ``device_id``, inputs on the host and dropout draws the same numbers again."""
    here = torch.device(rank_device().type, 0)
    grads = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.5), nn.Linear(64, 32)).to(here)
        unit = FSDP(layers, device_id=here)
        model = checkpoint_wrapper(unit) if checkpointed else unit
        torch.manual_seed(1)
        model(torch.ones(8, 32, device="cpu")).square().mean().backward()
        grads.append(unit.params[0].grad.clone())
    if not torch.equal(*grads):
        raise Missed("gradients with and without a checkpoint differ: dropout drew other numbers", {})
    return {}
