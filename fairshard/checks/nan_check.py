"""Finds gradients that are NaN or infinite, and reports the parameters' names and the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fairshard.engine.observer import Observer
from fairshard.engine.root import Root
from fairshard.engine.unit import Unit
from fairshard.errors import NonFiniteGradientError
from fairshard.utils.collectives import Communicator
from fairshard.utils.groups import communicator
from fairshard.utils.user_line import level_of_user

_MAX_NAMED = 4


class NanCheck(Observer):
    """Checks the gradients of one model.

    Checks each rank's own gradients before they are summed, because a sum no longer shows the rank of origin; then the
    sums, which can overflow although no summand did. Waits for the device once, at the end of the backward.
    """

    def __init__(self, units: list[Unit], comms: Sequence[Communicator]) -> None:
        self.is_on = units[0].config.nan_check
        self._units = units
        self._comms = [comm for comm in (*comms, *_comms_of_dtensors(units)) if comm.peers]
        self._seen: list[tuple[str, Tensor]] = []  # the names of parameters, and whether their gradients are finite
        self._has_warned = False

    @staticmethod
    def of(root: Root) -> NanCheck:
        """The check of ``root``."""
        return next(observer for observer in root.observers if isinstance(observer, NanCheck))

    def grads_sent(self, unit: Unit) -> None:
        """Record whether this rank's own gradients of ``unit`` are finite, before they are reduced."""
        if self.is_on:
            slots = [slot for flat_param in unit.flat_params for slot in flat_param.slots]
            self._seen += [(slot.fqn, _is_finite(slot.leaf.grad)) for slot in slots if slot.leaf.grad is not None]

    def interrupted(self, in_backward: bool) -> None:
        """Drop the records of a pass that was interrupted."""
        self._seen.clear()

    def backward_ends(self, is_reached: bool, reduces: bool) -> None:
        """See `look`."""
        if reduces and self.is_on:
            self.look()

    def look(self) -> None:
        """Combine the records of all ranks, after gradients are reduced. **Collective.**

        Raises:
            NonFiniteGradientError: on every rank, if a gradient of any is not finite.
        """
        flags = torch.stack([flag for _, flag in self._seen]).tolist() if self._seen else []  # waits once
        own = [f"`{name}`" for (name, _), is_finite in zip(self._seen, flags, strict=True) if not is_finite]
        self.interrupted(in_backward=True)
        own = own or [f"the sum over ranks of `{name}`" for name in _bad_sums(self._units)]
        found = self._gather(own)
        if found:
            raise NonFiniteGradientError(
                f"With `nan_check=True` gradients must be finite, but these are not, in the order of the backward: "
                f"{found}. No optimizer has stepped. Look at what these modules compute; with scaled fp16 "
                "gradients leave `nan_check` out, because these overflow sometimes, and the scaler skips that step."
            )

    def warn_once(self, norm: Tensor) -> None:
        """Warn once which reduced gradients make ``norm`` NaN or infinite; the same on every rank. **Collective.**"""
        if self._has_warned or bool(torch.isfinite(norm)):
            return
        self._has_warned = True
        found = self._gather([f"`{name}`" for name in _bad_sums(self._units)])
        warnings.warn(
            f"The gradient norm is {norm.item()}, because of the reduced gradients of {found}: the rank is the one "
            "that keeps that part. This is sometimes normal with scaled fp16 gradients, whose scaler skips the step; "
            "otherwise `nan_check=True` names the rank of origin. This warning appears once.",
            stacklevel=level_of_user(),
        )

    def _gather(self, own: list[str]) -> str:
        """The findings of all ranks as text; empty if nothing was found."""
        found = [f"{', '.join(own[:_MAX_NAMED])} on rank {dist.get_rank()}"] if own else []
        for comm in self._comms:
            has_found = torch.tensor([float(bool(found))], device=self._units[0].device)
            comm.all_reduce(has_found, "max").wait()
            if has_found.item():
                found = list(dict.fromkeys(text for texts in comm.gather_objects(found) for text in texts))
        return "; ".join(found)


def _bad_sums(units: list[Unit]) -> list[str]:
    """Parameters whose reduced gradient is not finite in the part that this rank keeps."""
    found = []
    for flat_param in (flat_param for unit in reversed(units) for flat_param in unit.flat_params):
        grad = flat_param.grad.value
        if grad is not None and not _is_finite(grad):
            runs = zip(flat_param.slots, flat_param.line.runs_of(grad), strict=True)
            found += [slot.fqn for slot, (_, run) in runs if not _is_finite(run)]
    return found


def _is_finite(grad: Tensor) -> Tensor:
    values = grad.detach()
    if isinstance(values, DTensor):
        values = values._local_tensor  # an operator on DTensors could wait for other ranks
    return torch.isfinite(values.coalesce().values() if values.is_sparse else values).all()


def _comms_of_dtensors(units: Iterable[Unit]) -> list[Communicator]:
    """With ``nan_check``, communicators of the meshes of parameters that were DTensors: their ranks must raise too."""
    slots: list[Any] = [
        slot
        for unit in units
        if unit.config.nan_check
        for flat_param in unit.flat_params
        for slot in flat_param.slots
        if slot.has_mesh
    ]
    meshes = dict.fromkeys(slot.spec.mesh for slot in slots)
    return list(dict.fromkeys(communicator(mesh.get_group(dim)) for mesh in meshes for dim in range(mesh.ndim)))
