"""Refuses to use gradients that are pending (see `PendingGrads`), or that an exception has left incomplete."""

from __future__ import annotations

from fairshard.errors import PartialGradientError, PendingGradientError
from fairshard.params.pending import PendingGrads
from fairshard.views.orig_param import OrigParam, Stepped


def check_whole(stepped: Stepped) -> None:
    """Raise if a gradient of ``stepped`` is pending or incomplete, unless it was zeroed since.

    Raises:
        PartialGradientError: an exception has left it incomplete.
        PendingGradientError: it waits to be reduced.
    """
    stepped.drop_zeroed()
    if stepped.pending is not None:
        faces = [(stepped.index, stepped)] if isinstance(stepped, OrigParam) else enumerate(stepped.stepped)
        for face, one in faces:
            where = f"{one.slots[0].fqn}, rank {stepped.line.rank}"
            check_absent(stepped.pending, face, one.name, where)


def check_absent(pending: PendingGrads, face: int, name: str, where: str) -> None:
    """Raise if the gradient of a face, ``name``, is not there; see `check_whole`."""
    if face in pending.lost:
        raise PartialGradientError(
            f"The gradient of `{name}` ({where}) must be whole before it is used, but an exception ended a "
            "backward after a part of it had been added, or after gradients that wait to be reduced had been "
            "changed or sent. Call zero_grad() and repeat the backwards of this step."
        )
    if face not in pending.covers:
        return
    if pending.shard_sum is not None:
        why = "it waits for its sum over replicas, because of set_requires_all_reduce(False)"
        cure = "Run the last backward of a step after set_requires_all_reduce(True)"
    else:
        why = "its last backward ran under no_sync or set_requires_gradient_sync(False)"
        cure = "Run the last backward of a step outside of no_sync, or after set_requires_gradient_sync(True)"
    raise PendingGradientError(
        f"Gradients must be reduced before they are used, but that of `{name}` ({where}) is pending: {why}. "
        f"{cure}; or drop the gradients with zero_grad()."
    )
