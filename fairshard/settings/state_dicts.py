"""Forms of state dicts, with FSDP1's names and defaults: whole, local or sharded, on the device or in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from fairshard.settings.check import require


class StateDictType(Enum):
    """Form of a state dict."""

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


@dataclass
class StateDictConfig:
    """Base of the configs for model state dicts; ``offload_to_cpu`` puts values into host memory."""

    offload_to_cpu: bool = False
    use_dtensor: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """Whole values; with ``rank0_only`` only rank 0 saves and loads them."""

    rank0_only: bool = False


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """Sharded values: each rank has its run."""


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """This rank's shards, unchanged."""


@dataclass
class OptimStateDictConfig:
    """Base of the configs for optimizer state dicts."""

    offload_to_cpu: bool = True
    use_dtensor: bool = False


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Whole values; ``rank0_only`` as in `FullStateDictConfig`."""

    rank0_only: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Sharded values: each rank has its run."""


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """State of this rank's shards, unchanged."""

    offload_to_cpu: bool = False


@dataclass
class StateDictSettings:
    """The form of state dicts set for a unit, with its configs."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
}


def default_settings() -> StateDictSettings:
    """Default settings: whole values on every rank."""
    return resolve_settings(StateDictType.FULL_STATE_DICT, None, None)


def resolve_settings(state_dict_type: Any, state_dict_config: Any, optim_state_dict_config: Any) -> StateDictSettings:
    """Settings from our or torch's enums and configs, checked against each other.

    Raises:
        TypeError: ``state_dict_type`` is not a `StateDictType`.
        RuntimeError: a config belongs to another type of state dict, or has an unsupported option.
    """
    wanted = StateDictType.__members__.get(getattr(state_dict_type, "name", ""))
    if wanted is None:
        names = ", ".join(f"StateDictType.{name}" for name in StateDictType.__members__)
        given = repr(state_dict_type) if isinstance(state_dict_type, (str, int)) else type(state_dict_type).__name__
        raise TypeError(f"`state_dict_type` must be one of {names}, but is {given}. It comes after the model.")
    of_model, of_optim = _CONFIGS[wanted]
    return StateDictSettings(
        wanted,
        _resolve("state_dict_config", state_dict_config, of_model, StateDictConfig, wanted),
        _resolve("optim_state_dict_config", optim_state_dict_config, of_optim, OptimStateDictConfig, wanted),
    )


def _resolve(argument: str, config: Any, cls: Any, base: type, wanted: StateDictType) -> Any:
    if config is None:
        return cls()
    names = {parent.__name__ for parent in type(config).__mro__}
    require(
        cls.__name__ in names or type(config).__name__ == base.__name__,
        f"`{argument}` must be a {cls.__name__} for {wanted.name}, but is {type(config).__name__}. Pass "
        f"{cls.__name__}(...), or leave it out for the defaults.",
        RuntimeError,
    )
    settings = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    settings["use_dtensor"] = getattr(config, "use_dtensor", getattr(config, "_use_dtensor", False))
    require(
        not settings["use_dtensor"],
        f"`{argument}` must have use_dtensor=False, but has True: shards of FullyShardedDataParallel are runs of flat "
        "parameters, which no DTensor placement describes. Its sharded values save and load with "
        "torch.distributed.checkpoint as they are.",
        RuntimeError,
    )
    unknown = settings.keys() - cls.__dataclass_fields__.keys()
    require(not unknown, f"`{argument}` of type {cls.__name__} has no {', '.join(sorted(unknown))}.", RuntimeError)
    return cls(**settings)
