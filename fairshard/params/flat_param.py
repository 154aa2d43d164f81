"""Parameters as one flat line, of which this rank owns a shard.

Tensors and their lifetimes, for ``W`` ranks and ``S`` elements per rank::

    shard    [S]     param dtype     always: the true values, stepped by the optimizer; in host memory with offload
    buffer   [W*S]   compute dtype   while gathered; the collective writes it, the leaves are views of it
    leaves   shaped  compute dtype   views of buffer while gathered, else empty; autograd fills their .grad
    grad     [S]     param dtype     after backward: the mean over ranks, added to the previous gradient
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fairshard.errors import FairshardError
from fairshard.params.gathered import Gather, Gathered
from fairshard.params.kept_part import KeptPart
from fairshard.params.leaves import Leaves
from fairshard.params.route import Route
from fairshard.params.rule import GradHome, Rule
from fairshard.params.shard_grad import GradTransfers
from fairshard.params.shown import ShownShard
from fairshard.params.slot import plain_and_others
from fairshard.utils.buckets import Bucket, Division, Hook
from fairshard.utils.collectives import Communicator, Communicators, exchange_tag
from fairshard.utils.layout import FlatLayout
from fairshard.utils.pinned import host_empty_like
from fairshard.utils.storage import set_data


class FlatParam(Leaves):
    """Parameters of one dtype and one ``requires_grad``, laid end to end and cut among the ranks of a group."""

    def __init__(self, shows: ShownShard, name: str, route: Route | None = None) -> None:
        self._own_division: Division | None = None
        super().__init__(shows, name, Route() if route is None else route)

    def _forget_runtime(self) -> None:
        super()._forget_runtime()
        self.comms: Any = None
        self.comm: Any = None
        self.hook: Hook | None = None
        self.lands_at_once = False
        self.landing_dtype: torch.dtype | None = None
        self._uses = 0
        self.device_shard: Tensor | None = None
        self._is_updated = True

    def __getstate__(self) -> dict[str, Any]:
        if self.hook is not None:
            raise FairshardError(
                "A model with a communication hook must not be pickled or copied, because the copy would lose it, but "
                f"`{self.name}` has one. Save its state_dict(), or register the hook on the copy instead."
            )
        kept = ("shows", "slots", "line", "shard_numel", "has_elements", "name", "route", "requires_grad", "trained")
        return {name: getattr(self, name) for name in (*kept, "_own_division")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_runtime()

    # ---- registered parameters

    def adopt_assigned(self) -> None:
        """Adopt tensors that the user has assigned to ``.data`` of registered parameters."""
        if self.shows.adopt_assigned(is_fixed=self.comm is not None) and self.grad is not None:
            self.grad.adopt_assigned()

    def split(self, indexes: Sequence[int]) -> FlatParam:
        """The parameters ``indexes``, now of one dtype and device, as a separate flat param.

        The registered parameters and the objects in `stepped` stay the same. Split off all other parameters too.
        """
        shows: Any = self.shows  # DTensors
        part = FlatParam(shows.split(indexes), self.slots[indexes[0]].fqn, replace(self.route))
        part._own_division = self._own_division
        part.trained = bytes(self.trained[index] for index in indexes)
        part.requires_grad = any(part.trained)
        for index, stepped in enumerate(part.stepped):
            stepped.move_to(part, index)
        part.adopt_assigned()
        part.shows.link()
        return part

    # ---- the interface of `GradSource`

    @property
    def layout(self) -> FlatLayout:
        """The position of each parameter on the line."""
        return self.line.layout

    @property
    def bucket_kind(self) -> type[Bucket]:
        """The class of its bucket."""
        return self.line.bucket_kind

    @property
    def bucket_numel(self) -> int:
        """Elements in a bucket, those of all ranks together."""
        return self.line.layout.padded_numel

    def bucket_views(self, columns: Any) -> list[list[Tensor]]:
        """See `FlatLine.bucket_views`."""
        return self.line.bucket_views(columns)

    # ---- setting up

    def compute_dtype_under(self, rule: Rule) -> torch.dtype:
        """The dtype in which these parameters are gathered; those of BatchNorm keep their own, as its buffers do."""
        return rule.compute_dtype_of(self.shard.dtype, self.slots[0].keeps_dtype)

    def materialize(self, comms: Communicators, rule: Rule, transfers: GradTransfers, on_grad: Any) -> None:
        """Create the buffer and the leaves, with the current dtype and device of the shard.

        ``on_grad(leaf)`` is called when autograd has accumulated a leaf's gradient. It must not refer to this
        object: the garbage collector does not see the references from leaves to their hooks.
        """
        self.adopt_assigned()
        self.follow_requires_grad()
        self.comms = comms
        comm = self.comm = comms.shard
        self.tag_id = comm.new_id()
        self.reduce_id = self.tag_id if comms.reduce is comm else comms.reduce.new_id()
        self.replica_id = 0 if comms.replicas is None else comms.replicas.new_id()
        self._division = self._own_division or rule.division_among(comms.num_ranks)
        self.compute_dtype = self.compute_dtype_under(rule)
        self.reduce_dtype = rule.reduce_dtype_of(self.compute_dtype)
        self.compute_device = transfers.device
        home = rule.grad_home if self.shows.on_cpu else GradHome.SHARD
        held, pending = (None, None) if self.grad is None else (self.grad.value, self.grad.pending)  # of another model
        grad_dtype = rule.grad_dtype_of(self.shard.dtype, self.reduce_dtype)
        self._on_grad = on_grad
        with torch.inference_mode(False), torch.no_grad():
            if self.shows.on_cpu:
                self._place_on_cpu(keep_on_device=not rule.cpu_offload)
            elif self.shard.device != self.compute_device:
                set_data(self.shard, self.shard.data.to(self.compute_device))
            self.gathered = self._make_gathered(comm)
        self._hook_leaves()
        self.shows.link()
        self.grad = self.shows.make_grad(grad_dtype, home, transfers, held)
        self.grad.adopt(pending)
        self.route.start_from(comms)
        self.follow_route()

    def _make_gathered(self, comm: Communicator) -> Gathered:
        """Memory of the whole parameters, freed."""
        # With one rank and one dtype the shard is the whole line: compute on it, gather nothing.
        self.computes_on_shard = (
            comm.world_size == 1 and self.compute_dtype == self.shard.dtype and not self.shows.on_cpu
        )
        if self.computes_on_shard:
            return self.line.in_place(self.shard.data.view(1, -1), comm)
        gathered = self.line.gathered_in(self._empty_line(self.compute_dtype), comm)
        gathered.free()
        return gathered

    def gather_into(self, gathered: Gathered) -> None:
        """Gather into ``gathered`` from now on."""
        gathered.copies = self.gathered.copies
        self.gathered = gathered
        gathered.gather_by(self.route.gather)
        self._hook_leaves()

    def divide_by(self, division: Division) -> None:
        """Divide gradients by ``division`` from now on, instead of by the number of ranks."""
        self._own_division = self.division = division

    @property
    def division(self) -> Division:
        """The divisors of gradients; 1 while gradients wait for the sum over replicas."""
        return _UNDIVIDED if self.route.keeps_sums else self._division

    @division.setter
    def division(self, division: Division) -> None:
        self._division = division

    def follow_route(self) -> None:
        """Apply the settings of `route`; call this after each change to them, between passes."""
        self.lands_at_once = self.route.hook is not None
        comms = self.route.follow()
        is_plain = self.grad is not None and self.route.hook is None and not self.route.keeps_sums
        self.landing_dtype = self.grad.dtype if is_plain else None
        if comms is not None:
            self.comms = comms
            self.gathered.gather_by(self.route.gather)

    def reduce_in(self, reduce: Communicator) -> None:
        """Sum over the ranks of the shard in the group ``reduce``, which has the same ranks."""
        if self.route.reduce_in(reduce):
            self.reduce_id = reduce.new_id()
            self.follow_route()

    def _place_on_cpu(self, keep_on_device: bool) -> None:
        """Move the shard to host memory that the device can read; `.cuda()` or `.half()` may have moved it out."""
        host = host_empty_like(self.shard, self.compute_device)
        host.copy_(self.shard)
        set_data(self.shard, host)
        if keep_on_device:
            self.device_shard = host.new_empty(host.shape, dtype=self.compute_dtype, device=self.compute_device)

    def _empty_line(self, dtype: torch.dtype) -> Tensor:
        return self.line.empty(self.comm.world_size, dtype, self.compute_device)

    def begin_pass(self) -> None:
        """Apply the user's changes since the last pass: values, gradients and ``requires_grad``."""
        self._is_updated = True
        if self.shows.has_moved:
            self.adopt_assigned()
        self.follow_requires_grad()
        self.grad.forget_dropped()

    def unshard(self, part: KeptPart | None = None) -> None:
        """Start gathering the line, even if it is gathered; from its kept ``part`` if given. **Collective.**"""
        self.is_gathered = True
        if self.computes_on_shard:
            if self.gathered.buffer.data_ptr() != self.shard.data_ptr():  # the user assigned `shard.data`
                self.gathered = self.line.in_place(self.shard.data.view(1, -1), self.comm)
                for slot, view in zip(self.slots, self.gathered.views, strict=True):
                    slot.show(view)
                self._plain, self._others = plain_and_others(self.slots, self.gathered.views)
        elif self.has_elements:
            self._uses += 1
            own = self._newest() if part is None else None
            self.gathered.start(own, part, exchange_tag("all_gather", self.tag_id, self._uses))

    def _newest(self) -> Tensor:
        """The current values of the shard, in its copy on the compute device if that exists."""
        if self.device_shard is None:
            return self.shows.shard.detach()
        if self._is_updated:
            # Copied in every pass, because a change through ``shard.data`` cannot be detected.
            self.device_shard.copy_(self.shard.detach(), non_blocking=True)
            self._is_updated = False
        return self.device_shard

    def wait_unshard(self) -> None:
        """Wait for the running gather, if any, and show it in the leaves."""
        if self.gathered.transfer is not None:
            self.gathered.wait()
        for leaf, view, _ in self._plain:
            leaf.data = view
        for slot, view in self._others:
            slot.show(view)

    def reshard(self) -> None:
        """Free the buffer, and empty the leaves."""
        for leaf, _, empty in self._plain:
            leaf.data = empty
        for slot, _ in self._others:
            slot.clear()
        if not self.computes_on_shard:
            self.gathered.free()
        self.is_gathered = False

    @torch.no_grad()
    def gather_line(self, values: Tensor) -> Tensor:
        """``values`` ``[S]`` of every rank as a line in new memory on the compute device. **Collective.**"""
        line = self._empty_line(values.dtype)
        self.line.row_of(line).copy_(values)
        return self.gather_rows(line, self.line.gather_of(line, self.comm))

    def gather_rows(self, rows: Tensor, gather: Gather | None = None) -> Tensor:
        """Fill ``rows`` ``[W, n]`` by ``gather``, or from the other ranks in their order. **Collective.**

        This rank's row is already written.
        """
        if rows.numel():
            self._uses += 1
            tag = exchange_tag("all_gather", self.tag_id, self._uses)
            (self.comm.all_gather(rows, tag) if gather is None else gather.start(tag)).wait()
        return rows


_UNDIVIDED = Division(1.0, 1.0)
