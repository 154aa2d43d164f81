"""Start the ranks of ``fairshard train`` on this machine, through torch's own elastic launcher."""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fairshard.cli.checks import check_options
from fairshard.cli.failure import Failure, first_failure, note_ending, num_stopped
from fairshard.cli.option_error import OptionError
from fairshard.cli.options import TrainOptions
from fairshard.cli.ranks import Ranks, default_threads
from fairshard.cli.resume import CHECKPOINTS, check_text, restarted_options
from fairshard.cli.text import TextPlan

# With these, glibc keeps freed memory instead of returning it to the kernel. Units are gathered and freed all the
# time, and faulting 64 MiB in again costs 19 ms instead of 3.
_KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
_STATUS = 75  # see fairshard.checkpoint.preemption, which imports the engine
_SAVED_WITHIN_S = 5  # after `grace` a rank ends by itself
_POLL_S = 0.5
_DEFAULTS = {**_KEEP_FREED_MEMORY, "TORCH_CPP_LOG_LEVEL": "ERROR"}


def launch(options: TrainOptions) -> int:
    """Check the options, then run all ranks until they exit; returns the exit code.

    Raises:
        OptionError: the options are invalid, or another run uses the folder; no rank has started.
    """
    nproc = options.num_ranks
    plan = check_options(options, nproc, nproc)
    check_text(options, plan)
    _check_unused(options.out)
    if options.max_restarts and options.out is None:
        from fairshard.cli.metrics import make_run_folder  # here because it imports the engine

        options = replace(options, out=make_run_folder(None))  # to find it after a failure
    threads = options.threads or default_threads(nproc)
    inherited = {**_DEFAULTS, **os.environ, "OMP_NUM_THREADS": str(threads)}
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fairshard-")))
        stack.enter_context(_environment(inherited))
        stack.enter_context(_own_messages())
        stack.enter_context(_restarts_told(logs, options.max_restarts))
        stack.enter_context(_ending_noted(logs))
        for number in options.stop_signals[1:]:
            signal.signal(number, _pass_on)
        return _run(options, plan, _launch_config(nproc, options, logs), logs)


def _run(options: TrainOptions, plan: TextPlan, config: LaunchConfig, logs: Path) -> int:
    try:
        elastic_launch(config, run_rank)(options, plan)
    except ChildFailedError as error:
        return _report(error, logs)
    except SignalException as error:
        return _STATUS if num_stopped(logs) == config.nproc_per_node else _stopped(error.sigval)
    except KeyboardInterrupt:
        return _stopped(signal.SIGINT)
    except RendezvousError as error:
        print(f"fairshard train: error: the ranks cannot connect on localhost: {error}", file=sys.stderr)
        return 1
    return _STATUS if num_stopped(logs) else 0


def run_rank(options: TrainOptions, plan: TextPlan) -> None:
    """Train as one rank; the elastic launcher runs this in each process."""
    from fairshard.cli.rank import train_rank  # here because the launcher itself does not need the engine

    ranks = Ranks.from_environment()
    assert ranks is not None
    train_rank(restarted_options(options), ranks, plan, quiet=True)


def _launch_config(nproc: int, options: TrainOptions, logs: Path) -> LaunchConfig:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=options.max_restarts,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs)),
    )
    if "shutdown_timeout" in {field.name for field in fields(LaunchConfig)}:  # older torch kills after 30 s
        config.shutdown_timeout = math.ceil(options.grace) + _SAVED_WITHIN_S
    return config


def _check_unused(out: Path | None) -> None:
    """Raise if a run on this machine uses the folder; others are found when the ranks take its lock."""
    if out is None or not (out / CHECKPOINTS / ".lock").exists():
        return
    from fairshard.checkpoint.run_lock import lock_of  # here because it imports the engine

    other = lock_of(str(out / CHECKPOINTS)).other()
    if other is not None:
        raise OptionError(f"--out {out} is in use by {other}. Wait for that run, end it, or pass another folder.")


def _pass_on(number: int, frame: FrameType | None) -> None:
    """Send a signal that asks to stop to all ranks; torch's launcher passes on only those that end it."""
    for child in multiprocessing.active_children():
        if child.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, number)


@contextlib.contextmanager
def _restarts_told(logs: Path, max_restarts: int) -> Iterator[None]:
    """Print why the ranks are restarted, as soon as one has failed; the launcher reports the last failure."""
    is_over = threading.Event()

    def tell() -> None:
        for attempt in range(max_restarts):
            while (found := first_failure(logs.rglob(f"attempt_{attempt}/*/error.json"))) is None:
                if is_over.wait(_POLL_S) or any(logs.rglob(f"attempt_{attempt + 1}")):
                    break
            if is_over.is_set():
                return
            message = "a rank was killed." if found is None else _text(found)
            for line in (message, f"restart {attempt + 1} of {max_restarts}"):
                print(f"fairshard train: {line}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=tell, name="fairshard restarts", daemon=True)
    if max_restarts:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        if max_restarts:
            thread.join()  # it reads `logs`, which is removed next


@contextlib.contextmanager
def _ending_noted(logs: Path) -> Iterator[None]:
    """Note for the ranks that a signal ends the launcher.

    Ranks that have finished wait for a word of torch's launcher, which it does not give after a signal: it waits until
    they exit, and then kills them. torch sets its own handlers for these signals, so a thread reads which arrive.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)

    def note() -> None:
        numbers = b""
        while 0 not in numbers:
            numbers = os.read(read, 64)
            if any(number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT) for number in numbers):
                note_ending(logs)
        os.close(read)

    thread = threading.Thread(target=note, name="fairshard launcher", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(write, b"\0")
        thread.join()
        os.close(write)


def _text(failure: Failure) -> str:
    return f"rank {failure.rank} failed: {failure.message}" if failure.trace else failure.message


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
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
    handlers = {number: signal.getsignal(number) for number in numbers}
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
        message = _text(recorded)
        sys.stderr.write(recorded.trace)
    print(f"fairshard train: error: {message}", file=sys.stderr)
    return 1


def _ending(failure: ProcessFailure) -> str:
    if failure.exitcode >= 0:
        return f"ended with exit code {failure.exitcode}."
    if failure.exitcode == -signal.SIGKILL:
        return "was killed by SIGKILL: the machine may have run out of memory."
    return f"was killed by {signal.Signals(-failure.exitcode).name}."


def _stopped(number: signal.Signals) -> int:
    print(f"\nfairshard train: stopped by {number.name}.", file=sys.stderr)
    return 128 + number
