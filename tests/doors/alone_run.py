"""Worlds of two ranks in which one does alone what all must do, or is stopped at or in a save.

    python -m tests.doors.alone_run FOLDER CASE...

All worlds run at the same time, forked from this process, so that torch is imported once. Prints one line of JSON per
case: what each rank has noted, with the seconds since rank 1 was stopped or rank 0 began, and how long each lived.
"""

import datetime
import functools
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import numpy.random  # noqa: F401 (otherwise each forked process imports this and the next one later)
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn

from fairshard.checkpoint import Checkpointer, load, save, writer
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import fully_shard
from tests.forked import Notes, fork, play_to_the_end

TIMEOUT_S, SLOW_S = 3.0, 4.5
START_S, APART_S = 60.0, 0.3  # of two worlds: they share the processors, and have a short timeout
ENDS_WITHIN_S = TIMEOUT_S + 5 + 10


class Writing(nn.Sequential):
    """Three layers; may write to the weights of the second after the first has computed."""

    def __init__(self):
        super().__init__(*(nn.Linear(4, 4) for _ in range(3)))
        self[0].writes = False

    def forward(self, x):
        x = self[0](x)
        if self[0].writes:
            with torch.no_grad():
                for param in self[1].parameters():
                    param.mul_(0.9)
        return self[2](self[1](x))


class World:
    """One rank of a world of two."""

    def __init__(self, rank, folder, note):
        self.rank, self.folder, self.note = rank, folder, note

    def build(self, door="wrapper", **kwargs):
        """A model and its optimizer, behind one of the doors."""
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model = fully_shard(module) if door == "fully_shard" else FSDP(module, **kwargs)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def elsewhere(self):
        """Wait, outside of fairshard, until rank 0 has got its error."""
        while not (self.folder / "over").exists():
            time.sleep(0.02)

    def alone(self, call):
        """Make ``call`` on rank 0 alone."""
        if self.rank:
            self.elsewhere()
            return
        self.note("began")
        try:
            call()
        finally:
            (self.folder / "over").touch()

    def train(self, model, optimizer):
        """One step."""
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    # ---- alone

    def construction(self):
        """Rank 1 has built another model before."""
        self.build()
        self.alone(lambda: FSDP(nn.Linear(4, 4), sync_module_states=True))

    def no_model(self):
        """Rank 1 has not called anything."""
        self.alone(lambda: FSDP(nn.Linear(4, 4), sync_module_states=True))

    def first_forward(self):
        """Nothing has been connected yet."""
        model, _ = self.build()
        self.alone(lambda: model(torch.ones(3, 4)))

    def state_dict(self):
        """After a step."""
        model, optimizer = self.build()
        self.train(model, optimizer)
        self.alone(model.state_dict)

    def optim_state_dict(self):
        """After a step."""
        model, optimizer = self.build()
        self.train(model, optimizer)
        self.alone(lambda: FSDP.optim_state_dict(model, optimizer))

    def save(self):
        """The first use of the host's group."""
        model, optimizer = self.build("fully_shard")
        self.train(model, optimizer)
        self.alone(lambda: save(self.folder / "saved", model, optimizer))

    def load(self):
        """Before any step."""
        model, optimizer = self.build("fully_shard")
        self.alone(lambda: load(self.folder / "saved", model, optimizer))

    def load_latest(self):
        """Before any step."""
        model, optimizer = self.build()
        saver = Checkpointer(self.folder / "saved")
        self.alone(lambda: saver.load_latest(model, optimizer))

    # ---- in a forward

    def _writes(self, door):
        """In step 3 rank 0 writes to weights that are gathered ahead, before the unit is called."""
        torch.manual_seed(1)
        model = Writing()
        for index, layer in enumerate(model):
            model[index] = fully_shard(layer) if door == "fully_shard" else FSDP(layer)
        model = fully_shard(model) if door == "fully_shard" else FSDP(model)
        for step in (1, 2, 3):
            model[0].writes = step == 3 and self.rank == 0
            if model[0].writes:
                self.note("began")
            model(torch.ones(3, 4)).square().sum().backward()

    # ---- saves

    def _saves(self, door, async_save, place):
        model, optimizer = self.build(door)
        saver = Checkpointer(self.folder / "saved", every=1, async_save=async_save)
        for step in (1, 2, 3):
            self.train(model, optimizer)
            if step == 2 and self.rank == 1:
                if place == "at":
                    self._stop()
                meets = [self._stop if place == "in" else functools.partial(time.sleep, SLOW_S)]
                writer._exact = functools.partial(_meeting, meets)
            saver.save(step, model, optimizer)
        saver.wait()
        self.note("saved all")

    def background_save(self):
        """Rank 1 is stopped in its save; rank 0 still writes its own for long when its training fails."""
        model, optimizer = self.build()
        saver = Checkpointer(self.folder / "saved")
        self.train(model, optimizer)
        meets = [self._stop if self.rank else functools.partial(time.sleep, 2 * ENDS_WITHIN_S)]
        writer._exact = functools.partial(_meeting, meets)
        saver.save(1, model, optimizer)
        while True:
            self.train(model, optimizer)

    def _stop(self):
        self.note("began")
        os.kill(os.getpid(), signal.SIGSTOP)  # until it is killed


