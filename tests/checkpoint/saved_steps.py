"""A run with two checkpoints, and checks of what must hold when something fails."""

import os
from unittest import mock

import torch

from fairshard.checkpoint import Checkpointer, load
from fairshard.checkpoint.run_lock import NAME
from tests.kit import run_ranks
from tests.models import tiny, tiny_batch, tiny_loss, wrap_tiny

FILES = ("__0_0.distcp", "__1_0.distcp", ".metadata", "fairshard.json")


# ---- what the ranks do


def train(model, optimizer, *steps):
    """Train on batches that are the same on every rank."""
    for step in steps:
        *inputs, targets = tiny_batch(step)
        tiny_loss(model(*inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(seed=1, **kwargs):
    """A model after a step, and its optimizer."""
    model = wrap_tiny(tiny(seed=seed), **kwargs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, seed)
    return model, optimizer


def memory_of(model, optimizer):
    """Copies of everything that a load may change on this rank."""
    tensors = [*model.parameters(), *model.buffers(), torch.get_rng_state()]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    return [tensor.detach().clone() for tensor in tensors], [dict(g, params=None) for g in optimizer.param_groups]


def is_same(memory, other):
    """Whether both are the same, bit for bit."""
    pairs = zip(memory[0], other[0], strict=True)
    return memory[1] == other[1] and all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def attempt(fn):
    """The type and text of what ``fn()`` raises on this rank, or None."""
    try:
        fn()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def save_steps(root, steps=(3, 6), seed=1, **kwargs):
    """Train and save after each of ``steps``; return the full state dict of the last."""
    model, optimizer = trained(seed)
    kept = Checkpointer(root, **kwargs)
    for step in steps:
        train(model, optimizer, step)
        kept.save(step, model, optimizer)
    kept.wait()
    return model.state_dict()


def load_latest(root):
    """Resume; return the step and the full state dict."""
    model, optimizer = trained(seed=7)
    step = Checkpointer(root).load_latest(model, optimizer)
    return step, model.state_dict()


def try_to_load(target, how):
    """Return what loading ``target`` raises, and whether memory is unchanged."""
    model, optimizer = trained(seed=7)
    before = memory_of(model, optimizer)
    if how == "load":
        raised = attempt(lambda: load(target, model, optimizer))
    else:
        raised = attempt(lambda: Checkpointer(target).load_latest(model, optimizer))
    return raised, is_same(before, memory_of(model, optimizer))


def failing(name, error):
    """Make ``name`` raise ``error``."""
    return mock.patch(name, side_effect=error)


# ---- helpers


def assert_agreed(raised, *words):
    """Every rank raised the same `CheckpointError`, which contains ``words``."""
    for kind, text in raised:
        assert kind == "CheckpointError"
        assert text == raised[0][1]
        for word in words:
            assert word in text


def names_in(root):
    """The names in a folder of checkpoints, sorted, without the lock of a run that still lives."""
    return sorted(set(os.listdir(root)) - {NAME})


def assert_resumes_from(root, step, state=None):
    """The checkpoint of ``step`` is the newest and complete; nothing unfinished is left."""
    assert not [name for name in names_in(root) if name.startswith(".")], os.listdir(root)
    found, loaded = run_ranks(2, load_latest, str(root))[0]
    assert found == step
    for name, value in (state or {}).items():
        assert torch.equal(loaded[name], value), name


def fail_to_save(root, step=9, **kwargs):
    """Return what saving raises."""
    model, optimizer = trained()
    kept = Checkpointer(root, async_save=False, **kwargs)
    return attempt(lambda: kept.save(step, model, optimizer))
