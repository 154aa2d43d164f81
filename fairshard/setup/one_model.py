"""A unit belongs to one model: record the module of each model, and raise if a unit joins a second model."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

from torch import nn

from fairshard.checks.agreement import raise_together
from fairshard.engine.root import Root
from fairshard.engine.tree import is_wrapper, units_below, walk
from fairshard.engine.unit import Unit

_modules: weakref.WeakKeyDictionary[Root, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def note_model(root: Root, module: nn.Module) -> None:
    """Record that ``root`` is the root of the model ``module``."""
    _modules[root] = weakref.ref(module)


def check_one_model(module: nn.Module, found: Sequence[tuple[str, Unit]]) -> None:
    """Check that no unit ``found`` in ``module``, which becomes a model, is also in another existing model.

    The other model may be part of this one, contain it, or be deleted. Changes no unit of an existing model.
    **Collective** if a unit has been in a model before, because a model may be deleted on some ranks only.

    Raises:
        ValueError: on all ranks, naming both models.
    """
    known = [(fqn, unit) for fqn, unit in found if unit.comm is not None]
    ours = {unit for _, unit in found}
    error = None
    for fqn, unit in known:
        if error is None and unit.root is not None and unit.root.units[0] not in ours:
            error = _refusal(module, fqn, unit)
    groups = [unit.groups.communicators() for _, unit in known]
    comms = [comm for own in groups for comm in (own.shard, own.replicas) if comm is not None]
    raise_together(dict.fromkeys(comms), error)


def _refusal(module: nn.Module, fqn: str, unit: Unit) -> ValueError | None:
    """The error if ``unit`` is also in another model that still exists."""
    if not _is_there(unit):
        return None
    assert unit.root is not None
    other = _modules[unit.root]()
    assert other is not None
    theirs = {each: name for name, each in units_below(other)}
    if unit not in theirs or any(part is module for _, part in walk(other)):
        return None
    return ValueError(
        f"A unit must belong to one model, but `{fqn or 'root'}` of this {_class_of(module)} is also "
        f"`{theirs[unit] or 'root'}` of another {_class_of(other)} that has run and still exists. Wrap a module "
        "around both models and call that, so that one backward reduces the gradients of both; or make both ignore the "
        "shared part (`ignored_modules`, or `ignored_params` of fully_shard), which every rank then keeps whole; or "
        "delete the other model before this one runs."
    )


def _is_there(unit: Unit) -> bool:
    """Whether the model of ``unit`` still exists: something other than its units holds its module.

    The units of a deleted model can keep its module alive through reference cycles. They hold their root and a shared
    bucketer; the root holds the outermost unit, which with `fully_shard` holds the module; the bucketer holds flat
    params, which hold the module that they are registered on. So this function breaks the cycles by removing the units
    from the model, and adds them again if the module is still there.
    """
    assert unit.root is not None
    module = _modules[unit.root]
    if module() is None:
        return False
    root = weakref.ref(unit.root)
    unit.root.shared.bucketer.plan([])  # the next backward plans again
    inner = [each for each in unit.root.units[1:] if each.root is unit.root]
    for each in inner:
        each.root = None
    gc.collect()
    if module() is None:
        return False
    for each in inner:
        each.root = root()
    return True


def _class_of(module: nn.Module) -> str:
    while is_wrapper(module):
        (module,) = module.children()
    return getattr(type(module), "_fairshard_class", type(module)).__name__
