"""Checks optimizers by torch's public hooks around every step.

At the first step it raises if the optimizer would step nothing or wrong values; at every step, if gradients of its
parameters are pending (see `PendingGrads`) or incomplete.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fairshard.checks.block_state import adapt_blocks
from fairshard.checks.order_check import OrderCheck
from fairshard.checks.shards import add_copies, add_copy, add_shards, num_added, originals, shard_of
from fairshard.checks.whole_grads import check_whole
from fairshard.engine.root import Root
from fairshard.engine.tree import every_root
from fairshard.engine.unit import Unit
from fairshard.errors import HeldGradientError, ShardOptimizerError, StaleOptimizerError, TrainingStateError
from fairshard.params.flat_param import FlatParam
from fairshard.params.rule import GradHome
from fairshard.params.slot import ParamSlot
from fairshard.settings.config import UnitConfig
from fairshard.utils import before_step
from fairshard.utils.graph_breaks import untraced
from fairshard.utils.user_line import level_of_user
from fairshard.views.extended_param import ShownExtended

# Optimizers that passed the check: how many parameters were sharded then, and how many the optimizer had; and what
# `_shards_of` returns.
_clean: weakref.WeakKeyDictionary[Optimizer, tuple[tuple[int, int], list[tuple[Tensor, Tensor]]]]
_clean = weakref.WeakKeyDictionary()
_fetchers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_is_installed = False

_NEEDS_SHAPES = {
    "Adafactor", "Muon", "Shampoo", "DistributedShampoo", "SOAP", "Lamb", "LAMB", "FusedLAMB", "Lars", "LARS",
    "GaLoreAdamW", "CAME", "SM3",
}  # fmt: skip
_NEEDS_WHOLE = {"LBFGS"}


def watch_optimizers(flat_params: Sequence[FlatParam], config: UnitConfig) -> None:
    """From now on, check each optimizer that holds shards or original parameters of ``flat_params``."""
    add_shards(flat_params, config.rule.grad_home)
    _install()


def watch_copy(unit: Unit) -> None:
    """Watch the optimizers of ``unit``, a copy that is not complete yet, from the next check on."""
    add_copy(unit)
    _install()


def _install() -> None:
    global _is_installed
    if not _is_installed:
        before_step.install()  # first: a background save reads what this step changes, and `_before_step` counts writes
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _is_installed = True


def allow_held_gradients(optimizer: Optimizer) -> None:
    """Allow ``optimizer`` to step although units hold gradients, because it fetches them."""
    _fetchers.add(optimizer)


def check_optimizer_class(optimizer_class: type, name: str) -> None:
    """Raise if optimizers of this class cannot step the 1-D shard ``name``.

    Raises:
        ShardOptimizerError: it needs the shape of a parameter, or all parameters at once.
    """
    names = _names_of(optimizer_class)
    if names & _NEEDS_SHAPES:
        cure = "fairshard.optim.Muon, which finds the matrices of shards, or " if "Muon" in names else ""
        raise ShardOptimizerError(
            f"{optimizer_class.__name__} needs parameters in their own shape, but `{name}` is the shard of one rank. "
            f"Use {cure}an elementwise optimizer (AdamW, Adam, SGD, Adagrad, Lion), or leave that module unsharded."
        )
    if names & _NEEDS_WHOLE:
        raise ShardOptimizerError(
            f"{optimizer_class.__name__} needs all parameters and a closure, but `{name}` is the shard of one rank: "
            "its line search would take another step on every rank. Use an elementwise optimizer (AdamW, SGD)."
        )


def finds_parts(optimizer_class: type) -> bool:
    """Whether optimizers of this class find the original parameters of shards themselves."""
    return getattr(optimizer_class, "finds_parts", False) is True


def _check_class(optimizer_class: type, stepped: Any) -> None:
    has_shape = stepped.shows.keeps_shapes and _names_of(optimizer_class).isdisjoint(_NEEDS_WHOLE)
    if not (has_shape or finds_parts(optimizer_class)):
        check_optimizer_class(optimizer_class, stepped.name)


def _names_of(optimizer_class: type) -> set[str]:
    return {base.__name__ for base in optimizer_class.__mro__}


def check_cpu_steps(optimizer_class: type, units: list[Unit]) -> None:
    """Raise if `CPUOptimizer` cannot step the shards of ``units`` with ``optimizer_class``.

    Raises:
        ShardOptimizerError: see `check_optimizer_class`.
        ValueError: gradients of shards are in another dtype than the shards.
    """
    for unit in units:
        for flat_param in unit.flat_params:
            for stepped in flat_param.stepped:
                _check_class(optimizer_class, stepped)
                if isinstance(flat_param.shows, ShownExtended):
                    raise ShardOptimizerError(
                        f"CPUOptimizer must step plain tensors, but `{stepped.name}` is a "
                        f"{flat_param.shows.class_name}, a tensor subclass. Use the optimizer class itself."
                    )
        if unit.config.precision.keep_low_precision_grads:
            raise ValueError(
                f"CPUOptimizer needs gradients in the dtype of their shards, but unit `{unit.fqn or 'root'}` has "
                "`keep_low_precision_grads=True`. Leave that out, or use an optimizer that takes such gradients."
            )


def _refuse_inside_forward(optimizer: Optimizer) -> None:
    """Raise if a forward of a unit is running that would go on with the old weights after the step.

    Raises:
        TrainingStateError: names the unit.
    """
    if all(root.engine.is_between_passes for root in every_root()):
        return
    stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for root in _stepped_roots(optimizer):
        for unit in root.units:
            params = [one for flat_param in unit.flat_params for one in flat_param.stepped]
            if unit.open_calls and any(id(one.shard) in stepped for one in params):
                raise TrainingStateError(
                    "An optimizer must step a unit outside of the unit's forward, but "
                    f"{type(optimizer).__name__} steps inside the forward of unit `{unit.fqn or 'root'}`, whose later "
                    "calls would compute with the old weights. Step after the forward, or shard each module called in "
                    "it as a unit of its own (with Lightning, call `wrap` or `fully_shard` in `configure_model`)."
                )


@untraced
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    add_copies()
    _refuse_inside_forward(optimizer)
    seen = num_added(), sum(len(group["params"]) for group in optimizer.param_groups)
    if optimizer not in _clean or _clean[optimizer][0] != seen:
        _check(optimizer)
        _clean[optimizer] = seen, _shards_of(optimizer)
    if optimizer in _fetchers:  # they check gradients themselves, and may step on another thread
        _count_writes(_clean[optimizer][1], has_grads=False)
        return None
    positional = len(args) > 1 and callable(args[1])  # a closure; `args[0]` is the optimizer
    has_closure = positional or callable(kwargs.get("closure"))
    if not has_closure:
        check_gradients(optimizer)
    _count_writes(_clean[optimizer][1], has_grads=not has_closure)
    if positional:
        return (args[0], _checked(optimizer, args[1]), *args[2:]), kwargs
    if has_closure:
        return args, {**kwargs, "closure": _checked(optimizer, kwargs["closure"])}
    return None


@untraced
def _after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for root in _stepped_roots(optimizer):
        if root.join is None:
            OrderCheck.of(root).count_step()


def needs_all(optimizer: Optimizer, what: str) -> None:
    """Tell observers of the models of ``optimizer`` that ``what``, which needs all ranks, is called."""
    for root in _stepped_roots(optimizer):
        for observer in root.observers:
            observer.needs_all(what)


def _stepped_roots(optimizer: Optimizer) -> list[Root]:
    """The models of which ``optimizer`` holds shards, in the order of its parameters: it is the same on all ranks."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    place = {id(param): index for index, param in enumerate(params)}
    first = {}
    for root in every_root():
        places = [place.get(id(one.shard)) for unit in root.units for fp in unit.flat_params for one in fp.stepped]
        if held := [index for index in places if index is not None]:
            first[root] = min(held)
    return sorted(first, key=first.__getitem__)


