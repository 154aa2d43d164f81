"""Host buffers to which gradients are copied from the compute device before their step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fairshard.optim.cpu_worker import CPUWorker
from fairshard.params.rule import GradHome
from fairshard.utils.pinned import host_empty_like
from fairshard.views.orig_param import Stepped


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
