"""What is summed over the ranks of a shard but not yet over its replicas, because the user wants that later.

::

    set_requires_all_reduce(False)    backward    reduce-scatter -> added to what waits
                            (True)    backward    reduce-scatter -> plus what waits -> sum over replicas -> divided
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class KeptSum:
    """The sum ``[S]`` of one shard, in fp32 or wider; ``mark`` tells later whether the user has zeroed gradients."""

    def __init__(self) -> None:
        self.waiting: Tensor | None = None
        self.mark: Any = None
        self._leaving: Tensor | None = None  # for the running backward to add ...
        self._is_taken = False  # ... which it has done
        self._arrived: Tensor | None = None  # a GPU may still read it

    def add(self, reduced: Tensor) -> None:
        """Let ``reduced`` wait, too."""
        wide = reduced.to(torch.promote_types(reduced.dtype, torch.float32))
        self.waiting = wide if self.waiting is None else self.waiting.add_(wide)

    def leave(self) -> None:
        """The running backward is to add what waits."""
        if self.waiting is not None:
            self._leaving, self.waiting, self._is_taken = self.waiting, None, False

    def take(self) -> Tensor | None:
        """What the running backward is to add; given out once."""
        if self._is_taken:
            return None
        self._is_taken = True
        return self._leaving

    def arrive(self) -> None:
        """A sum has arrived; what was added to it cannot come back."""
        if self._is_taken and self._leaving is not None:
            self._arrived = self._leaving if self._leaving.is_cuda else None
            self._leaving = None

    def begin_pass(self) -> None:
        """Nothing is under way."""
        self._arrived = None

    def come_back(self) -> None:
        """The backward that was to add it was interrupted."""
        if self._leaving is not None:
            self.waiting, self._leaving = self._leaving, None

    def drop(self) -> None:
        """The user does not want it any more."""
        self.waiting = self.mark = None
