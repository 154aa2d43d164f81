"""Ignored modules and parameters, which a wrapper leaves whole on every rank, and does not move, cast or reduce."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn

from fairshard.engine.tree import unit_of, walk
from fairshard.settings.check import require
from fairshard.setup.origin import Ignored
from fairshard.setup.survey import Survey
from fairshard.utils.user_line import level_of_user


def resolve_ignored(
    survey: Survey,
    ignored_modules: Any,
    ignored_states: Any,
    ignored_parameters: Any,
    name: str = "ignored_parameters",
) -> Ignored:
    """Modules and parameters of ``survey`` that its wrapper must ignore, and those that inner wrappers ignore.

    ``name``: name of the last argument, which `fully_shard` names differently.

    Raises:
        TypeError: an argument is not an iterable of modules, or of parameters.
        ValueError: arguments are mutually exclusive, or an inner unit has already sharded an ignored parameter.
    """
    require(
        ignored_states is None or (ignored_modules is None and ignored_parameters is None),
        "`ignored_states` cannot be combined with `ignored_modules` or `ignored_parameters`. It accepts both modules "
        "and parameters: pass all of them there.",
    )
    given = [
        *_items("ignored_modules", ignored_modules, nn.Module),
        *_items("ignored_states", ignored_states, nn.Module, nn.Parameter),
        *_items(name, ignored_parameters, nn.Parameter),
    ]
    every = [unit.origin.ignored for _, unit in survey.units]
    inner = [ignored for ignored in every if ignored.modules or ignored.params]
    if not given and not inner:
        return Ignored()
    roots = [item for item in given if isinstance(item, nn.Module)]
    for root in roots:
        wrapped = next((fqn for fqn, part in walk(root) if unit_of(part) is not None), None)
        require(
            wrapped is None,
            f"Ignored modules must not be sharded, but in the ignored {type(root).__name__}, "
            f"{f'its `{wrapped}` is wrapped already' if wrapped else 'is a wrapper itself'}. Do not ignore it, or do "
            "not wrap it.",
        )
    if any(root is survey.module for root in roots):
        warnings.warn(
            f"The wrapped module ({type(survey.module).__name__}) is itself ignored, so that nothing of it is sharded. "
            "Leave the wrapper out, or ignore parts of the module.",
            stacklevel=level_of_user(),
        )
    in_tree = {id(part) for _, part in survey.parts}
    modules = {id(part): part for root in roots for part in root.modules() if id(part) in in_tree}
    modules.update({id(part): part for ignored in inner for part in ignored.modules})
    singles = {id(param) for param in given if isinstance(param, nn.Parameter)}
    singles.update(id(param) for ignored in inner for param in ignored.params)
    _check_not_taken(survey, modules.keys() | singles)
    params = {
        id(param): param
        for _, part in survey.parts
        for param in part._parameters.values()
        if param is not None and (id(part) in modules or id(param) in singles)
    }
    return Ignored(tuple(modules.values()), tuple(params.values()))


def renewed(ignored: Ignored, module: nn.Module) -> Ignored:
    """Update ``ignored`` after inner modules were wrapped: ``param_init_fn`` may have replaced parameters."""
    survey = Survey(module)
    inner = [param for _, unit in survey.units for param in unit.origin.ignored.params]
    here = {id(param) for _, part in survey.parts for param in part._parameters.values()}
    params = {id(param): param for param in (*ignored.params, *inner) if id(param) in here}
    return Ignored(ignored.modules, tuple(params.values()))


def _items(name: str, given: Any, *kinds: type) -> list[Any]:
    if given is None:
        return []
    wanted = " or ".join("nn.Modules" if kind is nn.Module else "nn.Parameters" for kind in kinds)
    require(
        isinstance(given, Iterable),
        f"`{name}` must be an iterable of {wanted}, but is {type(given).__name__}. Pass a list.",
        TypeError,
    )
    items = list(given)
    stranger = next((type(item).__name__ for item in items if not isinstance(item, kinds)), None)
    require(
        stranger is None,
        f"`{name}` must be an iterable of {wanted}, but holds an object of type {stranger}. Pass them themselves, not "
        "their names.",
        TypeError,
    )
    return items


def _check_not_taken(survey: Survey, ignored: set[int]) -> None:
    survey.place_units()
    for fqn, unit in survey.units:
        for flat_param in unit.flat_params:
            for slot in flat_param.slots:
                seen = [slot.leaf, *flat_param.shows.registered, *(owner for owner, _ in slot.owners)]
                require(
                    ignored.isdisjoint(map(id, seen)),
                    f"An ignored parameter must belong to no unit, but `{slot.fqn}` has been sharded by the unit "
                    f"`{fqn or 'root'}`. Ignore it in that unit as well, or in neither.",
                )
