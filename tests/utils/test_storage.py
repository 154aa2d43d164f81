"""Freeing the memory of a tensor, and allocating it again in place."""

import pytest
import torch

from fairshard.utils.dtensors import own_storage
from fairshard.utils.storage import alloc_storage_, free_storage_


def test_free_gives_the_memory_back_and_keeps_the_shape():
    """After `free_storage_` the storage is empty; size, strides and dtype of the tensor are as before."""
    tensor = torch.ones(3, 5)
    free_storage_(tensor)
    assert tensor.untyped_storage().size() == 0
    assert (tensor.shape, tensor.stride(), tensor.dtype) == ((3, 5), (5, 1), torch.float32)


def test_views_come_back_with_the_memory():
    """A view made before a free shows what is written after the next allocation."""
    tensor = torch.zeros(6)
    view = tensor.data[2:4]
    free_storage_(tensor)
    alloc_storage_(tensor)
    tensor.copy_(torch.arange(6.0))
    assert view.tolist() == [2, 3]


@pytest.mark.parametrize("size", [None, torch.Size([3, 5]), 15])
def test_alloc_takes_exactly_what_is_asked(size):
    """The storage gets room for ``size``: a shape, a number, or by default the tensor's own."""
    tensor = torch.ones(3, 5, dtype=torch.float16)
    free_storage_(tensor)
    alloc_storage_(tensor, size)
    assert tensor.untyped_storage().size() == 15 * 2


def test_both_may_be_called_twice():
    """Freeing what is freed and allocating what is allocated do nothing; values survive the latter."""
    tensor = torch.ones(4)
    alloc_storage_(tensor)
    assert tensor.tolist() == [1] * 4
    free_storage_(tensor)
    free_storage_(tensor)
    assert tensor.untyped_storage().size() == 0


def test_shared_memory_is_not_freed():
    """A tensor that starts inside the storage of another must not free it."""
    whole = torch.ones(4)
    with pytest.raises(ValueError, match="starts at element 2"):
        free_storage_(whole[2:])
    assert whole.tolist() == [1] * 4


def test_another_size_must_be_freed_first():
    """Resizing memory that is in use would lose or hide values."""
    tensor = torch.ones(4)
    with pytest.raises(ValueError, match="freed"):
        alloc_storage_(tensor, 8)
    assert tensor.tolist() == [1] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_own_storage(dtype):
    """The result shows the view's memory, and its storage has no more than the view needs."""
    line = torch.arange(12, dtype=dtype)
    view = line[3:9].view(2, 3)
    own = own_storage(view)
    assert torch.equal(own, view)
    assert (own.storage_offset(), own.data_ptr(), own.stride()) == (0, view.data_ptr(), view.stride())
    assert own.untyped_storage().nbytes() == view.nbytes
    own.zero_()
    assert line[3:9].eq(0).all()
    del line, view
    assert own.eq(0).all()
    whole = torch.ones(3)
    assert own_storage(whole) is whole
    assert own_storage(torch.empty(4, 2)[4:]).shape == (0, 2)
    assert own_storage(torch.empty(4, device="meta")[2:]).is_meta
