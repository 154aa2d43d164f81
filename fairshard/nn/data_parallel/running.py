"""The forward of a sharded module: sets up the model on its first call, and gathers shared parameters with the unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from fairshard.checks.agreement import warn_of_other_values
from fairshard.engine.forward import call_in
from fairshard.engine.origin import move_inputs
from fairshard.engine.unit import Unit
from fairshard.errors import FairshardError
from fairshard.setup.added_parameters import check_added
from fairshard.setup.claim import claim


def run(
    holder: nn.Module, unit: Unit, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``function(*args, **kwargs)`` as a forward of ``unit``, the unit of ``holder``. **Collective.**"""
    if torch.compiler.is_dynamo_compiling():
        refuse_tracing()
    if unit.root is None:
        warn_of_other_values(claim(holder).units)
    if not unit.is_inner:
        check_added(holder, unit)
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
        "torch.compile must not wrap a sharded module, because it cannot trace gathers. Compile the module inside: "
        "`FullyShardedDataParallel(torch.compile(block))`, `fully_shard(torch.compile(block))`."
    )


# The flag that `torch.compiler.assume_constant_result` sets, without importing the compiler. Tracing then calls the
# function; a plain `raise` would only break the graph, and the engine's functions would be traced one by one.
refuse_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]
