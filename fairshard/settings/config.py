"""Resolved settings of a unit: validated once, frozen, shared by everything below it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fairshard.params.rule import GradHome, Rule
from fairshard.settings.fsdp1 import BackwardPrefetch, MixedPrecision, ShardingStrategy
from fairshard.settings.state_dicts import FullStateDictConfig, StateDictSettings, default_settings

ORDER_CHECKS = ("always", "sampled", "off")


@dataclass(frozen=True)
class LateOptions:
    """Options added to the wrapper later, described in its docstring; the defaults change nothing.

    Attributes:
        keeps_across_passes: the next forward reuses parameters that a forward left gathered, unless an optimizer has
            stepped the shards or torch has counted a write to them. After several forwards, the backward of each one
            frees them. If False, each forward gathers again, and parameters that a forward left gathered stay gathered
            until all gradients are ready.
    """

    disable_reshard_on_root: bool = True
    state_dict_device: torch.device | None = None
    state_dict_on_rank_0_only: bool = False
    no_broadcast_optim_state: bool = False
    clear_autocast_cache: bool = False
    verbose: bool = False
    keeps_across_passes: bool = False

    def settings(self) -> StateDictSettings | None:
        """The requested form of state dicts; None for the default."""
        if self.state_dict_device is None and not self.state_dict_on_rank_0_only:
            return None
        settings = default_settings()
        on_cpu = self.state_dict_device is not None and self.state_dict_device.type == "cpu"
        settings.state_dict_config = FullStateDictConfig(on_cpu, rank0_only=self.state_dict_on_rank_0_only)
        return settings


DEFAULTS = LateOptions()


@dataclass(frozen=True)
class UnitConfig:
    """Settings of one unit; ``compute_dtype`` None means the parameters' own dtype.

    ``precision`` is resolved from ``mixed_precision``, a flag or an object, and the dtypes passed with it.
    """

    reshard_after_forward: bool | int
    mixed_precision: bool | MixedPrecision
    fp32_reduce_scatter: bool
    flatten_parameters: bool
    cpu_offload: bool
    compute_dtype: torch.dtype | None
    move_grads_to_cpu: bool
    bucket_cap_mb: float
    sharding_strategy: ShardingStrategy
    precision: MixedPrecision
    force_input_to_fp32: bool
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: bool | None
    limit_all_gathers: bool
    gradient_predivide_factor: float | None
    keeps_in_no_sync: bool
    late: LateOptions
    use_orig_params: bool
    order_check: str = "sampled"
    nan_check: bool = False

    @property
    def master_on_cpu(self) -> bool:
        """Whether the parameters that an optimizer steps are masters in host memory."""
        return self.cpu_offload or self.move_grads_to_cpu

    def keeping_optim_state(self) -> UnitConfig:
        """These settings with ``no_broadcast_optim_state``."""
        return replace(self, late=replace(self.late, no_broadcast_optim_state=True))

    def state_dict_settings(self) -> StateDictSettings:
        """The form of state dicts to begin with."""
        return self.late.settings() or default_settings()

    @property
    def rule(self) -> Rule:
        """These settings as the engine needs them."""
        precision, late = self.precision, self.late
        casts_to = precision.param_dtype
        uncast = torch.float32 if self.force_input_to_fp32 and casts_to is None else None
        on_host = GradHome.HELD if self.cpu_offload else GradHome.SHARD
        return Rule(
            reshard_after_forward=self.reshard_after_forward,
            reshard_root=not late.disable_reshard_on_root,
            keeps_across_passes=late.keeps_across_passes,
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
