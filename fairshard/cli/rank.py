"""One rank of ``fairshard train``, as a process: signals, errors, exit codes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import NoReturn

import torch.distributed as dist

from fairshard.checkpoint import Preempted, on_preemption
from fairshard.checkpoint.preemption import STATUS
from fairshard.checkpoint.run_lock import release_all
from fairshard.cli.failure import describe, is_ending, note_end, note_start, other_failed, record_failure
from fairshard.cli.loop import join, train_steps
from fairshard.cli.options import TrainOptions
from fairshard.cli.ranks import Ranks
from fairshard.cli.sharded import TrainingStopped
from fairshard.cli.text import TextPlan
from fairshard.errors import CheckpointError

_NOTICE_S = 0.5
_POLL_S = 0.05


def train_rank(options: TrainOptions, ranks: Ranks, plan: TextPlan, quiet: bool) -> None:
    """Train as one rank. **Collective.** Ends the process with exit code 1 on failure, and 130 on Ctrl-C.

    A signal that asks to stop ends it with exit code 75 once the step is saved; if ``quiet``, the function returns.

    Args:
        quiet: print no error, and note a stop in a file: the launcher reports it, and knows the exit code.
    """
    leave_on_interrupt()
    note_start()
    preemption = on_preemption(None, signals=options.stop_signals, grace=options.grace)
    preemption.is_hopeless = other_failed
    try:
        device = join(options, ranks)
        train_steps(options, ranks, plan, device, preemption)
        note_end()
        threading.Thread(target=_leave_with_launcher, args=(0,), daemon=True).start()
        dist.destroy_process_group()
    except Preempted as stop:
        note_end(stopped_after=stop.step)
        if not quiet:
            _leave(STATUS)
        threading.Thread(target=_leave_with_launcher, args=(STATUS,), daemon=True).start()
        dist.destroy_process_group()
    except Exception as error:
        expected = isinstance(error, (TrainingStopped, CheckpointError))
        record_failure(error, ranks.rank, expected)
        if not quiet:
            print(f"fairshard train: error (rank {ranks.rank}): {describe(error, expected)}", file=sys.stderr)
        # If a peer was killed, its death is the cause to report: give the launcher time to see it first.
        time.sleep(_NOTICE_S)
        _leave(1)


def leave_on_interrupt() -> None:
    """Exit with 130 on Ctrl-C, also while the main thread waits for a rank outside Python, where no handler runs."""
    signal.signal(signal.SIGINT, _interrupted)
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def wait() -> None:
        while signal.SIGINT not in os.read(read, 64):
            pass
        time.sleep(_NOTICE_S)
        _leave(130)

    threading.Thread(target=wait, name="fairshard interrupt", daemon=True).start()


def _interrupted(signum: int, frame: FrameType | None) -> NoReturn:
    _leave(130)


def _leave_with_launcher(code: int) -> None:
    """Exit when a signal ends the launcher, which then waits for this process."""
    while not is_ending():
        time.sleep(_POLL_S)
    _leave(code)


def _leave(code: int) -> NoReturn:
    """Exit immediately: destroying a process group whose peers are gone can hang."""
    release_all()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
