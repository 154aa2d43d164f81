"""A model of the time of one step: the plan's messages and the blocks' arithmetic on three lanes.

::

    host       issues kernels and messages in program order, ahead of the device
    compute    one unit after another; a unit starts when it is gathered
    messages   one collective after another; a gather also waits for the memory that was freed last

Each lane does one thing after another. Lanes do not slow each other down, all ranks are alike, and nothing fails: a
step of a real machine takes longer.
"""

from __future__ import annotations

from dataclasses import dataclass

from scaling.machines import Machine
from scaling.shapes import Shape
from scaling.traffic import AGREEMENT_NBYTES, GATHER, REPLICAS, Message, Ranks, Traffic

KERNELS = 14
"""Kernels of a block's forward; a backward has twice as many."""
ACCESSES = 28
"""16-bit values that the elementwise kernels of a block's forward read or write, for each token and element of the
width: two norms (4), two residual sums (6), activation (8), the copies of queries, keys and values (6), biases and
masks (4)."""
SCORE_ACCESSES = 8
"""The same for each attention score that is not fused: product, scale and mask, softmax, dropout, product."""
ADAMW_NBYTES = 28
"""Bytes that AdamW reads and writes for each element: weight, gradient and two moments in, three of them out."""


@dataclass(frozen=True)
class HostTime:
    """Measured host seconds of the engine for one unit in one step, above those of plain torch."""

    unit: float


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and of its parts. ``compute`` and ``optimizer`` are work of the device; the rest of ``total``
    is exposed. ``messages``: all collectives, most of them beside compute. ``host``: the host's own time."""

    total: float
    compute: float
    messages: float
    host: float
    optimizer: float

    @property
    def exposed(self) -> float:
        """Seconds in which the device neither computes nor steps."""
        return self.total - self.compute - self.optimizer

    def tflops(self, shape: Shape, recomputes: bool) -> float:
        """Throughput of one accelerator; ``recomputes`` counts the forward that checkpointing runs again."""
        return shape.flops(recomputes) / self.total / 1e12


def message_seconds(message: Message, machine: Machine, ranks: Ranks) -> float:
    """Seconds of one collective: a ring through all ranks, whose slower part is NVLink or the nodes' network.

    Shards are neighbours: a group of shards that fits into a node uses NVLink alone, and its replicas the network, one
    ring for each of the ``node_size`` ranks of a node.
    """
    num_ranks = message.num_ranks
    if num_ranks == 1:
        return 0.0
    stride = ranks.num_shards if message.kind == REPLICAS else 1
    in_node = max(min(machine.node_size // stride, num_ranks), 1)
    num_nodes = -(-num_ranks // in_node)
    rings = machine.node_size // in_node  # groups that share the network of a node
    link = message.nbytes * (num_ranks - 1) / num_ranks / machine.link if in_node > 1 else 0.0
    network = rings * message.nbytes * (num_nodes - 1) / num_nodes / machine.network
    hops = machine.network_hop * (num_nodes - 1) + machine.link_hop * (num_ranks - num_nodes)
    seconds = max(link, network) / machine.link_share + hops
    return machine.base_latency + (2 * seconds if message.kind == REPLICAS else seconds)


def block_seconds(shape: Shape, machine: Machine) -> float:
    """Seconds of one block's forward on the device."""
    attention = shape.attention_flops()
    products = shape.block_flops() - attention
    share = machine.attention_share if shape.fused else machine.product_share
    accesses = ACCESSES * shape.num_tokens * shape.dim + SCORE_ACCESSES * shape.scores_numel()
    arithmetic = products / machine.product_share + attention / share
    return arithmetic / machine.flops + 2 * accesses / (machine.memory * machine.memory_share)


def agreement_seconds(machine: Machine, ranks: Ranks) -> float:
    """Host seconds of the exchange at the start of a backward: a gloo ring in each group."""
    others = ranks.num_shards - 1 + ranks.num_replicas - 1
    return others * (machine.host_hop + AGREEMENT_NBYTES / machine.host_network)


class _Lanes:
    """The moments at which the three lanes are free, and the device's own work so far."""

    def __init__(self, machine: Machine, ranks: Ranks, host: HostTime) -> None:
        self.machine, self.ranks, self.host_time = machine, ranks, host
        self.host = self.compute = self.lane = 0.0
        self.busy = self.messages = 0.0
        self.freed = 0.0  # when the newest memory was freed
        self.gathered: dict[str, float] = {}

    def gather(self, message: Message) -> None:
        """Issue a gather; it needs the memory that was freed last."""
        self.gathered[message.units[0]] = self._send(message, max(self.host, self.freed))

    def reduce(self, message: Message) -> None:
        """Issue the reduction of gradients that are ready when compute has come this far."""
        self._send(message, max(self.host, self.compute))

    def run(self, name: str, seconds: float, num_kernels: int) -> None:
        """Compute with unit ``name``."""
        self.host += num_kernels * self.machine.launch
        self.compute = max(self.compute, self.host, self.gathered[name]) + seconds
        self.busy += seconds

    def _send(self, message: Message, ready: float) -> float:
        seconds = message_seconds(message, self.machine, self.ranks)
        self.lane = max(self.lane, ready) + seconds
        self.messages += seconds
        return self.lane


def step_time(shape: Shape, traffic: Traffic, machine: Machine, ranks: Ranks, host: HostTime) -> StepTime:
    """The time of a step of ``shape`` with every block checkpointed, whose messages are ``traffic``."""
    lanes = _Lanes(machine, ranks, host)
    root, *blocks = traffic.forward
    forward = block_seconds(shape, machine)
    head = shape.head_flops() / (machine.flops * machine.product_share)
    lanes.gather(root)
    lanes.gather(blocks[0])
    for index, block in enumerate(blocks):
        lanes.host += host.unit / 2
        if index + 1 < len(blocks):  # its gather is issued when this unit starts
            lanes.gather(blocks[index + 1])
        lanes.run(block.units[0], forward, KERNELS)
        lanes.freed = lanes.compute
    lanes.run(root.units[0], head, 2)
    _backward(lanes, traffic, {root.units[0]: 2 * head}, 3 * forward, agreement_seconds(machine, ranks))
    end = max(lanes.compute, lanes.lane, lanes.host)
    numel = sum(message.nbytes for message in traffic.forward) / 2 / ranks.num_shards  # 2 bytes an element
    optimizer = ADAMW_NBYTES * numel / (machine.memory * machine.memory_share)
    return StepTime(end + optimizer, lanes.busy, lanes.messages, lanes.host, optimizer)


def _backward(lanes: _Lanes, traffic: Traffic, own: dict[str, float], block: float, agreement: float) -> None:
    """Walk the schedule; as in the engine, a reduction yields to the gather that follows it."""
    lanes.host += agreement
    waiting: list[Message] = []
    for mark in traffic.backward:
        for message in mark.gathers:
            assert message.kind == GATHER
            lanes.gather(message)
        if mark.word == "at":
            for message in waiting:
                lanes.reduce(message)
            waiting = []
            lanes.host += lanes.host_time.unit / 2
            lanes.run(mark.unit, own.get(mark.unit, block), 3 * KERNELS)
            lanes.freed = lanes.compute
        waiting += mark.sends
    for message in waiting:
        lanes.reduce(message)
