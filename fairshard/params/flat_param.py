"""Parameters as one flat line, of which this rank owns a shard, and the path of their gradients to the shard's.

Tensors and their lifetimes, for ``W`` ranks and ``S`` elements per rank::

    shard    [S]     param dtype     always: the true values, stepped by the optimizer; in host memory with offload
    buffer   [W*S]   compute dtype   while gathered; the collective writes it, the leaves are views of it
    leaves   shaped  compute dtype   views of buffer while gathered, else empty; autograd fills their .grad
    bucket   [W, S]  reduce dtype    `write_grads` copies the leaves' gradients there; the reduce-scatter reads it
    grad     [S]     param dtype     after backward: `accept_grad` has added the mean over ranks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from fairshard.params.gathered import Gathered, KeptPart
from fairshard.params.pending import PendingGrads
from fairshard.params.route import Route
from fairshard.params.rule import GradHome, Rule
from fairshard.params.shard_grad import GradTransfers, unexpected_error
from fairshard.params.shown import ShownShard
from fairshard.params.slot import ParamSlot
from fairshard.utils.autograd import accumulate_node, reached, reaches
from fairshard.utils.buckets import Division
from fairshard.utils.collectives import Communicator, Communicators, exchange_tag
from fairshard.utils.layout import joined_columns
from fairshard.utils.pinned import host_empty_like
from fairshard.utils.storage import set_data

# Of slots and of parameters; `map` with them costs less host time than a loop.
_TRAINS, _HOOKS = attrgetter("leaf.requires_grad"), attrgetter("_post_accumulate_grad_hooks")


class FlatParam:
    """Parameters of one dtype and one ``requires_grad``, laid end to end and cut among the ranks of a group.

    Attributes:
        shows: the shard and its registered parameters.
        line: the layout of the parameters; converts the gathered buffer to whole parameters.
        route: the user's settings for the communication.
        bucket_kind: makes the buckets of its gradients; that of `line`, or a `HookKind`.
        trained: for each parameter 1 if it needs a gradient, as last followed.
        gathered: the memory of the whole parameters; `materialize` sets it, the dtypes and the device.
        tag_id, uses: identify each gather; see `exchange_tag`.
        nodes: the graph nodes of the leaves; None for those not trained.
        reached: for each parameter 1 if the running backward gives it a gradient on any rank, or one is pending.
        contributed: parameters of which this rank has sent or kept gradients in this backward.
        keeps_sums: sums wait for those over replicas.
        part: what a few ranks keep of the line between forward and backward; None: not configured.
    """

    # Set by `materialize`, and by users and backwards afterwards; copies begin with these.
    comm: Any = None
    comms: Any = None
    grad: Any = None
    device_shard: Tensor | None = None
    part: KeptPart | None = None
    nodes: Sequence[Any] = ()
    reached = b""
    _is_updated = True
    _known: Any = {}  # never written to

    def __init__(self, shows: ShownShard, name: str, route: Route | None = None) -> None:
        self.shows, self.slots, self.line = shows, shows.slots, shows.line
        self.shard_numel = self.line.shard_numel  # of this rank
        self.bucket_kind: Any = self.line.bucket_kind
        self.name = name
        self.route = route or Route()
        self.trained = shows.wanted()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("shows", "slots", "line", "shard_numel", "bucket_kind", "name", "route", "trained")
        return {name: getattr(self, name) for name in kept}

    # ---- registered parameters

    @property
    def shard(self) -> nn.Parameter:
        """This rank's part of the line, ``[S]``."""
        return self.shows.shard

    @property
    def stepped(self) -> Sequence[Any]:
        """The objects whose ``shard`` optimizers step: this flat param, or one `OrigParam` per parameter."""
        return self.shows.stepped_by(self)

    @property
    def requires_grad(self) -> bool:
        """Whether any parameter needs a gradient, as last followed."""
        return 1 in self.trained

    def adopt_assigned(self) -> None:
        """Adopt tensors that the user has assigned to ``.data`` of registered parameters."""
        if self.shows.adopt_assigned(is_fixed=self.comm is not None) and self.grad is not None:
            self.grad.adopt_assigned()

    def follow_requires_grad(self) -> None:
        """Adopt the user's changes of ``requires_grad``.

        As in autograd, a leaf gets a gradient from a graph that was recorded while it was trained, if it is trained
        again when the backward runs.

        Raises:
            FairshardError: only some leaves were changed, but one flat parameter is registered for all.
        """
        if bytes(map(_TRAINS, self.slots)) != self.trained:
            self.shows.adopt_requires_grad(self.trained, self.name)
        wanted = self.shows.wanted()
        if wanted != self.trained:
            self.trained = wanted
            self.shard.requires_grad_(self.requires_grad)
            if self.nodes:
                self._show_leaves()

    # ---- setting up

    def compute_dtype_under(self, rule: Rule) -> torch.dtype:
        """The dtype in which these parameters are gathered; those of BatchNorm keep their own, as its buffers do."""
        return rule.compute_dtype_of(self.shard.dtype, self.slots[0].keeps_dtype)

    def materialize(self, comms: Communicators, rule: Rule, transfers: GradTransfers, on_grad: Any) -> None:
        """Create the buffer and the leaves, with the current dtype and device of the shard.

        ``comms`` is shared by all units over the same ranks. ``on_grad(leaf)`` is called when autograd has accumulated
        a leaf's gradient. It must not refer to this object: the garbage collector does not see the references from
        leaves to their hooks.
        """
        self.follow_requires_grad()
        comm = self.comm = comms.shard
        self.tag_id, self.uses = comm.new_id(), count(1)
        self.replica_id = 0 if comms.replicas is None else comms.replicas.new_id()
        self._mean = Division(rule.divide_before, comms.num_ranks / rule.divide_before)
        self.compute_dtype = self.compute_dtype_under(rule)
        self.reduce_dtype = rule.reduce_dtype_of(self.compute_dtype)
        self._sum_dtype = torch.promote_types(self.compute_dtype, self.reduce_dtype)
        self.compute_device = transfers.device
        home = rule.grad_home if self.shows.on_cpu else GradHome.SHARD
        before = self.grad  # of another model
        held = None if before is None else before.value
        grad_dtype = self.reduce_dtype if rule.keeps_reduce_dtype else self.shard.dtype
        with torch.inference_mode(False), torch.no_grad():
            if self.shows.on_cpu:
                self._place_on_cpu(keep_on_device=not rule.cpu_offload)
            elif self.shard.device != self.compute_device:
                set_data(self.shard, self.shard.data.to(self.compute_device))
            gathered = self._make_gathered(comm)
        for _, hook in self._known.values():
            hook.remove()
        # Of each leaf that is or was trained: its graph node, and the handle of the hook on it.
        self._known, self._on_grad = {}, on_grad
        self.gather_into(gathered)
        self.shows.link()
        self.grad = self.shows.make_grad(grad_dtype, home, transfers, held)
        if before is not None:
            self.grad.adopt(before)
        self.communicate_in(comms)

    def _make_gathered(self, comm: Communicator) -> Gathered:
        """Memory of the whole parameters, freed."""
        # With one rank and one dtype the shard is the whole line: compute on it, gather nothing.
        is_cast = self.compute_dtype != self.shard.dtype
        self.computes_on_shard = comm.world_size == 1 and not is_cast and not self.shows.on_cpu
        if self.computes_on_shard:
            return self.line.in_place(self.shard.data.view(1, -1), comm)
        gathered = self.line.gathered_in(self.line.empty(self.compute_dtype, self.compute_device), comm)
        gathered.free()
        return gathered

    def gather_into(self, gathered: Gathered) -> None:
        """Gather into ``gathered`` from now on."""
        self.gathered = gathered
        gathered.custom = self.route.gather
        self._show_leaves()

    def _show_leaves(self) -> None:
        """Make the leaves ready to show `gathered`, and hook those that are trained for the first time.

        Those frozen now keep their hooks for earlier graphs.
        """
        pairs = list(zip(self.slots, self.gathered.views, strict=True))
        for index, (slot, view) in enumerate(pairs):
            is_whole = slot.is_gathered
            if slot.leaf.requires_grad != self.trained[index]:  # torch refuses it for what inference mode has made
                slot.leaf.requires_grad_(bool(self.trained[index]))
            slot.show(view)  # a leaf's graph node remembers the shape and dtype that it was made with
            if self.trained[index] and index not in self._known:
                hook = slot.leaf.register_post_accumulate_grad_hook(self._on_grad)
                self._known[index] = accumulate_node(slot.leaf), hook
            if not is_whole:
                slot.clear()
        self.nodes = [self._known[index][0] if trains else None for index, trains in enumerate(self.trained)]
        # To set the data of plain leaves in one loop costs far less host time than one call for each. Holds until a
        # leaf is replaced, which happens before the first forward only.
        self._plain = [(slot.leaf, view, view.new_empty(0)) for slot, view in pairs if type(slot) is ParamSlot]
        self._others = [(slot, view) for slot, view in pairs if type(slot) is not ParamSlot]

    def communicate_in(self, comms: Communicators) -> None:
        """Communicate in the groups of ``comms`` from now on; gathers stay in that of the shard."""
        self._given = comms
        self.reduce_id = self.tag_id if comms.reduce is comms.shard else comms.reduce.new_id()
        self.follow_route()

    def follow_route(self) -> None:
        """Apply the settings of `route`; call this after each change to them, between passes."""
        if self.comm is None:  # before the first forward
            return
        route, comms = self.route, self._given
        self.keeps_sums = not route.sums_replicas and comms.replicas is not None
        if route.scatter is not None:
            comms = replace(comms, reduce=route.scatter(comms.reduce))
        self.comms = replace(comms, replicas=None) if self.keeps_sums else comms
        self.division = _UNDIVIDED if self.keeps_sums else route.division or self._mean
        self.lands_at_once = route.hook is not None
        self.landing_dtype = None if route.hook is not None or self.keeps_sums else self.grad.dtype
        self.gathered.custom = route.gather

    def _place_on_cpu(self, keep_on_device: bool) -> None:
        """Move the shard to host memory that the device can read; `.cuda()` or `.half()` may have moved it out."""
        host = host_empty_like(self.shard, self.compute_device)
        host.copy_(self.shard)
        set_data(self.shard, host)
        if keep_on_device:
            self.device_shard = host.new_empty(host.shape, dtype=self.compute_dtype, device=self.compute_device)

    # ---- passes

    def begin_pass(self) -> None:
        """Apply the user's changes since the last pass: values, gradients and ``requires_grad``."""
        self._is_updated = True
        if self.shows.has_moved:
            self.adopt_assigned()
        self.follow_requires_grad()
        self.grad.forget_dropped()

    def unshard(self, in_backward: bool) -> None:
        """Start gathering the line, even if it is gathered; a backward starts from what is kept. **Collective.**"""
        if self.computes_on_shard:
            if self.gathered.buffer.data_ptr() != self.shard.data_ptr():  # the user assigned `shard.data`
                self.gather_into(self.line.in_place(self.shard.data.view(1, -1), self.comm))
        elif self.line.numel:
            tag = exchange_tag("all_gather", self.tag_id, next(self.uses))
            if in_backward and self.part is not None and self.part.kept is not None:
                self.gathered.start_from(self.part, tag)
            else:
                self.gathered.start(self._newest(), tag)

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

    # ---- gradients

    @property
    def pending(self) -> PendingGrads | None:
        """The gradients that no backward has reduced yet, or that an exception has left incomplete."""
        return None if self.grad is None else self.grad.pending

    def reach(self) -> bytearray:
        """For each parameter, 1 if the running backward gives it a gradient on this rank, or one is pending."""
        if not self.line.numel:
            return bytearray(len(self.slots))
        pending = self.pending
        if pending is None and 0 not in self.trained:
            return reached(self.nodes)
        kept = bytes(len(self.slots)) if pending is None else pending.kept(sends_shard_sum=not self.keeps_sums)
        return bytearray(
            own or (node is not None and reaches(node)) for node, own in zip(self.nodes, kept, strict=True)
        )

    def note_reached(self, which: bytearray) -> None:
        """A backward begins in which some rank has gradients of ``which`` parameters, 1 or 0 each.

        Gradients that no rank has stay None.
        """
        self.reached = bytes(which)
        self.contributed = bytearray(len(self.slots))

    def write_grads(self, views: list[list[Tensor]]) -> None:
        """Copy every leaf's gradient into ``views`` and cast it: the only copy of whole gradients that are not small.

        Then drop the leaves' gradients. A leaf without a gradient counts as zeros.
        """
        cut_as = self.line.cut_as
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        empty = list(views[-1])
        pending = self.pending
        if pending is None:
            grads = [slot.leaf.grad for slot in self.slots]
            self.drop_grads()
            self.contributed[:] = [grad is not None for grad in grads]
        else:
            self._keep_grads(pending)
            self.contributed[:] = pending.kept(sends_shard_sum=not self.keeps_sums)
            grads = pending.take_sums()
        # All slots are alike. Sums in a wider dtype are local already.
        is_dtensor = self.slots[0].has_mesh and (pending is None or self._sum_dtype == self.compute_dtype)
        for index, (slot, grad) in enumerate(zip(self.slots, grads, strict=True)):
            runs = views[index]
            if grad is None:
                empty += runs
                continue
            if is_dtensor or grad.is_sparse:
                grad = slot.local_grad(grad)
            if not self.reached[index]:
                raise unexpected_error(slot.fqn)
            targets += runs
            if runs and runs[0].shape == grad.shape:  # one run: the first of several has fewer elements
                sources += (grad,)
            else:
                sources += cut_as(runs, index, grad)
        for run in empty:
            run.zero_()
        if targets:
            columns = None if targets[0].is_cpu else joined_columns(targets)
            if columns is None or any(source.dtype != columns.dtype for source in sources):
                torch._foreach_copy_(targets, sources)
            else:  # one kernel; a foreach copy to parts of rows is one for each
                pairs = zip(sources, targets, strict=True)
                torch.cat([source.view(target.shape) for source, target in pairs], dim=1, out=columns)

    def _keep_grads(self, pending: PendingGrads) -> None:
        """Add the leaves' gradients to ``pending``, in the wider of compute and reduce dtype."""
        for index, slot in enumerate(self.slots):
            grad, slot.leaf.grad = slot.leaf.grad, None
            if grad is None:
                continue
            if self._sum_dtype != self.compute_dtype:  # local in that dtype: the sum over its own mesh would round
                grad = slot.local_grad(grad.to(self._sum_dtype))
            elif grad.is_sparse:
                grad = grad.to_dense()
            pending.add(index, grad)

    def take_kept(self) -> Tensor | None:
        """The sum of earlier backwards over the ranks of the shard only; None from the second call on."""
        return None if self.pending is None else self.pending.take_shard_sum()

    def accept_grad(self, reduced: Tensor) -> None:
        """Set or add the mean over ranks, ``[S]``, to the shard's gradient, and call its hooks and the listener.

        A sum that is not summed over replicas yet is kept pending instead.
        """
        if self.keeps_sums:
            with torch.no_grad():
                pending = self.grad.pending_of(len(self.slots))
                pending.add_shard_sum(reduced, self.reached)
                pending.show(self.reached)
            return
        if self.route.hook is not None:
            self.route.hook(reduced)
        self.grad.add(reduced, self.reached)
        for param in filter(_HOOKS, self.shows.registered):
            self.grad.land()
            for hook in tuple(_HOOKS(param).values()) if param.grad is not None else ():
                hook(param)
        listener = self.grad.transfers.listener
        if listener is not None:
            listener(self)

    @torch.no_grad()
    def accumulate(self) -> None:
        """Keep this pass's gradients whole, on this rank, for a later pass that reduces (``no_sync``).

        Faces show placeholders, also on ranks that have no gradients of their own.
        """
        pending = self.grad.pending_of(len(self.slots))
        self.contributed[:] = [slot.leaf.grad is not None for slot in self.slots]
        self._keep_grads(pending)
        pending.show(self.reached)

    @property
    def has_leaf_grads(self) -> bool:
        """Whether autograd has left a gradient on a leaf."""
        return bool([slot for slot in self.slots if slot.leaf.grad is not None])  # a generator costs host time

    def drop_zeroed(self) -> None:
        """Drop the pending gradients of parameters that the user has zeroed since.

        Raises:
            FairshardError: one was changed in another way.
        """
        if self.pending is not None:
            self.grad.drop_zeroed([one.name for one in self.stepped])

    def drop_grads(self) -> None:
        """Drop what an interrupted backward has left on the leaves."""
        for slot in self.slots:
            slot.leaf.grad = None


_UNDIVIDED = Division(1.0, 1.0)
