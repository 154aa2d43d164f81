"""What a wrapper was asked for: resolved and validated once, frozen, shared by everything below it."""

from dataclasses import dataclass
from enum import Enum

import torch


class GradHome(Enum):
    """Where the gradient of a shard is kept once it is reduced."""

    SHARD = "on the shard, where the reduction left it"
    HOST = "on the shard, in host memory"
    HELD = "with the unit, on the compute device: torch refuses a ``.grad`` on another device than its parameter"


@dataclass(frozen=True)
class UnitConfig:
    """Settings of one unit; ``compute_dtype`` None means the parameters' own."""

    reshard_after_forward: bool
    mixed_precision: bool
    fp32_reduce_scatter: bool
    flatten_parameters: bool
    cpu_offload: bool
    compute_dtype: torch.dtype | None
    move_grads_to_cpu: bool
    bucket_cap_mb: float

    @property
    def master_on_cpu(self) -> bool:
        """Whether the parameters that an optimizer steps are in host memory, apart from those that compute."""
        return self.cpu_offload or self.move_grads_to_cpu

    @property
    def grad_home(self) -> GradHome:
        """Where reduced gradients are kept."""
        if self.move_grads_to_cpu:
            return GradHome.HOST
        return GradHome.HELD if self.cpu_offload else GradHome.SHARD

    def compute_dtype_of(self, param_dtype: torch.dtype) -> torch.dtype:
        """The dtype in which parameters of ``param_dtype`` are gathered and compute."""
        return self.compute_dtype or param_dtype


def resolve(
    *,
    reshard_after_forward: bool,
    mixed_precision: bool,
    fp32_reduce_scatter: bool,
    flatten_parameters: bool,
    cpu_offload: bool,
    compute_dtype: torch.dtype | None,
    move_grads_to_cpu: bool | None,
    bucket_cap_mb: float,
) -> UnitConfig:
    """Check the arguments of the wrapper against each other and fill in what depends on others.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: arguments contradict each other.
    """
    flags = {
        "reshard_after_forward": reshard_after_forward,
        "mixed_precision": mixed_precision,
        "fp32_reduce_scatter": fp32_reduce_scatter,
        "flatten_parameters": flatten_parameters,
        "cpu_offload": cpu_offload,
    }
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"`{name}` must be True or False, but is {value!r}. Pass it by keyword.")
    if move_grads_to_cpu is None:
        move_grads_to_cpu = cpu_offload
    elif not isinstance(move_grads_to_cpu, bool):
        raise TypeError(f"`move_grads_to_cpu` must be True, False or None, but is {move_grads_to_cpu!r}.")
    if fp32_reduce_scatter and not mixed_precision:
        raise ValueError(
            "`fp32_reduce_scatter=True` must go with `mixed_precision=True`, but that is False. Without mixed "
            "precision gradients travel in the parameters' own dtype: leave `fp32_reduce_scatter` out."
        )
    if compute_dtype is not None and not (
        isinstance(compute_dtype, torch.dtype) and compute_dtype.is_floating_point
    ):
        raise ValueError(
            f"`compute_dtype` must be a floating dtype, but is {compute_dtype!r}. Pass torch.bfloat16 with "
            "`mixed_precision=True`, or leave it out to compute in the parameters' own dtype."
        )
    if isinstance(bucket_cap_mb, bool) or not isinstance(bucket_cap_mb, (int, float)):
        raise TypeError(f"`bucket_cap_mb` must be a number of megabytes, but is {bucket_cap_mb!r}.")
    if mixed_precision and compute_dtype is None:
        compute_dtype = torch.float16
    return UnitConfig(
        reshard_after_forward=reshard_after_forward,
        mixed_precision=mixed_precision,
        fp32_reduce_scatter=fp32_reduce_scatter,
        flatten_parameters=flatten_parameters,
        cpu_offload=cpu_offload,
        compute_dtype=compute_dtype,
        move_grads_to_cpu=move_grads_to_cpu,
        bucket_cap_mb=bucket_cap_mb,
    )


def check_param_dtype(config: UnitConfig, dtype: torch.dtype, fqn: str) -> None:
    """Raise unless a parameter of ``dtype`` can be computed with under ``config``.

    Raises:
        TypeError: it is not floating, or not fp32 under mixed precision.
        ValueError: a ``compute_dtype`` other than the parameter's own, without mixed precision.
    """
    if not dtype.is_floating_point:
        raise TypeError(
            f"Parameters must have a floating dtype to be sharded, but `{fqn}` has {dtype}. Register it as a "
            "buffer, which every rank keeps whole."
        )
    if config.mixed_precision and dtype != torch.float32:
        raise TypeError(
            f"With `mixed_precision=True` parameters must be torch.float32, the precision of the master weights, "
            f"but `{fqn}` is {dtype}. Wrap the fp32 module, or leave `mixed_precision` out to train in {dtype}."
        )
    if not config.mixed_precision and config.compute_dtype not in (None, dtype):
        raise ValueError(
            f"`compute_dtype` must be the parameters' own dtype without `mixed_precision=True`, but is "
            f"{config.compute_dtype} and `{fqn}` is {dtype}. Add `mixed_precision=True`, or leave it out."
        )
