"""Lines about passes: waits among streams, the schedule of a backward, precision, hooks of devices."""

import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from fairshard.engine.tree import units_below
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.utils import device as devices
from fairshard.utils.buckets import Bucketer
from fairshard.utils.pinned import can_register
from fairshard.utils.streams import Stream, now
from tests.gpu.check import Missed, NotHere, on_host, on_ranks
from tests.gpu.delays import COMPUTE, REDUCE, UNSHARD, late, must_not_wait, sleep
from tests.gpu.page import ROOT
from tests.gpu.training import DIM, Way, batches, build, same_when_late, train
from tests.kit import rank_device

BF16 = torch.bfloat16


@on_ranks("gather-after-free")
def gather_after_free(is_small):
    """With a slow compute stream, weights stay those of a run on time: no gather overwrites memory still in use."""
    return same_when_late(COMPUTE, Way(), Way(low=BF16), Way("fully_shard"), Way("fully_shard", BF16))


@on_ranks("bucket-reuse", 2)
def bucket_reuse(is_small):
    """With a slow reduce stream, weights stay the same: no bucket's memory is reused before it has been read."""
    return same_when_late(REDUCE, Way(), Way("fully_shard", BF16), Way(bucket_cap_mb=0.0))


@on_ranks("one-rank-ready")
def one_rank_ready(is_small):
    """At world size 1 and with NO_SHARD, compute waits for the cast and for the copy from host memory."""
    ways = [Way("fully_shard", BF16), Way("orig", BF16), Way(low=BF16, strategy="NO_SHARD")]
    ways += [Way(placement="offload"), Way("fully_shard", placement="offload"), Way(low=BF16, placement="offload")]
    return same_when_late(UNSHARD, *ways)


@on_ranks("unshard-waits")
def unshard_waits(is_small):
    """``FSDPModule.unshard()`` between passes waits for the optimizer's step, which is late on the compute stream."""
    return same_when_late(COMPUTE, Way("fully_shard", unshards=True), Way("fully_shard", BF16, unshards=True))


@on_ranks("two-buckets", 2)
def two_buckets(is_small):
    """Two buckets are under way at once while the reduce stream is late, and never more."""
    most, launch = [0], Bucketer.launch

    def counted(self, *bucket):
        launch(self, *bucket)
        most[0] = max(most[0], len(self._flying))

    with mock.patch.object(Bucketer, "launch", counted), late(REDUCE):
        train(Way(bucket_cap_mb=0.06))
    if most[0] != 2:
        raise Missed(f"at most 2 buckets are under way at once, but {most[0]} were", {"buckets": most[0]})
    return {"buckets under way": most[0]}


@on_ranks("host-waits", 2, alone=True)
def host_waits(is_small):
    """The host returns from a forward and from a backward while the device still sleeps before them."""
    for way in (Way(), Way("fully_shard", BF16)):
        model, inputs = build(way), batches(3)
        for each in inputs[:2]:
            model(each).square().mean().backward()
        loss = must_not_wait(lambda model=model, given=inputs[2]: model(given).square().mean())
        must_not_wait(loss.backward)
    return {}


class _Experts(nn.Module):
    """Two units that every rank calls; its loss depends on one of them."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x, number):
        outputs = [expert(x) for expert in self.experts]
        return self.last(outputs[number] + x)


@on_ranks("serve-only", 2)
def serve_only(is_small):
    """A rank that serves another rank's expert frees its gather, and its host does not wait for the device."""
    torch.manual_seed(0)
    model = _Experts().to(rank_device())
    for index in range(2):
        model.experts[index] = FSDP(model.experts[index])
    model = FSDP(model)
    inputs, held = batches(3), []
    for each in inputs:
        loss = model(each, dist.get_rank() % 2).square().mean()
        must_not_wait(loss.backward)
        held.append(devices.memory_allocated(rank_device()))
    if held[-1] > held[-2]:
        raise Missed("memory grows from step to step: a served gather is not freed", {"bytes": held})
    return {}


@on_ranks("no-graph")
def no_graph(is_small):
    """In grad mode a gather into the line of ``fully_shard`` leaves leaves: nothing of it is in a graph."""
    model = build(Way("fully_shard", BF16))
    model(batches(1)[0]).square().mean().backward()
    with torch.enable_grad():
        model.unshard()
        for block in model.blocks:
            block.unshard()
    found = [name for name, param in model.named_parameters() if param.grad_fn is not None or not param.is_leaf]
    if found:
        raise Missed(f"these parameters are in a graph after a gather: {', '.join(found)}", {})
    return {"parameters": len(list(model.parameters()))}


@on_ranks("fp16-scale", 2)
def fp16_scale(is_small):
    """Gradients whose sum overflows fp16 have an exact mean, because each is divided by a power of two first."""
    layer = nn.Linear(1, 1, bias=False).to(rank_device())
    model = FSDP(layer, mixed_precision=True, compute_dtype=torch.float16)
    model(torch.full((1, 1), 40000.0, device=rank_device())).sum().backward()
    grad = model.params[0].grad
    found = grad.float().sum().item() if grad.numel() else 40000.0
    if dist.get_rank() == 0 and found != 40000.0:
        raise Missed(f"the mean of gradients of 40000 must be 40000, but is {found}", {})
    return {"mean": found}


