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
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fairshard.errors import BackwardOrderError
from fairshard.params.pending import PendingGrads
from fairshard.params.rule import GradHome
from fairshard.utils.pinned import host_empty_like
from fairshard.utils.storage import is_aliased, set_grad
from fairshard.utils.streams import Event, Stream, now

MAX_KEPT_NBYTES = 64 << 20
"""How many bytes of copied gradients, besides the newest, are kept until their copies have finished."""


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
        reads = self._reads
        while reads and (reads[0][1].is_completed() or sum(kept.nbytes for kept, _ in reads) > MAX_KEPT_NBYTES):
            reads.popleft()[1].wait()
        self._reads.append((source, landed))
        return landed

    def drop(self) -> None:
        """The gradients in host memory are dropped: make the host wait for the copies to it."""
        for _, landed in self._reads:
            landed.synchronize()

    def wait(self, event: Event, counts: bool = True) -> None:
        """Make the host wait for ``event``; if it ``counts`` as blocking training, add the time to ``waited_s``."""
        if not event.is_completed():
            started = time.perf_counter()
            event.synchronize()
            if counts:
                self.waited_s += time.perf_counter() - started
        while counts and self._reads and self._reads[0][1].is_completed():  # never on the optimizer's thread
            self._reads.popleft()


def unexpected_error(fqn: str) -> BackwardOrderError:
    """Error for a gradient of parameter ``fqn`` to which no rank had a path when the backward began."""
    return BackwardOrderError(
        f"`{fqn}` must be trained when the backward begins, and reached through its unit's graph, but gets a gradient "
        "that no rank has announced: a hook, or the second run of a checkpoint, has set `requires_grad`; or a function "
        "of its own recomputes. Freeze and train outside of hooks and of checkpointed functions, and recompute with "
        "torch.utils.checkpoint."
    )


