"""Ignored modules and parameters, which a wrapper leaves whole on every rank, and does not move, cast or reduce."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn

from fairshard.engine.tree import unit_of, units_below, walk
from fairshard.setup.origin import Ignored
from fairshard.utils.names import join
from fairshard.utils.user_line import level_of_user


def resolve_ignored(
    module: nn.Module,
    ignored_modules: Any,
    ignored_states: Any,
    ignored_parameters: Any,
    name: str = "ignored_parameters",
) -> Ignored:
    """Modules and parameters in ``module`` that its wrapper must ignore, and those that inner wrappers ignore.

    ``name``: name of the last argument, which `fully_shard` names differently.

    Raises:
        TypeError: an argument is not an iterable of modules, or of parameters.
        ValueError: arguments are mutually exclusive, or an inner unit has already sharded an ignored parameter.
    """
    if ignored_states is not None and (ignored_modules is not None or ignored_parameters is not None):
        raise ValueError(
            "`ignored_states` cannot be combined with `ignored_modules` or `ignored_parameters`. It accepts both "
            "modules and parameters: pass all of them there."
        )
    given = [
        *_items("ignored_modules", ignored_modules, nn.Module),
        *_items("ignored_states", ignored_states, nn.Module, nn.Parameter),
        *_items(name, ignored_parameters, nn.Parameter),
    ]
    inner = [unit.origin.ignored for _, unit in units_below(module)]
    roots = [item for item in given if isinstance(item, nn.Module)]
    for root in roots:
        _check_holds_no_unit(root)
    if any(root is module for root in roots):
        warnings.warn(
            f"The wrapped module ({type(module).__name__}) is itself ignored, so that nothing of it is sharded. Leave "
            "the wrapper out, or ignore parts of the module.",
            stacklevel=level_of_user(),
        )
    in_tree = {id(part): part for _, part in walk(module)}
    modules = {id(part): part for root in roots for part in root.modules() if id(part) in in_tree}
    modules.update({id(part): part for ignored in inner for part in ignored.modules})
    singles = {id(param) for param in given if isinstance(param, nn.Parameter)}
    singles.update(id(param) for ignored in inner for param in ignored.params)
    _check_not_taken(module, modules.keys() | singles)
    params: dict[int, nn.Parameter] = {}
    for part in in_tree.values():
        for param in part._parameters.values():
            if param is not None and (id(part) in modules or id(param) in singles):
                params[id(param)] = param
    return Ignored(tuple(modules.values()), tuple(params.values()))


def renewed(ignored: Ignored, module: nn.Module) -> Ignored:
    """Update ``ignored`` after inner modules were wrapped: ``param_init_fn`` may have replaced parameters."""
    inner = [param for _, unit in units_below(module) for param in unit.origin.ignored.params]
    here = {id(param) for _, part in walk(module) for param in part._parameters.values()}
    params = {id(param): param for param in (*ignored.params, *inner) if id(param) in here}
    return Ignored(ignored.modules, tuple(params.values()))


def _items(name: str, given: Any, *kinds: type) -> list[Any]:
    wanted = " or ".join("nn.Modules" if kind is nn.Module else "nn.Parameters" for kind in kinds)
    if given is None:
        return []
    if not isinstance(given, Iterable):
        raise TypeError(f"`{name}` must be an iterable of {wanted}, but is {type(given).__name__}. Pass a list.")
    items = list(given)
    for item in items:
        if not isinstance(item, kinds):
            raise TypeError(
                f"`{name}` must be an iterable of {wanted}, but holds an object of type {type(item).__name__}. Pass "
                "them themselves, not their names."
            )
    return items


def _check_holds_no_unit(root: nn.Module) -> None:
    for fqn, part in walk(root):
        if unit_of(part) is not None:
            where = f"its `{fqn}` is wrapped already" if part is not root else "is a wrapper itself"
            raise ValueError(
                f"Ignored modules must not be sharded, but in the ignored {type(root).__name__}, {where}. Do not "
                "ignore it, or do not wrap it."
            )


def _check_not_taken(module: nn.Module, ignored: set[int]) -> None:
    for fqn, unit in units_below(module):
        for flat_param in unit.flat_params:
            for slot in flat_param.slots:
                seen = [slot.leaf, *flat_param.shows.registered, *(owner for owner, _ in slot.owners)]
                if any(id(item) in ignored for item in seen):
                    name = join(fqn, slot.fqn.removeprefix(f"{unit.fqn}.") if unit.fqn else slot.fqn)
                    raise ValueError(
                        f"An ignored parameter must belong to no unit, but `{name}` has been sharded by the unit "
                        f"`{fqn or 'root'}`. Ignore it in that unit as well, or in neither."
                    )
