"""Process groups of a unit: the ranks that it is sharded over, and the ranks that hold replicas."""

from __future__ import annotations

import os
import warnings
import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fairshard.settings.check import require
from fairshard.settings.fsdp import ShardingStrategy
from fairshard.utils.collectives import Communicators
from fairshard.utils.device import device_count
from fairshard.utils.groups import communicator, default_group, group_of_one, subgroup
from fairshard.utils.parallel import check_is_group
from fairshard.utils.user_line import level_of_user

Groups = ProcessGroup | tuple[ProcessGroup, ProcessGroup]
MISSING = "MISSING"

# Bytes of parameters that each rank of a group owns in units of models that have not run yet. Units are sharded one
# after the other, inner ones first, and know neither their siblings nor their model: they are counted together, so that
# ranks own about as much of the whole model. (Parameters are cut, and optimizers hold them, long before the whole model
# is known.) Ranks count alike if they shard the same units in the same order; the first forward compares owners across
# ranks, and counts anew. Deleted units stay counted until then, because ranks may delete at different times.
_loads: weakref.WeakKeyDictionary[ProcessGroup, list[int]] = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class SavedGroup:
    """The group that a shard was cut for; after unpickling, ``group`` is None until it is set or resolved.

    ``is_own``: that of this rank alone, for parameters that are not sharded.
    """

    group: ProcessGroup | None
    rank: int
    world_size: int
    is_own: bool = False

    def resolve(self) -> ProcessGroup:
        """The group; after unpickling, the one that was set or the default group.

        Raises:
            ValueError: its size, or this process's rank in it, differs from the shard's.
        """
        group = group_of_one() if self.is_own else self.group or default_group()
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        require(
            (rank, world_size) == (self.rank, self.world_size),
            f"A pickled model must be used by the rank of its shards, {self.rank} of {self.world_size}, but this is "
            f"rank {rank} of {world_size}. Set `model.process_group`, or after fully_shard call "
            "`model.set_device_mesh(mesh)`; or save with state_dict() and load into a newly wrapped model.",
        )
        self.group = group
        return group

    def __deepcopy__(self, memo: dict[int, Any]) -> SavedGroup:
        return replace(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "group": None}


@dataclass
class UnitGroups:
    """Groups of a unit: ``shard``, the ranks that it is sharded over; ``replicas``, the ranks with the same shard."""

    shard: SavedGroup
    replicas: SavedGroup | None = None
    reduce: SavedGroup | None = None

    @property
    def main(self) -> SavedGroup:
        """The group shown to users: the shard group, or the replicas if the unit is not sharded."""
        return self.replicas if self.shard.is_own and self.replicas is not None else self.shard

    @property
    def is_alone(self) -> bool:
        """Whether this rank shares its values with no other: other ranks may have others under the same names."""
        return all(group is None or group.world_size == 1 for group in (self.main, self.replicas))

    @property
    def is_pair(self) -> bool:
        """Whether the unit is sharded over some ranks and replicated over others."""
        return self.replicas is not None and not self.shard.is_own

    def set(self, group: Groups) -> None:
        """Use ``group`` after unpickling; a group or a pair, as for `find_groups`."""
        if isinstance(group, ProcessGroup):
            self.main.group = group
        else:
            assert self.replicas is not None
            self.shard.group, self.replicas.group = group

    def spanning(self) -> list[ProcessGroup]:
        """The groups that together span all ranks of the unit, if used one after the other."""
        return [group.resolve() for group in dict.fromkeys((self.main, self.replicas)) if group is not None]

    def loads(self) -> list[int]:
        """The bytes that each rank of the shard group owns; callers count what they place."""
        return _loads.setdefault(self.shard.resolve(), [0] * self.shard.world_size)

    def forget_loads(self) -> None:
        """Count anew on the shard group: its ranks make a model."""
        _loads.pop(self.shard.resolve(), None)

    def communicators(self) -> Communicators:
        """Communicators of the unit. **Collective** on the first use of a group."""
        shard = communicator(self.shard.resolve())
        replicas = None if self.replicas is None else communicator(self.replicas.resolve())
        if replicas is not None and replicas.world_size == 1:
            replicas = None
        reduce = shard if self.reduce is None else communicator(self.reduce.resolve())
        return Communicators(shard, reduce, replicas)


