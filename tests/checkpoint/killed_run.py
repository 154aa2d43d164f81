"""One rank of a training run that gets killed: it trains, saves, and notes what it does.

A kill inside a save comes from the saving process: an audit hook sees each change to a file or folder *before* it
happens and kills at the chosen one. The disk is left as a crash between any two system calls would leave it.
"""

import datetime
import hashlib
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy.random  # noqa: F401 (otherwise each forked process would import this and torch._dynamo late)
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn

from fairshard.checkpoint import Checkpointer, Preempted, checkpointer, on_preemption, writer
from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.forked import Notes
from tests.models import DIM, VOCAB, Block

WORLD_SIZE, NUM_STEPS, EVERY, KEEP_LAST = 2, 36, 3, 2
GROUP_TIMEOUT = datetime.timedelta(seconds=10)  # gloo waits five times as long for a dead rank to connect

# In the order in which a save reaches them. Every rank reaches those in ANY_RANK; only rank 0 reaches the others.
POINTS = {
    "folder": "before the temporary folder is made",
    "half a piece": "with half of a block of a rank's file written",
    "piece written": "after a rank's file is written, before it is synced",
    "metadata": "after all ranks' files, before .metadata",
    "metadata named": "before .metadata gets its name",
    "manifest": "before the manifest",
    "manifest named": "before the manifest gets its name",
    "set aside": "before the older checkpoint of the same step is moved out of the way",
    "publish": "before the rename",
    "published": "after the rename, before it is synced",
    "pointer": "after the rename, before `latest` is written",
    "pointer named": "before `latest` is replaced",
    "pointed": "after `latest` is replaced, before it is synced",
    "prune": "before the oldest checkpoint is moved out of the way",
    "half pruned": "with a part of the oldest checkpoint removed",
}
ANY_RANK = ("folder", "half a piece", "piece written")


@dataclass(frozen=True)
class Kill:
    """Kill ``who`` with -9 when ``rank`` reaches ``point`` in the ``save``-th save of this run or a later one.

    ``who`` is ``"own"`` (that rank), ``"other"`` or ``"all"``.
    """

    point: str
    save: int
    rank: int
    who: str


@dataclass(frozen=True)
class Run:
    """One start of the program; without ``root`` it trains without saving.

    At the ``end`` it may ``"wait"`` for its last save, or just ``"exit"``, or ``"destroy"`` the process group and exit.
    If it ``stops``, SIGTERM ends it after the running step.
    """

    root: str | None
    notes: str
    store: str
    async_save: bool
    cpu_offload: bool
    end: str = "wait"
    kill: Kill | None = None
    stops: bool = False


