"""Cutting a tensor among ranks, and refusing unusable process groups."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fairshard.utils.parallel import chunk_and_pad, validate_process_group
from tests.kit import fake_group, rank_device
from tests.on_ranks import on_ranks


@given(st.integers(0, 40), st.integers(1, 9))
def test_chunks_are_equal_and_hold_the_tensor(numel, num_chunks):
    """Every chunk has as many elements; put together they are the tensor, then zeros."""
    tensor = torch.arange(1.0, numel + 1)
    chunks = chunk_and_pad(tensor, num_chunks)
    assert len(chunks) == num_chunks
    assert len({chunk.numel() for chunk in chunks}) == 1
    line = torch.cat(chunks)
    assert torch.equal(line[:numel], tensor)
    assert not line[numel:].any()


@given(st.integers(1, 40), st.integers(1, 9))
def test_chunks_lie_where_torch_chunk_puts_them(numel, num_chunks):
    """Chunk ``i`` begins with the ``i``-th piece of ``torch.chunk``."""
    tensor = torch.arange(1.0, numel + 1)
    for own, torchs in zip(chunk_and_pad(tensor, num_chunks), tensor.chunk(num_chunks), strict=False):
        assert torch.equal(own[: torchs.numel()], torchs)


def test_shape_dtype_and_memory():
    """Any shape is flattened, the dtype is kept, and full chunks are views of the tensor."""
    tensor = torch.arange(10, dtype=torch.bfloat16).view(2, 5)
    chunks = chunk_and_pad(tensor, 4)  # 3 + 3 + 3 + 1, and 2 elements of padding
    assert [chunk.tolist() for chunk in chunks] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 0, 0]]
    assert {chunk.dtype for chunk in chunks} == {torch.bfloat16}
    assert chunks[1].data_ptr() == tensor.view(-1)[3:].data_ptr()


@on_ranks(1, 2)
def test_a_usable_group_passes():
    """The default group, and one made by hand, can move tensors of this device."""
    validate_process_group(rank_device(), dist.group.WORLD)
    validate_process_group(rank_device(), dist.new_group())


@pytest.mark.cpu_only("names a device that gloo has no part in")
@on_ranks(2)
def test_a_group_without_a_backend_for_the_device_is_refused():
    """A gloo group raises for a device that it was not set up for."""
    with pytest.raises(ValueError, match="backend"):
        validate_process_group(torch.device("meta"), dist.group.WORLD)


@on_ranks(2)
def test_a_group_that_this_rank_is_no_member_of_is_refused():
    """The object that ``new_group`` returns to non-members raises a ValueError that names the rank."""
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="must hold this rank, but rank 1 is not in it"):
            validate_process_group(rank_device(), group)


def test_other_objects_are_no_group():
    """Anything but a process group raises a TypeError that says what it is."""
    with pytest.raises(TypeError, match="'MISSING'"):
        validate_process_group(torch.device("cpu"), "MISSING")
    with fake_group(2):
        validate_process_group(torch.device("cpu"), dist.group.WORLD)
