"""A rank's part in one block of ``model.join()``, or of PyTorch's ``Join([model])``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.distributed.algorithms.join import JoinHook

from fairshard.checks.usage import assert_idle
from fairshard.checks.values_check import compare_values
from fairshard.engine.root import Root
from fairshard.extras.join.join import Call, Join, leave
from fairshard.extras.join.optimizers import JoinedOptimizers, without_grads
from fairshard.optim.grad_norm import clip_grad_norm_


class Joined(JoinHook):
    """The model ``root`` and its optimizers in one block, which begins at once. **Collective.**

    PyTorch's ``Join`` calls the hooks on a rank that is done; `taking_part` needs no ``Join``.
    """

    def __init__(self, root: Root, throws: bool, divides_by_all: bool, stateful: Iterable[Any]) -> None:
        self._optimizers = JoinedOptimizers(root, stateful)
        calls: dict[str, Call] = {"step": self._optimizers.follow, "clip_grad_norm_": partial(_follow_clip, root)}
        self._join = Join(root, throws, divides_by_all, calls)
        compare_values(root)  # a rank may run out of batches before its first forward
        leave(root)
        assert_idle(root, "join")
        self._join.enter()
        self._optimizers.open(self._join)

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Compute inside; then take part in what the other ranks run until all are done."""
        try:
            with self._join.taking_part(self._optimizers.finish):
                yield
        finally:
            self._close()

    def main_hook(self) -> None:
        """Take part in the next collectives of the other ranks."""
        self._join.follow_pass()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Finish when all ranks are done."""
        try:
            self._optimizers.finish()
        finally:
            self._close()

    def _close(self) -> None:
        self._optimizers.close()
        self._join.close()


def _follow_clip(root: Root, max_norm: float, norm_type: float) -> Callable[[], object]:
    def clip() -> None:
        ignored = dict.fromkeys(param for unit in root.units for param in unit.origin.ignored.params)
        with without_grads(list(ignored)):
            clip_grad_norm_(root.units, max_norm, norm_type)

    return clip