class Model(nn.Module):
    """Embedding, blocks, dropout: random numbers must continue where they stopped."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.dropout(self.embed(tokens))
        for block in self.blocks:
            x = self.dropout(block(x))
        return self.head(x)


class Data:
    """Random tokens, different on every rank; its state is its position."""

    def __init__(self, rank):
        self._random = torch.Generator().manual_seed(1000 + rank)

    def batch(self):
        """Tokens and targets."""
        return torch.randint(VOCAB, (2, 2, 6), generator=self._random)

    def state_dict(self):
        """The current position."""
        return {"random": self._random.get_state()}

    def load_state_dict(self, state):
        """Continue at a saved position."""
        self._random.set_state(state["random"])


def main(rank, run):
    """Train to the end, from the newest checkpoint if there is one."""
    torch.set_num_threads(1)
    note = Notes(run.notes, rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{run.store}", rank=rank, world_size=WORLD_SIZE, timeout=GROUP_TIMEOUT
    )
    pids = [None] * WORLD_SIZE
    dist.all_gather_object(pids, os.getpid())
    _watch_saves(note, _Killer(run, rank, pids, note))

    torch.manual_seed(1)
    model = Model()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FSDP(block, cpu_offload=run.cpu_offload)
    model = FSDP(model, cpu_offload=run.cpu_offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    data = Data(rank)
    torch.manual_seed(100 + rank)

    saver = run.root and Checkpointer(run.root, every=EVERY, keep_last=KEEP_LAST, async_save=run.async_save)
    if run.stops:
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
        note(f"step {step}")
        if saver:
            saver.maybe_save(step, model, optimizer, scheduler, extra=data)
    note(f"final {_digest(model.state_dict())}")
    if saver and run.end == "wait":
        saver.wait()
    elif run.end == "destroy":
        dist.destroy_process_group()


def play(rank, run, log):
    """Run `main` in a process that was just forked, then exit as Python would. Does not return."""
    code = 1
    try:
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        main(rank, run)
        code = 0
    except Preempted as stop:
        Notes(run.notes, rank)(f"stopped {stop.step}")
        code = stop.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        try:
            threading._shutdown()  # as at the end of a program: waits for a background save
        finally:
            sys.stderr.flush()
            os._exit(code)


class _Killer:
    """Sees every change to the checkpoint folder before it happens, and kills at one of them."""

    def __init__(self, run, rank, pids, note):
        self._root = run.root
        self._kill = run.kill
        self._is_ours = run.kill is not None and run.kill.rank == rank
        self._rank, self._pids, self._note = rank, pids, note
        self._num_removed = None  # files removed since the removal of a checkpoint began
        self._renamed = None  # source and target of the last rename
        self.num_saves = 0
        if self._is_ours:
            sys.addaudithook(self._hook)

    def reach(self, point):
        """Kill if this is the point."""
        kill = self._kill
        if not self._is_ours or point != kill.point or self.num_saves < kill.save:
            return
        self._note(f"kill {point}")
        self._is_ours = False
        others = [pid for rank, pid in enumerate(self._pids) if rank != self._rank]
        for pid in {"own": [], "other": others, "all": others}[kill.who]:
            os.kill(pid, signal.SIGKILL)
        if kill.who != "other":
            os.kill(os.getpid(), signal.SIGKILL)

    def _hook(self, event, args):
        if not self._is_ours or not self.num_saves:
            return
        if event == "open" and isinstance(args[0], (str, os.PathLike)) and args[2] & (os.O_WRONLY | os.O_RDWR):
            self._on_open(os.fspath(args[0]))
        elif event == "os.rename":
            self._on_rename(*map(os.fspath, args[:2]))
        elif event == "os.mkdir" and _name(args[0]).startswith(".tmp-"):
            self.reach("folder")
        elif event in ("os.remove", "os.rmdir") and self._num_removed is not None:
            self._on_remove(event)
        elif event == "shutil.rmtree":
            self._num_removed = 0 if _name(args[0]).startswith(".old-step-") else None

    def _on_open(self, path):
        name = _name(path)
        if name == ".metadata.tmp":
            self.reach("metadata")
        elif name.startswith(".tmp-fairshard.json"):
            self.reach("manifest")
        elif name.startswith(".tmp-latest"):
            self.reach("pointer")

    def _on_rename(self, source, target):
        source, target = self._renamed = _name(source), _name(target)
        if target == ".metadata":
            self.reach("metadata named")
        elif target == "fairshard.json":
            self.reach("manifest named")
        elif target == "latest":
            self.reach("pointer named")
        elif target.startswith("step-") and source.startswith(".tmp-"):
            self.reach("publish")
        elif target.startswith(".replaced-"):
            self.reach("set aside")
        elif target.startswith(".old-") and source.startswith("step-"):
            self.reach("prune")

    def _on_remove(self, event):
        self._num_removed += 1
        if self._num_removed == 2:
            self.reach("half pruned")

    def wrote(self, stream, block):
        """Write half of the block and kill, if the kill is due."""
        kill = self._kill
        if self._is_ours and kill.point == "half a piece" and self.num_saves >= kill.save and len(block) > 1:
            stream._raw.write(memoryview(block).cast("B")[: len(block) // 2])
            stream._raw.flush()
            self.reach("half a piece")

    def sync(self, descriptor):
        """A file or folder is about to be synced."""
        if not self._is_ours or not self.num_saves:
            return
        name = _name(os.readlink(f"/proc/self/fd/{descriptor}"))
        if name.endswith(".distcp"):
            self.reach("piece written")
        elif self._renamed is not None and name == _name(self._root):
            (_, target), self._renamed = self._renamed, None
            if target == "latest":
                self.reach("pointed")
            elif target.startswith("step-"):
                self.reach("published")


def _watch_saves(note, killer):
    """Note where a save begins and ends, and let ``killer`` see what it does."""
    write, fsync, begin = writer._ChecksumStream.write, os.fsync, checkpointer.Checkpointer._write

    def watched_write(stream, block):
        killer.wrote(stream, block)
        return write(stream, block)

    def watched_fsync(descriptor):
        killer.sync(descriptor)
        fsync(descriptor)

    def watched_save(self, draft, group):
        killer.num_saves += 1
        note(f"save {draft.step} begins")
        begin(self, draft, group)
        note(f"save {draft.step} {'failed' if self._failure else 'ends'}")

    writer._ChecksumStream.write = watched_write
    os.fsync = watched_fsync
    checkpointer.Checkpointer._write = watched_save


def _name(path):
    return Path(os.fspath(path)).name if isinstance(path, (str, os.PathLike)) else ""


def _digest(state):
    whole = hashlib.sha256()
    for name, value in state.items():
        whole.update(name.encode())
        whole.update(value.contiguous().numpy().tobytes())
    return whole.hexdigest()
