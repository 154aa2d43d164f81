"""Lines about shards, gradients and optimizer state in host memory."""

import contextlib
import resource
import time

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fairshard.engine.tree import units_below
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.optim import CPUOptimizer
from fairshard.utils import pinned
from fairshard.utils.testing import rank_device
from tests.gpu.check import Missed, on_ranks
from tests.gpu.delays import COMPUTE, COPY, UNSHARD, late
from tests.gpu.training import DIM, Way, batches, build, median_ms, same_when_late
from tests.models import mlp, wrap_each

BF16 = torch.bfloat16


@on_ranks("host-register", needs=("cudaHostRegister",))
def host_register(is_small):
    """Memory is pinned at its exact size, however small, and is released with its tensor."""
    for numel in ((1 << 20) + 12, 3):
        host = pinned.host_empty_like(torch.empty(numel, device=rank_device()), rank_device())
        is_exact = host.is_pinned() and host[1:].is_pinned() and host.untyped_storage().nbytes() == 4 * numel
        address = host.data_ptr()
        del host
        is_released = int(torch.cuda.cudart().cudaHostUnregister(address)) != 0  # it is no longer registered
        with contextlib.suppress(RuntimeError):
            torch.zeros((), device=rank_device())  # clears the error
        if not is_exact or not is_released:
            raise Missed(f"{numel} elements: pinned at their exact size {is_exact}, released {is_released}", {})
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {"locked memory limit": "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"}


@on_ranks("register-error", needs=("cudaHostRegister",))
def register_error(is_small):
    """After `host_register` has failed, the next launch and the next copy do not report its error."""
    data = torch.empty(1 << 20, dtype=torch.uint8, device="cpu")
    first = pinned.host_register(data, rank_device())
    second = pinned.host_register(data, rank_device())  # the same memory twice is an error at any limit
    after = (torch.arange(8, device=rank_device()) + 1).sum().item()
    if first:
        pinned.host_unregister(data.data_ptr(), rank_device())
    if not first or second or after != 36:
        raise Missed(f"registered {first}, registered again {second}, sum {after} for 36", {})
    return _under_a_limit()


