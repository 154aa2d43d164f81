"""Writes the gradients of one source to its columns of a bucket."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MAX_STAGED_NBYTES = 1 << 18
"""Gradients of a source up to this size are first written end to end, and then copied to their columns at once."""


class GradWriter:
    """Makes ``source`` write to ``columns``, or first to a stage, if its gradients are small and fill many runs.

    A second copy of a few KiB takes less host time than a copy for each run. The stage has memory only during `write`.
    """

    def __init__(self, source: Any, columns: Any) -> None:
        self._source, self._columns = source, columns
        self._stage: Tensor | None = None
        self._views: list[list[Tensor]] = source.bucket_views(columns)
        is_small = isinstance(columns, Tensor) and columns.is_cpu and columns.nbytes <= MAX_STAGED_NBYTES
        if is_small and not columns.is_contiguous():
            stage = torch.empty_like(columns, memory_format=torch.contiguous_format)
            views = source.bucket_views(stage)
            if all(run.is_contiguous() for runs in views for run in runs):
                self._stage, self._views = stage, views
                self._storage, self._nbytes = stage.untyped_storage(), stage.nbytes
                self._storage.resize_(0)

    def write(self) -> None:
        """Write the gradients, divided before the sum."""
        source, stage = self._source, self._stage
        if stage is not None:
            self._storage.resize_(self._nbytes)
        source.write_grads(self._views)
        written = self._columns if stage is None else stage
        if source.division.before != 1 and source.hook is None:
            written.div_(source.division.before)
        if stage is not None:
            self._columns.copy_(stage)
            self._storage.resize_(0)
