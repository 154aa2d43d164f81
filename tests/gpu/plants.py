"""Planted bugs that one rank can show: each removes a wait of the engine, by name.

`tests/sim/` has the table of all waits, which the simulator checks; here are those that a sleeping stream shows on a
real device at world size 1.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import torch

from fairshard.engine.root import Root
from fairshard.engine.shared import Shared
from fairshard.params.shard_grad import GradTransfers
from fairshard.utils.collectives import Ready
from tests.gpu.delays import COMPUTE, COPY, UNSHARD
from tests.gpu.training import Way

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Plant:
    """A bug: in the context ``planted()`` the engine has it; ``way`` of training shows it with ``late`` streams."""

    name: str
    planted: Callable[[], contextlib.AbstractContextManager]
    way: Way
    late: tuple[str, ...]


def _without(owner, name):
    """Patch ``owner.name`` so that it does nothing."""
    return lambda: mock.patch.object(owner, name, return_value=None)


@contextlib.contextmanager
def _no_wait_for_sums():
    """Copies of gradients to the host start without waiting for the sum that they copy."""
    copy = GradTransfers.copy

    def early(self, source, target):
        with mock.patch.object(self.stream, "wait"):
            return copy(self, source, target)

    with mock.patch.object(GradTransfers, "copy", early):
        yield


PLANTS = (
    Plant("compute waits for the cast", _without(Ready, "wait"), Way("fully_shard", BF16), (UNSHARD,)),
    Plant("compute waits for the copy from the host", _without(Ready, "wait"), Way(placement="offload"), (UNSHARD,)),
    Plant("gathers wait for the optimizer's step", _without(Shared, "await_step"), Way(low=BF16), (COMPUTE,)),
    Plant("gathers wait for freed memory", _without(Shared, "note_free"), Way(low=BF16), (COMPUTE,)),
    Plant("the host waits for gradients", _without(GradTransfers, "wait"), Way(placement="offload"), (COPY,)),
    Plant("copies wait for their sums", _no_wait_for_sums, Way(placement="offload"), (COMPUTE,)),
    Plant(
        "the host waits for reads", _without(Root, "_wait_for_reads"), Way(placement="offload", writes=True), (UNSHARD,)
    ),
)
