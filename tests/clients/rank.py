"""One rank of one case: ``python -m tests.clients.rank CASE ENGINE RANK WORLD_SIZE PORT OUT``."""

import json
import sys
from pathlib import Path

from tests.clients.case import be_torchrun
from tests.clients.table import case_named


def main(name, engine, rank, world_size, port, out):
    be_torchrun(int(rank), int(world_size), int(port))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    curve = case_named(name).program(engine)
    if int(rank) == 0:
        Path(out).write_text(json.dumps(curve.as_dict()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
