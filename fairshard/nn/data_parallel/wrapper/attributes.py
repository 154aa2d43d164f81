"""What a wrapper answers: names of fairscale's wrapper (its arguments, its ranks, its state), and of the module in it.

The wrapper answers the names that fairscale documented, the arguments of its first version included, and its methods.
For every other name the wrapped module comes first: ``model.config`` is the module's, and an option of the wrapper
(``precision``, ``verbose``) can be read only if the module has no attribute of that name.
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from operator import attrgetter
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from fairshard.engine.tree import UNIT_ATTRIBUTE, units_below, walk
from fairshard.engine.unit import Unit
from fairshard.nn.data_parallel.guards import check_other_door
from fairshard.settings.config import UnitConfig
from fairshard.settings.groups import MISSING, Groups

_NOTHING = object()


class Forwarding(nn.Module):
    """Forwards attributes, items, length and truth value to its ``module``."""

    def __getattr__(self, name: str) -> Any:
        """Look up attributes that the wrapper does not have on the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        try:
            return self._find_inside(name)
        except AttributeError:
            check_other_door(name)
            raise

    def _find_inside(self, name: str) -> Any:
        """The module's attribute ``name``, or its replacement."""
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set data or a submodule on the wrapped module, where its forward reads it, if only that has it.

        Methods, parameters, and names that begin with an underscore are set on the wrapper.
        """
        holder = None if isinstance(value, nn.Parameter) else _holder_of(self, name)
        if holder is None or holder is self:
            super().__setattr__(name, value)
        else:
            setattr(holder, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete the attribute where `__setattr__` sets it."""
        holder = _holder_of(self, name)
        if holder is None or holder is self:
            super().__delattr__(name)
        else:
            delattr(holder, name)

    def __getitem__(self, key: Any) -> Any:
        """Index the wrapped module."""
        return self.module[key]

    def __len__(self) -> int:
        """Length of the wrapped module."""
        return len(self.module)

    def __bool__(self) -> bool:
        """Truth value of the wrapped module, which need not have a length."""
        return bool(self.module)


def _holder_of(wrapper: Forwarding, name: str) -> nn.Module | None:
    """The outermost of ``wrapper`` and the modules that it wraps that has ``name``, if that is data or a submodule."""
    module: nn.Module | None = None if name.startswith("_") else wrapper
    while module is not None:
        own = module.__dict__
        if name in own or any(name in own.get(kind, ()) for kind in ("_buffers", "_parameters", "_modules")):
            return None if name in module._parameters else module
        inherited = inspect.getattr_static(type(module), name, _NOTHING)
        if inherited is not _NOTHING:
            is_set = isinstance(inherited, property) and inherited.fset is not None
            is_data = is_set or not (callable(inherited) or hasattr(inherited, "__get__"))
            return module if is_data else None
        key = "module" if isinstance(module, Forwarding) else "_orig_mod"  # of what torch.compile has made
        module = own.get("_modules", {}).get(key)
    return None


