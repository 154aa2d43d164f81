"""Resolved settings of a unit: validated once, frozen, shared by everything below it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from fairshard.params.rule import GradHome, Rule
from fairshard.settings.check import FLAG, FLAG_OR_NONE, Check, check_fields, is_number, must
from fairshard.settings.fsdp1 import BackwardPrefetch, MixedPrecision, ShardingStrategy
from fairshard.settings.state_dicts import FullStateDictConfig, StateDictSettings, default_settings

ORDER_CHECKS = ("always", "sampled", "off")
KEYWORDS = (
    "Positional arguments are in fairscale's order: pass those of PyTorch's FSDP by keyword, as in "
    "`FullyShardedDataParallel(module, sharding_strategy=..., cpu_offload=..., mixed_precision=...)`."
)
_FLAG = replace(FLAG, how=KEYWORDS)
_RESHARD = Check(lambda value: isinstance(value, int), "a bool or a number of ranks", how=KEYWORDS)
_AT_LEAST_ONE = Check(lambda value: isinstance(value, bool) or value > 0, _RESHARD.words, ValueError)
_PRECISION = Check(
    lambda value: isinstance(value, (bool, MixedPrecision)), "True, False or a MixedPrecision", how=KEYWORDS
)
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
_PREFETCH = Check(lambda value: isinstance(value, (BackwardPrefetch, type(None))), "a BackwardPrefetch or None")
_POSITIVE = Check(lambda value: value is None or value > 0, "positive", ValueError)
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
    sharding_strategy: ShardingStrategy | None = None
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
        if not dtype.is_floating_point:
            raise TypeError(
                f"Parameters must have a floating dtype to be sharded, but `{fqn}` has {dtype}. Register it as a "
                "buffer, which every rank keeps whole."
            )
        if self.mixed_precision is True and dtype != torch.float32:
            raise TypeError(
                f"With `mixed_precision=True` parameters must be torch.float32, the precision of the master weights, "
                f"but `{fqn}` is {dtype}. Wrap the fp32 module, or leave `mixed_precision` out to train in {dtype}."
            )
        if not self.mixed_precision and self.compute_dtype not in (None, dtype):
            raise ValueError(
                f"`compute_dtype` must be the parameters' own dtype without `mixed_precision=True`, but is "
                f"{self.compute_dtype} and `{fqn}` is {dtype}. Add `mixed_precision=True`, or leave it out."
            )
