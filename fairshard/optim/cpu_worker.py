"""A thread that steps shards in order of submission, and the host buffers in which it finds their gradients."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from fairshard.errors import FairshardError
from fairshard.params.rule import GradHome
from fairshard.utils.host import visible_cpus
from fairshard.utils.pinned import host_empty_like
from fairshard.views.orig_param import Stepped

_log = logging.getLogger("fairshard")


class CPUWorker:
    """Runs jobs one after another. After a failure the following jobs are skipped until `join` reports it."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._executor: ThreadPoolExecutor | None = None
        self._jobs: list[tuple[str, Future[None]]] = []
        self._has_failed = False

    def submit(self, what: str, job: Callable[[], None]) -> None:
        """Queue ``job``; ``what`` names it in errors."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="fairshard-cpu-optimizer")
        self._jobs.append((what, self._executor.submit(self._run, job)))

    def wait_until_left(self, number: int) -> None:
        """Wait until at most ``number`` jobs are running or queued."""
        if len(self._jobs) > number:
            self._jobs[-1 - number][1].exception()  # jobs end in order

    def wait_idle(self) -> None:
        """Wait until no job is running or queued; `join` reports failures."""
        self.wait_until_left(0)

    def clear(self) -> None:
        """Wait for all jobs and discard their results and failures."""
        self.wait_idle()
        self._jobs = []
        self._has_failed = False

    def join(self) -> None:
        """Wait for all jobs.

        Raises:
            FairshardError: a job failed; the message names it.
        """
        jobs = self._jobs
        self.clear()
        for what, future in jobs:
            error = future.exception()
            if error is not None:
                raise FairshardError(f"The CPU step of {what} failed: {error!r}") from error

    def _run(self, job: Callable[[], None]) -> None:
        if self._has_failed:
            return
        try:
            with cpu_threads(self.num_threads):
                job()
        except BaseException:
            self._has_failed = True
            raise


class GradStaging:
    """Two alternating buffers: one gradient is copied while the previous one is stepped."""

    def __init__(self, worker: CPUWorker) -> None:
        self._worker = worker
        self._buffers: list[Tensor | None] = [None, None]
        self._turn = 0

    def fetch(self, flat_param: Stepped | None, grad: Tensor) -> Callable[[], Tensor]:
        """Start the copy of ``grad`` to host memory, if its unit holds it; returns a function that waits for the copy.

        Each buffer is reused two gradients later, so this first waits until at most one job is left.
        """
        if flat_param is None or flat_param.grad.home is not GradHome.HELD:
            return lambda: grad
        self._worker.wait_until_left(1)
        self._turn = 1 - self._turn
        buffer = self._buffers[self._turn]
        if buffer is None or buffer.numel() < grad.numel() or buffer.dtype != grad.dtype:
            buffer = self._buffers[self._turn] = host_empty_like(grad.reshape(-1), grad.device)
        host = buffer[: grad.numel()].view(grad.shape)
        transfers = flat_param.grad.transfers
        landed = transfers.copy(grad, host)

        def wait() -> Tensor:
            transfers.wait(landed, counts=False)
            return host

        return wait


def default_num_threads(overlap: bool) -> int:
    """This rank's share of the host's CPUs; one less if steps overlap with the backward, which needs a thread."""
    cpus = visible_cpus()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size() if dist.is_initialized() else 1))
    threads = max(1, cpus // ranks - (1 if overlap else 0))
    _log.info("CPUOptimizer steps on %d threads (%d CPUs, %d ranks on this host)", threads, cpus, ranks)
    return threads


@contextmanager
def cpu_threads(number: int) -> Iterator[None]:
    """Set torch's number of threads inside the ``with`` block, whatever ``OMP_NUM_THREADS`` is."""
    before = torch.get_num_threads()
    if before == number:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
