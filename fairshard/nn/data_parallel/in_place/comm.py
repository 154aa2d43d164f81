"""User control of a sharded module's communication: gathers, reductions, and their memory."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fairshard.checks.usage import assert_idle
from fairshard.engine.tree import units_below
from fairshard.engine.unit import Unit
from fairshard.errors import OptionsExcludeError
from fairshard.settings.check import CALLABLE, FLAG, Check, is_number, require
from fairshard.settings.groups import SavedGroup
from fairshard.setup.claim import claim
from fairshard.utils.buckets import Division
from fairshard.utils.custom_comms import (
    AllGather,
    CustomGather,
    CustomReduce,
    GroupAllGather,
    GroupReduceScatter,
    ReduceScatter,
    check_allocates,
)
from fairshard.utils.device import current_device
from fairshard.utils.groups import subgroup
from fairshard.utils.hook_bucket import UserStream, in_turn
from fairshard.utils.streams import Event, is_asynchronous
from fairshard.views.ragged import check_none_owned
from fairshard.views.shown_dtensors import ShownDTensors

check_flag = replace(FLAG, error=ValueError)
"""``check_flag(name, value)`` raises a ValueError unless ``value``, of argument ``name``, is a bool."""

_NUMBER = Check(is_number, "a number to divide gradients by")
_DIVISOR = Check(
    lambda factor: factor > 0 and math.isfinite(factor), "positive and finite, to divide gradients by", ValueError
)
_INT = Check(lambda value: isinstance(value, int) and not isinstance(value, bool), "an int")
_AT_LEAST_ONE = Check(lambda value: value > 0, "1 or more", ValueError)
_BACKEND = Check(lambda backend: backend == "NCCL", '"NCCL", the only one with symmetric memory', ValueError)
_STREAM = Check(lambda stream: stream is None or hasattr(stream, "wait_event"), "a stream of the device")
_EVENT = Check(
    lambda event: all(hasattr(event, name) for name in ("record", "wait", "query")),
    "a torch.Event, or one of the device's own module",
)


class CommMethods(nn.Module):
    """Methods of a sharded module that configure its gathers and reductions.

    Call them between passes, or between a forward and its backward, with the same arguments on all ranks;
    otherwise the ranks deadlock.
    """

    _fairshard_unit: Unit

    # ---- sums over ranks

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False: sum gradients over the shard group only, until set to True again; for meshes with replicas.

        Each rank holds the sum, in fp32 or wider. The next backward with True, even one that does not reach this
        module, adds the held sum before the sum over replicas, and divides once. Until then, missing gradients of
        parameters are zeros. ``zero_grad`` also discards the held sums; after any other change to gradients the next
        backward raises. Without replicas the setting has no effect.

        Raises:
            ValueError: ``requires_all_reduce`` is not a bool.
            TrainingStateError: in the middle of a pass.
        """
        check_flag("requires_all_reduce", requires_all_reduce)
        for unit in units_of_module(self, recurse):
            _reroute(unit, "set_requires_all_reduce", sums_replicas=requires_all_reduce)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of this module's gradients, over all ranks and replicas, by ``factor`` only.

        Units inside the module keep their own divisors.

        Raises:
            ValueError: ``factor`` is not positive and finite.
            TypeError: ``factor`` is not a number.
        """
        _NUMBER("factor", factor)
        _DIVISOR("factor", factor)
        _reroute(self._fairshard_unit, "set_gradient_divide_factor", division=Division(1.0, float(factor)))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of `set_gradient_divide_factor`."""
        warnings.warn(
            "`set_reduce_scatter_divide_factor` is deprecated: call `set_gradient_divide_factor`.",
            FutureWarning,
            stacklevel=2,
        )
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """No effect: gradients are always summed over ranks, and divided afterwards.

        Raises:
            ValueError: ``enable`` is not a bool.
        """
        check_flag("enable", enable)

    def set_all_reduce_hook(self, hook: Callable[[Tensor], object], *, stream: Any = None) -> None:
        """Call ``hook(mean)`` to change this module's reduced gradients before they are added to ``.grad``.

        ``mean`` ``[S]`` holds this rank's parts of the gradients end to end, each padded to the size of the first
        rank's part; of parameters placed by `Owned` those that it owns, without padding. All sums (including the sum
        over replicas) and the division are done; the dtype is that of the sum, which on gloo is fp32 or wider. The hook
        changes ``mean`` in place, and is called once per dtype of the parameters. The hook may communicate: all ranks
        call it at the same point, after the reduction of the module's bucket and before the next one. On an accelerator
        it runs on ``stream``, or by default on the stream that reduces gradients.

        Raises:
            TypeError: ``hook`` is not callable.
            ValueError: ``stream`` is given on a mesh with replicas, whose sum has its own stream.
            TrainingStateError: in the middle of a pass.
        """
        CALLABLE("hook", hook)
        unit = self._fairshard_unit
        require(
            stream is None or unit.groups.replicas is None,
            "`stream` must be None on a mesh with replicas, but is given: hooks run on the stream of their sum.",
        )
        _STREAM("stream", stream)
        _reroute(unit, "set_all_reduce_hook", hook=partial(_change, hook=hook, stream=stream))

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """No effect: a missing gradient always counts as zeros, so that ranks may use different parameters.

        Raises:
            ValueError: ``reduce_scatter_unused_params`` is not a bool.
        """
        check_flag("reduce_scatter_unused_params", reduce_scatter_unused_params)
        check_flag("recurse", recurse)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """No effect: at most two buckets have memory at a time; see ``bucket_cap_mb`` of `fully_shard`.

        Raises:
            TypeError: ``max_input_buffers`` is not an int.
            ValueError: ``max_input_buffers`` is less than 1.
        """
        _INT("max_input_buffers", max_input_buffers)
        _AT_LEAST_ONE("max_input_buffers", max_input_buffers)
        check_flag("recurse", recurse)

    # ---- custom communication

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather this module's parameters through ``comm`` in forward and backward, but not for state dicts.

        ``comm`` is an `AllGather`, or has the same two methods. It is not called if there is only one rank.

        Raises:
            TypeError: a method of ``comm`` is missing.
            OptionsExcludeError: memory is allocated by the process group.
            ValueError: a parameter is placed by `Owned`.
            TrainingStateError: in the middle of a pass.
        """
        _customize(self._fairshard_unit, "set_custom_all_gather", comm, gather=partial(CustomGather, custom=comm))

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Sum this module's gradients over the shard group through ``comm``, in a separate bucket.

        ``comm`` is a `ReduceScatter`, or has the same two methods. The engine sums over replicas and divides. ``comm``
        is not called if there is only one rank.

        Raises:
            TypeError: a method of ``comm`` is missing.
            OptionsExcludeError: memory is allocated by the process group.
            ValueError: a parameter is placed by `Owned`.
            TrainingStateError: in the middle of a pass.
        """
        _customize(self._fairshard_unit, "set_custom_reduce_scatter", comm, scatter=partial(CustomReduce, custom=comm))

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Gather parameters and reduce gradients of this module in memory from the backend's allocator.

        Raises:
            ValueError: ``enable`` is not a bool, the backend has no allocator, or a parameter is placed by `Owned`.
            OptionsExcludeError: the module has a custom all-gather or reduce-scatter.
            TrainingStateError: in the middle of a pass.
        """
        check_flag("enable", enable)
        unit, name = self._fairshard_unit, "set_allocate_memory_from_process_group_for_comm"
        require(
            _uses_group_memory(unit) or not any(each.route.gather or each.route.scatter for each in unit.flat_params),
            "Custom communication cannot use memory of the process group, because it has its own `allocate`, but "
            f"unit `{unit.fqn or 'root'}` has both. Allocate from the group in `allocate`.",
            OptionsExcludeError,
        )
        if not enable:
            _reroute(unit, name, gather=None, scatter=None)
            return
        check_none_owned(unit.flat_params, name)
        group = unit.groups.shard.resolve()
        for shown in [flat_param.shows for flat_param in unit.flat_params]:
            on_accelerator = isinstance(shown, ShownDTensors) and shown.mesh.device_type != "cpu"
            check_allocates(group, current_device() if on_accelerator else torch.device("cpu"))
        gather, scatter = GroupAllGather(group), GroupReduceScatter(group)
        _reroute(unit, name, gather=partial(CustomGather, custom=gather), scatter=partial(CustomReduce, custom=scatter))

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Not supported: always raises.

        Raises:
            ValueError: ``backend`` is not ``"NCCL"``.
            NotImplementedError: ``backend`` is ``"NCCL"``.
        """
        _BACKEND("backend", backend)
        raise NotImplementedError(
            "`set_symm_mem_for_comm` is not supported: symmetric memory must stay allocated and registered on all "
            "ranks, but buffers are freed with each reshard. Allocate it in your own AllGather, for "
            "`set_custom_all_gather`."
        )

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Reduce gradients in a separate process group, so that gathers do not queue behind them on NCCL.

        The first call creates the group for all modules over the same ranks, and is **collective** over them.

        Raises:
            ValueError: ``enable`` is not a bool.
            TrainingStateError: in the middle of a pass.
        """
        check_flag("enable", enable)
        for unit in units_of_module(self, recurse):
            _check_idle(unit, "set_separate_reduce_scatter_group")
            shard = unit.groups.shard
            group = _twin(shard.resolve()) if enable and shard.world_size > 1 else None
            unit.groups.reduce = None if group is None else SavedGroup(group, shard.rank, shard.world_size)
            for flat_param in unit.flat_params:
                if flat_param.comm is not None:
                    flat_param.communicate_in(unit.groups.communicators())

    def set_post_optim_event(self, event: Any) -> None:
        """Make the gathers of the next pass wait only for ``event``, recorded after the optimizer's step.

        By default they wait for all work queued on the current stream when the pass begins. Applies to one pass. No
        effect on CPU.

        Raises:
            TypeError: ``event`` is not a ``torch.Event``, nor an event of a device's own module.
            ValueError: ``event`` belongs to another type of device.
        """
        _EVENT("event", event)
        root = self._fairshard_unit.root or claim(self)
        device = getattr(event, "device", None)
        on_accelerator = is_asynchronous(root.shared.device)
        require(
            not on_accelerator or device is None or device.type == root.shared.device.type,
            f"`event` must belong to a stream of {root.shared.device}, but belongs to {device}.",
        )
        root.shared.after_step = Event(event if on_accelerator else None)


@torch.no_grad()
def _change(reduced: Tensor, hook: Callable[[Tensor], object], stream: Any) -> None:
    """Call ``hook``, which changes ``reduced`` in place, on the user's ``stream`` of an accelerator."""
    with in_turn(UserStream(None if reduced.is_cpu else stream), reduced.device):
        hook(reduced)


