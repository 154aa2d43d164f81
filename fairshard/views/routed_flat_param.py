"""How one flat param's gathers and gradients travel, as far as its user has a say in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fairshard.errors import FairshardError
from fairshard.params.kept_part import KeptPart
from fairshard.params.shard_grad import GradTransfers
from fairshard.settings.config import UnitConfig
from fairshard.utils.collectives import Communicator, Communicators, RowGather
from fairshard.utils.custom_comms import AllGather, CustomGather, CustomReduce, ReduceScatter
from fairshard.utils.device import Stream, now
from fairshard.utils.reduce_scatter_bucketer import Division
from fairshard.views.joint_gather import JointGather
from fairshard.views.kept_sum import KeptSum
from fairshard.views.viewed_flat_param import ViewedFlatParam


@dataclass
class Route:
    """What the user has asked for.

    ``gather`` and ``scatter`` take the place of ours, or, with ``uses_group_memory``, are ours in the backend's memory.
    ``hook`` gets each mean, on ``hook_stream``. Without ``sums_replicas`` gradients wait for the sum over these.
    """

    gather: AllGather | None = None
    scatter: ReduceScatter | None = None
    uses_group_memory: bool = False
    hook: Callable[[Tensor], object] | None = None
    hook_stream: Any = None
    sums_replicas: bool = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Route:
        return replace(self)

    def __getstate__(self) -> dict[str, Any]:
        if self.gather or self.scatter or self.hook:
            raise FairshardError(
                "A model with custom communication or an all-reduce hook must not be pickled, for what was unpickled "
                "would lose it. Save its state_dict(), or use deepcopy, which keeps it."
            )
        return {"sums_replicas": self.sums_replicas}


class RoutedFlatParam(ViewedFlatParam):
    """A flat param with a `Route`."""

    _comms: Communicators | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.route = Route()
        super().__init__(*args, **kwargs)

    def materialize(self, comms: Communicators, config: UnitConfig, transfers: GradTransfers, on_grad: Any) -> None:
        """As for any flat param."""
        super().materialize(comms, config, transfers, on_grad)
        self._comms = comms
        self.follow_route()

    def follow_route(self) -> None:
        """Travel as `route` says from now on; to be called after each change of it, between passes."""
        comms = self._comms
        self.lands_at_once = self.route.hook is not None
        if comms is None:
            return
        if self.route.scatter is not None:
            comms = replace(comms, reduce=CustomReduce(comms.reduce, self.route.scatter))
        self.comms = replace(comms, replicas=None) if self._keeps_sums else comms

    def reduce_in(self, reduce: Communicator) -> None:
        """Sum over the ranks of the shard in this group, which has the same ranks."""
        if self._comms is not None:
            self._comms = replace(self._comms, reduce=reduce)
            self.reduce_id = reduce.new_id()
            self.follow_route()

    @property
    def division(self) -> Division:
        """By what gradients are divided: not at all, as long as they wait for the sum over replicas."""
        return _UNDIVIDED if self._keeps_sums else self._division

    @division.setter
    def division(self, division: Division) -> None:
        self._division = division

    @property
    def _keeps_sums(self) -> bool:
        return not self.route.sums_replicas and self._comms is not None and self._comms.replicas is not None

    # ---- gathering

    def gather_from(self, part: KeptPart | None) -> Any:
        """As for any flat param, through the user's own all-gather where there is one."""
        gather, custom = super().gather_from(part), self.route.gather
        if isinstance(gather, JointGather):
            gather.custom = custom
        elif custom is not None and isinstance(gather, RowGather):
            return CustomGather(gather, custom)
        return gather

    # ---- gradients

    def write_grads(self, views: list[list[Tensor]]) -> None:
        """As for any flat param; what waits for the sum over replicas goes with it, if there is one."""
        super().write_grads(views)
        if not self._keeps_sums:
            self._kept_sum.leave()

    def take_kept(self) -> Tensor | None:
        """What earlier backwards have summed over the ranks of the shard only."""
        return self._kept_sum.take()

    @torch.no_grad()
    def accept_grad(self, reduced: Tensor) -> None:
        """Take the mean, through the user's hook; or keep a sum that waits for that over replicas.

        A shard gets a gradient of zeros, as in `accumulate`, which tells whether the user has zeroed it meanwhile.
        """
        if self._keeps_sums:
            self._kept_sum.add(reduced)
            self._kept_sum.mark = self.grad.mark()
            self.num_sent -= 1
            return
        self._kept_sum.arrive()
        if self.route.hook is not None:
            stream = Stream.of(self.route.hook_stream if reduced.is_cuda else None)
            stream.wait(now(reduced.device))
            with stream.use():
                self.route.hook(reduced)
            stream.record().wait()
        super().accept_grad(reduced)

    @property
    def has_accumulated(self) -> bool:
        """Whether gradients of earlier passes wait here to be reduced by the running one."""
        return super().has_accumulated or (self._kept_sum.waiting is not None and not self._keeps_sums)

    def reach(self) -> bytearray:
        """As for any flat param; what waits for the sum over replicas is of all parameters."""
        if self._kept_sum.waiting is None or self._keeps_sums:
            return super().reach()
        return bytearray(self._trained)

    def forget_zeroed(self) -> None:
        """Drop what waits for each parameter whose gradient the user has zeroed since."""
        super().forget_zeroed()
        waiting = self._kept_sum.waiting
        if waiting is None:
            return
        zeroed = self.grad.zeroed_since(self._kept_sum.mark, [slot.fqn for slot in self.slots])
        if len(zeroed) == len(self.slots):
            self._kept_sum.drop()
        spans = self._own_spans()
        for index in zeroed:
            waiting[spans[index].start : spans[index].stop].zero_()

    def drop_grads(self) -> None:
        """Forget what an interrupted backward has made, but nothing that waited for it."""
        super().drop_grads()
        self._kept_sum.come_back()

    # ---- state

    def begin_pass(self) -> None:
        """As for any flat param."""
        super().begin_pass()
        self._kept_sum.begin_pass()

    def state_tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """As for any flat param, and what waits for the sum over replicas."""
        device, host = super().state_tensors()
        return device + [kept for kept in (self._kept_sum.waiting,) if kept is not None], host

    def _forget_runtime(self) -> None:
        super()._forget_runtime()
        self._comms = None
        self._kept_sum = KeptSum()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "route": self.route}


_UNDIVIDED = Division(1.0, 1.0)
