"""State dicts of a module inside a wrapper: refused while its parameters are shards, which it does not have or name.

Only the wrapper can gather them, and gathering is collective. A module inside is often asked on one rank alone
(``if rank == 0: torch.save(model.module.state_dict(), path)``): then an error is better than a gather that never ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fairshard.engine.training_state import TrainingState
from fairshard.engine.tree import paths_of
from fairshard.engine.unit import Unit
from fairshard.errors import ParameterShardedError
from fairshard.params.slot import ParamSlot
from fairshard.utils.names import join


def refuse_inner_states(wrapper: nn.Module, unit: Unit) -> None:
    """From now on, saving or loading a state dict of a module of ``unit`` raises unless its parameters are shown.

    ``wrapper`` holds the unit. The hooks are on all modules around the parameters, so that they raise before a wrapper
    inside gathers.
    """
    slots = {
        (id(owner), name): slot
        for flat_param in unit.flat_params
        for slot in flat_param.slots
        for owner, name in slot.owners
    }
    own = paths_of(wrapper)
    params = [
        _Param(join(path, name), module, name, slots[id(module), name])
        for path, module in own
        for name in module._parameters
        if (id(module), name) in slots
    ]
    for path, module in own:
        start = f"{path}." if path else ""
        inside = [replace(param, key=param.key[len(start) :]) for param in params if param.key.startswith(start)]
        if inside:
            guard = _Guard(unit, inside)
            module.register_state_dict_pre_hook(guard.before_save)
            module.register_load_state_dict_pre_hook(guard.before_load)


@dataclass(frozen=True)
class _Param:
    """The parameter of ``slot``, which ``module`` has under ``name``; ``key`` is its name in a module around it."""

    key: str
    module: nn.Module
    name: str
    slot: ParamSlot

    @property
    def is_sharded(self) -> bool:
        """Whether the module has no parameter or one of another shape in its place now."""
        params = self.module._parameters
        if self.name not in params or params[self.name] is not self.slot.registered:
            return False  # deleted or replaced
        shown = params[self.name]
        return shown is None or shown.shape != self.slot.shape


class _Guard:
    """Hooks on a module with ``params`` of ``unit`` in it."""

    def __init__(self, unit: Unit, params: list[_Param]) -> None:
        self._unit = unit
        self._params = params

    def before_save(self, module: nn.Module, _prefix: str, _keep_vars: bool) -> None:
        """Raise if the state dict would lack parameters, or have shards in their place."""
        for param in self._sharded():
            raise ParameterShardedError(
                "The state dict of a module inside a wrapper would lack its sharded parameters, such as "
                f"`{param.slot.fqn}`. Call `state_dict()` of the wrapper, on all ranks (and pass the result on: "
                "`save_pretrained(folder, state_dict=...)`), or do this inside `summon_full_params()`."
            )

    def before_load(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Raise if ``state`` has values of parameters that are sharded now."""
        for param in self._sharded():
            if prefix + param.key in state:
                raise ParameterShardedError(
                    f"A state dict must be loaded by the wrapper while parameters are sharded, but `{param.slot.fqn}` "
                    "would be loaded by a module inside it. Call `load_state_dict()` of the wrapper, on all ranks, or "
                    "do this inside `summon_full_params()`."
                )

    def _sharded(self) -> Iterator[_Param]:
        if self._unit.state is not TrainingState.SUMMON_FULL_PARAMS:
            yield from (param for param in self._params if param.is_sharded)
