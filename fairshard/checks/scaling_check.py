"""Checks torch's clipping and loss scaling: raises if they would treat the ranks' flat shards differently.

Both decide from the gradients that a rank has, which is right for DTensors and for whole gradients. Of a flat shard a
rank has only its part: `torch.nn.utils.clip_grad_norm_` would scale it by the norm of that part, and
`torch.amp.GradScaler` would skip the optimizer's step only on the ranks whose part overflowed.

Clipping raises inside torch's function, without communication: a list of parameters may be empty on some ranks, and
then not all would take part. For overflow the ranks compare what they have found inside the scaler, before any of them
steps; at the step it would be too late, because a rank that skips it would never arrive.
"""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from fairshard.checks.optimizer_check import check_gradients
from fairshard.checks.shards import stepped_of
from fairshard.engine.tree import every_root
from fairshard.errors import LocalScalingError
from fairshard.utils.collectives import Communicator
from fairshard.utils.failures import reported
from fairshard.utils.messages import gather_scalars
from fairshard.utils.user_line import level_of_user

_CLIP = "_clip_grads_with_norm_"  # `clip_grad_norm_` calls it with the norm that it has found in the list
_UNSCALE = "_unscale_grads_"
_DECIDING = (_UNSCALE, "unscale_", "step", "_maybe_opt_step", "_check_inf_per_device")
_warned: weakref.WeakSet[Optimizer] = weakref.WeakSet()


@functools.cache  # once
def watch_scaling() -> None:
    """From now on, check calls of torch's functions that clip or unscale gradients of flat shards."""
    for owner, name, checked in ((clip_grad, _CLIP, _checked_clip), (GradScaler, _UNSCALE, _compared_unscale)):
        function = getattr(owner, name, None)
        if function is not None:
            setattr(owner, name, checked(function))


def _checked_clip(clip: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(clip)
    def check_and_clip(parameters: Any, max_norm: float, total_norm: Tensor, foreach: bool | None = None) -> None:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not torch.compiler.is_compiling() and not math.isinf(max_norm):  # then only the norm is wanted
            _check_clip(parameters)
        clip(parameters, max_norm, total_norm, foreach)

    return check_and_clip


def _check_clip(params: Iterable[Any]) -> None:
    """Raise if ``params`` holds a cut flat shard: the norm of the whole may be above that of each part.

    Raises:
        LocalScalingError: on every rank whose list has such a shard; no gradient has changed.
    """
    if cut := _cut(params):
        text = (
            "Gradients must be clipped by their norm over all ranks, but torch.nn.utils.clip_grad_norm_ was given flat "
            f"shards such as `{cut[0].name}`, and would clip those of each rank by the norm of that rank's part. Call "
            "`model.clip_grad_norm_(max_norm)` of the outermost wrapper instead, on all ranks."
        )
        raise reported(LocalScalingError(text))


def _compared_unscale(unscale: Callable[..., dict[torch.device, Tensor]]) -> Callable[..., dict[torch.device, Tensor]]:
    @functools.wraps(unscale)
    def unscale_and_compare(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        check_gradients(optimizer)
        found = unscale(scaler, optimizer, *args, **kwargs)
        # subclasses that look at other ranks replace a method
        if all(getattr(type(scaler), name, None) is getattr(GradScaler, name, None) for name in _DECIDING):
            _check_overflow(optimizer, found)
        return found

    return unscale_and_compare


def _check_overflow(optimizer: Optimizer, found: dict[torch.device, Tensor]) -> None:
    """Raise if only some ranks would skip the next step of ``optimizer``. **Collective** if it has cut shards.

    Raises:
        LocalScalingError: on all ranks, before any of them steps.
    """
    cut = _cut(param for group in optimizer.param_groups for param in group["params"])
    if cut and optimizer not in _warned:
        _warned.add(optimizer)
        warnings.warn(
            "torch's GradScaler looks for overflow only in the gradients of its own rank, but is used for flat shards "
            f"such as `{cut[0].name}`: training raises as soon as one rank overflows and another does not. Use "
            "`fairshard.optim.ShardedGradScaler`.",
            stacklevel=level_of_user(),
        )
    comms = list(dict.fromkeys(stepped.comm for stepped in cut))
    every = _difference(comms, any(bool(value.item()) for value in found.values()))
    if every:
        found_on = ", ".join(f"rank {rank} has {'' if found else 'no '}overflow" for rank, found in every.items())
        raise LocalScalingError(
            "All ranks must skip a step or none, but torch's GradScaler looks only at the gradients of its own rank, "
            f"and would step the parts of flat shards such as `{cut[0].name}` on some ranks alone: {found_on}. Use "
            "`fairshard.optim.ShardedGradScaler`, which decides for all ranks."
        )


def _cut(params: Iterable[Any]) -> list[Any]:
    """The owners of the flat shards in ``params`` that are cut among ranks."""
    found = (stepped_of(param) for param in params if not isinstance(param, DTensor))
    return [one for one in found if one is not None and one.comm is not None and one.comm.world_size > 1]


def _difference(comms: Iterable[Communicator], has_found: bool) -> dict[int, bool]:
    """``has_found`` of each rank of the first group whose ranks differ; empty if none do. **Collective.**"""
    found: dict[int, bool] = {}
    for comm in comms:  # all of them, also after a difference: the groups of other ranks may overlap
        own = [root for root in every_root() if comm in root.comms]
        if not comm.peers or not own:
            continue
        if any(root.join is not None for root in own):
            return {comm.rank: has_found}  # ranks that have run out of batches would not take part
        every = [bool(values[0]) for values in gather_scalars([float(has_found)], comm.group, own[0].shared.device)]
        if len(set(every)) > 1 and not found:
            found = dict(enumerate(every))
    return found
