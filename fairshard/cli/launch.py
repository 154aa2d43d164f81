"""Start the ranks of ``fairshard train`` on this machine, as torchrun does."""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import sys
import tempfile
import uuid
from dataclasses import replace
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fairshard.cli.loop import check_options
from fairshard.cli.ranks import Ranks, default_threads
from fairshard.cli.runs import chosen_options, make_run_folder

STOPPED = "FAIRSHARD_STOPPED"
"""Variable of a rank: the file to make once the step is saved that a signal has asked to save."""

_STOPPED_STATUS = 75
_SAVED_WITHIN_S = 5  # after `grace` a rank ends by itself
_ENVIRONMENT = {
    # With these, glibc keeps freed memory instead of returning it to the kernel. Units are gathered and freed all the
    # time, and faulting 64 MiB in again costs 19 ms instead of 3.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # ranks that are restarted meet at a new store
}


def launch(arguments: argparse.Namespace) -> int:
    """Check the options, then run all ranks until they exit; returns the exit code.

    Raises:
        OptionError: the options are invalid; no rank has started.
    """
    options = chosen_options(vars(arguments))
    nproc = options.num_ranks
    check_options(options, Ranks(0, nproc, 0, nproc))
    if options.max_restarts and options.out is None:
        options = replace(options, out=make_run_folder(None))  # to find it after a failure
    line = replace(options, nproc=None, max_restarts=0).line()
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
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=options.max_restarts,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        text, code = "", 0
        try:
            elastic_launch(config, sys.executable)("-m", "fairshard.cli.train", *line)
        except SignalException as error:
            text, code = f"stopped by {error.sigval.name}.", 128 + error.sigval
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            message = failure.message["message"] if isinstance(failure.message, dict) else failure.message
            text, code = f"error: rank {rank}: {message}", 1
        except RendezvousError as error:
            text, code = f"error: the ranks cannot connect on localhost: {error}", 1
        if stopped.exists():
            return _STOPPED_STATUS
    if text:
        print(f"fairshard train: {text}", file=sys.stderr)
    return code
