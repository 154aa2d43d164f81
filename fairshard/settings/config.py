"""Settings of a unit: the user's options, checked by themselves and against each other, frozen."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fairshard.params.rule import GradHome, Rule
from fairshard.settings.check import FLAG, FLAG_OR_NONE, Check, check_fields, is_number, must, require
from fairshard.settings.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, adopt
from fairshard.settings.state_dicts import FullStateDictConfig, StateDictSettings, default_settings
from fairshard.utils.user_line import level_of_user

ORDER_CHECKS = ("always", "sampled", "off")
KEYWORDS = (
    "Positional arguments are in fairscale's order: pass those of PyTorch's FSDP by keyword, as in "
    "`FullyShardedDataParallel(module, sharding_strategy=..., cpu_offload=..., mixed_precision=...)`."
)
_FLAG = replace(FLAG, how=KEYWORDS)
_RESHARD = Check(int, "a bool or a number of ranks", how=KEYWORDS)
_AT_LEAST_ONE = Check(lambda value: isinstance(value, bool) or value > 0, _RESHARD.words, ValueError)
_PRECISION = Check((bool, MixedPrecision), "True, False or a MixedPrecision", how=KEYWORDS)
_DTYPE = Check(
    lambda value: value is None or (isinstance(value, torch.dtype) and value.is_floating_point),
    "a floating dtype",
    ValueError,
    "Pass torch.bfloat16 with `mixed_precision=True`, or leave it out to compute in the parameters' own dtype.",
)
_MEGABYTES = Check(lambda value: is_number(value) and not math.isnan(value), "a number of megabytes")
_NOT_NEGATIVE = Check(
    lambda value: value >= 0, "0 or more", ValueError, "Pass 0 to reduce the gradients of each unit separately."
)
_PREFETCH = Check((BackwardPrefetch, type(None)), "a BackwardPrefetch or None")
_POSITIVE = Check(lambda value: value is None or value > 0, "positive", ValueError)
_STRATEGY = Check(
    (ShardingStrategy, type(None)),
    "a ShardingStrategy or None",
    how=lambda value: (
        f"Pass `ShardingStrategy.{value if value in ShardingStrategy.__members__ else 'FULL_SHARD'}` of fairshard.nn."
    ),
)
_ORDER = Check(lambda value: value in ORDER_CHECKS, f"one of {', '.join(ORDER_CHECKS)}", ValueError)


@dataclass(frozen=True)
class Options:
    """The options of both entry points that concern one unit, each checked by itself.

    They are described where users pass them.

    Attributes:
        keeps_across_passes: the next forward reuses parameters that a forward left gathered, unless an optimizer has
            stepped the shards or torch has counted a write to them. After several forwards, the backward of each one
            frees them. If False, each forward gathers again, and parameters that a forward left gathered stay gathered
            until all gradients are ready.
    """

    reshard_after_forward: bool | int = field(default=True, metadata=must(_RESHARD, _AT_LEAST_ONE))
    mixed_precision: bool | MixedPrecision = field(default=False, metadata=must(_PRECISION))
    fp32_reduce_scatter: bool = field(default=False, metadata=must(_FLAG))
    flatten_parameters: bool = field(default=True, metadata=must(_FLAG))
    cpu_offload: bool = field(default=False, metadata=must(_FLAG))
    compute_dtype: torch.dtype | None = field(default=None, metadata=must(_DTYPE))
    move_grads_to_cpu: bool | None = field(default=None, metadata=must(FLAG_OR_NONE))
    bucket_cap_mb: float = field(default=25, metadata=must(_MEGABYTES, _NOT_NEGATIVE))
    sharding_strategy: ShardingStrategy | None = field(default=None, metadata=must(_STRATEGY))
    buffer_dtype: torch.dtype | None = field(default=None, metadata=must(_DTYPE))
    force_input_to_fp32: bool = field(default=False, metadata=must(_FLAG))
    backward_prefetch: BackwardPrefetch | None = field(default=BackwardPrefetch.BACKWARD_PRE, metadata=must(_PREFETCH))
    forward_prefetch: bool | None = field(default=None, metadata=must(FLAG_OR_NONE))
    limit_all_gathers: bool = field(default=True, metadata=must(_FLAG))
    gradient_predivide_factor: float | None = field(default=None, metadata=must(_POSITIVE))
    use_orig_params: bool = field(default=False, metadata=must(_FLAG))
    order_check: str = field(default="sampled", metadata=must(_ORDER))
    nan_check: bool = field(default=False, metadata=must(_FLAG))
    disable_reshard_on_root: bool = field(default=True, metadata=must(_FLAG))
    state_dict_device: torch.device | None = None
    state_dict_on_rank_0_only: bool = field(default=False, metadata=must(_FLAG))
    no_broadcast_optim_state: bool = field(default=False, metadata=must(_FLAG))
    clear_autocast_cache: bool = field(default=False, metadata=must(_FLAG))
    verbose: bool = field(default=False, metadata=must(_FLAG))
    keeps_across_passes: bool = field(default=False, metadata=must(_FLAG))

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class UnitConfig(Options):
    """Settings of one unit, from its `Options`; ``compute_dtype`` None means the parameters' own dtype.

    ``precision`` is resolved from ``mixed_precision``, a flag or an object, and the dtypes passed with it.
    """

    move_grads_to_cpu: bool = field(default=False, metadata=must(_FLAG))
    sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    precision: MixedPrecision = field(default_factory=MixedPrecision)
    keeps_in_no_sync: bool = False

    def __post_init__(self) -> None:
        """Nothing: `Options` have been checked."""

    @property
    def master_on_cpu(self) -> bool:
        """Whether the parameters that an optimizer steps are masters in host memory."""
        return self.cpu_offload or self.move_grads_to_cpu

    @property
    def sets_state_dicts(self) -> bool:
        """Whether the options ask for another form of state dicts than the default."""
        return self.state_dict_device is not None or self.state_dict_on_rank_0_only

    def state_dict_settings(self) -> StateDictSettings:
        """The form of state dicts to begin with."""
        settings = default_settings()
        on_cpu = self.state_dict_device is not None and self.state_dict_device.type == "cpu"
        settings.state_dict_config = FullStateDictConfig(on_cpu, rank0_only=self.state_dict_on_rank_0_only)
        return settings

    @property
    def rule(self) -> Rule:
        """These settings as the engine needs them."""
        precision = self.precision
        casts_to = precision.param_dtype
        uncast = torch.float32 if self.force_input_to_fp32 and casts_to is None else None
        on_host = GradHome.HELD if self.cpu_offload else GradHome.SHARD
        return Rule(
            reshard_after_forward=self.reshard_after_forward,
            reshard_root=not self.disable_reshard_on_root,
            keeps_across_passes=self.keeps_across_passes,
            keeps_in_no_sync=self.keeps_in_no_sync,
            compute_dtype=self.compute_dtype,
            reduce_dtype=precision.reduce_dtype,
            keeps_reduce_dtype=precision.keep_low_precision_grads,
            buffer_dtype=precision.buffer_dtype,
            input_dtype=(casts_to if precision.cast_forward_inputs else None) or uncast,
            root_input_dtype=(casts_to if precision.cast_root_forward_inputs else None) or uncast,
            divide_before=self.gradient_predivide_factor or 1.0,
            cpu_offload=self.cpu_offload,
            grad_home=GradHome.HOST if self.move_grads_to_cpu else on_host,
            prefetches_in_forward=self.forward_prefetch is not False,
            backward_prefetch=self.backward_prefetch,
        )

    def check_param_dtype(self, dtype: torch.dtype, fqn: str) -> None:
        """Check that a parameter of ``dtype`` can compute with these settings.

        Raises:
            TypeError: ``dtype`` is not floating, or not fp32 under mixed precision.
            ValueError: without mixed precision, ``compute_dtype`` is not the parameter's own dtype.
        """
        require(
            dtype.is_floating_point,
            f"Parameters must have a floating dtype to be sharded, but `{fqn}` has {dtype}. Register it as a "
            "buffer, which every rank keeps whole.",
            TypeError,
        )
        require(
            self.mixed_precision is not True or dtype == torch.float32,
            f"With `mixed_precision=True` parameters must be torch.float32, the precision of the master weights, "
            f"but `{fqn}` is {dtype}. Wrap the fp32 module, or leave `mixed_precision` out to train in {dtype}.",
            TypeError,
        )
        require(
            self.mixed_precision or self.compute_dtype in (None, dtype),
            f"`compute_dtype` must be the parameters' own dtype without `mixed_precision=True`, but is "
            f"{self.compute_dtype} and `{fqn}` is {dtype}. Add `mixed_precision=True`, or leave it out.",
        )


def resolve(**given: Any) -> UnitConfig:
    """Check ``given``, arguments with the names of `Options`, against each other, and fill in dependent defaults.

    Objects of PyTorch's classes are converted; None for ``cpu_offload`` and ``mixed_precision`` is False.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: arguments contradict each other.
    """
    given = {name: adopt(value) for name, value in given.items()}
    if isinstance(given.get("cpu_offload"), CPUOffload):
        given["cpu_offload"] = given["cpu_offload"].offload_params
    for name in ("cpu_offload", "mixed_precision"):
        given[name] = False if given.get(name) is None else given[name]
    options = Options(**given)
    strategy, reshards = _strategy(options.sharding_strategy, options.reshard_after_forward)
    moves_grads = options.cpu_offload if options.move_grads_to_cpu is None else options.move_grads_to_cpu
    precision = _precision(options)
    _check_precision(precision, options, options.cpu_offload or moves_grads)
    changed = {
        "reshard_after_forward": reshards,
        "sharding_strategy": strategy,
        "move_grads_to_cpu": moves_grads,
        "compute_dtype": precision.param_dtype if options.mixed_precision else options.compute_dtype,
    }
    keeps = options.sharding_strategy is not None and not strategy.reshards_after_forward
    return UnitConfig(**{**vars(options), **changed}, precision=precision, keeps_in_no_sync=keeps)


def _strategy(strategy: ShardingStrategy | None, reshard: bool | int) -> tuple[ShardingStrategy, bool | int]:
    """The strategy, and whether the forward frees parameters, or over how many ranks it reshards them."""
    if reshard == 1 and not isinstance(reshard, bool):
        text = "`reshard_after_forward=1` keeps whole parameters on each rank: it means False."
        warnings.warn(text, stacklevel=level_of_user())
        reshard = False
    if strategy is None:
        return (ShardingStrategy.FULL_SHARD if reshard else ShardingStrategy.SHARD_GRAD_OP), reshard
    require(
        reshard is not False or not strategy.reshards_after_forward,
        f"`reshard_after_forward=False` contradicts `sharding_strategy={strategy.name}`, which frees parameters after "
        "the forward. Pass one of the two.",
    )
    require(
        reshard is True or strategy.reshards_after_forward,
        f"`sharding_strategy={strategy.name}` keeps parameters after the forward: `reshard_after_forward` must be left "
        f"out beside it, but is {reshard}. Pass one of the two.",
    )
    return strategy, reshard if strategy.reshards_after_forward else False


def _precision(options: Options) -> MixedPrecision:
    """Resolve the precision arguments; ``reduce_dtype`` None means the compute dtype."""
    mixed, reduces_in_fp32 = options.mixed_precision, options.fp32_reduce_scatter
    if isinstance(mixed, MixedPrecision):
        require(
            options.compute_dtype is None and not reduces_in_fp32 and options.buffer_dtype is None,
            "A MixedPrecision object must hold all precision settings, but `compute_dtype`, `buffer_dtype` or "
            "`fp32_reduce_scatter` was also passed. Set its `param_dtype`, `buffer_dtype` and `reduce_dtype`.",
        )
        return mixed
    require(
        mixed or not reduces_in_fp32,
        "`fp32_reduce_scatter=True` needs `mixed_precision=True`, but that is False. Without mixed precision "
        "gradients are reduced in the parameters' own dtype: leave `fp32_reduce_scatter` out.",
    )
    if not mixed:
        return MixedPrecision(buffer_dtype=options.buffer_dtype, cast_root_forward_inputs=False)
    param_dtype = options.compute_dtype or torch.float16
    return MixedPrecision(
        param_dtype=param_dtype,
        reduce_dtype=torch.float32 if reduces_in_fp32 else None,
        buffer_dtype=options.buffer_dtype or param_dtype,
        cast_forward_inputs=True,
    )


def _check_precision(precision: MixedPrecision, options: Options, is_stepped_on_cpu: bool) -> None:
    keeps = precision.keep_low_precision_grads
    require(
        not (keeps and is_stepped_on_cpu),
        "`keep_low_precision_grads=True` cannot be combined with `cpu_offload` or `move_grads_to_cpu`: an optimizer on "
        "the CPU steps fp32 masters with fp32 gradients. Remove it: gradients are cast as they arrive.",
    )
    require(
        not (keeps and options.use_orig_params),
        "`keep_low_precision_grads=True` cannot be combined with `use_orig_params=True`, whose gradients are in the "
        "parameters' dtype. Remove one of the two.",
    )
    casts = precision.param_dtype is not None
    idle = {
        "`force_input_to_fp32=True` has no effect beside a low-precision `param_dtype`": (
            options.force_input_to_fp32 and casts
        ),
        "`cast_forward_inputs=True` has no effect without `param_dtype`": precision.cast_forward_inputs and not casts,
        "`keep_low_precision_grads=True` has no effect without `param_dtype` or `reduce_dtype`": (
            keeps and not casts and precision.reduce_dtype is None
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
    require(
        found is None or found.type in ("cpu", device.type),
        f"`state_dict_device` must be the CPU or the module's device, {device.type}, but is {found}. Leave it out, or "
        "move the module first.",
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
    given = adopt(cpu_offload)
    require(
        move_params_to_cpu or not (given.offload_params if isinstance(given, CPUOffload) else given),
        "`move_params_to_cpu=False` contradicts `cpu_offload=True`, its earlier name. Pass one of the two.",
    )
    return move_params_to_cpu
