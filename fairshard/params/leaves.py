"""The leaves of a flat param, and the path of their gradients to the shard's gradient.

::

    leaves    .grad, whole    autograd sets them; `no_sync` adds them up in `PendingGrads`
    bucket    [W, S]          `write_grads` copies them there; the reduce-scatter reads it
    shard     .grad, [S]      `accept_grad` adds the mean over ranks to it
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from fairshard.params.gathered import Gathered
from fairshard.params.pending import PendingGrads
from fairshard.params.route import Route
from fairshard.params.shard_grad import unexpected_error
from fairshard.params.shown import ShownShard
from fairshard.params.slot import ParamSlot, plain_and_others
from fairshard.utils.autograd import accumulate_node, reached, reaches
from fairshard.utils.block import joined_columns

# Of slots and of parameters; `map` with them costs less host time than a loop.
_TRAINS, _HOOKS = attrgetter("leaf.requires_grad"), attrgetter("_post_accumulate_grad_hooks")


class Leaves:
    """The leaves of the parameters whose shard ``shows`` registers.

    Attributes:
        shows: the shard and its registered parameters.
        line: the layout of the parameters; converts the gathered buffer to whole parameters.
        route: the user's settings for the communication.
        trained: for each parameter 1 if it needs a gradient, as last followed.
        gathered: the memory of the whole parameters; `materialize` sets it, the dtypes and the device.
    """

    gathered: Gathered
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    compute_device: torch.device
    _on_grad: Any

    def __init__(self, shows: ShownShard, name: str, route: Route) -> None:
        self.shows, self.slots, self.line = shows, shows.slots, shows.line
        self.shard_numel = self.line.shard_numel  # of this rank
        self.has_elements = self.line.numel > 0
        self.name = name
        self.route = route
        self.requires_grad = shows.shard.requires_grad
        self.trained = shows.wanted()
        self._forget_runtime()

    def _forget_runtime(self) -> None:
        """Reset everything that `materialize` creates; pickle and deepcopy leave it out."""
        self.grad: Any = None
        self.nodes: list[Any] = []  # graph nodes of the leaves; None for those not trained
        self._nodes: list[Any] = []  # ... and of those trained earlier, which a graph may still use
        self.has_frozen = False
        self.is_gathered = False
        self.is_owed = False  # some rank has a gradient, from its backward or kept by `no_sync`, ...
        self.reached: bytes | None = None  # ... of these parameters; None: of all
        self.num_sent = 0  # sums in flight
        self.contributed = bytearray(len(self.slots))  # parameters of which this rank has sent gradients
        self._hooks: list[Any] = []
        self._has_dtensors = self.slots[0].has_mesh  # all slots are alike

    @property
    def shard(self) -> nn.Parameter:
        """This rank's part of the line, ``[S]``."""
        return self.shows.shard

    @property
    def registered(self) -> tuple[nn.Parameter, ...]:
        """The parameters that users see and attach hooks to."""
        return self.shows.registered

    @property
    def stepped(self) -> Sequence[Any]:
        """The objects whose ``shard`` optimizers step: this flat param, or one `OrigParam` per parameter."""
        return self.shows.stepped_by(self)

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
        if wanted == self.trained:
            return
        self.trained = wanted
        self.requires_grad = any(wanted)
        self.shows.follow(wanted)
        if self._nodes:
            self._hook_trained()

    def _hook_leaves(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._nodes = [None] * len(self.slots)
        self._hook_trained()

    def _hook_trained(self) -> None:
        """Hook leaves that are trained for the first time; those frozen now keep their hooks for earlier graphs."""
        for index, (slot, view) in enumerate(zip(self.slots, self.gathered.views, strict=True)):
            slot.leaf.requires_grad_(bool(self.trained[index]))
            slot.show(view)  # a leaf's graph node remembers the shape and dtype that it was made with
            if self.trained[index] and self._nodes[index] is None:
                self._nodes[index] = accumulate_node(slot.leaf)
                self._hooks.append(slot.leaf.register_post_accumulate_grad_hook(self._on_grad))
            if not self.is_gathered:
                slot.detach()
        self.nodes = [node if trains else None for node, trains in zip(self._nodes, self.trained, strict=True)]
        self.has_frozen = None in self.nodes
        self._plain, self._others = plain_and_others(self.slots, self.gathered.views)

    def write_grads(self, views: list[list[Tensor]]) -> None:
        """Copy every leaf's gradient into ``views`` and cast it: the only copy of whole gradients that are not small.

        Then drop the leaves' gradients. A leaf without a gradient counts as zeros.
        """
        cut_as = self.line.cut_as
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        empty = list(views[-1])
        pending = self.pending
        for index, slot in enumerate(self.slots):
            runs, grad = views[index], slot.leaf.grad
            slot.leaf.grad = None
            if pending is not None:
                if grad is not None:
                    pending.add(index, self._as_kept(slot, grad))
                grad = pending.take(index)
            if grad is None:
                empty += runs
                continue
            if grad.is_sparse or (self._has_dtensors and (pending is None or self._wide is None)):
                grad = _local(slot, grad)
            self.contributed[index] = 1
            if self.reached is not None and not self.reached[index]:
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
        if pending is not None:
            pending.note_sent()
            if not self.route.keeps_sums:
                self.contributed = bytearray(map(max, self.contributed, pending.in_shard_sum))

    def take_kept(self) -> Tensor | None:
        """The sum of earlier backwards over the ranks of the shard only; None from the second call on."""
        return None if self.pending is None else self.pending.take_shard_sum()

    def accept_grad(self, reduced: Tensor) -> None:
        """Set or add the mean over ranks, ``[S]``, to the shard's gradient, and call its hooks and the listener.

        A sum that is not summed over replicas yet is kept pending instead.
        """
        route = self.route
        if route.keeps_sums:
            reached = self._reached_by_any
            with torch.no_grad():
                pending = self.grad.pending_of(len(self.slots))
                pending.add_shard_sum(reduced, reached)
                pending.show(reached)
            self.num_sent -= 1
            return
        if route.hook is not None:
            route.change(reduced)
        self.grad.add(reduced, self.reached)
        for param in self.shows.registered if any(map(_HOOKS, self.shows.registered)) else ():
            self.grad.land()
            for hook in tuple((_HOOKS(param) or {}).values()) if param.grad is not None else ():
                hook(param)
        self.num_sent -= 1
        listener = self.grad.transfers.listener
        if listener is not None and not self.num_sent:
            listener(self)

    @property
    def has_leaf_grads(self) -> bool:
        """Whether autograd has left a gradient on a leaf."""
        return any(slot.leaf.grad is not None for slot in self.slots)

    @property
    def pending(self) -> PendingGrads | None:
        """The gradients that no backward has reduced yet, or that an exception has left incomplete."""
        return None if self.grad is None else self.grad.pending

    @property
    def _reached_by_any(self) -> bytes:
        return bytes(b"\1" * len(self.slots)) if self.reached is None else self.reached

    def _as_kept(self, slot: ParamSlot, grad: Tensor) -> Tensor:
        """A leaf's gradient as it is kept pending: in the wider of compute and reduce dtype."""
        if self._wide is not None:  # made local in that dtype: the sum over the parameter's own mesh would round
            return _local(slot, grad.to(self._wide))
        return grad.to_dense() if grad.is_sparse else grad

    @property
    def _wide(self) -> torch.dtype | None:
        """The dtype of pending sums; None: that of the leaves."""
        wide = torch.promote_types(self.compute_dtype, self.reduce_dtype)
        return None if wide == self.compute_dtype else wide

    def reach(self) -> bytearray:
        """For each parameter, 1 if the running backward gives it a gradient on this rank, or one is pending."""
        if not self.has_elements:
            return bytearray(len(self.slots))
        pending = self.pending
        if not self.has_frozen and pending is None:
            return reached(self.nodes)
        kept = bytes(len(self.slots)) if pending is None else pending.kept(sends_shard_sum=not self.route.keeps_sums)
        return bytearray(
            own or (node is not None and reaches(node)) for node, own in zip(self.nodes, kept, strict=True)
        )

    def note_reached(self, which: bytearray | None) -> None:
        """A backward begins in which some rank has gradients of ``which`` parameters, 1 or 0 each (None: all).

        Gradients that no rank has stay None.
        """
        self.is_owed = which is None or 1 in which
        self.reached = None if which is None or 0 not in which else bytes(which)
        self.contributed = bytearray(len(self.slots))

    @torch.no_grad()
    def accumulate(self) -> None:
        """Keep this pass's gradients whole, on this rank, for a later pass that reduces (``no_sync``).

        Faces show placeholders, also on ranks that have no gradients of their own.
        """
        pending = self.grad.pending_of(len(self.slots))
        for index, slot in enumerate(self.slots):
            grad, slot.leaf.grad = slot.leaf.grad, None
            if grad is not None:
                pending.add(index, self._as_kept(slot, grad))
        pending.show(self._reached_by_any)

    def forget_zeroed(self) -> None:
        """A backward begins: see `drop_zeroed`; what earlier backwards have changed cannot be lost any more."""
        self.grad.begin_backward()
        self.drop_zeroed()

    def drop_zeroed(self) -> None:
        """Drop the pending gradients of parameters that the user has zeroed since.

        Raises:
            FairshardError: one was changed in another way.
        """
        if self.pending is not None:
            self.grad.drop_zeroed(self._names)

    @property
    def _names(self) -> list[str]:
        """The names of the objects in `stepped`; each has its own gradient."""
        return [one.name for one in self.stepped]

    def note_sent(self) -> None:
        """The gradients are sent to be reduced."""
        self.num_sent += 1
        self.grad.note_sent()

    def drop_grads(self) -> None:
        """Drop what an interrupted backward has left on the leaves."""
        self.num_sent = 0
        for slot in self.slots:
            slot.leaf.grad = None

    def abandon_grads(self) -> None:
        """A backward has raised: its gradients, and those to which it has added some, must not be used."""
        self.drop_grads()
        self.grad.abandon(len(self.slots))

    def check_whole(self, face: int | None = None) -> None:
        """Raise if the gradient of one face, or of any, is pending or incomplete, unless it was zeroed since.

        Raises:
            PartialGradientError: an exception has left it incomplete.
            PendingGradientError: it waits to be reduced.
        """
        self.drop_zeroed()
        pending = self.pending
        if pending is not None:
            names = self._names
            for index in range(len(names)) if face is None else (face,):
                pending.check_absent(index, names[index], f"{self.slots[index].fqn}, rank {self.line.rank}")


def _local(slot: ParamSlot, grad: Tensor) -> Tensor:
    """The gradient of the leaf of ``slot``, dense, and without its own mesh if it has one."""
    grad = slot.local_grad(grad)
    return grad.to_dense() if grad.is_sparse else grad
