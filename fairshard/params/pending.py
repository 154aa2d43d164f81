"""Gradients that no backward has reduced yet, and what the shard shows in their place.

::

    backward under no_sync          `sums`, one whole gradient for each leaf
    set_requires_all_reduce(False)  `shard_sum` [S], summed over the ranks of the shard, not over its replicas
    exception in a backward         nothing: the face is `lost`

A *face* is a parameter that users see: the shard, or the view or DTensor of each original parameter. Its ``.grad`` is
a placeholder meanwhile, all elements of which are one -0.0. The placeholder itself shows what the user has done to it:

- ``grad = None``, or another tensor instead: the face no longer has it.
- ``zero_()``: its version moves, if torch counts the write (see `ShardGrad.zeroed_uncounted`); -0.0 has become 0.0.
- Scaling, clipping or copying into it raises in torch, because its elements share memory. That does not hold for one
  element, but this one is not 0.0 then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fairshard.errors import FairshardError


class PendingGrads:
    """The pending gradients of one flat param; made when there is one, and dropped when there is none.

    Attributes:
        faces: the `ShardGrad` that shows the gradients of the faces.
        covers: the faces that have a placeholder.
        sums: for each leaf, the sum of its gradients on this rank; None if it has none.
        shard_sum: the sum ``[S]`` over the ranks of the shard, in fp32 or wider.
        in_shard_sum: for each leaf, 1 if any rank has a part in `shard_sum`.
        lost: faces whose gradients an exception has left incomplete; what they get later is dropped.
    """

    def __init__(self, faces: Any, num_leaves: int) -> None:
        self.faces = faces
        self._face_of = range(num_leaves) if len(faces.shown) > 1 else [0] * num_leaves  # for each leaf
        self.sums: list[Tensor | None] = [None] * num_leaves
        self.shard_sum: Tensor | None = None
        self.in_shard_sum = bytearray(num_leaves)
        self.lost: set[int] = set()
        self.covers: dict[int, _Cover] = {}

    # ---- faces

    def _faces_of(self, leaves: bytes | bytearray) -> list[int]:
        """The faces of ``leaves`` that are 1, in order."""
        return sorted({face for face, own in zip(self._face_of, leaves, strict=True) if own})

    def behind(self, face: int, shown: Tensor | None) -> Tensor | None:
        """The reduced gradient of a face that has ``shown``: without a placeholder this one, else the earlier one."""
        cover = self.covers.get(face)
        return cover.earlier if cover is not None and shown is cover.placeholder else shown

    def _cover(self, face: int) -> None:
        if face not in self.covers:
            earlier = self.faces.shown[face]
            self.faces.show(face, self.faces.new(face, -0.0, shares_memory=True))
            placeholder = self.faces.shown[face]  # another object, if torch < 2.13 shows a gradient of another dtype
            self.covers[face] = _Cover(placeholder, placeholder._version, earlier)

    # ---- sums

    def add(self, leaf: int, grad: Tensor) -> None:
        """Add the whole gradient of a leaf, whose memory may be kept."""
        if self._face_of[leaf] not in self.lost:
            known = self.sums[leaf]
            self.sums[leaf] = grad if known is None else known.add_(grad)

    def add_shard_sum(self, reduced: Tensor, reached: bytes) -> None:
        """Add a sum ``[S]`` over the ranks of the shard, to which some rank has given the leaves ``reached``."""
        wide = reduced.to(torch.promote_types(reduced.dtype, torch.float32))
        self.shard_sum = wide if self.shard_sum is None else self.shard_sum.add_(wide)
        self.in_shard_sum[:] = map(max, self.in_shard_sum, reached)

    def show(self, reached: bytes) -> None:
        """Show placeholders on the faces of leaves that some rank has ``reached``; the running backward did that."""
        new = {*self._faces_of(reached)} - self.covers.keys()
        for face in new:
            self._cover(face)
        self.faces.created = bytes(face in new for face in range(len(self.faces.shown)))
        self.faces.at_stake = reached

    def uncover(self, face: int) -> None:
        """Nothing waits for a face after all: show what it had before."""
        self._drop_sums(face)
        self._uncover(face)

    def kept(self, sends_shard_sum: bool) -> bytes:
        """For each leaf, 1 if a backward must send something of it."""
        marks = self.in_shard_sum if sends_shard_sum else bytes(len(self.sums))
        return bytes(own or one is not None for own, one in zip(marks, self.sums, strict=True))

    def take_sums(self) -> list[Tensor | None]:
        """`sums`, which are sent now."""
        found = self.sums.copy()
        self.sums[:] = [None] * len(found)
        return found

    def take_shard_sum(self) -> Tensor | None:
        """The sum ``[S]``, which is sent now; None from the second call on."""
        found, self.shard_sum = self.shard_sum, None
        self.in_shard_sum[:] = bytes(len(self.sums))
        return found

    def finish(self) -> None:
        """What was sent has arrived: the faces show what they had before, and it is added to that next."""
        for face in self.covers.keys() - self.lost:
            self._uncover(face)

    def _uncover(self, face: int) -> None:
        cover = self.covers.pop(face)
        if self.faces.shown[face] is cover.placeholder:
            self.faces.show(face, cover.earlier)

    # ---- dropping

    @torch.no_grad()
    def drop_zeroed(self, names: Sequence[str]) -> None:
        """Drop the sums of faces whose placeholders the user has dropped or zeroed.

        Raises:
            FairshardError: a face, called by its entry in ``names``, was changed in another way.
        """
        seen = self.faces.shown
        dropped = {face for face in self.covers if self._is_dropped(face, seen[face], names[face])}
        dropped |= self.faces.zeroed_uncounted({face: self.covers[face].placeholder for face in self.covers}, dropped)
        for face in dropped:
            self._drop(face, seen[face])

    def _is_dropped(self, face: int, grad: Tensor | None, name: str) -> bool:
        cover = self.covers[face]
        if grad is None:
            return True
        if grad is cover.placeholder and grad._version == cover.version:
            return False
        values = self.faces.own_of(face, grad)
        if not (values.any() or values.reshape(-1)[:1].signbit().any()):
            return True
        if face in self.lost:
            return grad is not cover.placeholder
        raise FairshardError(
            f"The gradient of `{name}` must not be changed while gradients of no_sync passes wait to be added to it, "
            "because the change would not apply to those, but it was scaled, written or replaced. Change gradients "
            "(clip or unscale them) after a backward that reduces (outside of no_sync, or after "
            "`set_requires_gradient_sync(True)`), or drop all of them with zero_grad()."
        )

    def _drop(self, face: int, grad: Tensor | None) -> None:
        self._drop_sums(face)
        cover = self.covers.pop(face)
        self.lost.discard(face)
        if grad is cover.placeholder:  # zeroed in place: the zeros are the user's
            zeros = self.faces.new(face, 0.0) if cover.earlier is None else cover.earlier.zero_()
            self.faces.show(face, zeros)

    def _drop_sums(self, face: int) -> None:
        for leaf in [leaf for leaf, own in enumerate(self._face_of) if own == face]:
            self.sums[leaf] = None
            self.in_shard_sum[leaf] = 0
        if self.shard_sum is not None:
            self.faces.parts_of(self.shard_sum)[face].zero_()

    @torch.no_grad()
    def lose(self, leaves: bytes) -> None:
        """An exception has left the gradients of ``leaves`` incomplete: drop those that the user has not dropped since.

        Gradients of zeros were zeroed, or have nothing to lose. Those without elements are lost with the others.
        """
        shown = self.faces.shown
        own = {face: self.faces.own_of(face, shown[face]) for face in self._faces_of(leaves) if shown[face] is not None}
        zeros = {face for face, grad in own.items() if grad.numel() and face not in self.covers and not grad.any()}
        if zeros and not any(grad.numel() for face, grad in own.items() if face not in zeros):
            return
        for face in own.keys() - zeros:
            self._cover(face)
            self.covers[face].earlier = None
            self._drop_sums(face)
            self.lost.add(face)


class _Cover:
    """The placeholder of one face, its version when it was shown, and the reduced gradient that it hides."""

    __slots__ = ("earlier", "placeholder", "version")

    def __init__(self, placeholder: Tensor, version: int, earlier: Tensor | None) -> None:
        self.placeholder, self.version, self.earlier = placeholder, version, earlier
