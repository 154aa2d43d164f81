"""What a step waits for: one GPT, sharded by our engine or by torch's, on the simulator with stated costs.

The model is small; each of its dimensions stands for `SCALE` times as many (see `tests.sim.costs.charge`).
"""

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import fully_shard
from fairshard.nn.wrap import ModuleWrapPolicy, WrapPlan, describe
from fairshard.optim import CPUOptimizer
from fairshard.params import shard_grad
from tests import sim
from tests.sim.costs import H100, H100_PCIE, HostCosts, Machine, charge, timed_workers

SCALE = 32
_SMALL = {"dim": 16, "num_heads": 4, "num_blocks": 24}
LR = 1e-3

PLAIN = "plain"
"""The model alone, in the compute dtype: what a step takes without any engine."""


@dataclass(frozen=True)
class Case:
    """What is trained, and on what."""

    name: str
    machine: Machine = H100
    bf16: bool = True
    reshard: bool = True
    offload: bool = False
    steps_early: bool = False  # our steps on the CPU, during the backward
    max_norm: float = 0.1  # of clipping, with offload
    cap_mb: float = 25.0  # our buckets; the default
    num_blocks: int = 12
    dim: int = 64
    num_heads: int = 16
    vocab: int = 1572
    batch: int = 4
    context: int = 32


CASES = [
    Case("NVLink, bf16"),
    Case("NVLink, fp32", bf16=False),
    Case("NVLink, bf16, no reshard", reshard=False),
    Case("NVLink, bf16, small blocks", **_SMALL),
    Case("PCIe, bf16", machine=H100_PCIE),
    Case("PCIe, bf16, 1 sequence", machine=H100_PCIE, batch=1),
    Case("PCIe, bf16, 1 sequence, small blocks", machine=H100_PCIE, batch=1, **_SMALL),
    Case("the same, bucket_cap_mb=12.5", machine=H100_PCIE, batch=1, cap_mb=12.5, **_SMALL),
    Case("offload, clipped", offload=True),
    Case("offload, norm below the limit", offload=True, max_norm=1e3),
    Case("offload, norm below, 16 sequences", offload=True, max_norm=1e3, batch=16),
    Case("the same, steps early", offload=True, max_norm=1e3, batch=16, steps_early=True),
]
"""What the benchmark measures."""


@dataclass(frozen=True)
class Figures:
    """A timed step of one rank, in simulated seconds.

    ``waits``: the compute stream's idle time, by the task that it waited for.
    """

    losses: tuple[float, ...]
    makespan: float
    waits: dict[str, float]
    num_races: int


class Block(nn.Module):
    """A pre-norm transformer block: the unit of sharding."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.num_heads = case.num_heads
        self.attention_norm = nn.LayerNorm(case.dim)
        self.qkv = nn.Linear(case.dim, 3 * case.dim)
        self.projection = nn.Linear(case.dim, case.dim)
        self.mlp_norm = nn.LayerNorm(case.dim)
        self.up = nn.Linear(case.dim, 4 * case.dim)
        self.down = nn.Linear(4 * case.dim, case.dim)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Blocks between two embeddings, which belong to the outermost unit; returns logits."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.tokens = nn.Embedding(case.vocab, case.dim)
        self.blocks = nn.Sequential(*(Block(case) for _ in range(case.num_blocks)))
        self.norm = nn.LayerNorm(case.dim)
        self.head = nn.Linear(case.dim, case.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens))))


@dataclass(frozen=True)
class Trained:
    """A sharded model, and how one step's backward and update are done with it."""

    model: nn.Module
    backward: Callable[[Tensor], None]
    update: Callable[[], None]


def train(engine: str, case: Case, num_steps: int = 2, times_update: bool | None = None) -> Figures:
    """Train ``case`` with ``engine`` for ``num_steps``, then time one more: forward, backward, and the update if
    ``times_update`` (by default with offload).

    **Collective.**
    """
    times_update = case.offload if times_update is None else times_update
    trained = BUILDERS[engine](_new(case), case)
    texts = _texts(case, num_steps + 1)
    losses = []

    def step(text: Tensor, updates: bool = True) -> None:
        logits = trained.model(text[0])
        loss = F.cross_entropy(logits.float().flatten(0, 1), text[1].flatten())
        trained.backward(loss)
        losses.append(loss.detach())
        if updates:
            with HostCosts(case.machine, SCALE):
                trained.update()

    charge(case.machine, dist.get_world_size(), SCALE)
    limit = mock.patch.object(shard_grad, "MAX_KEPT_NBYTES", shard_grad.MAX_KEPT_NBYTES / SCALE**2)
    with timed_workers(case.machine, SCALE), limit:
        for text in texts[:-1]:
            step(text)
        torch.accelerator.synchronize()
        begin, num_before = sim.host_time(), len(sim.trace())
        step(texts[-1], times_update)
        makespan = max(sim.makespan(), sim.host_time()) - begin
    waits, kernels = Counter(), 0.0
    for name, _, stream, start, end in sim.trace()[num_before:]:
        start = max(start, begin)
        if stream == 0 and name.startswith("wait: "):
            waits[name.removeprefix("wait: ")] += end - start
        elif stream == 0:
            kernels += end - start
    waits["end"] = makespan - kernels - sum(waits.values())  # after the last kernel
    shown = {name: seconds for name, seconds in waits.items() if seconds}
    return Figures(tuple(float(loss) for loss in losses), makespan, shown, len(sim.races()))


