"""Errors for backwards that a unit cannot handle, and warnings about what costs memory."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from fairshard.errors import BackwardOrderError, FairshardError, GradRequiresGradError, ParameterShardedError
from fairshard.params.flat_param import FlatParam
from fairshard.params.shard_grad import unexpected_error
from fairshard.utils.user_line import level_of_user


class _Gathers(Protocol):
    """The part of a unit that is used here."""

    @property
    def flat_params(self) -> Sequence[FlatParam]:
        """Its flat params."""


def create_graph_error(fqn: str) -> GradRequiresGradError:
    """Error for ``create_graph=True`` in a backward through unit ``fqn``."""
    return GradRequiresGradError(
        f"Gradients of a sharded unit must not require grad, but the backward of `{fqn or 'the root'}` was started "
        "with create_graph=True. Sharded gradients cannot be differentiated again; compute such terms on a module that "
        "is not sharded."
    )


def split_error(fqn: str) -> FairshardError:
    """Error for a backward of unit ``fqn`` that leaves the gradients of parameters to a later one."""
    return FairshardError(
        "A pipeline schedule must compute gradients of inputs and of parameters in one backward, but this one splits "
        f"them: its backward of `{fqn or 'the root'}` computes gradients of inputs alone, and parameters would get "
        "none. Use ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B or ScheduleLoopedBFS."
    )


def unseen_error(fqn: str) -> ParameterShardedError:
    """Error for a backward that reaches leaves of unit ``fqn`` while they are not gathered."""
    return ParameterShardedError(
        f"A backward reached the parameters of unit `{fqn or 'root'}` while they were sharded, through a tensor that "
        "the unit did not return. Return every tensor that the loss depends on."
    )


def warn_opaque_outputs(fqn: str, outputs: Any) -> None:
    """Warn that unit ``fqn`` stays gathered because of the type of its outputs."""
    warnings.warn(
        f"Unit `{fqn or 'root'}` returned {type(outputs).__name__}, which holds objects that fairshard cannot look "
        "into. It stays gathered from now on, because a backward through them would be noticed too late. Return "
        "tensors in tuples, lists, dicts, dataclasses or objects of Python classes without `__slots__`.",
        stacklevel=level_of_user(),
    )


def warn_autocast(units: Sequence[_Gathers], device: torch.device) -> bool:
    """Warn of the memory cost if autocast is on and parameters are gathered in fp32; returns whether it warned."""
    if not torch.is_autocast_enabled(device.type):
        return False
    if not any(fp.compute_dtype == torch.float32 for unit in units for fp in unit.flat_params):
        return False
    warnings.warn(
        "Under autocast, parameters gathered in torch.float32 are cast once more, and the backward keeps a "
        "low-precision copy of every weight alive. Gathering in torch.bfloat16 sends half the bytes and keeps no such "
        "copy: `FullyShardedDataParallel(module, mixed_precision=True, compute_dtype=torch.bfloat16)`, or "
        "`fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))`.",
        stacklevel=level_of_user(),
    )
    return True


def late_error(fqn: str) -> BackwardOrderError:
    """Error for gradients of unit ``fqn`` that arrive after the backward has finished all calls of the unit."""
    return BackwardOrderError(
        f"The backward must finish unit `{fqn or 'root'}` before it reaches earlier computations, but gradients of "
        "the unit arrived later. Its calls must run on one thread, and on one device, in the order in which their "
        "results are used. If a checkpoint is around several sharded modules that are in no other, shard the whole "
        "model, too. If checkpoints are nested, pass `use_reentrant=False` to all of them."
    )


def check_owed(flat_params: Sequence[Any]) -> None:
    """Raise if leaves of ``flat_params`` have gradients, but no rank had a path to them when the backward began.

    Raises:
        BackwardOrderError: their gradients would never be summed.
    """
    for flat_param in flat_params:
        is_lost = flat_param.has_elements and not flat_param.is_owed
        if is_lost and any(slot.leaf.grad is not None for slot in flat_param.slots):
            raise unexpected_error(flat_param.name)


def other_rank_error(problems: Sequence[str]) -> FairshardError:
    """Error for ranks whose own backward could begin, when that of another rank cannot."""
    return FairshardError(f"The backward could not begin on another rank: {problems[0] if problems else 'see its log'}")


def warn_of_hooks(units: Sequence[_Gathers], turn: int) -> bool:
    """Warn if a user has put a hook on a shard with ``register_hook``; returns whether there is one.

    Looks at one parameter of each flat param, another one in each ``turn``, to save host time; in turn 0 at all.
    """
    for unit in units:
        for flat_param in unit.flat_params:
            registered = flat_param.registered
            looked_at = (registered[turn % len(registered)],) if turn else registered
            for param in looked_at:
                if param._backward_hooks:
                    _warn_of_hook(next(one.name for one in flat_param.stepped if one.shard is param))
                    return True
    return False


def _warn_of_hook(name: str) -> None:
    warnings.warn(
        f"A hook that `register_hook` put on `{name}` is never called, because autograd does not reach shards. Use "
        "`register_post_accumulate_grad_hook`, which sees the reduced gradient, or put the hook on the original "
        "parameter before sharding, where it sees this rank's whole gradient.",
        stacklevel=level_of_user(),
    )
