"""Any number of elements on any number of ranks: fewer elements than ranks, no elements, 0-d."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fairshard.engine.tree import units_below
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import fully_shard
from fairshard.utils import buckets
from fairshard.utils.storage import alloc_storage_
from tests.kit import rank_device, run_ranks
from tests.models import mlp, wrap_each
from tests.on_ranks import on_ranks
from tests.reference import randn, train_alike


class Params(nn.Module):
    """A loss that reads every element of parameters of the given shapes."""

    def __init__(self, shapes):
        super().__init__()
        torch.manual_seed(1)
        self.params = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self, scale):
        return sum((param * scale * (i + 1)).square().sum() for i, param in enumerate(self.params))


def loss_of(model, key):
    return model(randn(1, key=key))


def train_shapes(shapes, flatten):
    rtol = 0.0 if rank_device().type == "cpu" else 1e-6  # kernels may round 0-d tensors differently
    model = Params(shapes).to(rank_device())
    train_alike(model, lambda model: FSDP(model, flatten_parameters=flatten), loss_of, rtol=rtol)


@pytest.mark.pairs
@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize(
    "shapes",
    [[(1,)], [(3,)], [()], [(), (2, 1)], [(0,), (3, 2)], [(2, 0, 3)], [(5,), (0,), (), (1, 1)]],
    ids=str,
)
def test_odd_shapes_train(flatten, shapes):
    """Parameters with no elements, one, or fewer than ranks, and 0-d ones train as on the plain model."""
    train_shapes(shapes, flatten)


@given(st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=5), st.booleans())
@settings(max_examples=15)
def test_any_shapes_train_on_three_ranks(shapes, flatten):
    """For any shapes, three ranks train the same weights as one rank."""
    run_ranks(3, train_shapes, shapes, flatten)


@on_ranks(3)
@pytest.mark.parametrize("bucket", [0, 0.0001, 25])
def test_odd_sizes_share_buckets(bucket):
    """Units of uneven sizes, one of them with fewer elements than ranks, in one bucket or in many."""
    train_alike(
        mlp(4, 1, 7, 1), lambda m: wrap_each(m, bucket_cap_mb=bucket), lambda m, key: m(randn(2, 4, key=key)).sum()
    )


@on_ranks(4)
def test_empty_parameters_keep_their_shape_in_the_state_dict():
    """A parameter without elements is saved and loaded with its shape."""
    model = FSDP(Params([(0, 3), (2,), ()]))
    state = model.state_dict()
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "params.0": (0, 3),
        "params.1": (2,),
        "params.2": (),
    }
    model.load_state_dict(state)


@on_ranks(1, 2, 3)
def test_rows_of_empty_parameters_alone_are_summoned():
    """A unit of `fully_shard` of which no parameter has elements shows them whole, in their shapes."""
    model = fully_shard(Params([(0, 3), (2, 0)]))
    with FSDP.summon_full_params(model):
        assert [tuple(param.shape) for param in model.params] == [(0, 3), (2, 0)]


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("bucket_cap_mb", [0, 25])
def test_padding_has_no_gradient(flatten, bucket_cap_mb):
    """The padding of a shard has a gradient of zero, even if the bucket's memory held other values."""
    wrapped = wrap_each(mlp(4, 3, 1), flatten_parameters=flatten, bucket_cap_mb=bucket_cap_mb)

    def poisoned(data):
        alloc_storage_(data)
        data.fill_(float("nan"))

    with mock.patch.object(buckets, "alloc_storage_", poisoned):
        for _ in range(2):
            wrapped(randn(2, 4)).sum().backward()
    for _, unit in units_below(wrapped):
        for flat_param in unit.flat_params:
            padding = flat_param.shard.grad[flat_param.line.layout.filled(flat_param.line.rank) :]
            assert torch.equal(padding, torch.zeros_like(padding))
            assert flat_param.shard.grad.isfinite().all()
