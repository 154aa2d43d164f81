"""Planted bugs that one rank can show on a real device, with a stream that sleeps.

Each is a site of ``tests/sim/planted.py``, which finds all of them in the engine's source and needs no simulator.
``tests/sim/test_planted.py`` has the table of all sites, and shows each one as a race.
"""

from dataclasses import dataclass

import torch

from tests.gpu.delays import COMPUTE, COPY, UNSHARD
from tests.gpu.training import Way

BF16 = torch.bfloat16
HELD = Way(placement="held", optimizer="cpu")
OFFLOAD = Way(placement="offload")
WRITES = Way(placement="offload", writes=True)


@dataclass(frozen=True)
class Plant:
    """A bug: without ``site`` of `fairshard`, ``way`` of training is wrong while the stream of ``late`` sleeps."""

    claim: str
    site: str
    way: Way
    late: str


PLANTS = (
    Plant("compute waits for the cast", "utils.transfers:wait_all:wait", Way("fully_shard", BF16), UNSHARD),
    Plant("compute waits for the copy from the host", "utils.transfers:wait_all:wait", OFFLOAD, UNSHARD),
    Plant("compute waits for a unit", "params.flat_param:FlatParam.wait_unshard:wait", Way(low=BF16), UNSHARD),
    Plant("gathers wait for the optimizer's step", "engine.shared:Shared.await_step:wait", Way(low=BF16), COMPUTE),
    Plant("freed memory has an event", "engine.shared:Shared.note_free:record", Way(low=BF16), COMPUTE),
    Plant("gathers wait for freed memory", "engine.unit:Unit.unshard:wait-2", Way(low=BF16), COMPUTE),
    Plant("copies to the host wait for sums", "params.shard_grad:GradTransfers.copy:wait", OFFLOAD, COMPUTE),
    Plant("the host waits for gradients", "params.shard_grad:GradTransfers.wait:wait", OFFLOAD, COPY),
    Plant("events make the host wait", "utils.streams:Event.synchronize:wait", OFFLOAD, COPY),
    Plant("a step waits for held gradients", "optim.grad_staging:GradStaging.fetch:wait", HELD, COPY),
    Plant("reads of shards have an event", "engine.root:Root.wait_for_reads:record", WRITES, UNSHARD),
    Plant("the host waits for reads of shards", "engine.root:Root.wait_for_reads:wait", WRITES, UNSHARD),
)
