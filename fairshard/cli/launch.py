"""Start the ranks of ``fairshard train`` on this machine, through torch's own elastic launcher."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fairshard.cli.failure import first_failure
from fairshard.cli.options import TrainOptions, check_options
from fairshard.cli.ranks import Ranks, default_threads
from fairshard.cli.resume import CHECKPOINTS, restarted_options
from fairshard.cli.text import TextPlan

# With these, glibc keeps freed memory instead of returning it to the kernel. Units are gathered and freed all the
# time, and faulting 64 MiB in again costs 19 ms instead of 3.
_KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
_DEFAULTS = {**_KEEP_FREED_MEMORY, "TORCH_CPP_LOG_LEVEL": "ERROR"}


def launch(options: TrainOptions) -> int:
    """Check the options, then run all ranks until they exit; returns the exit code.

    Raises:
        OptionError: the options are invalid; no rank has started.
    """
    nproc = options.num_ranks
    plan = check_options(options, nproc, nproc)
    if (options.max_restarts or options.memory_every) and options.out is None:
        from fairshard.cli.metrics import make_run_folder  # here because it imports the engine

        options = replace(options, out=make_run_folder(None))  # to find it after a failure
    threads = options.threads or default_threads(nproc)
    inherited = {**_DEFAULTS, **os.environ, "OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory(prefix="fairshard-") as logs, _environment(inherited), _own_messages():
        code = _run(options, plan, _launch_config(nproc, options.max_restarts, logs), Path(logs))
    if code and options.memory_every and options.out is not None:
        _report_memory(options.out)
    return code


def _run(options: TrainOptions, plan: TextPlan, config: LaunchConfig, logs: Path) -> int:
    try:
        elastic_launch(config, run_rank)(options, plan)
    except ChildFailedError as error:
        return _report(error, logs)
    except SignalException as error:
        return _stopped(error.sigval)
    except KeyboardInterrupt:
        return _stopped(signal.SIGINT)
    except RendezvousError as error:
        print(f"fairshard train: error: the ranks cannot connect on localhost: {error}", file=sys.stderr)
        return 1
    return 0


def run_rank(options: TrainOptions, plan: TextPlan) -> None:
    """Train as one rank; the elastic launcher runs this in each process."""
    from fairshard.cli.rank import train_rank  # here because the launcher itself does not need the engine

    ranks = Ranks.from_environment()
    assert ranks is not None
    train_rank(restarted_options(options), ranks, plan, quiet=True)


def _launch_config(nproc: int, max_restarts: int, logs: str) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=max_restarts,
        logs_specs=DefaultLogsSpecs(log_dir=logs),
    )


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set ``values`` for the ranks to inherit: glibc and OpenMP read theirs when a process starts."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _own_messages() -> Iterator[None]:
    """Silence the launcher's long log of a failure, which ``_report`` sums up; restore signal handlers."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _report(error: ChildFailedError, logs: Path) -> int:
    """Print which rank failed first and why; returns the exit code."""
    rank, failure = error.get_first_failure()
    if failure.exitcode == 130:
        return _stopped(signal.SIGINT)
    recorded = first_failure(logs.rglob("error.json"))
    if failure.exitcode < 0 or recorded is None:
        message = f"rank {rank} {_ending(failure)}"
    else:
        message = f"rank {recorded.rank} failed: {recorded.message}" if recorded.trace else recorded.message
        sys.stderr.write(recorded.trace)
    print(f"fairshard train: error: {message}", file=sys.stderr)
    return 1


def _report_memory(out: Path) -> None:
    """Print where the run's copies in memory are: only a clean end removes them."""
    from fairshard.checkpoint.memory_folder import memory_left  # here because it imports the engine

    folder = memory_left(str(out.absolute() / CHECKPOINTS))
    if folder is not None:
        print(
            f"fairshard train: the last steps are kept in memory, in {folder}. --resume --out {out} continues from "
            "there. If you do not resume, remove that folder.",
            file=sys.stderr,
        )


def _ending(failure: ProcessFailure) -> str:
    if failure.exitcode >= 0:
        return f"ended with exit code {failure.exitcode}."
    if failure.exitcode == -signal.SIGKILL:
        return "was killed by SIGKILL: the machine may have run out of memory."
    return f"was killed by {signal.Signals(-failure.exitcode).name}."


def _stopped(number: signal.Signals) -> int:
    print(f"\nfairshard train: stopped by {number.name}.", file=sys.stderr)
    return 128 + number
