"""A forward through a door: the model is set up at the first one, and what a unit shares is gathered with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from fairshard.checks.agreement import warn_of_other_values
from fairshard.engine.origin import move_inputs
from fairshard.engine.root import call_in
from fairshard.engine.unit import Unit
from fairshard.errors import FairshardError
from fairshard.setup.claim import claim


def run(
    holder: nn.Module, unit: Unit, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``function(*args, **kwargs)`` as a forward of ``unit``, which ``holder`` has. **Collective.**"""
    if torch.compiler.is_dynamo_compiling():
        refuse_tracing()
    if unit.root is None:
        warn_of_other_values(claim(holder).units)
    if unit.origin.moves_inputs and not unit.is_inner:
        args, kwargs = move_inputs((args, kwargs), unit.device)
    if unit.origin.shared.owners:
        function = unit.origin.shared.computing_with(function)
    return call_in(unit, function, args, kwargs)


def refuse_tracing() -> NoReturn:
    """Raise while torch.compile traces the call of a sharded module.

    Raises:
        FairshardError: always.
    """
    raise FairshardError(
        "torch.compile must not go around a sharded module, whose gathers it cannot trace. Compile what is inside "
        "instead: `FullyShardedDataParallel(torch.compile(block))`, `fully_shard(torch.compile(block))`."
    )


# What `torch.compiler.assume_constant_result` sets, without its import of the compiler: tracing calls the function,
# where a plain `raise` would only end the graph, and the engine's own functions be traced one by one.
refuse_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]
