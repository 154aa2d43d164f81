"""This rank's share of a whole line, kept from forward to backward so that only a few ranks gather the line again.

Ranks ``k * part .. k * part + k - 1`` together keep the whole line, each ``W * S / k`` elements of it::

    W = 4, k = 2     | row 0 | row 1 | row 2 | row 3 |      the buffer
    ranks 0 and 2    | kept ---------|                      after forward
    ranks 1 and 3                    | kept ---------|

Source: ZeRO++ (Wang et al. 2023), secondary partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from fairshard.utils.collectives import Communicator, RowGather


class KeptPart:
    """This rank's share of ``buffer`` ``[W, S]`` among the ranks of ``comm``, whose number divides ``W``."""

    def __init__(self, buffer: Tensor, comm: Communicator) -> None:
        self._rows = buffer.view(comm.world_size, -1)
        self._comm = comm
        self._kept: Tensor | None = None

    @property
    def is_kept(self) -> bool:
        """Whether a share is kept."""
        return self._kept is not None

    def keep(self) -> None:
        """Copy this rank's share out of the buffer before the buffer is freed."""
        self._kept = self._rows[self._comm.rank].clone()

    def write(self) -> RowGather:
        """Write the share into the buffer, which has memory again; returns the gather of the other shares."""
        assert self._kept is not None
        self._rows[self._comm.rank].copy_(self._kept)
        return RowGather(self._comm, self._rows)

    def forget(self) -> None:
        """Drop the share, because the weights may change."""
        self._kept = None


class _Gathered(Protocol):
    def unshard(self, part: KeptPart | None) -> None: ...


class KeptParts:
    """The parts of a unit's flat params, each with the buffer that it is cut from."""

    def __init__(self, buffers: Sequence[Tensor], comm: Communicator) -> None:
        self._parts = [KeptPart(buffer, comm) if buffer.numel() else None for buffer in buffers]

    def end_forward(self, keep: bool) -> None:
        """Copy this rank's shares out of the buffers if ``keep``; otherwise drop older ones, which may be outdated."""
        for part in self._parts:
            if part is not None and keep:
                part.keep()
            elif part is not None:
                part.forget()

    @property
    def are_kept(self) -> bool:
        """Whether a share of each buffer is kept."""
        return all(part is None or part.is_kept for part in self._parts)

    def kept(self) -> list[KeptPart]:
        """The parts whose share is kept."""
        return [part for part in self._parts if part is not None and part.is_kept]

    def unshard(self, flat_params: Sequence[_Gathered]) -> None:
        """Start gathering, each from its part if that was kept. **Collective** over the ranks of the parts."""
        for flat_param, part in zip(flat_params, self._parts, strict=True):
            flat_param.unshard(part if part is not None and part.is_kept else None)

    def forget(self) -> None:
        """Drop the shares."""
        for part in self._parts:
            if part is not None:
                part.forget()
