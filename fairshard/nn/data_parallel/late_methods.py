"""Methods of users' modules that change whole parameters, called on a sharded module: errors that name the cure."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from fairshard.checks.leaf_writes import LeafWrites
from fairshard.engine.training_state import TrainingState
from fairshard.engine.tree import units_below
from fairshard.engine.unit import Unit
from fairshard.errors import FairshardError, ParameterShardedError

CURES = {
    "resize_token_embeddings": "Resize the embeddings before sharding the model.",
    "tie_weights": "Tie the modules before sharding the model, in one unit.",
    "reset_parameters": (
        "Call it before sharding the model; or inside `FullyShardedDataParallel.summon_full_params(model)`; or pass "
        "`allow_reset_parameters=True` to the wrapper."
    ),
}
"""The cure for a call of each of these methods, by name."""


def refusing(unit: Unit, module: nn.Module, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` ``name`` of ``module``, sharded by ``unit``: raises if it fails on shards, or if writes would be lost.

    Writes would be lost in units that stay gathered after a forward.
    """

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if unit.state is not TrainingState.IDLE:
            return method(*args, **kwargs)
        units = {unit, *(inner for _, inner in units_below(module))}
        text = (
            f"`{name}` of the sharded {type(module).__name__.removeprefix('FSDP')} (unit `{unit.fqn or 'root'}`) must "
            "change whole parameters, but only shards are kept of them."
        )
        if name == "reset_parameters" and any(_has_parts(each) for each in units):
            raise ParameterShardedError(f"{text} {CURES[name]}")  # a rank whose parts are empty would not fail
        try:
            result = method(*args, **kwargs)
        except Exception as error:
            why = "" if isinstance(error, FairshardError) else f" It raised {type(error).__name__}: {error}"
            raise ParameterShardedError(f"{text} {CURES[name]}{why}") from error
        if any(each.is_pinned and LeafWrites.of(each.root).written(each) is not None for each in units):
            raise ParameterShardedError(f"{text} {CURES[name]}")
        return result

    return call


def _has_parts(unit: Unit) -> bool:
    """Whether matrices of ``unit`` are registered as this rank's 1-D parts of them."""
    slots = [slot for flat_param in unit.flat_params for slot in flat_param.slots]
    return any(slot.registered is not None and slot.registered.dim() < len(slot.shape) for slot in slots)
