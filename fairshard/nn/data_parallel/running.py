"""The forward of a sharded module, which sets up the model on its first call."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import profiler

from fairshard.checks.profile_regions import follow_profiler, open_regions
from fairshard.checks.usage import assert_none_summoned
from fairshard.engine.training_state import TrainingState
from fairshard.engine.unit import Unit
from fairshard.errors import FairshardError
from fairshard.setup.changes import check_added, has_changed
from fairshard.setup.claim import check_place, claim
from fairshard.setup.origin import move_inputs
from fairshard.state.shown import is_shown, shown_on_first
from fairshard.utils.async_tensors import waited
from fairshard.utils.dynamo import set_tracer
from fairshard.utils.fake_mode import is_fake_mode_on
from fairshard.utils.graph_breaks import allows_breaks, breaks_graph
from fairshard.utils.nested import cast_inputs_to_fp16
from fairshard.utils.user_line import level_of_user

NOT_IN_A_GRAPH = (
    "A sharded module must be called between graphs, because gathers cannot be compiled. Leave out `fullgraph=True`, "
    "or compile the blocks inside units: `FullyShardedDataParallel(torch.compile(block, fullgraph=True))`, "
    "`fully_shard(torch.compile(block, fullgraph=True))`"
)

_warned: weakref.WeakSet[Any] = weakref.WeakSet()  # roots of models called by compiled code


@breaks_graph(NOT_IN_A_GRAPH)
def run(
    holder: nn.Module, unit: Unit, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``function(*args, **kwargs)`` as a forward of ``unit``, the unit of ``holder``. **Collective.**

    If compiled code calls it, only ``function`` is compiled. A unit that `summon_full_params` shows on all ranks
    computes with the shown parameters, without communication and without casts.

    Raises:
        FairshardError: code compiled with ``fullgraph=True`` calls it, a fake mode is on, or a transform of torch.func.
        TrainingStateError: the unit is shown, and gradients are enabled; or another thread is in a forward.
    """
    tracer = set_tracer(None)
    if tracer is not None:
        try:
            return _run_compiled(tracer, holder, unit, function, args, kwargs)
        finally:
            set_tracer(tracer)
    begins = unit.root is None or unit.root.engine.is_between_passes
    if begins and is_fake_mode_on():
        raise FairshardError(
            "A sharded module must be called with real tensors, because ranks exchange the values of its parameters, "
            f"but unit `{unit.fqn or 'root'}` was called under FakeTensorMode. Call it outside of that mode; "
            "`fairshard plan` estimates the memory of a model without running it."
        )
    if torch._C._functorch.peek_interpreter_stack() is not None and unit.state is not TrainingState.SUMMON_FULL_PARAMS:
        raise FairshardError(
            "A sharded module must be called outside of transforms of torch.func (`grad`, `vmap`, `jvp`, ...), because "
            f"its parameters cannot be gathered inside of one, but unit `{unit.fqn or 'root'}` was called in one. For "
            "gradients of inputs use `torch.autograd.grad`; for the rest, `torch.func.functional_call` of the "
            "unsharded module with the whole tensors of `state_dict()`."
        )
    root = unit.root or claim(holder)
    if begins:
        check_place(holder, root, unit)
    if not unit.is_inner and has_changed(holder, unit) and not any(map(is_shown, root.units)):
        check_added(holder, unit)
    if profiler._is_profiler_enabled or open_regions:
        follow_profiler(root)
    if unit.origin.moves_inputs and not unit.is_inner:
        args, kwargs = move_inputs((args, kwargs), unit.device)
    if unit.state is TrainingState.SUMMON_FULL_PARAMS and unit not in shown_on_first:
        if torch.is_grad_enabled():
            assert_none_summoned([unit], "forward")
        return function(*args, **kwargs)
    if unit.input_dtype is not None:
        args, kwargs = cast_inputs_to_fp16(*args, dtype=unit.input_dtype, **kwargs)
    args, kwargs = waited(args, kwargs)
    return root.engine.call(unit, function, args, kwargs)


def _run_compiled(
    tracer: Any, holder: nn.Module, unit: Unit, function: Callable[..., Any], args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    if not allows_breaks(tracer):
        raise FairshardError(f"{NOT_IN_A_GRAPH} (unit `{unit.fqn or 'root'}`).")
    outputs = run(holder, unit, functools.partial(_call_with, tracer, function), args, kwargs)
    if unit.root not in _warned:
        _warned.add(unit.root)
        warnings.warn(
            "torch.compile around a sharded model compiles the forward of each unit by itself, because gathers cannot "
            "be in a graph. To compile each block as one graph, which is faster, compile the blocks and not the model: "
            "`block.compile()` before each block is sharded.",
            stacklevel=level_of_user(),
        )
    return outputs


def _call_with(tracer: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)`` with ``tracer``; afterwards there is none."""
    set_tracer(tracer)
    try:
        return function(*args, **kwargs)
    finally:
        set_tracer(None)
