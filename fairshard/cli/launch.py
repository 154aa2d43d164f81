"""The ranks of ``fairshard train``: starts them on this machine, as torchrun does; or trains as one of them."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, get_error_handler
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fairshard.checkpoint import Preempted
from fairshard.checkpoint.preemption import STATUS
from fairshard.cli.loop import check_options, train_here
from fairshard.cli.options import OptionError, TrainingStopped
from fairshard.cli.ranks import Ranks, default_threads
from fairshard.cli.runs import chosen_options, make_run_folder
from fairshard.errors import CheckpointError

STOPPED = "FAIRSHARD_STOPPED"
"""Variable of a rank of our launcher: the file to make once the step is saved that a signal has asked to save."""

_NOTICE_S = 0.5
_POLL_S = 0.2
_SAVED_WITHIN_S = 5  # after `grace` a rank ends by itself
_ENVIRONMENT = {
    # With these, glibc keeps freed memory instead of returning it to the kernel. Units are gathered and freed all the
    # time, and faulting 64 MiB in again costs 19 ms instead of 3.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # ranks that are restarted meet at a new store
}


def train(given: Mapping[str, Any], words: Sequence[str]) -> int:
    """Train with the options ``given`` by ``words``: as a rank if a launcher has started this process, or launch.

    Raises:
        OptionError: the options are invalid; no rank has started, or no process group has been created.
    """
    ranks = Ranks.from_environment()
    return launch(given, words) if ranks is None else train_rank(ranks, given)


def launch(given: Mapping[str, Any], words: Sequence[str]) -> int:
    """Check the options, then run all ranks with the same words until they exit; returns the exit code."""
    options = chosen_options(given)
    nproc = options.num_ranks
    check_options(options, Ranks(0, nproc, 0, nproc))
    if options.max_restarts and options.out is None:
        options = replace(options, out=make_run_folder(None))  # to find it after a failure
    for number in options.stop_signals[1:]:  # torch's launcher passes SIGTERM on
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGTERM))
    logging.disable(logging.CRITICAL)  # the launcher's long log of a failure, which is summed up here
    with tempfile.TemporaryDirectory(prefix="fairshard-") as logs:
        stopped = Path(logs, "stopped")
        own = {
            STOPPED: str(stopped),
            "OMP_NUM_THREADS": str(options.threads or default_threads(nproc)),
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(options.grace) + _SAVED_WITHIN_S),  # older torch: 30 s
        }
        os.environ.update({**_ENVIRONMENT, **os.environ, **own})
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=stopped.parent.name,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=options.max_restarts,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        text, code = "", 0
        out = [] if options.out is None else [f"--out={options.out}"]
        try:
            elastic_launch(config, sys.executable)("-m", "fairshard.cli.train", *words, *out)
        except SignalException as error:
            text, code = f"stopped by {error.sigval.name}.", 128 + error.sigval
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            message = failure.message["message"] if isinstance(failure.message, dict) else failure.message
            text, code = f"error: rank {rank}: {message}", 1
        except RendezvousError as error:
            text, code = f"error: the ranks cannot connect on localhost: {error}", 1
        if stopped.exists():
            return STATUS
    if text:
        print(f"fairshard train: {text}", file=sys.stderr)
    return code


def train_rank(ranks: Ranks, given: Mapping[str, Any]) -> NoReturn:
    """Train as one rank. **Collective.** Ends the process: 0, 1 after a failure, 75 once a signal's step is saved.

    Under our own launcher it is 0 after such a stop, which the launcher would take for a failure: it is told by a file.
    """
    options, note = chosen_options(given), os.environ.get(STOPPED)
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0)
    if note is None and {"nproc", "max_restarts"} & given.keys():
        raise OptionError(
            "--nproc and --max-restarts are for fairshard train: torchrun, which launches ranks, has both."
        )
    if options.resume_from is not None and restarts:
        raise OptionError(
            "torchrun --max-restarts continues from the newest checkpoint, which with --resume-from may belong to the "
            "dropped steps. Leave one of them out."
        )
    plan = check_options(options, ranks)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends a rank that waits outside of Python, too
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
        code = STATUS if note is None else 0
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
