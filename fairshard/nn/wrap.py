"""Wrap the modules of a model, by hand inside `enable_wrap` or by a policy; and describe the result of a policy.

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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm

from fairshard.nn.data_parallel.fully_sharded_data_parallel import FullyShardedDataParallel
from fairshard.planning.choice import Chooser, ModuleTree
from fairshard.planning.policies import (
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
from fairshard.utils.groups import group_of_one
from fairshard.utils.lazy import lazy

if TYPE_CHECKING:
    from fairshard.extras.planning.describe import describe
    from fairshard.extras.planning.peak import OPTIMIZERS
    from fairshard.extras.planning.wrap_plan import BucketRow, MemoryTerm, WrapPlan

_PLANNING = "fairshard.extras.planning"
_HOMES = {
    "OPTIMIZERS": f"{_PLANNING}.peak",
    "BucketRow": f"{_PLANNING}.wrap_plan",
    "MemoryTerm": f"{_PLANNING}.wrap_plan",
    "WrapPlan": f"{_PLANNING}.wrap_plan",
    "describe": f"{_PLANNING}.describe",
}
if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, _HOMES)

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
    """Arguments of `enable_wrap`."""

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
    """Inside, `wrap` and `auto_wrap` wrap with ``wrapper_cls(module, **wrapper_kwargs)``; outside they do nothing.

    The model's code chooses where to wrap, and the caller whether and how. ``auto_wrap_policy`` is the policy of
    `auto_wrap`; if None, `default_auto_wrap_policy`. May be nested: the innermost applies.
    """
    token = _wrapping.set(_Wrapping(auto_wrap_policy, wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _wrapping.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap ``module`` with the arguments of `enable_wrap` and ``wrap_overrides``; outside, return ``module``.

    A dict in the module's attribute ``wrapper_config`` also overrides the arguments.
    """
    wrapping = _wrapping.get()
    return module if wrapping is None else wrapping.wrap(module, wrap_overrides)


def auto_wrap(module: nn.Module, auto_wrap_policy: Any = None, **kwargs: Any) -> nn.Module:
    """Wrap the modules that the policy chooses, possibly ``module`` itself; outside `enable_wrap` do nothing.

    ``auto_wrap_policy`` overrides the policy of `enable_wrap`; ``kwargs`` override its arguments.

    Returns: ``module``, changed in place, or the wrapper around it.

    Raises:
        ValueError: a module inside is already wrapped.
    """
    wrapping = _wrapping.get()
    if wrapping is None:
        return module
    policy = auto_wrap_policy or wrapping.policy or default_auto_wrap_policy
    tree = ModuleTree(module)
    wrapped = tree.find_unit(wrapping.wrapper_cls if isinstance(wrapping.wrapper_cls, type) else None)
    if wrapped is not None:
        raise ValueError(
            f"`auto_wrap` needs a module without wrappers, but `{wrapped}` is wrapped already. Call it first, or wrap "
            "the rest by hand."
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

    Low-precision inputs keep their dtype; statistics and weights stay fp32. Wrap the rest afterwards.

    Args:
        module: a module that contains BatchNorms, or is one.
        single_rank_pg: keep them whole on every rank (a process group of this rank alone). Their gradients are then
            not averaged over ranks. **Collective.**
        process_group: the ranks to shard them over; the default group if None.
        fsdp_config: the wrapper's arguments, instead of the settings above.
        wrap_it: False only sets the arguments as ``wrapper_config`` on each BatchNorm, for `config_auto_wrap_policy`.
        assert_on_collision: raise if a BatchNorm already has a ``wrapper_config``; False replaces it.

    Raises:
        AssertionError: a BatchNorm already has a ``wrapper_config``.
        ValueError: ``process_group`` and ``single_rank_pg`` contradict each other, or a module is already wrapped.

    Source: fairscale's function of the same name.
    """
    if single_rank_pg and process_group is not None:
        raise ValueError("`single_rank_pg=True` makes its own group: `process_group` must be left out.")
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
