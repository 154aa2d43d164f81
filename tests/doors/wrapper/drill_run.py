"""One rank of a training run that meets a fault: it trains, saves, and notes what it sees.

Every block is a unit; ``experts`` have the same shapes as ``blocks``, so one can run in place of the other.
"""

import contextlib
import datetime
import hashlib
import os
import signal
import time
from dataclasses import dataclass

import numpy.random  # noqa: F401 (otherwise each forked process imports this and the next one later)
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn

from fairshard.checkpoint import Checkpointer, writer
from fairshard.errors import FairshardError
from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.forked import Notes, play_to_the_end

NUM_STEPS, EVERY, FAULT_STEP = 8, 2, 5
DIM = 6
OTHER_ORDER = (0, 3, 1, 2)

FAULTS = {
    "killed in forward": "a rank is killed in the forward",
    "killed in backward": "a rank is killed in the backward",
    "killed in a step": "a rank is killed while its optimizer steps",
    "stopped": "a rank is stopped (SIGSTOP) in the forward",
    "stopped in a save": "a rank is stopped (SIGSTOP) while it writes its part of a checkpoint",
    "other module": "a rank runs another module of the same shape",
    "other order": "a rank runs modules of the same shape in another order",
    "other evaluation": "a rank evaluates modules of the same shape in another order",
    "skips a step": "a rank does not step its optimizer",
    "one batch short": "a rank runs out of batches and ends",
    "raises alone": "a rank raises in a forward",
    "other model": "a rank has built another model",
}
STOPS = ["stopped", "stopped in a save"]
KILLS = [*(fault for fault in FAULTS if fault.startswith("killed")), *STOPS]
DIVERGES = ["other module", "other order", "other evaluation", "skips a step", "other model"]
"""The faults that all ranks are told of, the one that causes them included."""


@dataclass(frozen=True)
class Run:
    """One start of the program; rank ``victim`` meets ``fault``, unless it is None."""

    root: str
    notes: str
    port: int
    world_size: int
    timeout_s: float
    fault: str | None = None
    victim: int = 0


class Model(nn.Module):
    """Blocks, and experts that no rank should run."""

    def __init__(self, width=DIM):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(4)])
        self.experts = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(2)])
        self.head = nn.Linear(DIM, width)
        self.meets = lambda place, x: x

    def forward(self, x):
        for index, block in enumerate(self.blocks):
            layer = self.meets(index, block)
            x = torch.tanh(layer(x))
        return self.head(x)


class Fault:
    """The fault that rank ``victim`` meets in one step."""

    def __init__(self, run, rank, model, note):
        self._fault = run.fault if rank == run.victim else None
        self._model = model
        self._note = note

    def begin(self, step):
        """Called when a step begins; False if there is no batch for it."""
        is_now = step == FAULT_STEP
        if is_now:
            self._note("fault")
        self._model.meets = self._meets if is_now and self._fault else lambda place, layer: layer
        return not (is_now and self._fault == "one batch short")

    def steps(self, step):
        """Whether the optimizer steps."""
        return step != FAULT_STEP or self._fault != "skips a step"

    def step(self, step):
        """Called when the optimizer has stepped this rank's parameters."""
        if step == FAULT_STEP and self._fault == "killed in a step":
            _die()

    def save(self, step):
        """Called before a save."""
        if step >= FAULT_STEP and self._fault == "stopped in a save":
            writer._save_tensor = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)

    def _meets(self, place, layer):
        if self._fault == "other evaluation" and not torch.is_grad_enabled():
            return self._model.blocks[OTHER_ORDER[place]]
        if self._fault == "other order" and torch.is_grad_enabled():
            return self._model.blocks[OTHER_ORDER[place]]
        if place == 2:
            if self._fault == "killed in forward":
                _die()
            if self._fault == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)  # until the drill kills it
            if self._fault == "raises alone":
                raise KeyError("a rank of its own mind")
            if self._fault == "other module":
                return self._model.experts[1]
            if self._fault == "killed in backward":
                return lambda x: layer(_DiesInBackward.apply(x))
        return layer


class _DiesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        _die()


def _die():
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@contextlib.contextmanager
def unchanged(model, note):
    """If the block raises, note whether the parameters are those from before it."""
    before = [(param, param.detach().clone()) for param in model.parameters()]
    try:
        yield
    except FairshardError:
        note(f"unchanged {all(torch.equal(param, old) for param, old in before)}")
        raise


def main(rank, run, note):
    """Train to the end, starting from the newest checkpoint if one exists."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=run.timeout_s)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{run.port}",  # rank 0 keeps the store
        rank=rank,
        world_size=run.world_size,
        timeout=timeout,
    )
    if run.fault == "other model":
        note("fault")
    torch.manual_seed(1)
    module = Model(DIM + 1 if run.fault == "other model" and rank == run.victim else DIM)
    for layers in (module.blocks, module.experts):
        for index, layer in enumerate(layers):
            layers[index] = FSDP(layer)
    model = FSDP(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    fault = Fault(run, rank, module, note)
    saver = Checkpointer(run.root, every=EVERY, keep_last=2, async_save=False)
    first = saver.load_latest(model, optimizer) or 0
    note(f"resumed {first}")
    optimizer.register_step_post_hook(lambda *_: fault.step(step))
    for step in range(first + 1, NUM_STEPS + 1):
        with unchanged(model, note):
            if not fault.begin(step):
                note(f"out of batches at {step}")
                return
            inputs = torch.randn(4, DIM, generator=torch.Generator().manual_seed(step))
            model(inputs).square().mean().backward()
        if fault.steps(step):
            optimizer.step()
        optimizer.zero_grad()
        with unchanged(model, note):
            with torch.no_grad():
                model(inputs)
            fault.save(step)
            saver.maybe_save(step, model, optimizer)
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.contiguous().numpy().tobytes())
    note(f"final {digest.hexdigest()}")


def play(rank, run, log):
    """Run `main` in a forked process. Does not return."""
    note = Notes(run.notes, rank, is_timed=True)
    play_to_the_end(lambda: main(rank, run, note), log, note)