class ShardGrad:
    """The gradient of one shard, in ``dtype``.

    Attributes:
        pending: what no backward has reduced yet, or an exception has left incomplete; None: nothing.
        at_stake: for each parameter 1 if the running backward has added to its gradient, or has sent or kept a part of
            it; None: nothing yet.
        created: for each face 1 if it had no gradient, or no placeholder, before the last one was added.
    """

    pending: PendingGrads | None = None
    at_stake: bytes | None = None
    created: Sequence[int] = b""

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
        self.home = home
        self.transfers = transfers
        self._at: Any = SimpleNamespace(grad=held) if home is GradHome.HELD else shard  # has the gradient as `.grad`
        self._buffers: deque[Tensor] = deque(maxlen=2)  # the second is used while gradients accumulate
        # Copies that `land` has not waited for yet, the event after each, and the parameters that it has gradients of.
        self.flights: deque[tuple[Tensor, Event, bytes]] = deque()

    # ---- what users see

    @property
    def shown(self) -> Sequence[Tensor | None]:
        """The gradient of each face (see `PendingGrads`), here of the shard, wherever it is kept."""
        return (self._at.grad,)

    def show(self, face: int, grad: Tensor | None) -> None:
        """Make ``grad`` the gradient of a face."""
        self._set(grad)

    def new(self, face: int, value: float, shares_memory: bool = False) -> Tensor:
        """A gradient for a face that is filled with ``value``; all elements may be one."""
        return self._filled(self._shard.shape, value, shares_memory)

    def _filled(self, shape: Sequence[int], value: float, shares_memory: bool) -> Tensor:
        device = self.transfers.device if self.home is GradHome.HELD else self._shard.device
        filled = torch.full((1,) if shares_memory else shape, value, dtype=self.dtype, device=device)
        return filled.expand(shape) if shares_memory else filled

    def own_of(self, face: int, grad: Tensor) -> Tensor:
        """This rank's elements of ``grad``, the gradient of a face, in memory order."""
        return grad

    def parts_of(self, whole: Tensor) -> Sequence[Tensor]:
        """The part of ``whole`` ``[S]`` for each face."""
        return (whole,)

    def zeroed_uncounted(self, placeholders: Mapping[int, Tensor], counted: set[int]) -> set[int]:
        """The faces of ``placeholders`` that a write has zeroed that torch did not count, besides those ``counted``."""
        return set()

    # ---- the reduced gradient

    @property
    def value(self) -> Tensor | None:
        """The reduced gradient ``[S]``, wherever it is kept; None if missing."""
        return self.of(0)

    def of(self, face: int) -> Tensor | None:
        """The reduced gradient of one face; reads no other."""
        shown = self.shown[face]
        return shown if self.pending is None else self.pending.behind(face, shown)

    def _show_behind(self, face: int, grad: Tensor) -> None:
        """Make ``grad`` the reduced gradient of a face, behind its placeholder if it has one."""
        cover = None if self.pending is None else self.pending.covers.get(face)
        if cover is None:
            self.show(face, grad)
        else:
            cover.earlier = grad

    def tensors(self) -> list[Tensor]:
        """Memory that this object keeps between steps."""
        kept = self._buffers if self.home is GradHome.HOST else (self.value,)
        return [grad for grad in kept if grad is not None]

    def add(self, reduced: Tensor, reached: bytes) -> None:
        """Set or add ``reduced``, made on the current stream; if gradients move to the host, `land` completes the move.

        ``reached``: for each parameter 1 if it has a gradient.
        """
        if reduced.dtype != self.dtype:
            reduced = reduced.to(self.dtype)
        if self.home is not GradHome.HOST:
            self._receive(reduced, reached)
            return
        host = self._take_buffer()
        self.flights.append((host, self.transfers.copy(reduced, host), reached))

    def note_sent(self, reached: bytes) -> None:
        """A sum of the parameters ``reached`` is sent; one that is copied to host memory may still be dropped there."""
        if self.home is not GradHome.HOST or self.pending is not None:
            self.at_stake = reached

    def retract(self, reached: bytearray) -> None:
        """Drop gradients, and placeholders, that this backward created for parameters that it has not ``reached``."""
        for face, is_new in enumerate(() if self.at_stake is None else self.created):  # None: it has not landed yet
            if is_new and 1 not in (reached if len(self.created) == 1 else reached[face : face + 1]):
                if self.pending is not None and face in self.pending.covers:
                    self.pending.uncover(face)
                else:
                    self.show(face, None)
        self._drop_if_empty()

    def land(self, counts: bool = True) -> None:
        """Wait for all copies and make their gradients visible; ``counts`` as in `GradTransfers.wait`."""
        while self.flights:
            host, landed, reached = self.flights.popleft()
            self.transfers.wait(landed, counts)
            self._receive(host, reached)

    def discard_flights(self) -> None:
        """Wait for all copies and drop their gradients, because their backward was interrupted."""
        while self.flights:
            self.transfers.wait(self.flights.popleft()[1])

    def value_or_zeros(self) -> Tensor:
        """The reduced gradient ``[S]``; creates zeros if missing."""
        value = self.value
        if value is None:
            value = self._filled(self._shard.shape, 0.0, shares_memory=False)
            self._show_behind(0, value)
        return value

    def forget_dropped(self) -> None:
        """Free the memory of dropped gradients; no-op here, because only the shard's `.grad` is kept."""

    def zero(self, set_to_none: bool) -> None:
        """Drop what is shown or overwrite it with zeros, as ``zero_grad`` does, and discard copies in flight."""
        self.discard_flights()
        if set_to_none:
            self._set(None)
        else:
            for grad in self.shown:
                if grad is not None:
                    grad.zero_()

    # ---- pending gradients

    def begin_backward(self) -> None:
        """A backward begins: what earlier ones have changed cannot be lost any more."""
        self.at_stake = None

    def pending_of(self, num_leaves: int) -> PendingGrads:
        """`pending`, made for ``num_leaves`` leaves if there is nothing yet."""
        self.land()
        if self.pending is None:
            self.pending = PendingGrads(self, num_leaves)
        return self.pending

    def adopt(self, other: ShardGrad) -> None:
        """Manage and show the pending gradients of ``other`` from now on, an object for the same shard."""
        self.pending = other.pending
        if self.pending is not None:
            self.pending.faces, shown = self, other.shown
            for face, cover in self.pending.covers.items():
                if shown[face] is cover.placeholder:
                    self.show(face, cover.placeholder)

    def drop_zeroed(self, names: Sequence[str]) -> None:
        """Adopt what the user has done to placeholders; see `PendingGrads.drop_zeroed`."""
        if self.pending is not None:
            self.pending.drop_zeroed(names)
            self._drop_if_empty()

    def abandon(self, num_leaves: int) -> None:
        """A backward has raised: what it has added to and sent is lost, unless the user has zeroed it since."""
        self.discard_flights()
        if self.at_stake is not None:
            self.pending_of(num_leaves).lose(self.at_stake)
            self.at_stake = None
            self._drop_if_empty()

    def _drop_if_empty(self) -> None:
        if self.pending is not None and not self.pending.covers:
            self.pending = None

    # ---- private

    def _set(self, grad: Tensor | None) -> None:
        if self.home is GradHome.HELD or self.dtype == self._shard.dtype:
            self._at.grad = grad
        else:
            set_grad(self._shard, grad)

    def _receive(self, grad: Tensor, reached: bytes) -> None:
        """Set or add ``grad`` ``[S]``, except to lost faces."""
        lost: Collection[int] = ()
        if self.pending is not None:
            self.pending.finish()
            lost = self.pending.lost
            self._drop_if_empty()
        self.created = self._set_or_add(grad, reached, lost)
        self.at_stake = reached

    def _set_or_add(self, grad: Tensor, reached: bytes, lost: Collection[int]) -> Sequence[int]:
        """Set or add ``grad``; returns for each face 1 if it had no gradient before."""
        if lost:
            return b"\0"
        kept = self.value
        if kept is not None:
            kept.add_(grad)
            return b"\0"
        self._set(grad.data)  # with its own version counter, not the whole bucket's
        return b"\1"

    def _take_buffer(self) -> Tensor:
        """Host memory for one gradient; reuses that of an earlier one if nothing refers to it any more."""
        for buffer in self._buffers:
            if not is_aliased(buffer):
                return buffer.detach()
        self._buffers.append(host_empty_like(self._shard, self.transfers.device))
        return self._buffers[-1].detach()