def peak(engine: str, case: Case) -> tuple[int, int]:
    """Bytes of device memory at the peak of a forward and backward: measured, and planned. **Collective.**

    Transfers are slow, as the plan assumes.
    """
    before = torch.sim.memory_allocated()
    charge(Machine(link=1e3, host_link=1e3), dist.get_world_size(), 1)
    trained = BUILDERS[engine](_new(case), case)
    (text,) = _texts(case, 1)
    for _ in range(3):  # the second in the order that the first has shown
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        logits = trained.model(text[0])
        trained.backward(F.cross_entropy(logits.float().flatten(0, 1), text[1].flatten()))
        torch.accelerator.synchronize()
        measured = torch.accelerator.max_memory_allocated() - before
        trained.update()
    return measured, sum(term.nbytes for term in _plan(case).terms if not term.on_host)


def _plan(case: Case) -> WrapPlan:
    options: dict[str, Any] = {"reshard_after_forward": case.reshard, "cpu_offload": case.offload}
    if case.bf16:
        options.update(mixed_precision=True, compute_dtype=torch.bfloat16)
    options.update(bucket_cap_mb=case.cap_mb / SCALE**2, optimizer="adamw" if case.offload else "sgd-momentum")
    return describe(_new(case), ModuleWrapPolicy({Block}), dist.get_world_size(), device="sim", **options)


def _new(case: Case) -> GPT:
    """The model in host memory, with the same weights on every rank and for every engine."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        return GPT(case)


def _texts(case: Case, number: int) -> Tensor:
    """Tokens and targets of ``number`` batches, different on each rank."""
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())
    shape = number, 2, case.batch, case.context
    return torch.randint(case.vocab, shape, generator=generator, device="cpu").to("sim")


def _plain(gpt: GPT, case: Case) -> Trained:
    gpt = gpt.to("sim", torch.bfloat16 if case.bf16 else torch.float32)
    optimizer = torch.optim.SGD(gpt.parameters(), LR)

    def update() -> None:
        optimizer.zero_grad()

    return Trained(gpt, torch.Tensor.backward, update)


def _wrapper(gpt: GPT, case: Case) -> Trained:
    options: dict[str, Any] = {
        "reshard_after_forward": case.reshard,
        "cpu_offload": case.offload,
        "bucket_cap_mb": case.cap_mb / SCALE**2,
    }
    if case.bf16:
        options.update(mixed_precision=True, compute_dtype=torch.bfloat16)
    gpt.to("cpu" if case.offload else "sim")
    for index, block in enumerate(gpt.blocks):
        gpt.blocks[index] = FSDP(block, compute_device=torch.device("sim", 0), **options)
    return _stepped(FSDP(gpt, compute_device=torch.device("sim", 0), **options), case)


def _fully_shard(gpt: GPT, case: Case) -> Trained:
    return _stepped(_in_place(partial(fully_shard, bucket_cap_mb=case.cap_mb / SCALE**2), gpt, case), case)


def _fsdp2(gpt: GPT, case: Case) -> Trained:
    model = _in_place(fsdp.fully_shard, gpt, case)
    if not case.offload:
        return _stepped(model, case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
        optimizer.step()
        optimizer.zero_grad()

    return Trained(model, torch.Tensor.backward, update)


def _in_place(shard: Any, gpt: GPT, case: Case) -> Any:
    options: dict[str, Any] = {"mesh": init_device_mesh("sim", (dist.get_world_size(),))}
    if case.bf16:
        options["mp_policy"] = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    if case.offload:
        options["offload_policy"] = fsdp.CPUOffloadPolicy()
    gpt.to("cpu" if case.offload else "sim")
    for block in gpt.blocks:
        shard(block, reshard_after_forward=case.reshard, **options)
    return shard(gpt, **options)


def _stepped(model: nn.Module, case: Case) -> Trained:
    if not case.offload:
        plain = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)

        def update() -> None:
            plain.step()
            plain.zero_grad()

        return Trained(model, torch.Tensor.backward, update)
    clip = None if case.steps_early else case.max_norm  # the norm is known after the backward
    optimizer = CPUOptimizer(model, torch.optim.AdamW, lr=LR, clip_grad_norm=clip, overlap=case.steps_early)

    def backward(loss: Tensor) -> None:
        with optimizer.last_backward() if case.steps_early else contextlib.nullcontext():
            loss.backward()

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Trained(model, backward, step)


BUILDERS: dict[str, Callable[[GPT, Case], Trained]] = {
    PLAIN: _plain,
    "wrapper": _wrapper,
    "fully_shard": _fully_shard,
    "fsdp2": _fsdp2,
}
"""How each engine shards a model."""

ENGINES = [name for name in BUILDERS if name != PLAIN]
PEER = "fsdp2"
