"""Parts of a parameter that must not be cut: rows, blocks of rows, or the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class RowBlocks:
    """Cuts fall only between blocks of ``rows`` rows, which are slices along a parameter's first dimension.

    Ranks may have unequal numbers of blocks of a parameter, or none; the last block may have fewer rows. The gathered
    memory is what computes, without a copy.

    Attributes:
        rows: rows in a block. For a stack of matrices ``[E, m, n]`` a row is a matrix.

    Raises:
        ValueError: ``rows`` is no positive integer.

    Source: veScale-FSDP's ``RaggedShard``, for the idea.
    """

    rows: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.rows, int) or isinstance(self.rows, bool) or self.rows < 1:
            raise ValueError(
                f"`RowBlocks(rows)` must be a number of rows, at least 1, but is {self.rows!r}. Pass 1 to cut between "
                "any two rows, or the number of rows that an optimizer or a quantizer needs together."
            )

    def block_of(self, shape: Sequence[int]) -> int:
        """Number of elements of a parameter of ``shape`` that stay together; at least 1."""
        return max(1, self.rows * prod(shape[1:]))


@dataclass(frozen=True)
class Owned:
    """The whole parameter is on one rank, so that an optimizer that needs all of it steps without communication.

    Attributes:
        rank: the owner, counted among the ranks that shard the parameter; None: the planner chooses.

    Raises:
        ValueError: ``rank`` is no rank.
    """

    rank: int | None = None

    def __post_init__(self) -> None:
        if self.rank is not None and (not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 0):
            raise ValueError(
                f"`Owned(rank)` must be a rank of the mesh's last dimension, from 0 on, or None, but is {self.rank!r}. "
                "Leave it out to let the planner choose an owner."
            )
