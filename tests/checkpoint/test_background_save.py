"""A background save holds the state of the moment when the save began."""

import contextlib
import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fairshard.checkpoint import Checkpointer, load
from fairshard.checkpoint.entries import Training
from fairshard.checkpoint.saving import take
from fairshard.checkpoint.snapshot import Snapshot
from fairshard.checkpoint.writer import CheckpointWriter
from fairshard.errors import CheckpointError
from fairshard.optim import CPUOptimizer
from tests.checkpoint.compared import assert_same, whole
from tests.checkpoint.limited import run_limited
from tests.models import tiny, wrap_tiny
from tests.on_ranks import on_ranks
from tests.trained import OPTIMIZERS, train, trained


@pytest.mark.pairs
@on_ranks(1, 2)
@pytest.mark.parametrize(
    ("kind", "placement"),
    [  # a plain optimizer does not see held gradients
        pair
        for pair in itertools.product(["plain", "overlap", "after"], ["device", "offload", "held"])
        if pair != ("plain", "held")
    ],
)
def test_a_background_save_is_of_its_moment(shared_folder, kind, placement):
    """Steps, early ones included, change values that a delayed writer has not read yet: it saves the old values."""
    held = {"cpu_offload": True, "move_grads_to_cpu": False}
    settings = {"device": {}, "offload": {"cpu_offload": True}, "held": held}
    model = wrap_tiny(tiny(), **settings[placement])
    if kind == "plain":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:
        optimizer = CPUOptimizer(model, torch.optim.AdamW, lr=0.01, overlap=kind == "overlap")

    def step():
        tokens, extra = torch.ones(2, 5, dtype=torch.long), torch.ones(2, 5, 6)
        if kind == "overlap":
            with optimizer.last_backward():
                model(tokens, extra).square().mean().backward()
        else:
            model(tokens, extra).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    before = whole(model, optimizer)
    with _held_writer() as writer, Checkpointer(f"{shared_folder}/one") as checkpointer:
        checkpointer.save(2, model, optimizer)
        writer.wait()
        step()
        writer.release()
        step()
    other = wrap_tiny(tiny(seed=2))
    its_optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    assert load(f"{shared_folder}/one", other, its_optimizer) == 2
    assert_same(whole(other, its_optimizer), before)


class _HeldWriter:
    """Holds a writer before it reads the third box."""

    def __init__(self):
        self._released, self._reached = threading.Event(), threading.Event()
        self._read, self._count = Snapshot.read, 0

    def read(self, snapshot, part):
        """Replaces `Snapshot.read`."""
        self._count += 1
        if self._count == 3:
            self._reached.set()
            assert self._released.wait(60)
        return self._read(snapshot, part)

    def wait(self):
        """Wait until the writer reaches that box."""
        assert self._reached.wait(60)

    def release(self):
        """Let the writer continue."""
        self._released.set()


@contextlib.contextmanager
def _held_writer():
    writer = _HeldWriter()
    with mock.patch.object(Snapshot, "read", lambda snapshot, part: writer.read(snapshot, part)):
        yield writer


WRAPPED_FIRST = """
from torch.optim.optimizer import _global_optimizer_pre_hooks
from fairshard.checks import optimizer_check
optimizer_check._install()  # as the first wrapper does
from fairshard.utils.before_step import add_before_step
add_before_step(0, lambda: None)  # as a background save does
print([hook.__module__.rpartition(".")[2] for hook in _global_optimizer_pre_hooks.values()])
"""


def test_a_save_hears_of_a_step_before_its_writes_are_counted():
    """Also in a program that imports checkpoints after it has wrapped a model; else a step would look like an edit."""
    run = subprocess.run([sys.executable, "-c", WRAPPED_FIRST], capture_output=True, text=True, check=True)
    assert run.stdout.strip().endswith("'before_step', 'optimizer_check']")


@on_ranks(2)
def test_an_edit_during_a_background_save_is_noticed(shared_folder):
    """If masters that are saved in place change without a step, the save fails, says so, and leaves nothing."""
    model = wrap_tiny(tiny(), cpu_offload=True)
    checkpointer = Checkpointer(f"{shared_folder}/edited")
    with _held_writer() as writer:
        checkpointer.save(1, model)
        writer.wait()
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
        writer.release()
        with pytest.raises(CheckpointError, match=r"only optimizers may change parameters"):
            checkpointer.wait()
    assert checkpointer.load_latest(model) is None
    checkpointer.save(2, model)
    checkpointer.wait()
    assert checkpointer.load_latest(model) == 2


@on_ranks(2)
def test_masters_in_host_memory_are_not_copied(shared_folder):
    """With offload and no step in between, a background save copies no shard; without offload it copies each once."""
    for offload in (True, False):
        model = wrap_tiny(tiny(), cpu_offload=offload)
        model, optimizer = trained(model, OPTIMIZERS["adamw"])
        draft = take(Training(model, optimizer), 1, {})
        nbytes = sum(param.nbytes for param in model.parameters())
        assert draft.snapshot.nbytes_copied == (0 if offload else 3 * nbytes)
        draft.snapshot.close()


@on_ranks(2)
def test_ranks_exchange_once_while_training_waits():
    """One message carries whether all can save, the step, diverging buffers and optimizer state."""
    model, optimizer = trained(wrap_tiny(tiny()), OPTIMIZERS["adamw"])
    take(Training(model, optimizer), 1, {}).snapshot.close()  # creates the group
    with mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as exchange:
        take(Training(model, optimizer), 2, {}).snapshot.close()
    assert exchange.call_count == 1


@on_ranks(2)
def test_a_refused_save_watches_nothing(shared_folder):
    """A save that failed because of another rank allows edits, even while its exception is still being handled."""
    model, optimizer = trained(wrap_tiny(tiny(), cpu_offload=True), OPTIMIZERS["adamw"])
    extra = {"fn": print} if dist.get_rank() == 1 else {}
    with pytest.raises(TypeError, match="rank 1 of 2") as caught:
        Checkpointer(f"{shared_folder}/refused").save(1, model, optimizer, extra=extra)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    train(model, optimizer, [2])
    del caught  # its frames hold the values to save


def end_with_a_slow_save(root):
    """Save in the background to a slow disk, and end as Python ends a program; the checkpoint that `latest` names."""
    write = CheckpointWriter.write_data
    with mock.patch.object(CheckpointWriter, "write_data", lambda *args: (time.sleep(0.2), write(*args))[1]):
        Checkpointer(root).save(1, torch.nn.Linear(1, 1))
        threading._shutdown()  # waits for all threads that are not daemons
    return Path(root, "latest").read_text().strip()


def test_a_program_that_ends_waits_for_its_last_save(shared_folder):
    """It does so without `wait`, and although the thread that writes is a daemon."""
    outcome = run_limited(end_with_a_slow_save, shared_folder)
    assert outcome.value == "step-00000001", outcome


def test_checkpoints_of_later_steps_are_neither_counted_nor_removed(shared_folder):
    """A run that goes back keeps what it saves, although an abandoned one has left as many later checkpoints."""
    model = torch.nn.Linear(1, 1)
    for step in (5, 6, 3):
        with Checkpointer(shared_folder, keep_last=2, async_save=False) as checkpointer:
            checkpointer.save(step, model)
    assert sorted(os.listdir(shared_folder)) == ["latest", *(f"step-{step:08}" for step in (3, 5, 6))]
    assert Checkpointer(shared_folder).load_latest(model) == 3
