"""Where the gradient of a shard is kept, and how it gets there.

A reduced gradient that moves to host memory is copied while the backward continues::

    reduce stream    | reduce-scatter k | reduce-scatter k+1 |
    copy stream                         | copy k ----- |            into memory of `ShardGrad`
    host                                               land: set as `.grad`, or added to it

*Invariant*: a gradient is visible only after it has landed. A read in the middle of a backward returns the last sum
or None, never memory that a copy is still writing.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fairshard.errors import BackwardOrderError, FairshardError
from fairshard.params.rule import GradHome
from fairshard.utils.dynamo import not_traced
from fairshard.utils.pinned import host_empty_like
from fairshard.utils.storage import is_aliased, set_grad
from fairshard.utils.streams import Event, Stream, now

MAX_KEPT_NBYTES = 64 << 20
"""How many bytes of copied gradients, besides the newest, are kept until their copies have finished."""

marked: weakref.WeakSet[ShardGrad] = weakref.WeakSet()
"""Gradients in which `ShardGrad.mark` has created zeros; see `ShardGrad.hide_zeros`."""


class GradTransfers:
    """Shared by the gradients of one model: the stream of their copies, a listener, and the time spent waiting."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = Stream(device)
        self.listener: Callable[[Any], None] | None = None
        self.waited_s = 0.0
        self._reads: deque[tuple[Tensor, Event]] = deque()

    def copy(self, source: Tensor, target: Tensor) -> Event:
        """Copy ``source``, made on the current stream, to host memory; the returned event passes when it has arrived.

        ``source`` is kept until then. If others of more than 64 MiB are kept, the current stream, on which later ones
        are made, waits for the oldest copy; the host never does, because it must queue the computation meanwhile.
        """
        made = now(source.device)
        with self.stream.use():
            self.stream.wait(made)
            target.copy_(source, non_blocking=True)
            landed = self.stream.record()
        while self._reads and (self._reads[0][1].has_passed() or self._num_kept_bytes() > MAX_KEPT_NBYTES):
            self._reads.popleft()[1].wait()
        self._reads.append((source, landed))
        return landed

    def wait(self, event: Event, counts: bool = True) -> None:
        """Make the host wait for ``event``; if it ``counts`` as blocking training, add the time to ``waited_s``."""
        if not event.has_passed():
            started = time.perf_counter()
            event.synchronize()
            if counts:
                self.waited_s += time.perf_counter() - started
        while counts and self._reads and self._reads[0][1].has_passed():  # never on the optimizer's thread
            self._reads.popleft()

    def _num_kept_bytes(self) -> int:
        return sum(source.nbytes for source, _ in self._reads)


def sign_zeros_(heads: Tensor) -> None:
    """Turn zeros in ``heads`` into -0.0, which adds like 0.0 and survives scaling, but not `zero_`."""
    heads.masked_fill_(heads == 0, -0.0)


def is_placeholder(grad: Tensor) -> bool:
    """Whether ``grad``, this rank's elements, still holds the zeros that `sign_zeros_` has marked."""
    return bool(grad.reshape(-1)[:1].signbit().all() & ~grad.any())  # one read: on a device, each waits for it


def is_zeroed(grad: Tensor | None, mark: tuple[Tensor, int], name: str, values: Tensor | None = None) -> bool:
    """Whether ``grad`` was dropped or zeroed after ``mark`` was made; `sign_zeros_` changed its first element then.

    ``values``: its elements on this rank, if ``grad`` also has elements of other ranks.

    Raises:
        FairshardError: ``grad`` was changed in another way.
    """
    kept, version = mark
    if grad is None:
        return True
    if grad is kept and grad._version == version:
        return False
    values = grad if values is None else values
    if values.any() or values.reshape(-1)[:1].signbit().any():
        raise FairshardError(
            f"The gradient of `{name}` must not be changed while gradients of no_sync passes wait to be added to it, "
            "because the change would not apply to those, but it was scaled, written or replaced. Change gradients "
            "(clip or unscale them) after a backward that reduces (outside of no_sync, or after "
            "`set_requires_gradient_sync(True)`), or drop all of them with zero_grad()."
        )
    return True