for _door in ("wrapper", "fully_shard"):
    setattr(World, f"write_in_forward_of_{_door}", functools.partialmethod(World._writes, _door))
    for _mode in ("sync", "async"):
        for _place in ("at", "in", "slow"):
            _case = functools.partialmethod(World._saves, _door, _mode == "async", _place)
            setattr(World, f"{_place}_{_mode}_save_of_{_door}", _case)


def _meeting(meets, tensor):
    """``tensor``, which is written next; before, call what is in the list ``meets``, once."""
    while meets:
        meets.pop()()
    return tensor.clone()


def play(case, rank, folder, port):
    """Run one rank in a forked process. Does not return."""
    note = Notes(str(folder / "notes"), rank, is_timed=True)

    def body():
        torch.set_num_threads(1)
        start, timeout = (datetime.timedelta(seconds=seconds) for seconds in (START_S, TIMEOUT_S))
        where = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2, timeout=start)
        dist.barrier()
        dist.distributed_c10d._set_pg_timeout(timeout, dist.group.WORLD)
        getattr(World(rank, folder, note), case)()

    play_to_the_end(body, folder / "log", note)


def main(folder, cases):
    """Run all ``cases``, and print what became of them."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    pids, ended = {}, {}
    for case in cases:
        (folder / case).mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(2):
            pids[case, rank] = fork(functools.partial(play, case, rank, folder / case, port))
        time.sleep(APART_S)
    until = time.monotonic() + 4 * ENDS_WITHIN_S
    while len(ended) < len(pids) and time.monotonic() < until:
        for key, pid in pids.items():
            if key not in ended:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    ended[key] = os.waitstatus_to_exitcode(status), time.monotonic()
            case, rank = key
            _, other = ended.get((case, 0), (0, until))
            if key not in ended and rank == 1 and time.monotonic() > other + 0.5:  # it is stopped
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    for key in pids.keys() - ended.keys():
        os.kill(pids[key], signal.SIGKILL)
        ended[key] = "hung", time.monotonic()
    for case in cases:
        lines = [line.split(maxsplit=2) for line in (folder / case / "notes").read_text().splitlines()]
        began = min((float(at) for _, at, text in lines if text == "began"), default=0.0)
        notes = [(int(rank), float(at) - began, text) for rank, at, text in lines]
        lives = [(ended[case, rank][0], ended[case, rank][1] - began) for rank in range(2)]
        print(json.dumps({"case": case, "notes": notes, "ended": lives}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
