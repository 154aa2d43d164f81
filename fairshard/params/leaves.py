"""The leaves of a flat param, and the path of their gradients to the shard's gradient.

::

    leaves    .grad, whole    autograd sets them; `no_sync` keeps them, here or in a wider dtype
    bucket    [W, S]          `write_grads` copies them there; the reduce-scatter reads it
    shard     .grad, [S]      `accept_grad` adds the mean over ranks to it
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from fairshard.errors import FairshardError, PartialGradientError
from fairshard.params.dtensor_slot import DTensorSlot
from fairshard.params.gathered import Gathered
from fairshard.params.route import Route
from fairshard.params.shard_grad import unexpected_error
from fairshard.params.shown import ShownShard
from fairshard.params.slot import ParamSlot, plain_and_others
from fairshard.utils.autograd import accumulate_node, reached, reaches
from fairshard.utils.block import joined_columns

# Of slots and of parameters; `map` with them costs less host time than a loop.
_TRAINS, _HOOKS = attrgetter("leaf.requires_grad"), attrgetter("_post_accumulate_grad_hooks")
interrupted: weakref.WeakSet[Leaves] = weakref.WeakSet()
"""Flat params whose gradients an exception may have left incomplete; see `Leaves.check_whole`."""


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
        self.contributed = bytearray(len(self.slots))  # parameters of which this rank had gradients
        self._num_landed = 0  # sums that the running backward has added to the gradient
        self._kept = bytearray(len(self.slots))  # parameters of which `no_sync` has kept gradients
        self._partial: Any = None  # the gradient's mark when an exception left it incomplete
        self._hooks: list[Any] = []
        self._marker: Any = None
        self._sent_marker: Any = None  # of `no_sync` gradients that the running backward has sent
        self._accumulated: Tensor | None = None
        self._has_dtensors = isinstance(self.slots[0], DTensorSlot)  # all slots are alike

    @property
    def shard(self) -> nn.Parameter:
        """This rank's part of the line, ``[S]``."""
        return self.shows.shard

    @property
    def registered(self) -> tuple[nn.Parameter, ...]:
        """The parameters that users see and attach hooks to."""
        return self.shows.registered

    @property
    def versioned(self) -> tuple[nn.Parameter, ...]:
        """Parameters whose version counters together count every write to the shard."""
        return self.shows.versioned

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

    def _drop_accumulated(self, index: int) -> None:
        self.slots[index].leaf.grad = None
        self._kept[index] = 0
        if self._accumulated is not None:
            span = self.line.layout.param_span(index)
            self._accumulated[span.start : span.stop].zero_()

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
        converts = self._accumulated is not None or self._has_dtensors
        for index, slot in enumerate(self.slots):
            runs, grad = views[index], slot.leaf.grad
            if converts or (grad is not None and grad.is_sparse):
                grad = self._take_grad(index, slot)
            else:
                slot.leaf.grad = None
            if grad is None:
                empty += runs
                continue
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
        self._sent_marker = self._marker
        self._marker = self._accumulated = None
        self._kept = bytearray(len(self.slots))
        if not self.route.keeps_sums and self.route.kept.waiting is not None:
            self.route.kept.lend()

    def take_kept(self) -> Tensor | None:
        """The waiting sum of earlier backwards, over the ranks of the shard only; None from the second call on."""
        return self.route.kept.take()

    def accept_grad(self, reduced: Tensor) -> None:
        """Set or add the mean over ranks, ``[S]``, to the shard's gradient, and call its hooks and the listener.

        A sum that is not summed over replicas yet is kept instead. The shard then gets a gradient of zeros, as in
        `accumulate`, which shows later whether the user has zeroed it.
        """
        route = self.route
        if route.keeps_sums:
            with torch.no_grad():
                route.kept.add(reduced)
                route.kept.mark = self.grad.mark()
            self.num_sent -= 1
            return
        if route.kept.lent is not None:
            route.kept.complete()
        if route.hook is not None:
            route.change(reduced)
        self.grad.add(reduced, self.reached, bytes(self.contributed) if 0 in self.contributed else None)
        self._num_landed += 1
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

    def reach(self) -> bytearray:
        """For each parameter, 1 if the running backward gives it a gradient on this rank, or `no_sync` has kept one."""
        if self.route.kept.waiting is not None and not self.route.keeps_sums:  # the sum is of all parameters
            return bytearray(self.trained)
        if not self.has_elements:
            return bytearray(len(self.slots))
        if not self.has_frozen and self._marker is None:
            return reached(self.nodes)
        kept = self._kept if self.has_accumulated else bytes(len(self.slots))
        return bytearray(
            own or (node is not None and reaches(node)) for node, own in zip(self.nodes, kept, strict=True)
        )

    def note_reached(self, which: bytearray | None) -> None:
        """Record that some rank has gradients of ``which`` parameters, 1 or 0 each (None: all).

        Gradients that no rank has stay None.
        """
        self.is_owed = which is None or 1 in which
        self.reached = None if which is None or 0 not in which else bytes(which)
        self.contributed = bytearray(len(self.slots))
        self._num_landed, self._sent_marker = 0, None

    @torch.no_grad()
    def accumulate(self) -> None:
        """Keep this pass's gradients whole, on this rank, for a later pass that reduces (``no_sync``).

        They stay on the leaves, or are kept in ``reduce_dtype`` if that is wider. If the shard has no gradient, it gets
        one of zeros: setting it to None or zero (``zero_grad``) also discards the accumulated gradients.
        """
        has_grad = [slot.leaf.grad is not None for slot in self.slots]
        if not any(has_grad):
            return
        self._kept = bytearray(map(max, self._kept, has_grad))
        dtype = torch.promote_types(self.compute_dtype, self.reduce_dtype)
        if dtype != self.compute_dtype:
            if self._accumulated is None:
                self._accumulated = torch.zeros(self.line.numel, dtype=dtype, device=self.compute_device)
            for index, slot in enumerate(self.slots):
                self._take_grad(index, slot)
        self._marker = self.grad.mark()

    @property
    def has_accumulated(self) -> bool:
        """Whether gradients of ``no_sync`` passes wait here to be reduced."""
        return self._marker is not None or self.route.has_waiting

    def forget_zeroed(self) -> None:
        """Drop the kept gradients of parameters that the user has zeroed since; called before a pass adds to them."""
        kept = self.route.kept
        if self.grad is not None:
            self.grad.show_zeros()  # a step that raised has left them hidden
        if self._partial is not None and self._is_zeroed(self._partial):
            self._partial = None
            interrupted.discard(self)
        if self._marker is None and kept.waiting is None:
            return
        names = self._names
        if self._marker is not None:
            zeroed = self.grad.zeroed_since(self._marker, names)
            if len(zeroed) == len(names):
                self._marker = None
                self.drop_grads()
            else:
                for index in zeroed:
                    self._drop_accumulated(index)
        if kept.waiting is not None:
            zeroed = self.grad.zeroed_since(kept.mark, names)
            if len(zeroed) == len(names):
                kept.drop()
            else:
                spans = self.shows.own_spans()
                for index in zeroed:
                    kept.waiting[spans[index].start : spans[index].stop].zero_()

    @property
    def _names(self) -> list[str]:
        """The names of the objects in `stepped`; each has its own gradient."""
        return [one.name for one in self.stepped]

    def drop_grads(self) -> None:
        """Forget the gradients of an interrupted backward, but not those that ``no_sync`` accumulated."""
        self.num_sent = 0
        if self._marker is None:
            self._accumulated = None
            self._kept = bytearray(len(self.slots))
            for slot in self.slots:
                slot.leaf.grad = None
        self.route.kept.restore()

    @property
    def keeps_sum(self) -> bool | None:
        """Whether the gradient still contains the sum that the running backward has added: it was not zeroed since.

        None: no sum was added, or this rank has no elements and cannot know.
        """
        grad = self.grad.value if self._num_landed else None
        if grad is None or not self.line.layout.pieces_of(self.line.rank):
            return None
        return bool(grad.any())

    def abandon_grads(self, is_touched: bool, keeps_sums: bool) -> None:
        """Drop the gradients of a backward that raised; ``is_touched``: it has given gradients to some leaves.

        Sums already added to earlier gradients cannot be subtracted: the next step must not use these gradients.
        ``keeps_sums``: some gradient of the model still contains such a sum, as far as this rank sees, so the user has
        not zeroed gradients since.
        """
        marker = self._sent_marker or (self._marker if is_touched else None)
        is_partial = keeps_sums and self._num_landed > 0 and self.grad.value is not None
        is_partial = is_partial or (marker is not None and not self._is_zeroed(marker))
        if is_touched:
            self._marker = None
        self.drop_grads()
        if is_partial:
            self.grad.discard_flights()
            self._partial = self.grad.mark()
            interrupted.add(self)

    def check_whole(self) -> None:
        """Raise if an exception left the gradient incomplete, unless it was dropped or zeroed since.

        Raises:
            PartialGradientError: it is incomplete.
        """
        if self._partial is None:
            return
        if not self._is_zeroed(self._partial):
            raise PartialGradientError(
                f"The gradient of `{self.name}` ({self.slots[0].fqn}, ...; rank {self.line.rank}) must be whole before "
                "a step, but an exception ended a backward after a part of it had been added, or after gradients that "
                "wait to be reduced had been changed. Call zero_grad() and repeat the backwards of this step."
            )
        self._partial = None
        interrupted.discard(self)

    def _is_zeroed(self, marker: Any) -> bool:
        names = self._names
        try:
            return len(self.grad.zeroed_since(marker, names)) == len(names)
        except FairshardError:  # for example, the gradients were scaled
            return False

    def _take_grad(self, index: int, slot: ParamSlot) -> Tensor | None:
        """Remove a leaf's gradient, and return it plus the gradient accumulated in a wider dtype, if any."""
        leaf = slot.leaf
        grad = leaf.grad
        if grad is not None:
            leaf.grad = None
            if self._has_dtensors:
                dtensor: Any = slot
                # In the wider dtype, if any, because the sum over the parameter's own mesh would round otherwise.
                grad = dtensor.local_grad(grad if self._accumulated is None else grad.to(self._accumulated.dtype))
            if grad.is_sparse:
                grad = grad.to_dense()
        if self._accumulated is None:
            return grad
        if grad is None and not self._kept[index]:  # no backward has reached it
            return None
        span = self.line.layout.param_span(index)
        kept = self._accumulated[span.start : span.stop].view(slot.shape)
        return kept if grad is None else kept.add_(grad)
