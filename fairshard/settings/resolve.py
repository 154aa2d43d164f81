"""Turn the user's options into the settings of a unit: check them against each other and fill in defaults."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from fairshard.settings.check import FLAG_OR_NONE
from fairshard.settings.config import Options, UnitConfig
from fairshard.settings.fsdp1 import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, adopt
from fairshard.utils.user_line import level_of_user

_CLASSES: dict[str, Any] = {
    "cpu_offload": CPUOffload,
    "mixed_precision": MixedPrecision,
    "sharding_strategy": ShardingStrategy,
    "backward_prefetch": BackwardPrefetch,
}


def resolve(**given: Any) -> UnitConfig:
    """Check ``given``, arguments with the names of `Options`, against each other, and fill in dependent defaults.

    Objects of PyTorch's classes are converted; None for ``cpu_offload`` and ``mixed_precision`` is False.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: arguments contradict each other.
    """
    given |= {name: adopt(given[name], kind) for name, kind in _CLASSES.items() if name in given}
    if isinstance(given.get("cpu_offload"), CPUOffload):
        given["cpu_offload"] = given["cpu_offload"].offload_params
    for name in ("cpu_offload", "mixed_precision"):
        given[name] = False if given.get(name) is None else given[name]
    strategy = given.get("sharding_strategy")
    if not isinstance(strategy, (ShardingStrategy, type(None))):
        known = strategy if strategy in ShardingStrategy.__members__ else "FULL_SHARD"
        raise TypeError(
            f"`sharding_strategy` must be a ShardingStrategy or None, but is {strategy!r}. Pass "
            f"`ShardingStrategy.{known}` of fairshard.nn."
        )
    options = Options(**given)
    resolved, reshards = _strategy(strategy, options.reshard_after_forward)
    moves_grads = options.cpu_offload if options.move_grads_to_cpu is None else options.move_grads_to_cpu
    precision = _precision(options)
    _check_precision(precision, options, options.cpu_offload or moves_grads)
    changed = {
        "reshard_after_forward": reshards,
        "sharding_strategy": resolved,
        "move_grads_to_cpu": moves_grads,
        "compute_dtype": precision.param_dtype if options.mixed_precision else options.compute_dtype,
    }
    keeps = strategy is not None and not resolved.reshards_after_forward
    return UnitConfig(**{**vars(options), **changed}, precision=precision, keeps_in_no_sync=keeps)


def _strategy(strategy: ShardingStrategy | None, reshard: bool | int) -> tuple[ShardingStrategy, bool | int]:
    """The strategy, and whether the forward frees parameters, or over how many ranks it reshards them."""
    if reshard == 1 and not isinstance(reshard, bool):
        text = "`reshard_after_forward=1` keeps whole parameters on each rank: it means False."
        warnings.warn(text, stacklevel=level_of_user())
        reshard = False
    if strategy is None:
        return (ShardingStrategy.FULL_SHARD if reshard else ShardingStrategy.SHARD_GRAD_OP), reshard
    if strategy.reshards_after_forward:
        if reshard is False:
            raise ValueError(
                f"`reshard_after_forward=False` contradicts `sharding_strategy={strategy.name}`, which frees "
                "parameters after the forward. Pass one of the two."
            )
        return strategy, reshard
    if reshard is not True:
        raise ValueError(
            f"`sharding_strategy={strategy.name}` keeps parameters after the forward: `reshard_after_forward` must be "
            f"left out beside it, but is {reshard}. Pass one of the two."
        )
    return strategy, False


def _precision(options: Options) -> MixedPrecision:
    """Resolve the precision arguments; ``reduce_dtype`` None means the compute dtype."""
    mixed = options.mixed_precision
    if isinstance(mixed, MixedPrecision):
        if options.compute_dtype is not None or options.fp32_reduce_scatter or options.buffer_dtype is not None:
            raise ValueError(
                "A MixedPrecision object must hold all precision settings, but `compute_dtype`, `buffer_dtype` or "
                "`fp32_reduce_scatter` was also passed. Set its `param_dtype`, `buffer_dtype` and `reduce_dtype`."
            )
        return mixed
    if options.fp32_reduce_scatter and not mixed:
        raise ValueError(
            "`fp32_reduce_scatter=True` needs `mixed_precision=True`, but that is False. Without mixed precision "
            "gradients are reduced in the parameters' own dtype: leave `fp32_reduce_scatter` out."
        )
    if not mixed:
        return MixedPrecision(buffer_dtype=options.buffer_dtype, cast_root_forward_inputs=False)
    param_dtype = options.compute_dtype or torch.float16
    return MixedPrecision(
        param_dtype=param_dtype,
        reduce_dtype=torch.float32 if options.fp32_reduce_scatter else None,
        buffer_dtype=options.buffer_dtype or param_dtype,
        cast_forward_inputs=True,
    )


def _check_precision(precision: MixedPrecision, options: Options, is_stepped_on_cpu: bool) -> None:
    if precision.keep_low_precision_grads and is_stepped_on_cpu:
        raise ValueError(
            "`keep_low_precision_grads=True` cannot be combined with `cpu_offload` or `move_grads_to_cpu`: an "
            "optimizer on the CPU steps fp32 masters with fp32 gradients. Remove it: gradients are cast as they arrive."
        )
    if precision.keep_low_precision_grads and options.use_orig_params:
        raise ValueError(
            "`keep_low_precision_grads=True` cannot be combined with `use_orig_params=True`, whose gradients are in "
            "the parameters' dtype. Remove one of the two."
        )
    casts, reduces = precision.param_dtype is not None, precision.reduce_dtype is not None
    idle = {
        "`force_input_to_fp32=True` has no effect beside a low-precision `param_dtype`": (
            options.force_input_to_fp32 and casts
        ),
        "`cast_forward_inputs=True` has no effect without `param_dtype`": precision.cast_forward_inputs and not casts,
        "`keep_low_precision_grads=True` has no effect without `param_dtype` or `reduce_dtype`": (
            precision.keep_low_precision_grads and not casts and not reduces
        ),
    }
    for line in [line for line, is_idle in idle.items() if is_idle]:
        warnings.warn(f"{line}. Leave it out.", stacklevel=level_of_user())


def host_or(device: torch.device, wanted: torch.device | str | None) -> torch.device | None:
    """``wanted``, the argument ``state_dict_device`` of a module on ``device``, as a device.

    Raises:
        ValueError: it is neither the CPU nor of the kind of ``device``.
    """
    found = None if wanted is None else torch.device(wanted)
    if found is not None and found.type not in ("cpu", device.type):
        raise ValueError(
            f"`state_dict_device` must be the CPU or the module's device, {device.type}, but is {found}. "
            "Leave it out, or move the module first."
        )
    return found


def offload_of(cpu_offload: Any, move_params_to_cpu: bool | None) -> Any:
    """The value of ``cpu_offload``, or of its newer name ``move_params_to_cpu`` if given.

    Raises:
        TypeError: ``move_params_to_cpu`` is not True, False or None.
        ValueError: the two contradict each other.
    """
    FLAG_OR_NONE("move_params_to_cpu", move_params_to_cpu)
    if move_params_to_cpu is None:
        return cpu_offload
    given = adopt(cpu_offload, CPUOffload)
    if (given.offload_params if isinstance(given, CPUOffload) else given) and not move_params_to_cpu:
        raise ValueError(
            "`move_params_to_cpu=False` contradicts `cpu_offload=True`, its earlier name. Pass one of the two."
        )
    return move_params_to_cpu