class UnitAttributes(Forwarding):
    """A module with a unit, and its attributes under fairscale's names, including the wrapper's arguments."""

    _fairshard_config: UnitConfig

    def extra_repr(self) -> str:
        """Main settings in fairscale's order; all settings if ``verbose``."""
        own = ["rank", "world_size", "reshard_after_forward", "mixed_precision", "fp32_reduce_scatter"]
        own += ["flatten_parameters", "cpu_offload", "compute_dtype", "move_grads_to_cpu", "bucket_cap_mb"]
        config = self._fairshard_config
        values = {**vars(config), "rank": self.rank, "world_size": self.world_size}
        if config.verbose:
            own += [name for name in values if name not in own]
        return ", ".join(f"{name}={values[name]}" for name in own)

    @property
    def params(self) -> list[nn.Parameter]:
        """This unit's own shards, as `parameters` yields them."""
        return [stepped.shard for flat_param in self._unit.flat_params for stepped in flat_param.stepped]

    @property
    def process_group(self) -> ProcessGroup | str:
        """Group of the ranks that this unit is sharded over; ``"MISSING"`` after unpickling, until set or used."""
        return self._unit.groups.main.group or MISSING

    @process_group.setter
    def process_group(self, group: Groups) -> None:
        self._unit.groups.set(group)
        self._unit.root = None

    @property
    def process_group_reduce_scatter(self) -> ProcessGroup | str:
        """Group in which gradients are reduced; `process_group` unless another one was passed."""
        reduce = self._unit.groups.reduce
        return self.process_group if reduce is None else reduce.group or MISSING

    @property
    def flatten_parameters(self) -> Any:
        """The argument as resolved; of a wrapped RNN, its method of this name."""
        found = getattr(self.module, "flatten_parameters", None)
        return found if callable(found) else self._fairshard_config.flatten_parameters

    @property
    def children_share_process_group(self) -> bool:
        """Whether all units below use this one's group."""
        own = self._unit.groups.main.group
        return all(unit.groups.main.group is own for _, unit in units_below(self))

    rank = property(attrgetter("_unit.groups.main.rank"), doc="This process's rank in the unit's group.")
    world_size = property(attrgetter("_unit.groups.main.world_size"), doc="Number of ranks in the unit's group.")
    training_state = property(attrgetter("_unit.state"), doc="The phase that this unit is in.")
    no_broadcast_optim_state = property(
        attrgetter("_unit.config.no_broadcast_optim_state"),
        doc="Whether optimizer state stays on this rank: as passed, or True for an inner unit on a group of one rank.",
    )
    require_backward_grad_sync = property(
        attrgetter("_unit.sync"),
        lambda self, sync: setattr(self._unit, "sync", sync),
        doc="Whether a backward reduces this unit's gradients; `no_sync` sets it for a whole model.",
    )

    def check_is_root(self) -> bool:
        """Whether this is an outermost wrapper, inside no other."""
        return not self._unit.is_inner

    def append_shared_param(self, p: nn.Parameter) -> None:
        """Not supported: always raises.

        Raises:
            NotImplementedError: a parameter belongs to one unit.
        """
        raise NotImplementedError(
            "`append_shared_param` is not supported: a parameter belongs to one unit. Put one wrapper around both "
            "modules, or wrap neither of them, so that the wrapper around both has the parameter."
        )

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[UnitAttributes]:
        """The wrappers in ``module``, itself included, outermost first; with ``root_only`` only outermost ones."""
        found = [part for _, part in walk(module) if isinstance(part, UnitAttributes)]
        return [wrapper for wrapper in found if wrapper.check_is_root() or not root_only]

    @property
    def _unit(self) -> Unit:
        unit: Unit = self.__dict__[UNIT_ATTRIBUTE]
        return unit


def option_of(wrapper: UnitAttributes, name: str) -> Any:
    """The option or attribute ``name`` of ``wrapper`` that the wrapped module does not hide.

    Raises:
        AttributeError: there is none.
    """
    config = wrapper._fairshard_config
    return config if name == "config" else getattr(config, "cpu_offload" if name == "move_params_to_cpu" else name)


def is_inside(wrapper: UnitAttributes, name: str) -> bool:
    """Whether the module inside all wrappers around it has an attribute ``name`` of its own."""
    module: nn.Module = wrapper
    while isinstance(module, UnitAttributes):
        module = module.module
    try:
        found = getattr(module, name)
    except AttributeError:
        return False
    return not isinstance(found, UnitConfig)  # of a wrapper inside, found by a module that forwards attributes


_FAIRSCALE = {
    *("reshard_after_forward", "mixed_precision", "fp32_reduce_scatter", "flatten_parameters", "cpu_offload"),
    *("compute_dtype", "move_grads_to_cpu", "bucket_cap_mb"),
}
HIDEABLE = (
    ({field.name for field in fields(UnitConfig)} | {"config", "move_params_to_cpu"})
    - _FAIRSCALE
    - {"no_broadcast_optim_state"}
)
"""Names that the wrapper answers only if the wrapped module does not."""
for _name in _FAIRSCALE - {"flatten_parameters"}:
    _get = attrgetter(f"_fairshard_config.{_name}")
    setattr(UnitAttributes, _name, property(_get, doc=f"The argument ``{_name}`` as resolved."))


def get_fsdp_instances(mod: nn.Module, skip_empty: bool = False) -> list[UnitAttributes]:
    """The wrappers in ``mod``, itself included, outermost first; ``skip_empty`` skips those without parameters.

    Source: fairscale's function of the same name.
    """
    return [wrapper for wrapper in UnitAttributes.fsdp_modules(mod) if wrapper.params or not skip_empty]
