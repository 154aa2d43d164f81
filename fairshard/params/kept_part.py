"""This rank's share of a whole line, kept from forward to backward so that only a few ranks gather the line again.

Ranks ``k * part .. k * part + k - 1`` together keep the whole line, each ``W * S / k`` elements of it::

    W = 4, k = 2     | row 0 | row 1 | row 2 | row 3 |      the buffer
    ranks 0 and 2    | kept ---------|                      after forward
    ranks 1 and 3                    | kept ---------|

Source: ZeRO++ (Wang et al. 2023), secondary partition.
"""

from __future__ import annotations

from torch import Tensor

from fairshard.utils.collectives import Communicator, RowGather


class KeptPart:
    """This rank's share of ``buffer`` ``[W, S]`` among the ranks of ``comm``, whose number divides ``W``.

    ``kept``: the share; None while the weights may change.
    """

    def __init__(self, buffer: Tensor, comm: Communicator) -> None:
        self._rows = buffer.view(comm.world_size, buffer.numel() // comm.world_size)
        self._comm = comm
        self.kept: Tensor | None = None

    def keep(self, keeps: bool) -> None:
        """If ``keeps``, copy this rank's share out of the buffer before the buffer is freed; otherwise drop it."""
        self.kept = self._rows[self._comm.rank].clone() if keeps else None

    def write(self) -> RowGather:
        """Write the share into the buffer, which has memory again; returns the gather of the other shares."""
        assert self.kept is not None
        self._rows[self._comm.rank].copy_(self.kept)
        return RowGather(self._comm, self._rows)
