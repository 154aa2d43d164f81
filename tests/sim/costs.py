"""The cost model of simulated time: a stated machine, and a model whose small shapes stand for large ones.

A task takes a fixed time plus the longer of two: its bytes over a bandwidth, or its operations over a rate. Streams do
not slow each other down; tasks of one stream run one after another. The host takes a fixed time for each task that it
issues, and for work on host memory its bytes over the host's bandwidth. No time depends on the machine that simulates.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fairshard.optim.cpu_worker import CPUWorker
from tests.sim.device import loaded


@dataclass(frozen=True)
class Machine:
    """What one rank has, in bytes and operations per second; of a bandwidth, the part that programs reach."""

    flops: float = 600e12
    """Matrix products of 2-byte elements; wider ones are slower by their width."""
    memory: float = 2.5e12
    """The device's own memory: every other kernel, and copies on the device."""
    link: float = 300e9
    """To other devices, one direction: collectives."""
    host_link: float = 50e9
    """To host memory, each direction."""
    host_memory: float = 75e9
    """The host's memory, this rank's share: steps and norms on the CPU."""
    kernel: float = 3e-6
    """Fixed time of a task on the device."""
    collective: float = 20e-6
    """Fixed time of a collective."""
    launch: float = 5e-6
    """The host's time to issue one task."""


H100 = Machine()
"""An H100 with NVLink (450 GB/s each way at best) and PCIe gen 5; TF32 for fp32."""
H100_PCIE = Machine(link=40e9)
"""The same without NVLink: collectives go over PCIe gen 5."""


def charge(machine: Machine, world_size: int, scale: float) -> None:
    """Charge ``machine``'s costs from now on, with each dimension of a tensor standing for ``scale`` times as many.

    Bytes then count ``scale**2`` times, operations of matrix products ``scale**3`` times.
    """
    made = loaded()  # the host's own memory is not counted: a copy counts the device's bytes
    area, volume = scale**2, scale**3
    made.set_cost("", machine.kernel, area / machine.memory, volume / machine.flops)
    for copy in ("copy_ to device", "copy_ to host"):
        made.set_cost(copy, machine.kernel, area / machine.host_link, 0)
    # A task counts the bytes of its inputs and outputs: W + 1 rows of a collective, of which W - 1 cross the link.
    rows = (world_size - 1) / (world_size + 1)
    for collective in ("all_gather", "reduce_scatter"):
        made.set_cost(collective, machine.collective, rows * area / machine.link, 0)
    made.set_cost("allreduce", machine.collective, (world_size - 1) / world_size * area / machine.link, 0)
    made.set_launch(machine.launch)


class HostCosts(TorchDispatchMode):
    """Charges the calling thread for the work that torch does in host memory."""

    def __init__(self, machine: Machine, scale: float) -> None:
        super().__init__()
        self._collective = machine.collective
        self._per_byte = scale**2 / machine.host_memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its parts come here again
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = func._schema
        if any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns):
            return result  # a view
        values = [*args, *(kwargs.get(one.name) for one in schema.arguments[len(args) :])]
        written = [v for v, one in zip(values, schema.arguments, strict=False) if one.alias_info is not None]
        fills = schema.name in ("aten::copy_", "aten::fill_", "aten::zero_", "aten::_foreach_copy_")  # reads no target
        made = result if all(one.alias_info is None for one in schema.returns) else ()
        touched = [t for t in tree_leaves((values, made, () if fills else written)) if isinstance(t, torch.Tensor)]
        if touched and all(t.is_cpu for t in touched):
            fixed = self._collective if func.namespace in ("c10d", "_c10d_functional") else 0.0
            loaded().reach_host_time(loaded().host_time() + fixed + sum(t.nbytes for t in touched) * self._per_byte)
        return result


@contextlib.contextmanager
def timed_workers(machine: Machine, scale: float) -> Iterator[None]:
    """Give the worker of every `CPUOptimizer` a clock of its own, and charge it, inside the ``with`` block.

    A job begins when it has been submitted and the job before it has ended; whoever waits for it waits until its end.
    """
    submit, wait, clear = CPUWorker.submit, CPUWorker.wait_until_left, CPUWorker.clear
    ends: dict[CPUWorker, list[float]] = {}

    def submit_timed(self: CPUWorker, what: str, job: Any) -> None:
        own, submitted = ends.setdefault(self, []), loaded().host_time()

        def run() -> None:
            loaded().own_host_time(max([submitted, *own[-1:]]))
            try:
                with HostCosts(machine, scale):
                    job()
            finally:
                own.append(loaded().drop_host_time())

        submit(self, what, run)

    def wait_timed(self: CPUWorker, number: int) -> None:
        wait(self, number)
        if len(self._jobs) > number:
            loaded().reach_host_time(ends[self][len(self._jobs) - number - 1])

    def clear_timed(self: CPUWorker) -> None:
        clear(self)
        ends.pop(self, None)

    CPUWorker.submit, CPUWorker.wait_until_left, CPUWorker.clear = submit_timed, wait_timed, clear_timed
    try:
        yield
    finally:
        CPUWorker.submit, CPUWorker.wait_until_left, CPUWorker.clear = submit, wait, clear
