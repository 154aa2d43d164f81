"""Tools for tests: ranks, fake groups, delays on one rank, and counters of copies and collectives.

Ranks come from :mod:`tests.kit.rank_pool`, whose names are also exported here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kit.rank_call import rank_device
from tests.kit.rank_pool import RankPool, RanksFailed, default_pool, run_ranks

__all__ = [
    "CollectiveCounter",
    "CopyCounter",
    "RankPool",
    "RanksFailed",
    "default_pool",
    "delayed",
    "fake_group",
    "rank_device",
    "run_ranks",
]


@contextlib.contextmanager
def fake_group(world_size: int, rank: int = 0) -> Iterator[ProcessGroup]:
    """A default process group of ``world_size`` whose collectives return immediately and transfer nothing.

    For tests of structure (shapes, counts, order) at any world size in one process.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        group = dist.group.WORLD
        assert isinstance(group, ProcessGroup)
        yield group
    finally:
        dist.destroy_process_group()


class CopyCounter(TorchDispatchMode):
    """Counts the operators that write a copy of a tensor, while the mode is on.

    ``counts[name]`` and ``nbytes[name]`` are the number of calls and the bytes written, for each ``name`` in
    ``copy_, _foreach_copy_, cat, clone, _to_copy``; a ``_foreach_copy_`` of any length is one call.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = dict.fromkeys(self._names, 0)
        self.nbytes = dict.fromkeys(self._names, 0)

    _names = ("copy_", "_foreach_copy_", "cat", "clone", "_to_copy")
    _packets = {getattr(torch.ops.aten, name): name for name in _names}

    def total_nbytes(self) -> int:
        """Bytes written by all copies together."""
        return sum(self.nbytes.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = self._packets.get(func.overloadpacket)
        if name is not None:
            self.counts[name] += 1
            written = args[0] if name == "_foreach_copy_" else [result]
            self.nbytes[name] += sum(t.numel() * t.element_size() for t in written)
        return result


@dataclass
class CollectiveCounter:
    """Counts calls of :class:`torch.distributed.ProcessGroup`, independently of fairshard's own counters.

    ``calls`` lists ``(method, nbytes)`` in order while the context is open; ``nbytes`` is the size of the largest
    tensor of the call: the output of an all-gather or ``recv``, the input of a reduce-scatter or ``send``.
    """

    calls: list[tuple[str, int]] = field(default_factory=list)

    _methods = (
        *("send", "recv", "broadcast", "reduce", "gather", "scatter", "barrier"),
        *("allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "all_to_all_single"),
        *("allgather", "_allgather_base", "all_gather_single", "allgather_into_tensor_coalesced"),
        *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
    )

    def count(self, *methods: str) -> int:
        """The number of calls of ``methods``."""
        return sum(method in methods for method, _ in self.calls)

    def nbytes(self, *methods: str) -> int:
        """The bytes of the calls of ``methods``."""
        return sum(nbytes for method, nbytes in self.calls if method in methods)

    def __enter__(self) -> CollectiveCounter:
        self._stack = contextlib.ExitStack()
        for name in filter(lambda name: hasattr(ProcessGroup, name), self._methods):
            self._stack.enter_context(mock.patch.object(ProcessGroup, name, self._counted(name)))
        return self

    def __exit__(self, *unused: object) -> None:
        self._stack.close()

    def _counted(self, name: str) -> Callable[..., Any]:
        original = getattr(ProcessGroup, name)

        def method(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            sizes = [t.numel() * t.element_size() for t in _tensors((args, tuple(kwargs.values())))]
            self.calls.append((name, max(sizes, default=0)))
            return original(group, *args, **kwargs)

        return method


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


@contextlib.contextmanager
def delayed(owner: Any, name: str, rank: int, delay: float | Callable[[], object]) -> Iterator[None]:
    """Delay ``owner.name(...)`` on ``rank`` only.

    ``delay`` is a time in seconds, or a function that blocks until the call may start, for example until a peer sets a
    key in a store; then the order of events does not depend on the speed of the machine.

    Raises:
        AssertionError: ``rank`` never called ``owner.name``, so that nothing was delayed.
    """
    original = getattr(owner, name)
    num_calls = 0

    def late(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        if dist.get_rank() == rank:
            num_calls += 1
            delay() if callable(delay) else time.sleep(delay)
        return original(*args, **kwargs)

    with mock.patch.object(owner, name, late):
        yield
    if dist.get_rank() == rank and not num_calls:
        raise AssertionError(f"{name} must be called on rank {rank} to be late there, but never was.")
