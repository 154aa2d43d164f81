"""The wrappers in a module can be listed, and the outermost ones found."""

import copy

import pytest
from torch import nn

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import clean_tensor_name, get_fsdp_instances
from fairshard.utils import names
from tests.models import mlp, tiny, wrap_each, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import randn

pytestmark = pytest.mark.behaviour("lists of wrappers")


@on_ranks(1, 2)
def test_wrappers_are_found_outermost_first():
    """Wrappers are found outermost first, including the module itself, and inside a plain module."""
    wrapped = wrap_tiny(tiny())
    inside = [wrapped.first, wrapped.first.up, wrapped.shared, wrapped.second]
    for found in (FSDP.fsdp_modules(wrapped), get_fsdp_instances(wrapped), get_fsdp_instances(nn.Sequential(wrapped))):
        assert found == [wrapped, *inside]
    assert FSDP.fsdp_modules(nn.Linear(4, 4)) == get_fsdp_instances(nn.Linear(4, 4)) == []


@on_ranks(2)
def test_wrappers_without_parameters_may_be_skipped():
    """``skip_empty`` skips a wrapper whose parameters all belong to inner wrappers."""
    wrapped = wrap_each(mlp(4, 9, 5))
    assert get_fsdp_instances(wrapped) == [wrapped, wrapped[0], wrapped[2]]
    assert get_fsdp_instances(wrapped, skip_empty=True) == [wrapped[0], wrapped[2]]


@on_ranks(2)
def test_the_outermost_wrapper_is_the_root():
    """The outermost wrapper is the root from construction on, and in copies; two side by side are both roots."""
    layer = FSDP(nn.Linear(4, 4))
    assert layer.check_is_root()
    layer(randn(2, 4))
    model = FSDP(nn.Sequential(layer, nn.Linear(4, 4)))
    for _ in range(2):
        assert not layer.check_is_root()
        assert model.check_is_root()
        assert FSDP.fsdp_modules(model, root_only=True) == [model]
        assert FSDP.fsdp_modules(layer, root_only=True) == []
        model(randn(2, 4)).sum().backward()
    other = copy.deepcopy(model)
    assert other.check_is_root()
    assert not other[0].check_is_root()
    assert FSDP.fsdp_modules(nn.Sequential(model, nn.ReLU(), other), root_only=True) == [model, other]


def test_clean_tensor_name_is_public():
    """``clean_tensor_name`` is exported next to the wrapper, as in FSDP1."""
    assert clean_tensor_name is names.clean_tensor_name
