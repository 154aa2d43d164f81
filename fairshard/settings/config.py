"""Resolved settings of a unit: validated once, frozen, shared by everything below it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch

from fairshard.settings.fsdp1 import BackwardPrefetch, MixedPrecision, ShardingStrategy
from fairshard.settings.state_dicts import FullStateDictConfig, StateDictSettings, default_settings
from fairshard.utils.buckets import Division

ORDER_CHECKS = ("always", "sampled", "off")


class GradHome(Enum):
    """Where the reduced gradient of a shard is kept."""

    SHARD = "on the shard, in the memory of the reduction"
    HOST = "on the shard, in host memory"
    HELD = "with the unit, on the compute device: torch refuses a ``.grad`` on another device than its parameter"


@dataclass(frozen=True)
class LateOptions:
    """Options added to the wrapper later, described in its docstring; the defaults change nothing.

    Attributes:
        keeps_across_passes: the next forward reuses parameters that a forward left gathered, unless an optimizer has
            stepped or torch has counted a write to the shards. After several forwards, the backward of each one frees
            them. If False, each forward gathers again, and parameters that a forward left gathered stay gathered until
            all gradients are ready.
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

    @property
    def grad_home(self) -> GradHome:
        """Where reduced gradients are kept."""
        if self.move_grads_to_cpu:
            return GradHome.HOST
        return GradHome.HELD if self.cpu_offload else GradHome.SHARD

    def compute_dtype_of(self, param_dtype: torch.dtype, keeps_dtype: bool = False) -> torch.dtype:
        """The dtype in which parameters of ``param_dtype`` are gathered and compute; with ``keeps_dtype`` their own."""
        return param_dtype if keeps_dtype else self.compute_dtype or param_dtype

    def reduce_dtype_of(self, compute_dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients are reduced, for parameters that compute in ``compute_dtype``."""
        return self.precision.reduce_dtype or compute_dtype

    def grad_dtype_of(self, param_dtype: torch.dtype, reduce_dtype: torch.dtype) -> torch.dtype:
        """The dtype of the gradient of a shard of ``param_dtype``, reduced in ``reduce_dtype``."""
        return reduce_dtype if self.precision.keep_low_precision_grads else param_dtype

    def division_among(self, num_ranks: int) -> Division:
        """The divisors that make gradients means over ``num_ranks``."""
        before = self.gradient_predivide_factor or 1.0
        return Division(before, num_ranks / before)

    def input_dtype(self, is_root: bool) -> torch.dtype | None:
        """The dtype to which floating inputs of a forward are cast; None does not cast."""
        precision = self.precision
        if precision.param_dtype is None:
            return torch.float32 if self.force_input_to_fp32 else None
        if precision.cast_root_forward_inputs if is_root else precision.cast_forward_inputs:
            return precision.param_dtype
        return None


def check_param_dtype(config: UnitConfig, dtype: torch.dtype, fqn: str) -> None:
    """Check that a parameter of ``dtype`` can compute under ``config``.

    Raises:
        TypeError: ``dtype`` is not floating, or not fp32 under mixed precision.
        ValueError: without mixed precision, ``compute_dtype`` is not the parameter's own dtype.
    """
    if not dtype.is_floating_point:
        raise TypeError(
            f"Parameters must have a floating dtype to be sharded, but `{fqn}` has {dtype}. Register it as a "
            "buffer, which every rank keeps whole."
        )
    if config.mixed_precision is True and dtype != torch.float32:
        raise TypeError(
            f"With `mixed_precision=True` parameters must be torch.float32, the precision of the master weights, "
            f"but `{fqn}` is {dtype}. Wrap the fp32 module, or leave `mixed_precision` out to train in {dtype}."
        )
    if not config.mixed_precision and config.compute_dtype not in (None, dtype):
        raise ValueError(
            f"`compute_dtype` must be the parameters' own dtype without `mixed_precision=True`, but is "
            f"{config.compute_dtype} and `{fqn}` is {dtype}. Add `mixed_precision=True`, or leave it out."
        )
