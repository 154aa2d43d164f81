"""One gather for all flat params of a unit that has several, because of several dtypes or frozen parameters.

The rows of all flat params lie side by side in one buffer of bytes, aligned::

    buffer [W, bytes]    | bf16, trained | fp32, trained | fp32, frozen |
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from fairshard.utils.collectives import Communicator, RowGather, UserGather
from fairshard.utils.span import cut
from fairshard.utils.transfers import Transfer

_ALIGNED = 16  # bytes: no dtype is wider


class Joined(Protocol):
    """The attributes of a flat param that the gather uses."""

    comm: Communicator
    compute_dtype: torch.dtype
    compute_device: torch.device
    shard_numel: int


class JointGather(Transfer):
    """Gathers the rows of all ``flat_params`` at once, after the last one was written."""

    __slots__ = ("_gather", "_next", "_transfer", "buffer", "columns")

    def __init__(self, flat_params: Sequence[Joined]) -> None:
        super().__init__()
        first = flat_params[0]
        nbytes = [each.shard_numel * each.compute_dtype.itemsize for each in flat_params]
        starts = list(accumulate((cut(each, _ALIGNED) * _ALIGNED for each in nbytes), initial=0))
        shape = first.comm.world_size, starts[-1]
        self.buffer = torch.empty(shape, dtype=torch.uint8, device=first.compute_device)
        self.columns: list[Tensor] = [
            self.buffer[:, start : start + size].view(each.compute_dtype)
            for start, size, each in zip(starts, nbytes, flat_params, strict=False)
        ]
        self._gather = self._next = RowGather(first.comm, self.buffer)
        self._transfer: Transfer | None = None

    def start(self, tag: int) -> Transfer:
        """Gather all rows; this rank's are already written. **Collective.**"""
        gather, self._next = self._next, self._gather
        self._transfer = gather.start(tag)
        return self

    def through(self, user: UserGather | None) -> JointGather:
        """Itself; the next start gathers by ``user``."""
        self._next = self._gather.through(user)
        return self

    def wait(self) -> None:
        """Wait for all rows."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.wait()


class DeferredGather:
    """Replaces the gather of a flat param that is not the last of its unit: the last one starts ``joint``."""

    def __init__(self, joint: JointGather) -> None:
        self._joint = joint

    def start(self, tag: int) -> Transfer:
        """Return the transfer of all flat params; starts nothing."""
        return self._joint

    def through(self, user: UserGather | None) -> DeferredGather:
        """Itself: it gathers nothing."""
        return self
