"""Run a module as the only rank of torchrun, on any device: ``python -m tests.gpu.as_rank TYPE MODULE ...``."""

import os
import runpy
import socket
import sys


def main():
    device, module = sys.argv[1:3]
    if device == "sim":
        from tests import sim

        sim.load()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="gpu")
    sys.argv[:] = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