def find_groups(
    strategy: ShardingStrategy,
    process_group: Groups | None,
    device_mesh: DeviceMesh | None,
    reduce_group: ProcessGroup | None,
) -> UnitGroups:
    """The groups that the arguments describe. **Collective** on the first call for hybrid strategies without groups.

    Raises:
        TypeError: a group is not a process group of this rank.
        ValueError: the arguments contradict the strategy or each other.
    """
    if reduce_group is not None:
        check_is_group(reduce_group, "process_group_reduce_scatter")
    if device_mesh is not None:
        require(process_group is None, "`device_mesh` and `process_group` must not both be given. Pass one of the two.")
        process_group = _groups_of(device_mesh, strategy)
    if strategy.is_hybrid:
        shard, replicas = _hybrid_groups(process_group, strategy)
        require(
            reduce_group is None,
            f"`process_group_reduce_scatter` cannot be combined with {strategy.name}, whose gradients are reduced over "
            "two groups. Remove it.",
        )
        return UnitGroups(_saved(shard), _saved(replicas))
    require(
        not isinstance(process_group, (tuple, list)),
        f"`process_group` must be one group for {strategy.name}, but is several. Pass a pair only with "
        "ShardingStrategy.HYBRID_SHARD.",
    )
    group: Any = default_group() if process_group is None else process_group
    if strategy is ShardingStrategy.NO_SHARD:
        if reduce_group is not None:
            text = "`process_group_reduce_scatter` has no effect with NO_SHARD: leave it out."
            warnings.warn(text, stacklevel=level_of_user())
        return UnitGroups(SavedGroup(None, 0, 1, is_own=True), _saved(group))
    if reduce_group is not None:
        wanted, found = map(dist.get_process_group_ranks, (group, reduce_group))
        require(
            found == wanted,
            "`process_group_reduce_scatter` must have the ranks of `process_group`, in the same order, "
            f"{wanted}, but has {found}.",
        )
    return UnitGroups(_saved(group), None, None if reduce_group is None else _saved(reduce_group))


def _saved(group: Any) -> SavedGroup:
    check_is_group(group)
    return SavedGroup(group, dist.get_rank(group), dist.get_world_size(group))


def _groups_of(mesh: DeviceMesh, strategy: ShardingStrategy) -> Groups:
    require(
        isinstance(mesh, DeviceMesh),
        f"`device_mesh` must be a DeviceMesh, but is {type(mesh).__name__}. Make one with init_device_mesh.",
        TypeError,
    )
    wanted = 2 if strategy.is_hybrid else 1
    require(
        mesh.ndim == wanted,
        f"`device_mesh` must have {wanted} dimension{'s' * (wanted - 1)} for {strategy.name}, but has {mesh.ndim}. "
        "For hybrid sharding the first dimension holds replicas, the second shards.",
    )
    return (mesh.get_group(1), mesh.get_group(0)) if strategy.is_hybrid else mesh.get_group()


def _hybrid_groups(given: Any, strategy: ShardingStrategy) -> tuple[ProcessGroup, ProcessGroup]:
    if given is None:
        return _groups_by_node()
    require(
        isinstance(given, (tuple, list)) and len(given) == 2,
        f"`process_group` must be a pair for {strategy.name}: the ranks to shard over, and the ranks that hold the "
        "same shard. Pass (shard_group, replicate_group), a 2-D `device_mesh`, or neither to shard within nodes.",
    )
    shard, replicas = given
    for group in given:
        check_is_group(group)
    common = set(dist.get_process_group_ranks(shard)) & set(dist.get_process_group_ranks(replicas))
    require(
        common == {dist.get_rank()},
        f"The two groups of {strategy.name} must have this rank, {dist.get_rank()}, in common and no other, but "
        f"have {sorted(common)}: ranks that hold different shards would be summed as replicas. Pass (shard_group, "
        "replicate_group) that cross like rows and columns, or a 2-D `device_mesh`.",
    )
    return shard, replicas


_by_node: weakref.WeakKeyDictionary[ProcessGroup, tuple[ProcessGroup, ProcessGroup]] = weakref.WeakKeyDictionary()


def _groups_by_node() -> tuple[ProcessGroup, ProcessGroup]:
    """Shard within a node, replicate across nodes; the same pair for all units. **Collective** on the first call."""
    world = default_group()
    if world not in _by_node:
        size = world.size()
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or device_count()
        require(
            per_node and not size % per_node,
            f"Hybrid sharding without groups needs ranks spread evenly over the nodes, but there are {size} ranks and "
            f"{per_node} per node (LOCAL_WORLD_SIZE, which torchrun sets). Pass `process_group` or `device_mesh`.",
        )
        own = world.rank()
        first = own - own % per_node
        _by_node[world] = (
            subgroup(list(range(first, first + per_node)), world),
            subgroup(list(range(own % per_node, size, per_node)), world),
        )
    return _by_node[world]
