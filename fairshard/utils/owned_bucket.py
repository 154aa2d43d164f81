r"""A bucket for gradients of parameters that are each whole on one rank: each rank gets those that it owns.

The gradients for one rank follow each other, so that they are one message, and none of them is padded::

    bucket    | A for rank 0 | B for rank 0 | A for rank 1 | B for rank 1 | ...     units A and B
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fairshard.utils.buckets import Bucket
from fairshard.utils.transfers import Transfer
from fairshard.utils.unequal_rows import reduce_rows


class Runs(tuple[Tensor, ...]):
    """A source's part of the bucket: for each rank the run of what it owns."""

    def zero_(self) -> None:
        """Fill with zeros."""
        torch._foreach_zero_(self)

    def div_(self, divisor: float) -> None:
        """Divide in place."""
        torch._foreach_div_(self, divisor)


class OwnedBucket(Bucket):
    """A bucket ``[numel]``; its sources have an `OwnedLayout` each."""

    def _make_columns(self) -> Sequence[Runs]:
        first, widths = self.sources[0], [source.line.layout.widths for source in self.sources]
        by_rank = list(zip(*widths, strict=True))
        self.data = torch.empty(sum(map(sum, by_rank)), dtype=first.reduce_dtype, device=first.compute_device)
        self._rows = self.data.split([sum(each) for each in by_rank])
        runs = self.data.split([width for each in by_rank for width in each])
        return [Runs(runs[index :: len(widths)]) for index in range(len(widths))]

    def _reduce(self, tag: int) -> Transfer:
        return reduce_rows(self.comms.reduce, self.data, self._rows, tag)
