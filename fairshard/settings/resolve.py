"""Turn the user's arguments into the settings of a unit: check them against each other and fill in defaults."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from fairshard.settings.config import DEFAULTS, ORDER_CHECKS, LateOptions, UnitConfig
from fairshard.settings.fsdp1 import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, adopt, elsewhere
from fairshard.utils.user_line import level_of_user


def resolve(
    *,
    reshard_after_forward: bool | int,
    mixed_precision: bool | MixedPrecision | None,
    fp32_reduce_scatter: bool,
    flatten_parameters: bool,
    cpu_offload: bool | CPUOffload | None,
    compute_dtype: torch.dtype | None,
    move_grads_to_cpu: bool | None,
    bucket_cap_mb: float,
    sharding_strategy: ShardingStrategy | None = None,
    buffer_dtype: torch.dtype | None = None,
    force_input_to_fp32: bool = False,
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
    forward_prefetch: bool | None = None,
    limit_all_gathers: bool = True,
    gradient_predivide_factor: float | None = None,
    late: LateOptions = DEFAULTS,
    use_orig_params: bool = False,
    order_check: str = "sampled",
    nan_check: bool = False,
) -> UnitConfig:
    """Check the arguments of the wrapper against each other and fill in dependent defaults.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: arguments contradict each other.
    """
    cpu_offload = adopt(cpu_offload, CPUOffload)
    if isinstance(cpu_offload, CPUOffload):
        cpu_offload = cpu_offload.offload_params
    mixed_precision = adopt(mixed_precision, MixedPrecision)
    flags = {
        "fp32_reduce_scatter": fp32_reduce_scatter,
        "flatten_parameters": flatten_parameters,
        "cpu_offload": False if cpu_offload is None else cpu_offload,
        "force_input_to_fp32": force_input_to_fp32,
        "limit_all_gathers": limit_all_gathers,
        "use_orig_params": use_orig_params,
        "forward_prefetch": forward_prefetch is True,
        "nan_check": nan_check,
    }
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"`{name}` must be True or False, but is {value!r}. {elsewhere(value) or _KEYWORDS}")
    if move_grads_to_cpu is None:
        move_grads_to_cpu = flags["cpu_offload"]
    elif not isinstance(move_grads_to_cpu, bool):
        raise TypeError(f"`move_grads_to_cpu` must be True, False or None, but is {move_grads_to_cpu!r}.")
    if forward_prefetch not in (None, True, False):
        raise TypeError(f"`forward_prefetch` must be True, False or None, but is {forward_prefetch!r}.")
    if isinstance(bucket_cap_mb, bool) or not isinstance(bucket_cap_mb, (int, float)) or math.isnan(bucket_cap_mb):
        raise TypeError(f"`bucket_cap_mb` must be a number of megabytes, but is {bucket_cap_mb!r}.")
    if bucket_cap_mb < 0:
        raise ValueError(
            f"`bucket_cap_mb` must be 0 or more, but is {bucket_cap_mb}. Pass 0 to reduce the gradients of each unit "
            "separately."
        )
    if gradient_predivide_factor is not None and not gradient_predivide_factor > 0:
        raise ValueError(f"`gradient_predivide_factor` must be positive, but is {gradient_predivide_factor!r}.")
    backward_prefetch = adopt(backward_prefetch, BackwardPrefetch)
    if not isinstance(backward_prefetch, (BackwardPrefetch, type(None))):
        raise TypeError(f"`backward_prefetch` must be a BackwardPrefetch or None, but is {backward_prefetch!r}.")
    strategy, reshard_after_forward = _strategy(sharding_strategy, reshard_after_forward)
    mixed_precision = False if mixed_precision is None else mixed_precision
    precision = _precision(mixed_precision, compute_dtype, fp32_reduce_scatter, buffer_dtype)
    _check_precision(precision, force_input_to_fp32, flags["cpu_offload"] or move_grads_to_cpu)
    if use_orig_params and precision.keep_low_precision_grads:
        raise ValueError(
            "`keep_low_precision_grads=True` cannot be combined with `use_orig_params=True`, whose gradients are in "
            "the parameters' dtype. Remove one of the two."
        )
    if order_check not in ORDER_CHECKS:
        raise ValueError(f"`order_check` must be one of {', '.join(ORDER_CHECKS)}, but is {order_check!r}.")
    return UnitConfig(
        reshard_after_forward=reshard_after_forward,
        mixed_precision=mixed_precision,
        fp32_reduce_scatter=fp32_reduce_scatter,
        flatten_parameters=flatten_parameters,
        cpu_offload=flags["cpu_offload"],
        compute_dtype=precision.param_dtype if mixed_precision else compute_dtype,
        move_grads_to_cpu=move_grads_to_cpu,
        bucket_cap_mb=bucket_cap_mb,
        sharding_strategy=strategy,
        precision=precision,
        force_input_to_fp32=force_input_to_fp32,
        backward_prefetch=backward_prefetch,
        forward_prefetch=forward_prefetch,
        limit_all_gathers=limit_all_gathers,
        gradient_predivide_factor=gradient_predivide_factor,
        order_check=order_check,
        nan_check=nan_check,
        keeps_in_no_sync=sharding_strategy is not None and not strategy.reshards_after_forward,
        late=late,
        use_orig_params=use_orig_params,
    )


_KEYWORDS = (
    "Positional arguments are in fairscale's order: pass those of PyTorch's FSDP by keyword, as in "
    "`FullyShardedDataParallel(module, sharding_strategy=..., cpu_offload=..., mixed_precision=...)`."
)


def _strategy(strategy: Any, reshard: Any) -> tuple[ShardingStrategy, bool | int]:
    """The strategy, and whether the forward frees parameters, or over how many ranks it reshards them."""
    strategy = adopt(strategy, ShardingStrategy)
    if not isinstance(reshard, int):
        raise TypeError(f"`reshard_after_forward` must be a bool or a number of ranks, but is {reshard!r}. {_KEYWORDS}")
    if not isinstance(reshard, bool) and reshard < 1:
        raise ValueError(f"`reshard_after_forward` must be a bool or a number of ranks, but is {reshard}.")
    if reshard == 1 and not isinstance(reshard, bool):
        text = "`reshard_after_forward=1` keeps whole parameters on each rank: it means False."
        warnings.warn(text, stacklevel=level_of_user())
        reshard = False
    if strategy is None:
        return (ShardingStrategy.FULL_SHARD if reshard else ShardingStrategy.SHARD_GRAD_OP), reshard
    if not isinstance(strategy, ShardingStrategy):
        known = strategy if strategy in ShardingStrategy.__members__ else "FULL_SHARD"
        raise TypeError(
            f"`sharding_strategy` must be a ShardingStrategy or None, but is {strategy!r}. Pass "
            f"`ShardingStrategy.{known}` of fairshard.nn."
        )
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


def _precision(
    mixed: Any, compute_dtype: torch.dtype | None, fp32_reduce_scatter: bool, buffer_dtype: torch.dtype | None
) -> MixedPrecision:
    """Resolve the precision arguments; ``reduce_dtype`` None means the compute dtype."""
    if not isinstance(mixed, (bool, MixedPrecision)):
        how = elsewhere(mixed) or _KEYWORDS
        raise TypeError(f"`mixed_precision` must be True, False or a MixedPrecision, but is {mixed!r}. {how}")
    if isinstance(mixed, MixedPrecision):
        if compute_dtype is not None or fp32_reduce_scatter or buffer_dtype is not None:
            raise ValueError(
                "A MixedPrecision object must hold all precision settings, but `compute_dtype`, `buffer_dtype` or "
                "`fp32_reduce_scatter` was also passed. Set its `param_dtype`, `buffer_dtype` and `reduce_dtype`."
            )
        return mixed
    if fp32_reduce_scatter and not mixed:
        raise ValueError(
            "`fp32_reduce_scatter=True` needs `mixed_precision=True`, but that is False. Without mixed precision "
            "gradients are reduced in the parameters' own dtype: leave `fp32_reduce_scatter` out."
        )
    for name, dtype in (("compute_dtype", compute_dtype), ("buffer_dtype", buffer_dtype)):
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(
                f"`{name}` must be a floating dtype, but is {dtype!r}. Pass torch.bfloat16 with "
                "`mixed_precision=True`, or leave it out to compute in the parameters' own dtype."
            )
    if not mixed:
        return MixedPrecision(buffer_dtype=buffer_dtype, cast_root_forward_inputs=False)
    param_dtype = compute_dtype or torch.float16
    return MixedPrecision(
        param_dtype=param_dtype,
        reduce_dtype=torch.float32 if fp32_reduce_scatter else None,
        buffer_dtype=buffer_dtype or param_dtype,
        cast_forward_inputs=True,
    )


def _check_precision(precision: MixedPrecision, force_input_to_fp32: bool, is_stepped_on_cpu: bool) -> None:
    if precision.keep_low_precision_grads and is_stepped_on_cpu:
        raise ValueError(
            "`keep_low_precision_grads=True` cannot be combined with `cpu_offload` or `move_grads_to_cpu`: an "
            "optimizer on the CPU steps fp32 masters with fp32 gradients. Remove it: gradients are cast as they arrive."
        )
    idle = []
    if precision.param_dtype is not None and force_input_to_fp32:
        idle.append("`force_input_to_fp32=True` has no effect beside a low-precision `param_dtype`")
    if precision.param_dtype is None and precision.cast_forward_inputs:
        idle.append("`cast_forward_inputs=True` has no effect without `param_dtype`")
    if precision.param_dtype is None and precision.reduce_dtype is None and precision.keep_low_precision_grads:
        idle.append("`keep_low_precision_grads=True` has no effect without `param_dtype` or `reduce_dtype`")
    for line in idle:
        warnings.warn(f"{line}. Leave it out.", stacklevel=level_of_user())


def late_options(
    *, state_dict_device: torch.device | str | None, compute_device: torch.device, **flags: Any
) -> LateOptions:
    """Check the options in `LateOptions`.

    Raises:
        TypeError: a flag is not True or False.
        ValueError: ``state_dict_device`` is neither the CPU nor the compute device.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"`{name}` must be True or False, but is {value!r}.")
    device = None if state_dict_device is None else torch.device(state_dict_device)
    if device is not None and device.type != "cpu" and device.type != compute_device.type:
        raise ValueError(
            f"`state_dict_device` must be the CPU or the module's device, {compute_device.type}, but is {device}. "
            "Leave it out, or move the module first."
        )
    return LateOptions(state_dict_device=device, **flags)


def offload_of(cpu_offload: Any, move_params_to_cpu: bool | None) -> Any:
    """The value of ``cpu_offload``, or of its newer name ``move_params_to_cpu`` if given.

    Raises:
        TypeError: ``move_params_to_cpu`` is not True, False or None.
        ValueError: the two contradict each other.
    """
    if move_params_to_cpu is None:
        return cpu_offload
    if not isinstance(move_params_to_cpu, bool):
        raise TypeError(f"`move_params_to_cpu` must be True, False or None, but is {move_params_to_cpu!r}.")
    given = adopt(cpu_offload, CPUOffload)
    if (given.offload_params if isinstance(given, CPUOffload) else given) and not move_params_to_cpu:
        raise ValueError(
            "`move_params_to_cpu=False` contradicts `cpu_offload=True`, its earlier name. Pass one of the two."
        )
    return move_params_to_cpu
