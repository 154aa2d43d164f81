"""Process groups, and messages between their ranks outside of training: objects, numbers, rows for rank 0."""

import contextlib
import datetime
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from fairshard.errors import FairshardError
from fairshard.utils.failures import explained

# Methods of the group, not functions of torch.distributed, which cost twice as much host time. Renamed in torch
# 2.13; the old names can go with support for torch < 2.13.
GATHER = "all_gather_single" if hasattr(ProcessGroup, "all_gather_single") else "_allgather_base"
"""The method of a group that gathers tensors into one."""
SCATTER = "reduce_scatter_single" if hasattr(ProcessGroup, "reduce_scatter_single") else "_reduce_scatter_base"
"""The method of a group that sums tensors over ranks and gives each rank its part."""


_PART_NUMEL = 1 << 26
"""Elements of one message of `exchange_runs`."""


class Works(list[Any]):
    """Works of one direct exchange; those that nobody waits for are moved to ``kept`` together with their memory.

    A model whose backward has raised may be dropped while they run. gloo stops reading what a rank sends if the memory
    for it is gone, so that all later exchanges with that rank would hang.
    """

    __slots__ = ("_kept",)

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()
        self._kept = kept

    def __del__(self) -> None:
        if any(not work.is_completed() for work in self):
            self._kept[:] = [work for work in (*self._kept, *self) if not work.is_completed()]


class GroupMessages:
    """One process group: this rank's place in it, and messages between its ranks.

    Attributes:
        unfinished: works of dropped models, kept as long as the group; see `Works`.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.unfinished: list[Any] = []
        self._group = weakref.ref(group)  # registries are keyed by it: a strong reference would keep both forever
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    @property
    def group(self) -> ProcessGroup:
        """The process group; users of a communicator keep its group alive."""
        group = self._group()
        if group is None:
            raise FairshardError("The process group of a model was destroyed while the model was in use.")
        return group

    def send_to_first(self, runs: list[Tensor]) -> None:
        """Send ``runs`` to rank 0, which calls `receive_on_first`."""
        self._exchange([dist.P2POp(dist.isend, run, None, self.group, tag, 0) for tag, run in enumerate(runs)])

    def receive_on_first(self, runs: list[Tensor], targets: list[list[Tensor]]) -> None:
        """Fill ``targets``, by rank, with the other ranks' runs and this rank's own, without extra memory."""
        for target, run in zip(targets[0], runs, strict=True):
            target.copy_(run)
        self._exchange(
            [
                dist.P2POp(dist.irecv, target, None, self.group, tag, rank)
                for rank in range(1, self.world_size)
                for tag, target in enumerate(targets[rank])
            ]
        )

    @staticmethod
    @explained
    def _exchange(operations: list[dist.P2POp]) -> None:
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()

    @explained
    def scatter_rows(self, row: Tensor, line: Tensor | None) -> None:
        """Fill ``row`` with this rank's row of ``line`` ``[world_size, *row.shape]`` on rank 0. **Collective.**"""
        if self.world_size == 1:
            assert line is not None
            row.copy_(line[0])
        elif row.numel():
            dist.scatter(row, None if line is None else list(line), group=self.group, group_src=0)

    @explained
    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Fill ``tensor``, which is contiguous, with that of rank ``source``. **Collective.**"""
        if self.world_size > 1 and tensor.numel():
            dist.broadcast(tensor, group=self.group, group_src=source)

    @explained
    @torch.no_grad()
    def broadcast_tensors(self, tensors: Sequence[Tensor], device: torch.device, cap_nbytes: int) -> None:
        """Broadcast rank 0's ``tensors``, which have equal shapes and dtypes on all ranks. **Collective.**

        They may be on any device, and are sent as bytes through one bucket of at most ``cap_nbytes`` on ``device``.
        """
        values = [tensor for tensor in tensors if tensor.numel()]
        lines = [value.detach().contiguous() for value in values]
        nbytes = sum(line.nbytes for line in lines)
        if self.world_size == 1 or not nbytes:
            return
        bucket = torch.empty(min(cap_nbytes, nbytes), dtype=torch.uint8, device=device)
        for start in range(0, nbytes, cap_nbytes):
            part = bucket[: nbytes - start]
            pairs = _pairs(part, lines, start)
            if self.rank == 0:
                for slot, run in pairs:
                    slot.copy_(run)
            dist.broadcast(part, group=self.group, group_src=0)
            if self.rank != 0:
                for slot, run in pairs:
                    run.copy_(slot)
        for value, line in zip(values, lines, strict=True):
            if self.rank == 0 or value.is_contiguous():
                continue
            if 0 in value.stride():  # expanded: it has fewer stored elements than numel
                value.data = line
            else:
                value.copy_(line)

    @explained
    def exchange_parts(self, line: Tensor, to: Sequence[int], of: Sequence[int]) -> tuple[Tensor, Any]:
        """Send consecutive parts of ``line``, of ``to[r]`` elements to rank ``r``. **Collective.**

        Returns new memory for the parts received, of ``of[r]`` elements from rank ``r``, and the work to wait for,
        until which the caller keeps ``line``. All ranks must know all sizes. Elements are sent as bytes.
        """
        received, width = line.new_empty(sum(of)), line.element_size()
        target, source = received.view(torch.uint8), line.view(torch.uint8)
        num_in, num_out = ([width * numel for numel in each] for each in (of, to))
        return received, dist.all_to_all_single(target, source, num_in, num_out, self.group, async_op=True)

    @explained
    def broadcast_object(self, value: Any) -> Any:
        """``value`` of rank 0, pickled. **Collective.**"""
        if self.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """``value`` of every rank, pickled. **Collective**; for error messages, never on the fast path."""
        return gather_objects(value, self.group)


_groups_of_one: "weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup]" = weakref.WeakKeyDictionary()


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
    if within is not None and backend_name(within, torch.device("cpu")) != "fake":
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


_host_groups: "weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup]" = weakref.WeakKeyDictionary()


@explained
def host_group() -> ProcessGroup | None:
    """A separate gloo group of all ranks for work beside training. **Collective** on the first call.

    None if torch.distributed is not initialised: then there is one process. It has the timeout of the default group;
    ranks that may work longer than others meanwhile send messages (see ``checkpoint/agreement.py``).
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    world = default_group()
    found = _host_groups.get(world)
    if found is None:
        found = _host_groups[world] = dist.new_group(backend="gloo", timeout=timeout_of(world))
    return found


