"""Copies in host memory of several Checkpointers in one process, such as those of a generator and a critic."""

import os
import threading
from pathlib import Path
from unittest import mock

from fairshard.checkpoint import Checkpointer, agreement, memory_copies
from tests.checkpoint.saved_steps import is_same, memory_of, train, trained
from tests.kit import run_ranks


def test_a_copy_waits_for_that_of_another_checkpointer(tmp_path):
    """The copies of two models share a process group, so the second begins once the first has been written."""
    root = str(tmp_path)
    assert run_ranks(2, copy_two, root) == [[False, False]] * 2
    assert run_ranks(2, restart_two, root) == [[(1, True), (1, True)]] * 2


def pair(root):
    """Two models, their optimizers and their checkpointers."""
    memory = Path(root, "memory")
    memory.mkdir(exist_ok=True)
    names = ("generator", "critic")
    keep = [Checkpointer(os.path.join(root, name), memory_every=1, memory_folder=memory) for name in names]
    return [trained(seed=seed) for seed in (1, 2)], keep


def copy_two(root):
    """Copy both models at once; return for each whether the first copy was being written when it began."""
    models, keep = pair(root)
    released, main, overlaps = threading.Event(), threading.get_ident(), []
    write, take, ended = memory_copies._write_copy, memory_copies.take_over, agreement.ended

    def held_write(draft, place, name):
        released.wait()
        write(draft, place, name)

    def noted_take(*args):
        overlaps.append(keep[0]._memory._thread is not None and keep[0]._memory._thread.is_alive())
        if overlaps[-1]:
            released.set()
            keep[0]._memory.wait()  # the test must end without the fix, too
        return take(*args)

    def noted_ended(thread):
        if threading.get_ident() == main:  # it waits: the copy may go on
            released.set()
        return ended(thread)

    with (
        mock.patch.object(memory_copies, "_write_copy", held_write),
        mock.patch.object(memory_copies, "take_over", noted_take),
        mock.patch.object(agreement, "ended", noted_ended),
        mock.patch.object(memory_copies, "ended", noted_ended),
    ):
        for kept in keep:  # their folders, before one of them copies
            kept._memory.begin()
        for (model, optimizer), kept in zip(models, keep, strict=True):
            kept.copy_to_memory(1, model, optimizer)
        for kept in keep:
            kept.wait()
    return overlaps


def restart_two(root):
    """Resume both in new models; return the step of each, and whether it has the values that were copied."""
    expected, keep = pair(root)
    found = []
    for (model, optimizer), kept in zip(expected, keep, strict=True):
        memory = memory_of(model, optimizer)
        train(model, optimizer, 9)
        found.append((kept.load_latest(model, optimizer), is_same(memory_of(model, optimizer), memory)))
    return found
