"""Wrapping the modules of a model: by hand inside `enable_wrap`, or by a policy; and what a policy would make.

>>> import torch
>>> from fairshard.nn import FullyShardedDataParallel as FSDP
>>> from fairshard.nn.wrap import ModuleWrapPolicy, describe, enable_wrap, wrap
>>> with enable_wrap(wrapper_cls=FSDP, bucket_cap_mb=50):
...     model = wrap(torch.nn.Sequential(wrap(torch.nn.Linear(8, 8)), wrap(torch.nn.Linear(8, 8))))
>>> layers = [torch.nn.TransformerEncoderLayer(8, 2, device="meta") for _ in range(4)]
>>> plan = describe(torch.nn.Sequential(*layers), ModuleWrapPolicy({torch.nn.TransformerEncoderLayer}), world_size=8)
>>> [unit.fqn for unit in plan.units]
['', '0', '1', '2', '3']
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from fairshard.nn.data_parallel.fully_sharded_data_parallel import FullyShardedDataParallel
from fairshard.plan.choice import Chooser, ModuleTree
from fairshard.plan.memory import OPTIMIZERS, BucketRow, MemoryTerm, WrapPlan, plan_memory
from fairshard.plan.policies import (
    CustomPolicy,
    ModuleWrapPolicy,
    _or_policy,
    always_wrap_policy,
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrapper_config,
)
from fairshard.plan.units import UnitPlan
from fairshard.setup.ignored import resolve_ignored
from fairshard.utils.device import default_device_type
from fairshard.utils.messages import group_of_one

__all__ = [
    "OPTIMIZERS",
    "BucketRow",
    "CustomPolicy",
    "MemoryTerm",
    "ModuleWrapPolicy",
    "WrapPlan",
    "_or_policy",
    "always_wrap_policy",
    "auto_wrap",
    "auto_wrap_bn",
    "config_auto_wrap_policy",
    "default_auto_wrap_policy",
    "describe",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]


@dataclass(frozen=True)
class _Wrapping:
    """What `enable_wrap` was given."""

    policy: Any
    wrapper_cls: Callable[..., nn.Module]
    arguments: dict[str, Any]

    def wrap(self, module: nn.Module, overrides: dict[str, Any]) -> nn.Module:
        return self.wrapper_cls(module, **{**self.arguments, **(wrapper_config(module) or {}), **overrides})


_wrapping: ContextVar[_Wrapping | None] = ContextVar("fairshard_wrapping", default=None)


@contextmanager
def enable_wrap(
    auto_wrap_policy: Any = None, *, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any
) -> Iterator[None]:
    """Inside, `wrap` and `auto_wrap` wrap in ``wrapper_cls(module, **wrapper_kwargs)``; outside they do nothing.

    So that a model can say where it is wrapped, and whoever builds it whether and how. ``auto_wrap_policy`` is that
    of `auto_wrap`, `default_auto_wrap_policy` if None. May be nested: the innermost counts.
    """
    token = _wrapping.set(_Wrapping(auto_wrap_policy, wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _wrapping.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """``module`` wrapped as `enable_wrap` says, with ``wrap_overrides``; as it is outside of one.

    A dict that the module has as its attribute ``wrapper_config`` overrides the arguments too.
    """
    wrapping = _wrapping.get()
    return module if wrapping is None else wrapping.wrap(module, wrap_overrides)


def auto_wrap(module: nn.Module, auto_wrap_policy: Any = None, **kwargs: Any) -> nn.Module:
    """Wrap what the policy chooses, ``module`` itself too, as `enable_wrap` says; nothing outside of one.

    ``auto_wrap_policy`` comes before that of `enable_wrap`; ``kwargs`` override its arguments.

    Returns: ``module``, changed in place, or the wrapper around it.

    Raises:
        ValueError: something inside is wrapped already.
    """
    wrapping = _wrapping.get()
    if wrapping is None:
        return module
    policy = auto_wrap_policy or wrapping.policy or default_auto_wrap_policy
    tree = ModuleTree(module)
    wrapped = tree.find_unit(wrapping.wrapper_cls if isinstance(wrapping.wrapper_cls, type) else None)
    if wrapped is not None:
        raise ValueError(
            f"`auto_wrap` needs a module in which nothing is wrapped yet, but `{wrapped}` is. Call it before, or "
            "wrap the rest by hand."
        )
    result = module
    for choice in Chooser(tree, policy).choose(include_root=True):
        wrapper = wrapping.wrap(choice.module, {**kwargs, **choice.overrides})
        if choice.module is module:
            result = wrapper
        else:
            tree.replace(choice.module, wrapper)
    return result


def auto_wrap_bn(
    module: nn.Module,
    single_rank_pg: bool = False,
    process_group: ProcessGroup | None = None,
    fsdp_config: dict[str, Any] | None = None,
    wrap_it: bool = True,
    assert_on_collision: bool = True,
) -> nn.Module:
    """Wrap each BatchNorm in a unit of its own: without mixed precision, not flattened, not bucketed, kept gathered.

    Low-precision inputs stay as they are; statistics and weights stay fp32. Wrap the rest afterwards.

    Args:
        module: what holds them, or one itself.
        single_rank_pg: keep them whole on every rank (a process group of this rank alone). Their gradients are then
            not averaged over ranks. **Collective.**
        process_group: the ranks to shard them over; the default group if None.
        fsdp_config: the wrapper's arguments, instead of those said above.
        wrap_it: False only sets the arguments as ``wrapper_config`` on each BatchNorm, for `config_auto_wrap_policy`.
        assert_on_collision: refuse a BatchNorm that has a ``wrapper_config`` already; False replaces it.

    Raises:
        AssertionError: there is a ``wrapper_config`` already.
        ValueError: ``process_group`` and ``single_rank_pg`` contradict each other, or something is wrapped already.

    Source: fairscale's function of the same name.
    """
    if single_rank_pg and process_group is not None:
        raise ValueError("`single_rank_pg=True` makes a group of its own: `process_group` must be left out.")
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
    if assert_on_collision and any(wrapper_config(norm) is not None for norm in norms):
        raise AssertionError("A BatchNorm has a `wrapper_config` already. assert_on_collision=False replaces it.")
    config = fsdp_config or {
        "process_group": group_of_one() if single_rank_pg else process_group,
        "mixed_precision": False,
        "flatten_parameters": False,
        "reshard_after_forward": False,
        "bucket_cap_mb": 0,
    }
    if not wrap_it:
        for norm in norms:
            norm.wrapper_config = config  # type: ignore[assignment]
        return module
    with enable_wrap(wrapper_cls=FullyShardedDataParallel):
        return auto_wrap(module, ModuleWrapPolicy({_BatchNorm}), **config)


def describe(
    module: nn.Module,
    policy: Any = None,
    world_size: int = 1,
    *,
    num_replicas: int | None = None,
    optimizer: str | Callable[[list[nn.Parameter]], Optimizer] = "adamw",
    device: str | None = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    **wrapper_kwargs: Any,
) -> WrapPlan:
    """What ``FullyShardedDataParallel(module, auto_wrap_policy=policy, **wrapper_kwargs)`` would make of ``module``.

    Changes nothing and needs no process group; the module may be on the meta device, where a model of any size takes
    no memory.

    Args:
        module: the model, not wrapped.
        policy: as ``auto_wrap_policy``; None puts all into one unit.
        world_size: the ranks to shard over, or, with NO_SHARD, to average gradients over.
        num_replicas: with hybrid strategies, how many groups of ``world_size`` ranks there are.
        optimizer: a name from ``OPTIMIZERS``, or a function from parameters to an optimizer.
        device: where it computes, ``"cpu"`` with gloo or ``"cuda"`` with NCCL; where this process would if None.
        ignored_modules: left alone, with all below them.
        wrapper_kwargs: the wrapper's other arguments, ``ignored_states`` and ``ignored_parameters`` among them.

    Returns: units, buckets and the predicted peak of memory by terms. Activations are not in it.

    Raises:
        ValueError: the module holds a unit already, an argument cannot be planned for, or as the wrapper does.
        TypeError: as the wrapper does.
    """
    bound = inspect.signature(FullyShardedDataParallel).bind(module, **wrapper_kwargs)
    bound.apply_defaults()
    arguments = {name: value for name, value in bound.arguments.items() if name not in ("module", "auto_wrap_policy")}
    others = arguments["ignored_states"], arguments["ignored_parameters"]
    units = UnitPlan(module, policy, arguments, resolve_ignored(module, ignored_modules, *others)).units
    return plan_memory(units, world_size, num_replicas, optimizer, device or default_device_type())
