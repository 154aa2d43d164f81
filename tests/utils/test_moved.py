"""Modules that have moved are found at their old paths, with a warning that says where they are."""

import importlib
import inspect

import pytest

from fairshard.utils.moved import moved
from tests.test_architecture import OLD_PATHS

# One name per module, which the docs show.
SHOWN = {
    "fairshard.nn.data_parallel.options": "MixedPrecision",
    "fairshard.nn.data_parallel.policies": "MixedPrecisionPolicy",
    "fairshard.nn.data_parallel.state_dict_config": "FullStateDictConfig",
    "fairshard.nn.data_parallel.summary": "unit_table",
    "fairshard.utils.timeline": "draw_timeline",
    "fairshard.utils.unit_event": "UnitEvent",
}


@pytest.mark.parametrize(("old", "new"), OLD_PATHS.items(), ids=OLD_PATHS.keys())
def test_an_old_path_has_every_public_name(old, new):
    """Every object that the new module defines is also at the old path, with a warning that names both paths."""
    there = importlib.import_module(new)
    names = [name for name, value in vars(there).items() if getattr(value, "__module__", None) == new]
    assert SHOWN[old] in names
    for name in names:
        with pytest.warns(DeprecationWarning, match=rf"`{old}` has moved to `{new}`"):
            assert getattr(importlib.import_module(old), name) is getattr(there, name)


def test_the_warning_points_at_the_import():
    """The warning points at the import from the old path."""
    with pytest.warns(DeprecationWarning, match="has moved") as caught:
        from fairshard.utils.timeline import draw_timeline
    assert inspect.isfunction(draw_timeline)
    assert {warning.filename for warning in caught} == {__file__}


def test_other_names_are_missing_as_ever():
    """A name that the module never had raises an AttributeError, without a warning about a move."""
    find = moved("fairshard.utils.timeline", "fairshard.observe.timeline")
    for name in ("no_such_name", "__no_such_name__"):
        with pytest.raises(AttributeError, match=name):
            find(name)
