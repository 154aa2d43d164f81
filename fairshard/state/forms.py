"""The form of a model's state dicts, set for all its units at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fairshard.engine.tree import units_below
from fairshard.engine.unit import Unit
from fairshard.errors import FairshardError, StateDictTypesDifferError
from fairshard.settings.state_dicts import (
    OptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    default_settings,
    resolve_settings,
)


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Set the form of the state dicts of all units in ``module`` and of their optimizers; returns the previous form.

    FULL_STATE_DICT gives whole values, SHARDED_STATE_DICT values that ``torch.distributed.checkpoint`` saves and
    loads, LOCAL_STATE_DICT this rank's shards. torch's enum and configs are accepted.

    Raises:
        RuntimeError: a config does not belong to the form.
        AssertionError: the units had different forms.
    """
    settings = resolve_settings(state_dict_type, state_dict_config, optim_state_dict_config)
    _check_door(module, settings)
    before = common_settings(module)
    for _, unit in units_below(module):
        unit.state_dict_settings = dataclasses.replace(settings)
    return before


@contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """`set_state_dict_type` for the ``with`` block; restores the previous form at its end."""
    before = set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        for _, unit in units_below(module):
            unit.state_dict_settings = dataclasses.replace(before)


def common_settings(module: nn.Module) -> StateDictSettings:
    """The form and configs of all units below ``module``; the defaults if there are no units.

    Raises:
        StateDictTypesDifferError: the units' settings differ.
    """
    units: list[tuple[str, Unit]] = units_below(module)
    if not units:
        return default_settings()
    (first_fqn, first), *others = units
    for fqn, unit in others:
        if unit.state_dict_settings != first.state_dict_settings:
            raise StateDictTypesDifferError(
                "All units of a model must have one type of state dict set, but they differ: "
                f"`{first_fqn or 'root'}` has {first.state_dict_settings}, `{fqn}` has {unit.state_dict_settings}. "
                "Call FullyShardedDataParallel.set_state_dict_type on the outermost module."
            )
    settings: StateDictSettings = first.state_dict_settings
    return dataclasses.replace(settings)


def _check_door(module: nn.Module, settings: StateDictSettings) -> None:
    """Raise if units of `fully_shard` are asked for a form other than DTensors, the only one they support."""
    for fqn, unit in units_below(module):
        if unit.members is not None and settings.state_dict_type is not StateDictType.SHARDED_STATE_DICT:
            raise FairshardError(
                f"The state dict of `{fqn or 'root'}`, sharded by `fully_shard`, must hold DTensors, but "
                f"{settings.state_dict_type.name} was requested. For whole values call "
                "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
                "options=StateDictOptions(full_state_dict=True)); load_state_dict accepts them."
            )