def _under_a_limit():
    """What a limit of 64 KiB of locked memory does; a driver need not respect it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, hard))
    try:
        data = torch.empty(1 << 22, dtype=torch.uint8, device="cpu")
        is_registered = pinned.host_register(data, rank_device())
        torch.zeros((), device=rank_device()).add_(1).item()
        if is_registered:
            pinned.host_unregister(data.data_ptr(), rank_device())
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    return {"`ulimit -l 64` is enforced": not is_registered}


@on_ranks("shard-reads")
def shard_reads(is_small):
    """With late copies to the device, an optimizer on the host changes no shard that is still being read."""
    ways = [Way(placement="offload"), Way(low=BF16, placement="offload", optimizer="cpu")]
    ways += [Way("orig", placement="offload", optimizer="overlap"), Way("fully_shard", placement="offload")]
    return same_when_late(UNSHARD, *ways, Way(placement="offload", writes=True))


@on_ranks("grad-copies")
def grad_copies(is_small):
    """With late copies to the host, gradients are whole when the backward returns, and in a hook of their parameter."""
    figures = same_when_late(COPY, Way(placement="offload"), Way(placement="master"), Way("orig", placement="offload"))
    sums = []
    for slow in (False, True):
        with late(COPY) if slow else contextlib.nullcontext():
            model, inputs = build(Way(placement="offload")), batches(1)
            seen = []
            for param in model.parameters():
                param.register_post_accumulate_grad_hook(lambda shard, seen=seen: seen.append(shard.grad.clone()))
            model(inputs[0]).square().mean().backward()
            after = [param.grad.clone() for param in model.parameters()]
        sums.append(sorted(grad.double().sum().item() for grad in seen))
        if len(seen) != len(after) or sums[-1] != sorted(grad.double().sum().item() for grad in after):
            raise Missed(f"{len(seen)} hooks have not seen the {len(after)} gradients of the end", {})
    if sums[0] != sums[1]:
        raise Missed("hooks see other gradients when copies are late", {})
    return figures


@on_ranks("staging")
def staging(is_small):
    """Held gradients reach the host through two buffers in turn, whether copies or the device are late."""
    way = Way(placement="held", optimizer="cpu")
    same_when_late(COPY, way)
    return same_when_late(COMPUTE, way, Way(low=BF16, placement="held", optimizer="cpu"))


@on_ranks("offload-fraction")
def offload_fraction(is_small):
    """Units that stay on the device are stepped there; with 0.0 all state is there, and the model computes there."""
    kinds = {}
    for fraction in (0.0, 0.5, 1.0):
        model = wrap_each(mlp(*[DIM] * 5), cpu_offload=True)
        optimizer = CPUOptimizer(model, torch.optim.AdamW, lr=0.01, offload_fraction=fraction)
        output = model(batches(1)[0])
        output.square().mean().backward()
        optimizer.step()
        if output.device.type != rank_device().type:
            raise Missed(f"with offload_fraction={fraction} the model computes on {output.device}", {})
        moments = [
            value
            for state in optimizer.state.values()
            for value in state.values()
            if torch.is_tensor(value) and value.dim()
        ]
        kinds[fraction] = {moment.device.type for moment in moments}
    expected = {0.0: {rank_device().type}, 0.5: {rank_device().type, "cpu"}, 1.0: {"cpu"}}
    if kinds != expected:
        raise Missed(f"moments must be on {expected}, but are on {kinds}", {})
    return {}


@on_ranks("held-overlap")
def held_overlap(is_small):
    """An overlapped step of held gradients is right; copies through pageable memory beside pinned ones, in GB/s."""
    figures = same_when_late(COMPUTE, Way(placement="held", optimizer="overlap"))
    nbytes = 1 << (16 if is_small else 26)
    source = torch.ones(nbytes, dtype=torch.uint8, device=rank_device())
    pageable = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    fixed = pinned.host_empty_like(source, rank_device())
    for name, target in (("pageable", pageable), ("pinned", fixed)):
        figures[f"to {name} memory GB/s"] = _speed(source, target)
    return figures


def _speed(source, target):
    """GB/s of a copy, the median of five."""
    module = torch.get_device_module(rank_device().type)
    times = []
    for _ in range(5):
        module.synchronize()
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        module.synchronize()
        times.append(time.perf_counter() - begin)
    return round(source.nbytes / sorted(times)[2] / 1e9, 2)


@on_ranks("cast-side")
def cast_side(is_small):
    """Seconds to bring an fp32 shard to the device in bf16: cast there, or cast on the host first."""
    numel = 1 << (12 if is_small else 26)
    shard = pinned.host_empty_like(torch.empty(numel, device=rank_device()), rank_device()).fill_(1.0)
    low = pinned.host_empty_like(torch.empty(numel, dtype=BF16, device=rank_device()), rank_device())
    row = torch.empty(numel, dtype=BF16, device=rank_device())

    def on_device():
        row.copy_(shard, non_blocking=True)

    def on_host():
        low.copy_(shard)
        row.copy_(low, non_blocking=True)

    figures = {}
    for name, bring in (("device", on_device), ("host", on_host)):
        figures[f"cast on the {name} ms"] = round(median_ms(bring), 2)
    if not bool((row == 1).all()):
        raise Missed("the values have not arrived", figures)
    return figures


@on_ranks("assigned-data")
def assigned_data(is_small):
    """`.data` assigned to an offloaded shard's view is in pinned memory again, and the next gather reads it."""
    model = wrap_each(mlp(*[DIM] * 4), cpu_offload=True, use_orig_params=True)
    inputs = batches(2)
    model(inputs[0]).square().mean().backward()
    for param in model.parameters():
        param.data = torch.full_like(param.data, 0.01)
    with late(COMPUTE):
        output = model(inputs[1])
    shards = [flat.shard for _, unit in units_below(model) for flat in unit.flat_params]
    pageable = sum(not shard.is_pinned() for shard in shards)
    plain = mlp(*[DIM] * 4)
    with torch.no_grad():
        for param in plain.parameters():
            param.fill_(0.01)
    torch.testing.assert_close(output, plain(inputs[1]))
    if pageable:
        raise Missed(f"{pageable} of {len(shards)} shards are in pageable memory after the assignment", {})
    return {"shards": len(shards)}


@on_ranks("zeros-step")
def zeros_step(is_small):
    """A step while gradients are kept waits for the device only for parameters of which only zeros are shown."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)).to(rank_device())
    model = FSDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    inputs = batches(3)
    waits = []
    with model.no_sync():
        model(inputs[0]).square().mean().backward()
    for shows_zeros in (True, False):
        if not shows_zeros:
            model(inputs[1]).square().mean().backward()
        with _Reads() as reads:
            optimizer.step()
        waits.append(reads.number)
    figures = {"waits with zeros alone": waits[0], "waits with gradients": waits[1]}
    if waits[1] or waits[0] > len(list(model.parameters())):
        raise Missed(f"a step has waited more often than once for each parameter of zeros: {figures}", figures)
    return figures


class _Reads(TorchDispatchMode):
    """Counts how often the host reads a value of the device, for which it waits."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten._local_scalar_dense:
            self.number += args[0].device.type == rank_device().type
        return func(*args, **(kwargs or {}))