@on_ranks("cudnn-rnn", needs=("cuDNN",))
def cudnn_rnn(is_small):
    """An LSTM of cuDNN on leaves trains as the plain one; says whether its weights are one chunk for cuDNN."""
    size = 64
    torch.manual_seed(0)
    plain = nn.LSTM(size, size, num_layers=2, batch_first=True).to(rank_device())
    twin = nn.LSTM(size, size, num_layers=2, batch_first=True).to(rank_device())
    twin.load_state_dict(plain.state_dict())
    x = torch.randn(4, 12, size, device=rank_device())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = FSDP(twin)
        for one in (plain, model):
            optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
            for _ in range(3):
                one(x)[0].square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    state = model.state_dict()
    worst = max((state[name] - value).abs().max().item() for name, value in plain.state_dict().items())
    if worst > 1e-5:  # sums of 64 terms, in another order when the weights are not one chunk
        raise Missed(f"weights differ from the plain LSTM's by {worst:.1e}", {})
    chunked = not any("single contiguous chunk" in str(warning.message) for warning in caught)
    return {"largest difference": worst, "weights are one chunk": chunked}


@on_ranks("events-of-two-devices", num_devices=2)
def events_of_two_devices(is_small):
    """`Event.wait` makes the stream of the event's own device wait, whatever device is current."""
    kind = rank_device().type
    if devices.device_count(kind) < 2:
        raise NotHere("needs two devices in one process")
    here, other = (torch.device(kind, number) for number in range(2))
    slow, seen = torch.zeros(1024, device=other), torch.empty(1024, device=other)
    side = Stream(other)
    devices.set_device(other)
    try:
        torch.accelerator.synchronize()
        with side.use():
            sleep(50.0)
            slow.fill_(1.0)
        event = side.record()
        devices.set_device(here)
        event.wait()
        devices.set_device(other)
        seen.copy_(slow)
        is_right = bool((seen == 1).all())
    finally:
        devices.set_device(here)
    if not is_right:
        raise Missed("the current stream of the event's device has not waited", {})
    return {}


@on_ranks("device-hooks")
def device_hooks(is_small):
    """What `utils/device.py` asks a device's module for is there: current device, memory, random state, events."""
    kind = rank_device().type
    here = devices.current_device()
    before = devices.memory_allocated(here)
    held = torch.empty(1 << 20, dtype=torch.uint8, device=here)
    grown = devices.memory_allocated(here) - before
    saved = devices.accelerator_rng_state()
    first = torch.rand(8, device=here)
    devices.set_accelerator_rng_state(saved)
    again = torch.rand(8, device=here)
    event = now(here)
    event.synchronize()
    holds = {
        "one device at least": devices.device_count(kind) >= 1,
        "the current device": here.type == kind == devices.default_device_type(),
        "memory grows": held.nbytes <= grown <= devices.peak_memory(here),
        "random numbers repeat": torch.equal(first, again),
        "a synchronised event has passed": event.is_completed(),
        "host memory can be pinned": can_register(here) == (kind == "cuda"),
    }
    broken = [name for name, is_so in holds.items() if not is_so]
    if broken:
        raise Missed(f"does not hold: {', '.join(broken)}", {})
    return {}


@on_ranks("post-optim-event")
def post_optim_event(is_small):
    """After ``set_post_optim_event`` the next gathers wait for that event, and not for later work on compute."""
    figures = same_when_late(COMPUTE, Way("fully_shard", BF16, gives_event=True))
    model, inputs = build(Way("fully_shard", BF16)), batches(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    model(inputs[0]).square().mean().backward()
    optimizer.step()
    model.set_post_optim_event(torch.accelerator.current_stream().record_event())
    sleep(200.0)
    slept = torch.accelerator.current_stream().record_event()
    model.unshard(async_op=True)
    _, unit = next(iter(units_below(model)))
    unit.root.shared.unshard_stream.record().synchronize()
    if slept.query() and not is_small:  # the simulator may do other work while the host waits
        raise Missed("the gather has waited for work that was queued after the event", {})
    model(inputs[1]).square().mean().backward()
    return figures


@on_host("train-losses", "lines", needs=("matplotlib", "tqdm"), timeout=100.0)
def train_losses(machine, seconds):
    """``fairshard train`` gives the losses of a run on the CPU with the same seed, within 1e-3 in fp32."""
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
        for device in ("cpu", machine.device):
            flags = f"--layers 2 --dim 32 --heads 2 --context 32 --batch-size 8 --steps 20 --device {device}"
            command = [sys.executable, "-m", "tests.gpu.as_rank", device, "fairshard.cli.train", *flags.split()]
            command += ["--data", f"{folder}/text.txt", "--out", f"{folder}/{device}"]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds / 2)
            if done.returncode:
                raise Missed(f"fairshard train --device {device} failed: {done.stderr[-800:]}", {})
            lines = Path(folder, device, "metrics.jsonl").read_text().splitlines()
            losses.append([step["loss"] for step in map(json.loads, lines) if "loss" in step])
    cpu, own = losses
    worst = max(abs(a - b) / abs(a) for a, b in zip(cpu, own, strict=True))
    if worst > 1e-3:  # fp32 matmuls sum in another order, and 20 steps of Adam let that grow
        raise Missed(f"losses differ by {worst:.1e}, at the end {cpu[-1]} and {own[-1]}", {})
    return {"largest relative difference": worst, "steps": len(cpu)}