def _checked(optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    """``closure``, after which the gradients of ``optimizer`` are checked."""

    def call() -> Any:
        loss = closure()
        check_gradients(optimizer)
        return loss

    return call


def check_gradients(optimizer: Optimizer) -> None:
    """Raise if ``optimizer`` would use a gradient that is pending, or that an exception has left incomplete.

    Cleans up after a backward that raised only in models that ``optimizer`` steps: that is **collective**, and some
    ranks may have dropped another model.

    Raises:
        PartialGradientError: naming the first such shard.
        PendingGradientError: naming the first such shard.
    """
    if any(root.backward is not None for root in every_root()):
        for root in _stepped_roots(optimizer):
            root.engine.drop_interrupted(root)
    for group in optimizer.param_groups:
        for param in group["params"]:
            stepped = shard_of(param)[0]
            if stepped is not None and stepped.pending is not None:
                check_whole(stepped)


def _shards_of(optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
    """Each parameter of ``optimizer`` that shows a shard, and that shard."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    pairs = ((param, shard_of(param)[0]) for param in params)
    return [(param, shard) for param, one in pairs if one is not None for shard in one.shows.versioned[:1]]


def _count_writes(shards: Sequence[tuple[Tensor, Tensor]], has_grads: bool) -> None:
    """Count the writes of a step that begins: torch counts neither fused ones, nor foreach ones to DTensors.

    ``shards``: pairs of a parameter and the shard that it shows. ``has_grads``: parameters without a gradient are not
    stepped; otherwise they may get one first.
    """
    written = {id(shard): shard for param, shard in shards if not has_grads or param.grad is not None}
    for shard in written.values():
        increment_version(shard)


def _check(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            slot: weakref.ref[ParamSlot] | None = originals.get(param)
            if slot is not None:
                known = slot()
                name = known.fqn if known else "of a model that no longer exists"
                raise StaleOptimizerError(
                    "An optimizer must hold the shards that `model.parameters()` yields after sharding, but "
                    f"{type(optimizer).__name__} holds the original parameter `{name}`, whole: stepping it would "
                    "change nothing. Either the optimizer was built before sharding: build it afterwards. Or the "
                    "module was gathered at that moment (by `unshard()`, or between a forward and its backward): call "
                    "`reshard()` before you build the optimizer."
                )
            _check_shard(optimizer, param)
    adapt_blocks(optimizer)
    _warn_of_shape_groups(optimizer)


def _warn_of_shape_groups(optimizer: Optimizer) -> None:
    """Warn if parameters were probably grouped by ``p.dim() >= 2``, or by names, that flat shards do not have.

    Grouped so, all 1-D shards, of matrices and of vectors, have one weight decay. If `p.dim()` decided, groups that
    decay more hold nothing of fewer than two dimensions; if names did, a group that decays less is empty.
    """
    shards: dict[float, list[Any]] = {}
    for group in optimizer.param_groups:
        found = [shard_of(param)[0] for param in group["params"]]
        flat = [stepped for stepped in found if stepped is not None and stepped.shard.dim() == 1]
        if flat:
            shards.setdefault(group.get("weight_decay", 0), []).extend(flat)
    if len(shards) != 1:
        return
    ((decay, flat),) = shards.items()
    if len({len(slot.shape) >= 2 for stepped in flat for slot in stepped.slots}) < 2:
        return
    has_names = all(stepped.slots[0].registered is not None for stepped in flat)
    more = [group for group in optimizer.param_groups if group.get("weight_decay", 0) > decay]
    less = [group for group in optimizer.param_groups if group.get("weight_decay", 0) < decay and not group["params"]]
    if more and all(param.dim() >= 2 for group in more for param in group["params"]):
        other = more[0]
    elif less and not has_names:
        other = less[0]
    else:
        return
    cure = (
        "a shard has one dimension, so `p.dim()` cannot group them. Group by the names in `named_parameters()`"
        if has_names
        else "flat shards have one dimension and not the original names, so neither `p.dim()` nor a name can group "
        "them. Wrap with `use_orig_params=True` and group by the names in `named_parameters()`"
    )
    warnings.warn(
        f"A parameter group of {type(optimizer).__name__} has weight_decay={other['weight_decay']} but no shards, and "
        f"the shards of matrices and vectors alike, such as `{flat[0].name}`, have weight_decay={decay}: {cure}, or "
        "use `fully_shard`, whose parameters keep their shapes.",
        stacklevel=level_of_user(),
    )


def _check_shard(optimizer: Optimizer, param: nn.Parameter) -> None:
    flat_param, home = shard_of(param)
    if flat_param is None:
        return
    if not isinstance(param, DTensor):  # DTensors have their true shapes, which PyTorch's optimizers support
        _check_class(type(optimizer), flat_param)
    if flat_param.shows.on_cpu and param.dtype in (torch.float16, torch.bfloat16):
        _refuse_low_precision(flat_param.name, param)
    if home is GradHome.HELD and flat_param.shows.on_cpu and optimizer not in _fetchers:
        raise HeldGradientError(
            f"With `cpu_offload=True, move_grads_to_cpu=False` the gradient of `{flat_param.name}` stays on the "
            f"compute device, where {type(optimizer).__name__} does not see it and would skip the parameter. Use "
            "fairshard.optim.CPUOptimizer, or leave `move_grads_to_cpu` out."
        )


def _refuse_low_precision(name: str, param: nn.Parameter) -> None:
    why = f"but `{name}` is {param.dtype}, in which moments lose small updates."
    if isinstance(param, DTensor):  # only a warning: with PyTorch's fully_shard such steps are allowed
        warnings.warn(
            f"An optimizer on the CPU should step fp32 masters, {why} Shard the fp32 module with "
            f"MixedPrecisionPolicy(param_dtype={param.dtype}).",
            stacklevel=6,
        )
        return
    raise ShardOptimizerError(
        f"An optimizer on the CPU must step fp32 masters, {why} Wrap the fp32 module with `mixed_precision=True` and "
        f"`compute_dtype={param.dtype}`; CPUOptimizer's `state_dtype` halves the moments."
    )