def unexpected_error(fqn: str) -> BackwardOrderError:
    """Error for a gradient of parameter ``fqn`` to which no rank had a path when the backward began."""
    return BackwardOrderError(
        f"`{fqn}` must be trained when the backward begins, and reached through its unit's graph, but gets a gradient "
        "that no rank has announced: a hook, or the second run of a checkpoint, has set `requires_grad`; or a function "
        "of its own recomputes. Freeze and train outside of hooks and of checkpointed functions, and recompute with "
        "torch.utils.checkpoint."
    )


def hook_of_leaf(leaves: Any, index: int) -> Callable[[Tensor], None]:
    """The hook on the leaf of parameter ``index``: drops its gradient if a hook has frozen it, then calls ``_on_grad``.

    Autograd checks ``requires_grad`` of the leaf when it accumulates, but users set it on the registered parameter. The
    reference to ``leaves`` is weak, because the garbage collector cannot see hooks. torch cannot swap a parameter that
    has a weak reference, so there is none to parameters.
    """
    owner, on_grad = weakref.ref(leaves), leaves._on_grad
    place = index if len(leaves.registered) > 1 else 0

    @not_traced
    def on_grad_of(leaf: Tensor) -> None:
        own = owner()
        if own is not None and not own.shows.registered[place].requires_grad:
            _drop(own, index, leaf)
        on_grad(leaf)

    return on_grad_of


def _drop(leaves: Any, index: int, leaf: Tensor) -> None:
    """Drop the gradient of ``leaf``, unless the leaf was frozen already when its unit was gathered.

    Raises:
        BackwardOrderError: autograd has added the gradient to one of earlier `no_sync` passes.
    """
    if not leaves.trained[index]:
        return
    if leaves._kept[index] and leaves._accumulated is None:
        raise BackwardOrderError(
            f"`{leaves.slots[index].fqn}` must not be frozen by a hook in the backward of its unit while it has "
            "gradients of earlier no_sync passes, because autograd has already added this one to them. Freeze it "
            "before the backward."
        )
    leaf.grad = None


@dataclass(frozen=True)
class _Flight:
    """A copy to ``host`` not waited for yet; it is complete when ``landed`` has passed."""

    host: Tensor
    landed: Event
    reached: bytes | None
    given: bytes | None


