"""One rank's part of a call of :class:`~tests.kit.rank_pool.RankPool`, in the process of that rank."""

from __future__ import annotations

import datetime
import gc
import os
import pickle
import random
import sys
import time
import traceback
import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import ProcessGroup

from fairshard.utils.device import device_count, set_device
from tests.kit.dtensor_caches import clear_dtensor_caches

INTERFACE = ("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
"""Environment variable and value: gloo's ranks of one machine meet on the loopback interface."""

_MAX_COLLECTIONS = 4
"""Garbage collections after a call."""

_RELEASE_S = 0.0 if hasattr(Store, "clone") else 0.005
"""Time without the GIL before a group is destroyed, for torch < 2.7: there the destructor keeps the GIL while it waits
for gloo's threads, and one of them may need the GIL to drop its last tensor."""


@dataclass(frozen=True)
class RankCall:
    """Message to one worker: one rank of one call; ``body`` is ``(around, fn, args, kwargs)``, pickled."""

    number: int
    rank: int
    world_size: int
    device: str
    path: list[str]
    body: bytes


def rank_device() -> torch.device:
    """The device on which a function under :func:`run_ranks` puts its model."""
    return torch.device(_rank_device)


_rank_device = "cpu"
_left: weakref.ref[ProcessGroup] | None = None
_num_modules = 0


def answer(call: RankCall, store: TCPStore) -> bytes:
    """Run one rank of ``call`` and return pickled ``(ok, result or traceback)``."""
    try:
        sys.path[:] = call.path
        around, fn, args, kwargs = pickle.loads(call.body)
        freeze_modules()
        with around():
            _join_group(call, store)
            random.seed(0)
            torch.manual_seed(0)
            result = fn(*args, **kwargs)
        return pickle.dumps((True, result))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


def leave_group() -> None:
    """Destroy the default group and the objects that refer to it."""
    global _left
    world = dist.group.WORLD
    if world is None:
        gc.collect()
        return
    _left = weakref.ref(world)
    del world
    if _RELEASE_S:
        time.sleep(_RELEASE_S)
    dist.destroy_process_group()
    clear_dtensor_caches(_rank_device)
    for _ in range(_MAX_COLLECTIONS):  # one collection may leave a cycle for the next
        gc.collect()
        if _left() is None:
            return


def freeze_modules() -> None:
    """Exempt what is alive from collections, if modules have been imported since the last time: they stay.

    Not while the last call's group is alive: each group has threads that poll, and frozen objects would keep it.
    """
    global _num_modules
    if _num_modules != len(sys.modules) and (_left is None or _left() is None):
        _num_modules = len(sys.modules)
        gc.freeze()


def _join_group(call: RankCall, store: TCPStore) -> None:
    global _rank_device
    _rank_device = call.device
    backend = "gloo"
    if call.device != "cpu":
        take_device(call.device, call.rank)
        torch.set_default_device(call.device)
        backend = f"cpu:gloo,{call.device}:{dist.get_default_backend_for_device(call.device)}"
    dist.init_process_group(
        backend,
        store=PrefixStore(str(call.number), store),
        rank=call.rank,
        world_size=call.world_size,
        timeout=datetime.timedelta(minutes=10),
    )


def take_device(kind: str, rank: int) -> None:
    """Make device ``rank`` of type ``kind``, modulo their number, the current one of this process.

    NCCL refuses ranks of one host that share a device, so such ranks get different host ids.
    """
    host, index = divmod(rank, device_count(kind))
    if host:
        os.environ["NCCL_HOSTID"] = f"fairshard-{host}"
    set_device(torch.device(kind, index))
