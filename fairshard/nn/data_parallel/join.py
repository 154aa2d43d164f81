"""Ranks that run out of batches at different times: those that are done keep their part in every gather.

Inside ``join`` each pass begins with a small all-reduce that says who still computes. As soon as a rank does not, the
others say before each gather which unit is next, and the ranks that are done gather it too, and free it at once::

    rank 0 (computes)  | begin | a: gather, compute | b: gather, compute | end |
    rank 1 (is done)   | begin | a: gather, free    | b: gather, free    | end |  next `begin`, or all are done

*Invariant*: what ranks exchange here has one shape, whatever it says, so that one message always meets another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fairshard.errors import FairshardError, TrainingStateError

if TYPE_CHECKING:
    from fairshard.nn.data_parallel.root import Root
    from fairshard.nn.data_parallel.unit import Unit

_BEGIN, _END, _OTHER, _FIRST_UNIT = range(4)


@dataclass(frozen=True)
class _Message:
    """What the ranks said together: how many compute, with grad, have failed; and what the first of them does next."""

    num_active: int
    num_with_grad: int
    num_failed: int
    subject: int


class Join:
    """The part of one rank in one ``with model.join():``."""

    def __init__(self, root: Root, throws: bool) -> None:
        comm = root.units[0].comm
        assert comm is not None
        for unit in root.units:
            if unit.comm is not comm or any(flat_param.comms.replicas for flat_param in unit.flat_params):
                raise ValueError(
                    f"`join` needs all units sharded over one process group, but unit `{unit.fqn or 'root'}` uses "
                    "another one or has replicas. Give every rank the same number of batches instead."
                )
        if root.join is not None:
            raise TrainingStateError("`join` must not be entered inside of itself. Leave the outer `with` block first.")
        self._root = root
        self._comm = comm
        self._throws = throws
        self._index = {unit: index for index, unit in enumerate(root.units)}
        self._is_short = False  # some rank is done, as far as this pass knows
        self._has_failed = False

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Compute inside; then do what is left to do for the ranks that go on."""
        try:
            yield
        except Exception:
            if not self._has_failed:
                self._exchange(num_failed=1)
            raise
        self._is_short = False  # from now on this rank follows what others announce
        while self._shadow():
            pass

    def begin_pass(self) -> None:
        """A forward begins on the ranks that compute."""
        message = self._say(_BEGIN, torch.is_grad_enabled())
        self._is_short = message.num_active < self._comm.world_size
        self._check(message)

    def end_pass(self) -> None:
        """It is over."""
        if self._is_short:
            self._say(_END)

    def announce(self, unit: Unit) -> None:
        """``unit`` is gathered next."""
        if self._is_short:
            self._say(_FIRST_UNIT + self._index[unit])

    def check_all_compute(self, what: str) -> None:
        """Raise, on all ranks, if ``what``, which needs all of them, is called while some are done."""
        if self._say(_OTHER).num_active < self._comm.world_size:
            self._fail(f"`{what}` must not be called inside of `join` once a rank has run out of batches")

    def _shadow(self) -> bool:
        """Do a rank's part in what the others do next; False when there are no others."""
        message = self._exchange()
        self._check(message)
        if message.subject == _OTHER:
            self._fail("Another rank called what needs all ranks, but this one has run out of batches")
        if message.subject >= _FIRST_UNIT:
            unit = self._root.units[message.subject - _FIRST_UNIT]
            unit.is_stale = True  # gathered again, as on the other ranks
            unit.unshard()
            if unit.is_pinned:
                unit.wait_unshard()
            else:
                unit.reshard()
        elif message.subject == _BEGIN:
            for unit in self._root.units:
                for flat_param in unit.flat_params:
                    flat_param.begin_pass()
        return message.num_active > 0

    def _say(self, subject: int, with_grad: bool = False) -> _Message:
        message = self._exchange(num_active=1, num_with_grad=int(with_grad), subject=subject)
        if message.num_failed:
            self._check(message)
        return message

    def _exchange(
        self, num_active: int = 0, num_with_grad: int = 0, num_failed: int = 0, subject: int = 0
    ) -> _Message:
        own = [num_active, num_with_grad, num_failed, subject]
        numbers = torch.tensor(own, dtype=torch.int64, device=self._root.device)
        self._comm.all_reduce(numbers, "sum").wait()
        num_active, num_with_grad, num_failed, subject = map(int, numbers.tolist())
        if num_active and subject % num_active:
            self._fail("Ranks inside of `join` must call the same units in the same order, but did not")
        return _Message(num_active, num_with_grad, num_failed, subject // max(num_active, 1))

    def _check(self, message: _Message) -> None:
        """Raise, on all ranks, where they cannot go on together."""
        if message.num_failed:
            self._fail("Another rank raised inside of `join`")
        if message.subject != _BEGIN or not 0 < message.num_active < self._comm.world_size:
            return
        if self._throws:
            self._fail("A rank has run out of batches, and `throw_on_early_termination=True`")
        if message.num_with_grad:
            self._fail(
                "A rank has run out of batches, and others go on with a forward for training. A rank that is done "
                "cannot step its shard of the parameters, which the others gather"
            )

    def _fail(self, why: str) -> None:
        self._has_failed = True
        raise FairshardError(
            f"{why} (rank {self._comm.rank}). Give every rank the same number of batches to train on; without a "
            "backward (`torch.no_grad()`), ranks may have different numbers of them."
        )
