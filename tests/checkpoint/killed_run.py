"""One rank of a training run that gets killed: it trains, saves, and notes what it does.

The numbers do not depend on how many ranks share the work, except for rounding: every batch, and every dropout mask,
is drawn for all rows, and a rank takes its own. All values are fp64, so that Adam does not make much of the rounding.
"""

import datetime
import hashlib
import os
import random
import sys
import threading
from dataclasses import dataclass

import numpy.random  # noqa: F401 (otherwise each forked process would import this and torch._dynamo late)
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fairshard.checkpoint import Checkpointer, Preempted, on_preemption
from fairshard.nn import CPUOffloadPolicy, fully_shard
from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.checkpoint.kill_points import Kill, Killer, watch
from tests.forked import Notes
from tests.models import DIM, VOCAB, Block

NUM_STEPS, EVERY, KEEP_LAST = 36, 3, 2
DOORS = ("wrapper", "fully_shard")
ENDS = ("wait", "exit", "destroy", "close")
ROWS, LENGTH, DROPPED = 12, 6, 0.2  # 1, 2, 3 and 4 ranks have equal parts of the rows
GROUP_TIMEOUT = datetime.timedelta(seconds=10)  # gloo waits five times as long for a dead rank to connect


@dataclass(frozen=True)
class Kind:
    """How a run is sharded and saved.

    At the ``end`` it may ``"wait"`` for its last save, ``"close"`` the checkpointer, just ``"exit"``, or ``"destroy"``
    the process group and exit. If it ``stops``, SIGTERM ends it after the running step.
    """

    door: str = "wrapper"
    cpu_offload: bool = False
    async_save: bool = False
    end: str = "wait"
    stops: bool = False

    def __str__(self):
        parts = [self.door, "async" if self.async_save else "sync"]
        parts += ["offload"] * self.cpu_offload
        return ", ".join(parts)


@dataclass(frozen=True)
class Run:
    """The start ``number`` of a program in ``folder``; unless it ``saves``, it only trains."""

    kind: Kind
    world_size: int
    folder: str
    number: int = 0
    saves: bool = True
    kill: Kill | None = None

    @property
    def root(self):
        """The folder of its checkpoints."""
        return f"{self.folder}/root" if self.saves else None

    def path(self, name):
        """Path of a file of this start only."""
        return f"{self.folder}/{name}-{self.number}"


class Model(nn.Module):
    """Embedding, blocks, dropout: random numbers must continue where they stopped. ``part``: this rank's rows."""

    def __init__(self, part):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(DIM, VOCAB)
        self._part = part

    def forward(self, tokens):
        x = self._drop(self.embed(tokens))
        for block in self.blocks:
            x = self._drop(block(x))
        return self.head(x)

    def _drop(self, x):
        return x * (torch.rand(ROWS, LENGTH, DIM)[self._part] >= DROPPED) / (1 - DROPPED)


class Data:
    """Random tokens for all ranks, of which each takes its part; its state is its position.

    fairshard continues torch's random numbers, for dropout, on the same number of ranks only; here they are the same
    on all ranks, so the program continues them itself on another.
    """

    def __init__(self, part, world_size):
        self._random = torch.Generator().manual_seed(1000)
        self._part = part
        self._world_size = world_size

    def batch(self):
        """Tokens and targets."""
        return torch.randint(VOCAB, (2, ROWS, LENGTH), generator=self._random)[:, self._part]

    def state_dict(self):
        """The current position."""
        own = {"random": self._random.get_state(), "world_size": self._world_size}
        return {**own, "dropout": torch.get_rng_state()}

    def load_state_dict(self, state):
        """Continue at a saved position."""
        self._random.set_state(state["random"])
        if state["world_size"] != self._world_size:
            torch.set_rng_state(state["dropout"])


def main(rank, run):
    """Train to the end, from the newest checkpoint if there is one."""
    torch.set_num_threads(1)
    kind, note = run.kind, Notes(run.path("notes"), rank)
    store = f"file://{run.path('store')}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=run.world_size, timeout=GROUP_TIMEOUT)
    pids = [None] * run.world_size
    dist.all_gather_object(pids, os.getpid())
    watch(note, Killer(run, rank, pids, note))

    part = slice(rank, None, run.world_size)
    torch.manual_seed(1)
    model = _sharded(Model(part).double(), kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)
    data = Data(part, run.world_size)
    torch.manual_seed(100)
    random.seed(rank)

    saver = _checkpointer(run) if run.saves else None
    if kind.stops:
        on_preemption(saver)
    first = saver.load_latest(model, optimizer, scheduler, extra=data) if saver else None
    note(f"resumed {first}")
    for step in range((first or 0) + 1, NUM_STEPS + 1):
        tokens, targets = data.batch()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        random.random()
        note(f"step {step}")
        if saver:
            saver.maybe_save(step, model, optimizer, scheduler, extra=data)
    weights = {name: _whole(value) for name, value in model.state_dict().items()}
    if rank == 0:
        torch.save(weights, run.path("weights"))
    note(f"random {random.random()}")  # differs from rank to rank
    note(f"final {_digest(weights)}")
    if saver and kind.end in ("wait", "close"):
        getattr(saver, kind.end)()
    elif kind.end == "destroy":
        dist.destroy_process_group()


def play(rank, run):
    """Run `main` in a process that was just forked, then exit as Python would. Does not return."""
    code = 1
    try:
        file = os.open(run.path("log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        main(rank, run)
        code = 0
    except Preempted as stop:
        Notes(run.path("notes"), rank)(f"stopped {stop.step}")
        code = stop.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        try:
            threading._shutdown()  # as at the end of a program: waits for a background save
        finally:
            sys.stderr.flush()
            os._exit(code)


def _checkpointer(run):
    return Checkpointer(run.root, every=EVERY, keep_last=KEEP_LAST, async_save=run.kind.async_save)


def _sharded(model, kind):
    if kind.door == "fully_shard":
        options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if kind.cpu_offload else {}
        for block in model.blocks:
            fully_shard(block, **options)
        return fully_shard(model, **options)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FSDP(block, cpu_offload=kind.cpu_offload)
    return FSDP(model, cpu_offload=kind.cpu_offload)


def _whole(value):
    return (value.full_tensor() if isinstance(value, DTensor) else value).contiguous()


def _digest(state):
    whole = hashlib.sha256()
    for name, value in state.items():
        whole.update(name.encode())
        whole.update(value.numpy().tobytes())
    return whole.hexdigest()
