"""Collectives that run: what a caller waits for."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from fairshard.utils.failures import explain

# "send" or "recv", what is sent or filled, the rank at the other end, and a number to add to the tag.
Message = tuple[str, list[Tensor], int, int]


class Works(list[Any]):
    """Works of ``messages`` in ``group``; those that nobody waits for are moved to ``kept`` together with their memory.

    A model whose backward has raised may be dropped while they run. gloo stops reading what a rank sends if the memory
    for it is gone, so that all later exchanges with that rank would hang.
    """

    __slots__ = ("_kept",)

    def __init__(self, group: ProcessGroup, messages: Sequence[Message], tag: int, kept: list[Any]) -> None:
        super().__init__()
        self._kept = kept
        try:
            for name, tensors, peer, number in messages:
                self.append(getattr(group, name)(tensors, peer, tag + number))
        except Exception as error:
            wait_all(self, error)

    def __del__(self) -> None:
        if any(not work.is_completed() for work in self):
            self._kept[:] = [work for work in (*self._kept, *self) if not work.is_completed()]


class Transfer:
    """A running collective, or work queued before an `Event`. The caller keeps the tensors that it reads.

    ``wait`` makes the current stream (on CPU: the calling thread) wait for it, and returns ``result``. It waits for
    every work even if one fails, because a work that is not waited for would make the next collective time out.

    Attributes:
        works: what to wait for.
        result: what `wait` returns; None: ``finish`` makes it.
    """

    __slots__ = ("_finish", "result", "works")

    def __init__(
        self,
        works: Sequence[Any] = (),
        result: Tensor | None = None,
        finish: Callable[[], Tensor] | None = None,
    ) -> None:
        self.works = works
        self._finish = finish
        self.result = result

    def wait(self) -> Tensor | None:
        """Wait, then return the result of the collective, or None. Called once."""
        wait_all(self.works)
        return self.result if self._finish is None else self._finish()

    def is_completed(self) -> bool:
        """Whether `wait` would return immediately."""
        return all(work.is_completed() for work in self.works)


class Chain(Transfer):
    """A transfer, and one that ``start`` starts with its result when somebody waits."""

    __slots__ = ("_first", "_start")

    def __init__(self, first: Transfer, start: Callable[[Any], Transfer]) -> None:
        super().__init__()
        self._first, self._start = first, start

    def wait(self) -> Tensor | None:
        """See `Transfer.wait`. On CPU the calling thread waits for the first before the second starts."""
        return self._start(self._first.wait()).wait()

    def is_completed(self) -> bool:
        """See `Transfer.is_completed`. *Invariant*: starts nothing, because ranks call it at different times."""
        return False


def wait_all(works: Sequence[Any], failure: Exception | None = None) -> None:
    """Wait for all works, even if one fails; ``failure``: the error of a work that could not start."""
    for work in works:
        try:
            work.wait()
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise explain(failure) from failure
