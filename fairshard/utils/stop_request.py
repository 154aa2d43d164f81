"""Whether a signal has asked this process to stop, and whether all ranks know of it.

A signal may reach one rank only, at any moment. Each backward begins with a message among the ranks
(``engine/reach.py``), and one bit of it says that a rank was asked to stop. So all ranks learn of it in the same
backward, without a message of its own. `StopRequest.num_heard` counts the messages that have reached all ranks: where
it stays the same, the ranks must ask each other in another way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from fairshard.utils.collectives import Communicator


class StopRequest:
    """The state of this process; `request` is its only instance.

    Attributes:
        is_watched: whether anybody reads the other attributes; if not, messages are not counted.
        is_asked: whether this rank was asked to stop; written by a signal handler.
        is_agreed: whether some rank was asked, by the last message that reached all ranks; equal on all of them.
        num_heard: number of messages that have reached all ranks; grows at the same moments of training on all of them.
    """

    def __init__(self) -> None:
        self._comms: list[Communicator] = []
        self._joins_all = False
        self.num_heard = 0
        self.reset()

    def reset(self) -> None:
        """Forget who was asked; messages are no longer counted."""
        self.is_watched = self.is_asked = self.is_agreed = False

    def hear(self, is_asked: bool, comms: Sequence[Communicator]) -> None:
        """A message has passed through ``comms``, one after the other; ``is_asked`` on any rank that it has reached."""
        if comms != self._comms:
            self._comms = list(comms)
            self._joins_all = joins_all(comms)
        if self._joins_all:
            self.num_heard += 1
            self.is_agreed |= is_asked


def joins_all(comms: Sequence[Communicator]) -> bool:
    """Whether a message that passes through ``comms`` in order reaches every rank from every rank.

    It does if the last group has all ranks, or if the last two are the rows and columns of a grid of all ranks: they
    share one rank, and the product of their sizes is the number of ranks.
    """
    num_ranks = dist.get_world_size()
    if comms and comms[-1].world_size == num_ranks:
        return True
    if len(comms) < 2 or comms[-1].world_size * comms[-2].world_size != num_ranks:
        return False
    rows, columns = (set(dist.get_process_group_ranks(comm.group)) for comm in comms[-2:])
    return len(rows & columns) == 1


request = StopRequest()
"""The request of this process."""
