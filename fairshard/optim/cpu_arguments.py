"""Arguments of `CPUOptimizer`: what contradicts what, and defaults that depend on the optimizer's class."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fairshard.checks.block_state import adapt_blocks, has_block_state
from fairshard.utils.keywords import check_keywords, keywords_of


def check_classes(model: Any, optimizer_class: Any) -> None:
    """Raise unless ``model`` is a module, and ``optimizer_class`` a class.

    Raises:
        TypeError: naming the argument.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"`model` must be the sharded module, but is {type(model).__name__}. Pass the model; parameters or param "
            "groups are passed as `params`."
        )
    if not isinstance(optimizer_class, type):
        raise TypeError(
            f"`optimizer_class` must be a class, but is an object of {type(optimizer_class).__name__}. Pass "
            "torch.optim.AdamW and its arguments, as in `CPUOptimizer(model, torch.optim.AdamW, lr=1e-3)`."
        )


def check_optimizer_keywords(optimizer_class: type, given: Mapping[str, Any]) -> None:
    """Raise if ``optimizer_class`` does not take one of the arguments ``given``.

    Raises:
        TypeError: with the nearest argument of it or of `CPUOptimizer`.
    """
    known = keywords_of(optimizer_class)
    if known is not None:
        check_keywords(f"CPUOptimizer (or {optimizer_class.__name__})", given, (known | _OWN) - {"params"})


_OWN = {"params", "clip_grad_norm", "clip_mode", "overlap", "state_dtype", "offload_fraction", "num_threads"}


def check_arguments(clip: float | None, mode: str, overlap: bool, state_dtype: torch.dtype | None) -> None:
    """Raise if arguments are out of range or contradict each other.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if clip is not None and not hasattr(clip, "__float__"):
        raise TypeError(f"`clip_grad_norm` must be the largest norm, a number, or None, but is {clip!r}. Pass 1.0.")
    if clip is not None and not clip > 0:
        raise ValueError(f"`clip_grad_norm` must be positive or None, but is {clip}.")
    if mode == "speculate":
        raise ValueError(
            '`clip_mode="speculate"` was removed in fairshard 0.7, because copies of all shards and moments cost more '
            'than waiting for the norm. Use "wait", the default, and leave `overlap` out.'
        )
    if mode != "wait":
        raise ValueError(f'`clip_mode` must be "wait", but is {mode!r}.')
    if overlap and clip is not None:
        raise ValueError(
            "`overlap=True` must not be used with `clip_grad_norm`: the norm is known only after the backward, when "
            "shards have already been stepped. Leave one of them out."
        )
    if state_dtype not in (None, torch.bfloat16):
        raise ValueError(f"`state_dtype` must be torch.bfloat16 or None (fp32), but is {state_dtype}.")


def check_steps_together(optimizer_class: type, overlap: bool, state_dtype: torch.dtype | None) -> None:
    """Raise if `CPUOptimizer` was given an option for which it steps shard by shard.

    Raises:
        ValueError: naming the option.
    """
    option = "overlap=True" if overlap else None if state_dtype is None else f"state_dtype={state_dtype}"
    if option is not None:
        raise ValueError(
            f"{optimizer_class.__name__} must step all shards together, after the backward and in their own dtype, but "
            f"CPUOptimizer was given `{option}`. Leave that out."
        )


def check_quantised(template: Optimizer, state_dtype: torch.dtype | None) -> None:
    """Check a ``template`` that quantises its state in blocks, such as torchao's; see also `adapt_blocks`.

    Raises:
        ValueError: ``state_dtype`` is set, but quantised state cannot be converted.
    """
    if has_block_state(template) and state_dtype is not None:
        raise ValueError(
            f"{type(template).__name__} keeps quantised state, which cannot be converted, but CPUOptimizer was given "
            f"`state_dtype={state_dtype}`. Leave that out."
        )
    adapt_blocks(template)


def with_fused(optimizer_class: type[Optimizer], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """``kwargs`` with ``fused=True`` if the class supports it and ``kwargs`` choose no other implementation."""
    own = inspect.signature(optimizer_class.__init__).parameters
    others = ("fused", "foreach", "capturable", "differentiable")
    if "fused" in own and not any(name in kwargs for name in others):
        return {**kwargs, "fused": True}
    return dict(kwargs)
