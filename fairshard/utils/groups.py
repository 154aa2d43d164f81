"""Process groups: those that fairshard makes, and the `Communicator` of each."""

import contextlib
import datetime
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from fairshard.utils.collectives import Communicator, communicators, gather_objects
from fairshard.utils.failures import explained

EXCHANGE_RANKS = range(2, 5)
"""Numbers of ranks that exchange rows directly, on gloo."""

_HOST = torch.device("cpu")


def communicator(group: ProcessGroup) -> Communicator:
    """The only `Communicator` of ``group``; **collective** the first time: it sets up groups of its ranks."""
    found = communicators.get(group)
    if found is None:
        backend = backend_name(group, _HOST)
        exchanges = backend == "gloo" and group.size() in EXCHANGE_RANKS
        found = communicators[group] = Communicator(group, backend, gloo_twin(group) if exchanges else None)
    return found


def on_host(comm: Communicator) -> Communicator:
    """The ranks of ``comm``, for tensors in host memory. **Collective** the first time."""
    if backend_name(comm.group, _HOST) is None and comm.host_group is None:
        comm.host_group = gloo_twin(comm.group)
        communicator(comm.host_group)
    return comm.host


_Groups = weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup]
_groups_of_one = _Groups()


def group_of_one() -> ProcessGroup:
    """The group of this rank alone."""
    world = default_group()
    found = _groups_of_one.get(world)
    if found is None:
        with _named_alike(None):
            found = _groups_of_one[world] = dist.new_group([dist.get_rank(world)], use_local_synchronization=True)
    return found


@explained
def subgroup(ranks: list[int], within: ProcessGroup) -> ProcessGroup:
    """A new group of ``ranks``, with the timeout of ``within``, of which they are. **Collective** over ``within``.

    ``ranks``: their numbers in the default group.
    """
    with _named_alike(within):
        group: ProcessGroup = dist.new_group(ranks, timeout_of(within), use_local_synchronization=True)
    return group


_OWN_NUMBERS = 1 << 20
"""The groups that `_named_alike` names are counted from here, apart from those that others make."""

_numbers = [_OWN_NUMBERS]  # the next


@contextlib.contextmanager
def _named_alike(within: ProcessGroup | None) -> Iterator[None]:
    """A group made in the block has one name on all ranks of ``within``. **Collective** over them; None: this rank.

    torch names a group by its ranks and by the number of groups that a rank has (to 2.13), or has made (from 2.14).
    Ranks with different numbers, because some have groups of their own, would wait for each other under two names.
    The number of groups made is put back: torch gives it to groups that ranks outside of ``within`` make, too.
    """
    names: Any = _world.pg_names
    own = most = len(names), _numbers[0]
    if within is not None and backend_name(within, _HOST) != "fake":
        most = tuple(map(max, *gather_objects(own, within))) if within.size() > 1 else own
    extra = [object() for _ in range(most[0] - own[0])]
    names.update(dict.fromkeys(extra, ""))
    _world.group_count, made = most[1], _world.group_count
    _numbers[0] = most[1] + 1
    try:
        yield
    finally:
        _world.group_count = made
        for each in extra:
            del names[each]


def default_group() -> ProcessGroup:
    """The default process group.

    Raises:
        ValueError: it is not initialised.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "torch.distributed must be initialised before a module is sharded, but there is no default process "
            "group. Call torch.distributed.init_process_group(...) first (torchrun sets its environment)."
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def backend_name(group: ProcessGroup, device: torch.device) -> str | None:
    """Name of the backend that ``group`` uses for tensors of ``device``; None if it has none."""
    config = dict(entry.split(":") for entry in dist.get_backend_config(group).split(",") if ":" in entry)
    return config.get(device.type)


def communicates(group: ProcessGroup, device: torch.device) -> bool:
    """Whether the backend that ``group`` uses for ``device`` reads and writes the memory of ``device`` itself.

    Gloo, MPI and fake groups do not: a model in host memory stays there with them, even if there is an accelerator.
    """
    return backend_name(group, device) not in (None, "gloo", "mpi", "fake", "threaded")


_parts: "weakref.WeakKeyDictionary[ProcessGroup, dict[int, ProcessGroup]]" = weakref.WeakKeyDictionary()


def part_of(comm: Communicator, size: bool | int, fqn: str) -> Communicator | None:
    """The group of ``size`` consecutive ranks of ``comm`` with this rank; None for a bool, one rank, or all ranks.

    **Collective** on the first use of a size.

    Raises:
        ValueError: ``size`` does not divide the number of ranks.
    """
    if isinstance(size, bool) or comm.world_size in (1, size):
        return None
    if comm.world_size % size:
        raise ValueError(
            f"`reshard_after_forward` must divide the number of ranks, {comm.world_size}, but is {size} for unit "
            f"`{fqn or 'root'}`. Pass a divisor, or True."
        )
    known = _parts.setdefault(comm.group, {})
    if size not in known:
        ranks = dist.get_process_group_ranks(comm.group)
        first = comm.rank - comm.rank % size
        known[size] = subgroup(ranks[first : first + size], comm.group)
    return communicator(known[size])


_host_groups = _Groups()


@explained
def host_group() -> ProcessGroup | None:
    """A separate gloo group of all ranks for work beside training. **Collective** on the first call.

    None if torch.distributed is not initialised: then there is one process. It has the timeout of the default group;
    ranks that may work longer than others meanwhile send messages (see ``checkpoint/agreement.py``).
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    world = default_group()
    if world not in _host_groups:
        _host_groups[world] = dist.new_group(backend="gloo", timeout=timeout_of(world))
    return _host_groups[world]


def fail_at_once(group: ProcessGroup | None) -> None:
    """Make later operations of ``group``, whose ranks are no longer all there, fail without waiting for them."""
    if group is not None:
        _set_pg_timeout(datetime.timedelta(milliseconds=1), group)


def timeout_of(group: ProcessGroup) -> datetime.timedelta | None:
    """Timeout of an operation; None if the backend does not report it."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)


@explained
def gloo_twin(group: ProcessGroup) -> ProcessGroup:
    """A new gloo group of the ranks of ``group``, with its timeout. **Collective** over them.

    Raises:
        CollectiveFailedError: a rank has ended; gloo notices after five times the timeout.
    """
    ranks = dist.get_process_group_ranks(group)
    with _named_alike(group):
        twin: ProcessGroup = dist.new_group(ranks, timeout_of(group), "gloo", use_local_synchronization=True)
    return twin
