"""``python -m fairshard.cli.train``: ``fairshard train`` as one rank of a launcher, torchrun's or our own.

Without a launcher, it launches ranks on this machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from fairshard.checkpoint import Preempted
from fairshard.cli.launch import STOPPED, launch
from fairshard.cli.loop import check_options, train_here
from fairshard.cli.main import run
from fairshard.cli.options import OptionError, TrainingStopped
from fairshard.cli.ranks import Ranks
from fairshard.cli.runs import chosen_options
from fairshard.errors import CheckpointError

_NOTICE_S = 0.5
_POLL_S = 0.2


def main(argv: Sequence[str] | None = None) -> int:
    """Train as a rank, or launch the ranks as ``fairshard train`` does; returns the exit code."""
    ranks = Ranks.from_environment()
    command = launch if ranks is None else partial(train_rank, ranks)
    return run(["train", *(sys.argv[1:] if argv is None else argv)], command)


def train_rank(ranks: Ranks, arguments: argparse.Namespace) -> NoReturn:
    """Train as one rank. **Collective.** Ends the process: 0, 1 after a failure, 75 once a signal's step is saved.

    Under our own launcher it is 0 after such a stop, which the launcher would take for a failure: it is told by a file.

    Raises:
        OptionError: the options are invalid; no process group has been created.
    """
    options = chosen_options(vars(arguments))
    if options.nproc is not None or options.max_restarts:
        raise OptionError(
            "--nproc and --max-restarts are for fairshard train: torchrun, which launches ranks, has both."
        )
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0)
    if options.resume_from is not None and restarts:
        raise OptionError(
            "torchrun --max-restarts continues from the newest checkpoint, which with --resume-from may belong to the "
            "dropped steps. Leave one of them out."
        )
    plan = check_options(options, ranks)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends a rank that waits outside of Python, too
    note = os.environ.get(STOPPED)
    if note is not None:
        threading.Thread(target=_leave_with, args=(os.getppid(),), name="fairshard launcher", daemon=True).start()
    get_error_handler().initialize()
    code = 0
    try:
        train_here(options, plan)
        dist.destroy_process_group()
    except Preempted as stop:
        if ranks.rank == 0:
            where = "" if options.out is None else f" --out {options.out}"
            text = f"stopped by a signal after step {stop.step}, which is saved. To continue: --resume{where}"
            print(f"fairshard train: {text}", file=sys.stderr)
        if note is not None:
            Path(note).touch()
        code = 0 if note else int(stop.code or 0)
    except Exception as error:
        get_error_handler().record_exception(error)
        if not isinstance(error, (TrainingStopped, CheckpointError)):
            traceback.print_exc()
        if note is None or restarts:
            print(f"fairshard train: error (rank {ranks.rank}): {error}", file=sys.stderr)
        # If a peer was killed, its death is the cause to report: give the launcher time to see it first.
        time.sleep(_NOTICE_S)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # destroying a process group whose peers are gone can hang


def _leave_with(launcher: int) -> None:
    """End this process when the launcher is killed: it has a session of its own, and would train on."""
    while os.getppid() == launcher:
        time.sleep(_POLL_S)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