_copy_groups: "weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup]" = weakref.WeakKeyDictionary()


@explained
def copy_group() -> ProcessGroup | None:
    """As `host_group`, for copies in memory, which do not wait for a save. **Collective** on the first call.

    It keeps the timeout of the default group: no rank writes to a disk between its messages.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    world = default_group()
    found = _copy_groups.get(world)
    if found is None:
        found = _copy_groups[world] = dist.new_group(backend="gloo", timeout=timeout_of(world))
    return found


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


class Poll:
    """Asks all ranks a question of one bit in the background, over a group of its own. **Collective** to create.

    Ranks call `ask` and `answer` in turn.
    """

    def __init__(self) -> None:
        self._group = gloo_twin(default_group())
        self._bit = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self._work: Any = None

    @property
    def is_asked(self) -> bool:
        """Whether `answer` comes next."""
        return self._work is not None

    def ask(self, is_true: bool) -> None:
        """Send this rank's answer, without waiting. **Collective.**"""
        self._bit.fill_(is_true)
        self._work = dist.all_reduce(self._bit, dist.ReduceOp.MAX, self._group, async_op=True)

    @explained
    def answer(self) -> bool:
        """Whether it is true on any rank, once all ranks have sent theirs. **Collective.**"""
        work, self._work = self._work, None
        work.wait()
        return bool(self._bit.item())


@explained
def gather_objects(value: Any, group: ProcessGroup | None) -> list[Any]:
    """``value`` of every rank of ``group``, pickled; only of this process if ``group`` is None. **Collective.**"""
    if group is None:
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@explained
def exchange_runs(
    sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], group: ProcessGroup
) -> None:
    """Send 1-D CPU tensors to ranks of ``group``, and fill others with what ranks send to this one.

    The tensors from one rank to another have equal sizes and the same order on both. Returns when all are sent and
    received, or raises when none is still in use.
    """
    pairs = [(dist.isend, each) for each in sends] + [(dist.irecv, each) for each in receives]
    works: list[Any] = []
    failure: Exception | None = None
    tags: dict[tuple[Any, int], int] = {}
    for operation, (rank, run) in pairs:
        for part in run.split(_PART_NUMEL):
            tag = tags[operation, rank] = tags.get((operation, rank), -1) + 1
            works += dist.batch_isend_irecv([dist.P2POp(operation, part, None, group, tag, rank)])
    for work in works:
        try:
            work.wait()
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure


@explained
def gather_scalars(
    values: Sequence[float], group: ProcessGroup | None = None, device: torch.device | None = None
) -> list[list[float]]:
    """``values`` of every rank, by rank, in fp64. **Collective**; not counted, meant for logs."""
    group = group or default_group()
    own = torch.tensor(list(values), dtype=torch.float64, device=device)
    every = own.new_empty(dist.get_world_size(group) * own.numel())
    getattr(group, GATHER)(every, own).wait()
    return every.view(-1, max(own.numel(), 1)).tolist()


def _pairs(bucket: Tensor, lines: list[Tensor], start: int) -> list[tuple[Tensor, Tensor]]:
    """Pairs of a run of ``bucket`` and its bytes in ``lines``, laid end to end and counted from byte ``start``."""
    pairs = []
    offset = -start  # of a line, from the bucket's start
    for line in lines:
        first, last = max(offset, 0), min(offset + line.nbytes, len(bucket))
        if first < last:
            pairs.append((bucket[first:last], line.view(-1).view(torch.uint8)[first - offset : last - offset]))
        offset += line.nbytes
    return pairs
