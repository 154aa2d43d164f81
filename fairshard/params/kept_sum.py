"""A sum over the ranks of a shard that is not yet summed over its replicas, because the user asked to do that later.

::

    set_requires_all_reduce(False)    backward    reduce-scatter -> added to `waiting`
                            (True)    backward    reduce-scatter -> plus `waiting` -> sum over replicas -> divided
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class KeptSum:
    """The sum ``[S]`` of one shard, in fp32 or wider; ``mark`` shows later whether the user has zeroed gradients.

    Attributes:
        waiting: the sum.
        lent: the sum that the running backward adds.
    """

    def __init__(self) -> None:
        self.waiting: Tensor | None = None
        self.mark: Any = None
        self.lent: Tensor | None = None
        self._is_taken = False  # the running backward has added it

    def add(self, reduced: Tensor) -> None:
        """Add ``reduced`` to the waiting sum."""
        wide = reduced.to(torch.promote_types(reduced.dtype, torch.float32))
        self.waiting = wide if self.waiting is None else self.waiting.add_(wide)

    def lend(self) -> None:
        """Lend the waiting sum to the running backward, which adds it."""
        if self.waiting is not None:
            self.lent, self.waiting, self._is_taken = self.waiting, None, False

    def take(self) -> Tensor | None:
        """The sum that the running backward must add; None from the second call on."""
        if self._is_taken:
            return None
        self._is_taken = True
        return self.lent

    def complete(self) -> None:
        """A reduction that includes the lent sum has finished: `restore` does nothing from now on."""
        if self._is_taken and self.lent is not None:
            self.lent = None

    def restore(self) -> None:
        """Keep the lent sum for the next backward: the one that should have added it was interrupted."""
        if self.lent is not None:
            self.waiting, self.lent = self.lent, None

    def drop(self) -> None:
        """Drop the waiting sum."""
        self.waiting = self.mark = None
