"""Print the walks of one wrap, of one forward of a unit, and of one gradient.

    torchrun --nproc-per-node 2 docs/scripts/walk.py

A stay is a run of calls in one file of fairshard, until a function of another file is called.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fairshard
from fairshard.nn import FullyShardedDataParallel as FSDP

FOLDER = f"{Path(fairshard.__file__).parent}/"


class Walk:
    """The stays from the first call of ``first`` to the end of ``last``, each ``file:function``."""

    def __init__(self, first, last):
        self.first, self.last = first, last
        self.stays = []

    def __call__(self, frame, event, _):
        code = frame.f_code
        file, name = code.co_filename.removeprefix(FOLDER), code.co_name
        if event not in ("call", "return") or file == code.co_filename:
            return
        if event == "return":
            if self.stays and f"{file}:{name}" == self.last:
                sys.setprofile(None)
        elif self.stays or f"{file}:{name}" == self.first:
            if not self.stays or self.stays[-1][0] != file:
                self.stays.append((file, {}))
            self.stays[-1][1][name] = None

    def lines(self, title):
        files = {file for file, _ in self.stays}
        return [f"{title}: {len(self.stays)} stays in {len(files)} files"] + [
            f"{number:3}  {file:46} {', '.join(names)}" for number, (file, names) in enumerate(self.stays, 1)
        ]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    inputs = torch.ones(2, 3)

    wrap = Walk(*["nn/data_parallel/fully_sharded_data_parallel.py:__init__"] * 2)
    sys.setprofile(wrap)
    FSDP(nn.Linear(3, 3))

    blocks = [FSDP(nn.Linear(3, 3)) for _ in range(2)]
    model = FSDP(nn.Sequential(*blocks))
    for _ in range(2):
        model(inputs).sum().backward()
    forward = Walk(*["nn/data_parallel/fully_sharded_data_parallel.py:forward"] * 2)
    blocks[0].register_forward_pre_hook(lambda *_: sys.setprofile(forward))
    model(inputs).sum().backward()

    model = FSDP(nn.Linear(3, 3, bias=False))
    for _ in range(2):
        model(inputs).sum().backward()
    loss = model(inputs).sum()
    gradient = Walk("engine/unit.py:on_grad", "params/shard_grad.py:add")
    sys.setprofile(gradient)
    loss.backward()

    if dist.get_rank() == 0:
        walks = {"one wrap": wrap, "one forward of one unit": forward, "one gradient": gradient}
        print(*(line for title, walk in walks.items() for line in walk.lines(title)), sep="\n")
    dist.destroy_process_group()
