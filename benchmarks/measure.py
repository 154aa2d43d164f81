"""What is read while an engine runs: this process's memory, and what its collectives carry."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def resident_bytes() -> int:
    """Return the memory this process holds now."""
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """Return the most this process has held since `reset_peak_resident`."""
    return _status("VmHWM")


def reset_peak_resident() -> None:
    """Reset the peak to the memory held now (Linux: 5 is the high-water mark's number, see proc(5))."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def loaded_module(name: str, attribute: str) -> ModuleType | None:
    """Find a module of fairshard by its last name and one of its attributes; None where fairshard does not run.

    Files move from commit to commit, and a benchmark must measure the same on both sides of a move.
    """
    names = [path for path in sys.modules if path.startswith("fairshard.") and path.endswith(f".{name}")]
    found = [sys.modules[path] for path in names if hasattr(sys.modules[path], attribute)]
    if not found and "fairshard.nn" in sys.modules:  # a simulated device brings other modules of it into peers
        raise RuntimeError(
            f"A loaded module of fairshard must be called {name!r} and have {attribute!r}, but there is none. If "
            "either was renamed, change the name in benchmarks/measure.py."
        )
    return found[0] if found else None


# Bytes that a rank receives, from (bytes of all inputs, bytes of all outputs, world size). The same rule
# serves every way to do the work: an all-reduce is a reduce-scatter and an all-gather, a direct exchange is
# its receives.
_RECEIVED: dict[str, Callable[[int, int, int], int]] = {
    "_allgather_base_": lambda inputs, outputs, world: outputs - inputs,
    "allgather_": lambda inputs, outputs, world: outputs - inputs,
    "allgather_into_tensor_coalesced_": lambda inputs, outputs, world: outputs - inputs,
    "_reduce_scatter_base_": lambda inputs, outputs, world: inputs - outputs,
    "reduce_scatter_": lambda inputs, outputs, world: inputs - outputs,
    "reduce_scatter_tensor_coalesced_": lambda inputs, outputs, world: inputs - outputs,
    "allreduce_": lambda inputs, outputs, world: 2 * outputs * (world - 1) // world,
    "allreduce_coalesced_": lambda inputs, outputs, world: 2 * outputs * (world - 1) // world,
    "alltoall_base_": lambda inputs, outputs, world: outputs * (world - 1) // world,
    "broadcast_": lambda inputs, outputs, world: outputs,
    "recv_": lambda inputs, outputs, world: outputs,
    "send": lambda inputs, outputs, world: 0,
    "barrier": lambda inputs, outputs, world: 0,
}


class CommCounter(TorchDispatchMode):
    """Count the c10d calls made in this thread, by kind, with the bytes that this rank receives.

    Every engine's collectives pass through the dispatcher: also those of DDP's C++ reducer, which patched
    Python functions miss, and ``isend`` / ``irecv``, which CommDebugMode misses. So do those of DTensors.
    """

    def __init__(self, world_size: int):
        super().__init__()
        self.world_size = world_size
        self.counts: dict[str, int] = {}
        self.received: dict[str, int] = {}
        from torch.distributed.tensor import DTensor  # not at the top: it would count to the memory at the start

        self._dtensor = DTensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, self._dtensor) for kind in types):
            return NotImplemented  # becomes operators on local tensors, and collectives
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._count(func._opname, _RECEIVED[func._opname](*_input_and_output_bytes(func, args), self.world_size))
        elif func.namespace == "_c10d_functional" and func._opname != "wait_tensor":
            copies = 2 if func._opname == "all_reduce" else 1
            self._count(func._opname, copies * result.nbytes * (self.world_size - 1) // self.world_size)
        return result

    def _count(self, kind: str, received: int) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.received[kind] = self.received.get(kind, 0) + received


def _input_and_output_bytes(func: Any, args: Any) -> tuple[int, int]:
    """Sum the bytes of the tensors that ``func`` reads and writes, as its schema names them."""
    inputs = outputs = 0
    for argument, value in zip(func._schema.arguments, args, strict=False):
        nbytes = sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
        if argument.name.startswith("output") or argument.name == "tensors":
            outputs += nbytes
        else:
            inputs += nbytes
    return inputs, outputs
