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
    """The sum ``[S]`` of one shard, in fp32 or wider; ``mark`` tells later whether the user has zeroed gradients.

    Attributes:
        waiting: the sum.
        leaving: what has waited, and the running backward is to add.
        arrived: what it has added, which a GPU may still read; dropped when the next pass begins.
    """

    def __init__(self) -> None:
        self.waiting: Tensor | None = None
        self.mark: Any = None
        self.leaving: Tensor | None = None
        self._is_taken = False  # the running backward has added it
        self.arrived: Tensor | None = None

    def add(self, reduced: Tensor) -> None:
        """Let ``reduced`` wait, too."""
        wide = reduced.to(torch.promote_types(reduced.dtype, torch.float32))
        self.waiting = wide if self.waiting is None else self.waiting.add_(wide)

    def leave(self) -> None:
        """The running backward is to add what waits."""
        if self.waiting is not None:
            self.leaving, self.waiting, self._is_taken = self.waiting, None, False

    def take(self) -> Tensor | None:
        """What the running backward is to add; given out once."""
        if self._is_taken:
            return None
        self._is_taken = True
        return self.leaving

    def arrive(self) -> None:
        """A sum has arrived; what was added to it cannot come back."""
        if self._is_taken and self.leaving is not None:
            self.arrived = self.leaving if self.leaving.is_cuda else None
            self.leaving = None

    def come_back(self) -> None:
        """The backward that was to add it was interrupted."""
        if self.leaving is not None:
            self.waiting, self.leaving = self.leaving, None

    def drop(self) -> None:
        """The user does not want it any more."""
        self.waiting = self.mark = None
