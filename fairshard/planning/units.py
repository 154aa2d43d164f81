"""The units that a policy makes from a module: first planned without changing the module, then wrapped."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fairshard.params.slot import ParamSlot
from fairshard.planning.choice import Chooser, ModuleTree
from fairshard.planning.policies import wrapper_config
from fairshard.planning.summary import FlatSizes, UnitRow, unit_lines, unit_row
from fairshard.settings.config import Options, UnitConfig, resolve
from fairshard.settings.fsdp import ShardingStrategy
from fairshard.setup.ignored import renewed
from fairshard.setup.lines import PlacementFn, placed_lines
from fairshard.setup.origin import Ignored
from fairshard.setup.sharding import check_not_sharded, collect_slots, group_slots
from fairshard.setup.survey import Survey
from fairshard.utils.layout import FlatLayout
from fairshard.utils.nested import apply_to_tensors
from fairshard.utils.placed_layout import RaggedLayout
from fairshard.utils.user_line import level_of_user

_CONFIGURED = frozenset(field.name for field in fields(Options))
_FULL_PRECISION = {"mixed_precision": False, "compute_dtype": None, "buffer_dtype": None, "fp32_reduce_scatter": False}


@dataclass(eq=False)
class PlannedUnit:
    """A planned unit: ``slots`` are its parameters by flat param, ``steps`` the order of its forward.

    ``steps`` holds parameters and inner units in the order of registration.
    """

    fqn: str
    module: nn.Module
    overrides: dict[str, Any]
    config: UnitConfig
    slots: list[list[ParamSlot]] = field(default_factory=list)
    steps: list[nn.Parameter | PlannedUnit] = field(default_factory=list)
    layouts: dict[int, RaggedLayout] = field(default_factory=dict)
    rank: int = 0  # whose shards the sizes are of

    def place(self, placement: PlacementFn, world_size: int, loads: list[int]) -> None:
        """Lay the parameters that ``placement`` places out by blocks, or by owners, on ``world_size`` ranks.

        ``loads``: what each rank owns of the units that are sharded before, in bytes; updated. ``layouts`` then has the
        layouts of flat params of such parameters, by their index.
        """
        if self.config.sharding_strategy is ShardingStrategy.NO_SHARD:
            world_size = 1
        groups, self.slots = self.slots, []
        for group in groups:
            for line in placed_lines(group, placement, world_size, lambda: loads):
                if line.layout is not None:
                    self.layouts[len(self.slots)] = line.layout
                self.slots.append(line.slots)

    def flat_sizes(self, world_size: int) -> list[FlatSizes]:
        """Sizes of its flat params when sharded over ``world_size`` ranks (not sharded with NO_SHARD)."""
        if self.config.sharding_strategy is ShardingStrategy.NO_SHARD:
            world_size = 1
        sizes = []
        for index, group in enumerate(self.slots):
            leaf = group[0].leaf
            compute_dtype = self.config.rule.compute_dtype_of(leaf.dtype, group[0].keeps_dtype)
            layout = self.layouts.get(index) or FlatLayout([slot.numel for slot in group], world_size)
            sizes.append(FlatSizes(layout, leaf.dtype, compute_dtype, leaf.requires_grad, self.rank))
        return sizes

    def row(self, world_size: int) -> UnitRow:
        """Its row in the table of units."""
        return unit_row(self.fqn, self.flat_sizes(world_size))


class UnitPlan:
    """The units that ``policy`` makes from ``module`` with a wrapper's ``arguments``; None makes one unit.

    ``units`` starts with the outermost. Changes nothing, needs no process group, accepts modules on any device.

    Raises:
        ValueError: the module already holds a unit, or a parameter cannot be sharded.
        TypeError: a parameter's dtype cannot be sharded, or ``policy`` is not a policy.
    """

    def __init__(
        self,
        module: nn.Module,
        policy: Any,
        arguments: Mapping[str, Any],
        ignored: Ignored,
    ) -> None:
        self._tree = ModuleTree(module, ignored)
        self._arguments = arguments
        wrapped = self._tree.find_unit()
        if wrapped is not None:
            raise ValueError(
                f"`auto_wrap_policy` needs a module without units, but `{wrapped}` is wrapped already. Leave the "
                "policy out to wrap by hand, or do not wrap inner modules before."
            )
        check_not_sharded(Survey(module), ignored)
        config = self._config_with({})
        overrides: dict[nn.Module, dict[str, Any]] = {}
        self.apart: list[str] = []
        if policy is not None:
            chooser = Chooser(self._tree, policy)
            if config.precision.param_dtype is not None:
                self.apart = chooser.take(config.precision._module_classes_to_ignore, _in_full_precision)
            for choice in chooser.choose():
                overrides[choice.module] = {**(wrapper_config(choice.module) or {}), **choice.overrides}
        self.units: list[PlannedUnit] = []
        self._by_module: dict[nn.Module, PlannedUnit] = {}
        self._add(module, {}, overrides)

    def rows(self, world_size: int) -> list[UnitRow]:
        """The table of units."""
        return [unit.row(world_size) for unit in self.units]

    def wrap(self, wrapper_cls: type[nn.Module]) -> None:
        """Wrap every unit but the outermost, inner ones first."""
        for unit in reversed(self.units[1:]):
            wrapper = wrapper_cls(unit.module, **{**self._arguments, **unit.overrides})
            if unit.config.force_input_to_fp32 and unit.fqn in self.apart:
                wrapper.register_forward_hook(_restore_dtype, with_kwargs=True)
            self._tree.replace(unit.module, wrapper)

    def _config_with(self, overrides: Mapping[str, Any]) -> UnitConfig:
        arguments = {**self._arguments, **overrides}
        return resolve(**{name: value for name, value in arguments.items() if name in _CONFIGURED})

    def _add(
        self, module: nn.Module, own: dict[str, Any], overrides: Mapping[nn.Module, dict[str, Any]]
    ) -> PlannedUnit:
        unit = PlannedUnit(self._tree.fqns[module], module, own, self._config_with(own))
        self.units.append(unit)
        self._by_module[module] = unit
        parts: dict[nn.Module, str] = {}

        def visit(part: nn.Module) -> None:
            parts[part] = self._tree.fqns[part]
            for param in part._parameters.values():
                if param is not None and param not in self._tree.ignored_params:
                    unit.steps.append(param)
            for child in self._tree.children(part):
                if child in overrides:
                    unit.steps.append(self._by_module.get(child) or self._add(child, overrides[child], overrides))
                else:
                    visit(child)

        visit(module)
        slots = collect_slots(
            [(fqn, part) for part, fqn in parts.items()], skip={id(param) for param in self._tree.ignored_params}
        )
        for slot in slots:
            unit.config.check_param_dtype(slot.leaf.dtype, slot.fqn)
        unit.slots = group_slots(slots, unit.config)
        return unit


def auto_wrap_children(
    module: nn.Module,
    policy: Any,
    wrapper_cls: type[nn.Module],
    arguments: Mapping[str, Any],
    *,
    world_size: int,
    ignored: Ignored,
) -> Ignored:
    """Wrap the modules that ``policy`` chooses inside ``module``, but not ``module`` itself, in place.

    ``arguments`` are the outer wrapper's by name; inner wrappers get the same. Errors are raised before anything
    changes.

    Returns: ``ignored``, updated for the wrapped modules.

    Raises:
        ValueError: the module already holds a unit, or a parameter cannot be sharded.
        TypeError: a parameter's dtype cannot be sharded, or ``policy`` is not a policy.
    """
    plan = UnitPlan(module, policy, {**arguments, "ignored_states": [*ignored.modules, *ignored.params]}, ignored)
    if plan.apart:
        warnings.warn(
            f"Modules of classes excluded from mixed precision (`_module_classes_to_ignore`) are wrapped on their own "
            f"without it: {', '.join(plan.apart)}.",
            stacklevel=level_of_user(),
        )
    rows = plan.rows(world_size)
    numel = sum(row.numel for row in rows)
    if 2 * max(row.numel for row in rows) > numel > 0:
        fault = "matches no module" if len(rows) == 1 else "leaves much in one unit"
        warnings.warn("\n".join([f"`auto_wrap_policy` {fault}:", *unit_lines(rows)]), stacklevel=level_of_user())
    plan.wrap(wrapper_cls)
    return renewed(ignored, module)


def _in_full_precision(module: nn.Module) -> dict[str, Any]:
    """Overrides for full precision. BatchNorm accepts any dtype; other modules get fp32, and outputs are cast back."""
    return {**_FULL_PRECISION, "force_input_to_fp32": not isinstance(module, _BatchNorm)}


def _restore_dtype(wrapper: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
    dtypes: list[torch.dtype] = []

    def note(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            dtypes.append(tensor.dtype)
        return tensor

    apply_to_tensors(note, (args, kwargs))

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtypes[0]) if dtypes and tensor.is_floating_point() else tensor

    return apply_to_tensors(cast, outputs)