class ShardGrad:
    """The gradient of one shard, in ``dtype``."""

    def __init__(
        self,
        shard: nn.Parameter,
        dtype: torch.dtype,
        home: GradHome,
        transfers: GradTransfers,
        held: Tensor | None = None,
    ) -> None:
        self._shard = shard
        self.dtype = dtype
        self._home = home
        self.transfers = transfers
        self._held = held
        self._buffers: deque[Tensor] = deque(maxlen=2)  # the second is used while gradients accumulate
        self.flights: deque[_Flight] = deque()  # copies that `land` has not waited for yet
        self._is_new = False  # there was no gradient before the last one was added
        self._had_none: Any = False  # there was no gradient before `mark` created zeros
        self._hidden: Any = None  # the zeros that `hide_zeros` has hidden

    @property
    def value(self) -> Tensor | None:
        """The gradient ``[S]``, wherever it is kept; None if missing."""
        return self._held if self._home is GradHome.HELD else self._shard.grad

    @property
    def is_on_host(self) -> bool:
        """Whether gradients move to host memory."""
        return self._home is GradHome.HOST

    @property
    def is_held(self) -> bool:
        """Whether gradients are held here, on the compute device, and not on the shard."""
        return self._home is GradHome.HELD

    def tensors(self) -> list[Tensor]:
        """Memory that this object keeps between steps."""
        return list(self._buffers) if self.is_on_host else [grad for grad in (self.value,) if grad is not None]

    def add(self, reduced: Tensor, reached: bytes | None = None, given: bytes | None = None) -> None:
        """Set or add ``reduced``, made on the current stream; if gradients move to the host, `land` completes the move.

        ``reached``: for each parameter 1 if it has a gradient; None: all have one. ``given``: 1 if this rank has had a
        part of it; None: of all. What was frozen before any rank had a part of it gets no gradient.
        """
        if reduced.dtype != self.dtype:
            reduced = reduced.to(self.dtype)
        if self._home is not GradHome.HOST:
            self._set_or_add(reduced, reached, given)
            return
        host = self._take_buffer()
        self.flights.append(_Flight(host, self.transfers.copy(reduced, host), reached, given))

    def retract(self, reached: bytearray) -> None:
        """Drop the gradient if the last backward created it but has not ``reached`` any of its parameters."""
        if self._is_new and not any(reached):
            self._set(None)

    def land(self, counts: bool = True) -> None:
        """Wait for all copies and make their gradients visible; ``counts`` as in `GradTransfers.wait`."""
        while self.flights:
            flight = self.flights.popleft()
            self.transfers.wait(flight.landed, counts)
            self._set_or_add(flight.host, flight.reached, flight.given)

    def discard_flights(self) -> None:
        """Wait for all copies and drop their gradients, because their backward was interrupted."""
        while self.flights:
            self.transfers.wait(self.flights.popleft().landed)

    def value_or_zeros(self) -> Tensor:
        """The gradient; creates zeros if missing."""
        if self.value is None:
            device = self.transfers.device if self.is_held else None
            self._set(torch.zeros_like(self._shard, dtype=self.dtype, device=device, requires_grad=False))
        assert self.value is not None
        return self.value

    def mark(self) -> Any:
        """Land all copies, and record the current gradient (zeros if missing) for `zeroed_since`."""
        self.land()
        self._had_none = self._had_none or self.value is None
        grad = self.value_or_zeros()
        sign_zeros_(grad.detach()[:1])
        if self._had_none:
            marked.add(self)
        return grad, grad._version

    @property
    def has_zeros(self) -> bool:
        """Whether zeros that `mark` has created may still be the gradient, or a part of it."""
        return bool(self._had_none)

    def hide_zeros(self) -> bool:
        """Make a gradient missing that is only zeros created by `mark`, until `show_zeros`; returns whether it was."""
        grad = self.value
        if not self._had_none or grad is None or self.is_held or not is_placeholder(grad):
            return False
        self._set(None)
        self._hidden = grad
        return True

    def show_zeros(self) -> None:
        """Undo `hide_zeros`, unless there is a gradient again."""
        hidden, self._hidden = self._hidden, None
        if hidden is not None and self.value is None:
            self._set(hidden)

    def zeroed_since(self, mark: Any, names: Sequence[str]) -> list[int]:
        """Indexes of ``names`` (here one) whose gradient was dropped or zeroed after `mark`; raises as `is_zeroed`."""
        return [index for index, name in enumerate(names) if is_zeroed(self.value, mark, name)]

    def forget_dropped(self) -> None:
        """Free the memory of dropped gradients; no-op here, because only the shard's `.grad` is kept."""

    def zero(self, set_to_none: bool) -> None:
        """Drop the gradient or overwrite it with zeros, and discard copies in flight."""
        self.discard_flights()
        self._hidden = None
        if set_to_none:
            self._set(None)
        elif self.value is not None:
            self.value.zero_()

    def _set(self, grad: Tensor | None) -> None:
        if self._home is GradHome.HELD:
            self._held = grad
        elif self.dtype == self._shard.dtype:
            self._shard.grad = grad
        else:
            set_grad(self._shard, grad)

    def _set_or_add(self, grad: Tensor, reached: bytes | None, given: bytes | None) -> None:
        kept = self.value
        if kept is not None or given is None or 1 in given or self._shard.requires_grad or bool(grad.any()):
            self._add_to(kept, grad)

    def _add_to(self, kept: Tensor | None, grad: Tensor) -> None:
        self._is_new, self._had_none = kept is None or self._had_none, False
        if kept is None:
            self._set(grad.data)  # with its own version counter, not the whole bucket's
        else:
            kept.add_(grad)

    def _take_buffer(self) -> Tensor:
        """Host memory for one gradient; reuses that of an earlier one if nothing refers to it any more."""
        for buffer in self._buffers:
            if not is_aliased(buffer):
                return buffer.detach()
        self._buffers.append(host_empty_like(self._shard, self.transfers.device))
        return self._buffers[-1].detach()
