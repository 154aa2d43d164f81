"""The sharded model of a run, through either entry point of the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fairshard.cli.option_error import OptionError
from fairshard.cli.options import COMPUTE_DTYPES, TrainOptions
from fairshard.cli.task import Task, make_task
from fairshard.cli.wrapping import policy_of
from fairshard.engine.tree import units_below
from fairshard.errors import FairshardError
from fairshard.nn import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from fairshard.optim.grad_norm import clip_grad_norm_
from fairshard.planning.choice import Chooser, ModuleTree
from fairshard.utils.collectives import gather_objects
from fairshard.utils.groups import host_group


class TrainingStopped(FairshardError):
    """Training cannot continue; raised on all ranks at the same step, with the same message."""


class Sharded:
    """A sharded ``model``, the ``task`` that it came from, and what differs between the entry points."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        self.model = model
        self.task = task

    @property
    def has_fused_kernels(self) -> bool:
        """Whether torch's fused optimizers can step the parameters: DTensors have none."""
        return isinstance(self.model, FullyShardedDataParallel)

    @contextlib.contextmanager
    def unreduced(self) -> Iterator[None]:
        """Accumulate full gradients in a backward, without communication."""
        if isinstance(self.model, FullyShardedDataParallel):
            with self.model.no_sync():
                yield
            return
        model: Any = self.model
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def clip(self, max_norm: float) -> float:
        """Clip the gradients; returns their norm over all ranks. **Collective.**"""
        if isinstance(self.model, FullyShardedDataParallel):
            return float(self.model.clip_grad_norm_(max_norm))
        return float(clip_grad_norm_([unit for _, unit in units_below(self.model)], max_norm, 2.0))


def build_model(options: TrainOptions, device: torch.device) -> Sharded:
    """Build the model and shard it: one unit for each module that the policy chooses, and one for the rest.

    **Collective.**

    Raises:
        TrainingStopped: the model is not what the options need, or differs between ranks.
    """
    try:
        task = make_task(options)
        policy = policy_of("--policy", options.policy, task.model)
    except OptionError as error:
        raise TrainingStopped(str(error)) from error
    if options.factory is not None:
        _check_alike(task, options.factory)
    module = task.model.to(device)
    shard = _wrapped if options.engine == "wrapper" else _in_place
    return Sharded(shard(module, policy, options), task)


def _wrapped(module: nn.Module, policy: Any, options: TrainOptions) -> nn.Module:
    dtype = COMPUTE_DTYPES.get(options.precision)
    settings: dict[str, Any] = {
        "reshard_after_forward": options.reshard_after_forward,
        "mixed_precision": dtype is not None,
        "compute_dtype": dtype,
        "bucket_cap_mb": options.bucket_cap_mb,
        "cpu_offload": options.cpu_offload,
        "move_grads_to_cpu": options.move_grads_to_cpu,
    }
    tree = ModuleTree(module)
    for choice in [] if policy is None else Chooser(tree, policy).choose():
        tree.replace(choice.module, FullyShardedDataParallel(choice.module, **settings))
    return FullyShardedDataParallel(module, **settings)


def _in_place(module: nn.Module, policy: Any, options: TrainOptions) -> nn.Module:
    settings: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=COMPUTE_DTYPES.get(options.precision)),
        "offload_policy": CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy(),
        "bucket_cap_mb": options.bucket_cap_mb,
    }
    chosen = [] if policy is None else Chooser(ModuleTree(module), policy).choose()
    for choice in chosen:
        fully_shard(choice.module, reshard_after_forward=options.reshard_after_forward, **settings)
    # As in the wrapper, the outermost unit stays gathered between forward and backward.
    fully_shard(module, reshard_after_forward=None if options.reshard_after_forward else False, **settings)
    return module


def _check_alike(task: Task, factory: str) -> None:
    """Raise if the function has not built the same weights on every rank. **Collective.**"""
    own = {}
    for name, param in task.model.named_parameters():
        values = param.detach().double()
        own[name] = list(param.shape), float(values.sum()), float(values.abs().sum())
    group = host_group()
    first, *others = gather_objects(own, group)
    for rank, other in enumerate(others, start=1):
        differing = [name for name in first.keys() | other.keys() if first.get(name) != other.get(name)]
        if differing:
            raise TrainingStopped(
                f"--factory {factory} must build the same weights on every rank, but `{min(differing)}` differs on "
                f"rank {rank}. Draw them from torch's generator, which is seeded with --seed, or load them from a file."
            )
