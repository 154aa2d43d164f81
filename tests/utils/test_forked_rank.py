"""Ranks for functions of ``__main__``: run as in a notebook, from a process whose ``__main__`` has no file."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from fairshard.utils.testing import run_ranks

pytestmark = pytest.mark.cpu_only("its ranks are forks")

SETUP = """
    import json, os, sys, threading, time
    import torch
    import torch.distributed as dist
    from fairshard.nn import FullyShardedDataParallel as FSDP
    from fairshard.utils.testing import RanksFailed, run_ranks

    assert not hasattr(sys.modules["__main__"], "__file__")
"""


def start(cells):
    """A process that runs ``cells``."""
    text = textwrap.dedent(SETUP) + textwrap.dedent(cells)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", text], text=True, env=env, **pipes)


CELLS = """
    torch.set_num_threads(2)  # OpenMP's second thread starts in the backward, and no fork has it
    weight = torch.randn(512, 512, requires_grad=True)
    (torch.randn(256, 512) @ weight).relu().pow(2).mean().backward()

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 1))

        def forward(self, x):
            return self.layers(x)

    def train(steps):
        model = FSDP(Net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        losses = []
        for _ in range(steps):
            loss = model(torch.ones(64, 512)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        print("trained on", dist.get_rank())
        return losses, torch.get_num_threads(), Net

    def fail():
        print("before it fails")
        if dist.get_rank():
            raise KeyError("from the cell")

    def hang():
        threading.Event().wait()

    def message(function, *args, **kwargs):
        try:
            run_ranks(*args, **kwargs)
        except function as error:
            return str(error)

    found = {}
    (losses, threads, net), other = run_ranks(2, train, 3)
    assert other[0] == losses and net is Net
    found["losses"], found["threads"] = losses, threads
    found["lambda"] = run_ranks(3, lambda: dist.get_rank())
    found["instance"] = run_ranks(2, isinstance, Net(), torch.nn.Module)
    found["fails"] = message(RanksFailed, 2, fail)
    found["hangs"] = message(RanksFailed, 2, hang, timeout=1.0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found["group"] = message(RuntimeError, 2, train, 3)
    with open(f"/proc/self/task/{os.getpid()}/children") as children:
        found["left"] = children.read().split()
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def played():
    """What the cells print, line by line; the last line as a dictionary."""
    process = start(CELLS)
    out, err = process.communicate(timeout=120)
    assert not process.returncode, err
    *lines, found = out.splitlines()
    return lines, json.loads(found)


def test_a_function_of_a_cell_trains_after_the_notebook_itself_did(played):
    """A model and a function without a module train on two ranks, though the parent's backward started threads."""
    _, found = played
    assert found["losses"][0] > found["losses"][1] > found["losses"][2]
    assert found["threads"] == 1


def test_what_ranks_print_is_shown_with_their_number(played):
    """The ranks' own output appears once they are done, in rank order."""
    assert played[0] == ["[rank 0] trained on 0", "[rank 1] trained on 1"]


def test_lambdas_and_objects_of_the_notebook_reach_the_ranks(played):
    """Nothing is pickled on the way there: a lambda runs, and so does a library's function with a cell's object."""
    _, found = played
    assert found["lambda"] == [0, 1, 2]
    assert found["instance"] == [True, True]


def test_failures_and_hangs_of_forks_are_reported(played):
    """The traceback names the failed rank and the cell's function; a hung rank shows its stack; no rank is left."""
    _, found = played
    assert found["fails"].startswith("[rank 1] Traceback")
    assert "in fail" in found["fails"]
    assert "before it fails" in found["fails"]
    assert found["hangs"].count("hung for 1.0 s") == 2
    assert "in hang" in found["hangs"]
    assert found["left"] == []


def test_a_process_group_of_the_notebook_is_an_error(played):
    """A fork would inherit the group without its threads; the message says what to do."""
    assert "must be called without a process group" in played[1]["group"]
    assert "this process is rank 0 of 1" in played[1]["group"]
    assert "destroy_process_group()" in played[1]["group"]


def test_forks_end_with_their_parent():
    """Killed with no chance to clean up, a notebook leaves no rank behind."""
    process = start("""
        def hang():
            os.write(pipe, b"%d " % os.getpid())
            threading.Event().wait()

        pipe = os.dup(1)
        run_ranks(2, hang)
    """)
    pids = ""
    while pids.count(" ") < 2:
        character = process.stdout.read(1)
        assert character, process.communicate()
        pids += character
    os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in pids.split()):
        assert time.monotonic() < deadline, "a rank outlives its notebook"
    process.communicate()


UNSENDABLE = {"lambda": (lambda: 1,), "value": (print, threading.Lock())}


@pytest.mark.parametrize("task", UNSENDABLE.values(), ids=UNSENDABLE)
def test_what_cannot_be_sent_is_an_error_before_any_rank_starts(task):
    """A lambda of a module, or a value that pickle refuses: the message says what works."""
    with pytest.raises(TypeError, match=r"must be picklable to be sent to ranks, but: .*top level of a module"):
        run_ranks(2, *task)
