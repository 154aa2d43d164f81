"""Whole gradients are copied to the rows of a bucket as they are laid out, on few and on many ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairshard.params.line import FlatLine

shapes = st.lists(st.lists(st.integers(0, 7), max_size=3).map(torch.Size), min_size=1, max_size=5)


@given(shapes, st.integers(1, 40), st.booleans())
def test_gradients_are_written_as_the_line_is_laid_out(shapes, world_size, is_alone):
    """Also beside other columns of a bucket; padding is all that is left, and each run has the shape of its source."""
    line = FlatLine.among(shapes, 0, world_size)
    values = [torch.randn(shape) for shape in shapes]
    beside = 0 if is_alone else 3
    bucket = torch.full((world_size, line.shard_numel + beside), float("nan"))
    columns = bucket[:, : line.shard_numel]
    *views, padding = line.bucket_views(columns)
    for run in padding:
        run.zero_()
    for index, (runs, value) in enumerate(zip(views, values, strict=True)):
        for run, source in zip(runs, line.cut_as(runs, index, value), strict=True):
            assert run.shape == source.shape
            run.copy_(source)
    flat = torch.cat([value.flatten() for value in values])
    padded = torch.cat([flat, torch.zeros(columns.numel() - flat.numel())])
    assert torch.equal(columns, padded.view(columns.shape))
    assert bucket[:, line.shard_numel :].isnan().all()


@pytest.mark.parametrize("world_size", [8, 1024])
def test_the_number_of_copies_does_not_grow_with_the_ranks(world_size):
    """A parameter on many ranks is at most three copies."""
    line = FlatLine.among([torch.Size([100, 100]), torch.Size([100])], 0, world_size)
    bucket = torch.empty(world_size, line.shard_numel + 1)
    assert max(map(len, line.bucket_views(bucket[:, :-1]))) <= 3