def units_of_module(module: CommMethods, recurse: bool) -> list[Unit]:
    """The unit of ``module``, and with ``recurse`` all below it.

    Raises:
        ValueError: ``recurse`` is not a bool.
    """
    check_flag("recurse", recurse)
    return [unit for _, unit in units_below(module)] if recurse else [module._fairshard_unit]


def _check_idle(unit: Unit, method: str) -> None:
    if unit.root is not None:
        assert_idle(unit.root, method)


def _reroute(unit: Unit, method: str, **fields: Any) -> None:
    """Set ``fields`` of the routes of ``unit``, by ``method``; raises in the middle of a pass."""
    _check_idle(unit, method)
    for flat_param in unit.flat_params:
        flat_param.route = replace(flat_param.route, **fields)
        flat_param.follow_route()


def _customize(unit: Unit, method: str, comm: Any, **fields: Any) -> None:
    """Use ``comm`` for the communication of ``unit``, by ``method``: set ``fields`` of the routes."""
    require(
        callable(comm) and callable(getattr(comm, "allocate", None)),
        f"`comm` must have `__call__` and `allocate`, but is {comm!r}.",
        TypeError,
    )
    check_none_owned(unit.flat_params, method)
    require(
        not _uses_group_memory(unit),
        f"`{method}` cannot be combined with memory of the process group, but unit `{unit.fqn or 'root'}` uses it. "
        "Call set_allocate_memory_from_process_group_for_comm(False) first.",
        OptionsExcludeError,
    )
    _reroute(unit, method, **fields)


def _uses_group_memory(unit: Unit) -> bool:
    """Whether its collectives are the engine's, in memory from the backend."""
    gathers = [flat_param.route.gather for flat_param in unit.flat_params]
    return any(isinstance(each, partial) and isinstance(each.keywords["custom"], GroupAllGather) for each in gathers)


_twins: weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()


def _twin(group: ProcessGroup) -> ProcessGroup:
    """A second group of the same ranks. **Collective** on the first call."""
    if group not in _twins:
        _twins[group] = subgroup(dist.get_process_group_ranks(group), group)
    return _twins[group]
