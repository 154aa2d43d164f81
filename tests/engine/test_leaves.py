"""Behaviour of torch that the engine relies on: if one of these fails, torch has changed."""

import pytest
import torch
import torch.nn.functional as F

from fairshard.engine.tree import units_below
from fairshard.utils.storage import alloc_storage_, free_storage_
from tests.models import mlp, wrap_each
from tests.on_ranks import on_ranks
from tests.reference import randn

pytestmark = pytest.mark.behaviour("leaves")


def test_a_data_view_survives_refilling_its_buffer():
    """Views taken through ``.data`` have their own version counter: the backward uses the refilled memory."""
    buffer = torch.zeros(12)
    leaf = torch.nn.Parameter(buffer.data[:12].view(3, 4))
    values = torch.arange(12.0)
    buffer.copy_(values)
    x = torch.ones(2, 4, requires_grad=True)
    loss = F.linear(x, leaf).sum()
    free_storage_(buffer)
    alloc_storage_(buffer)
    buffer.copy_(values)
    loss.backward()
    assert torch.equal(x.grad, values.view(3, 4).sum(0).expand(2, 4))


def test_a_detached_view_does_not():
    """The same with ``.detach()`` raises: this is why the leaves are ``.data`` views."""
    buffer = torch.zeros(12)
    leaf = buffer.detach()[:12].view(3, 4).requires_grad_()
    x = torch.ones(2, 4, requires_grad=True)
    loss = F.linear(x, leaf).sum()
    buffer.copy_(torch.arange(12.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autograd_steals_the_first_gradient():
    """The first gradient of a leaf is not copied: the memory that the backward allocated becomes ``.grad``."""
    weight = torch.nn.Parameter(torch.ones(3, 4))
    seen = []
    loss = F.linear(torch.ones(2, 4), weight).sum()
    weight.register_hook(lambda grad: seen.append(grad.data_ptr()) and None)
    loss.backward()
    assert seen == [weight.grad.data_ptr()]


@on_ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_memory_is_freed(reshard):
    """Between forward and backward only buffers of the root and of unsharded units have memory; afterwards none do."""
    wrapped = wrap_each(mlp(4, 9, 7, 5), reshard_after_forward=reshard)
    buffers = [fp for _, unit in units_below(wrapped) for fp in unit.flat_params]

    def sizes():
        return [fp.gathered.buffer.untyped_storage().size() for fp in buffers]

    for _ in range(2):
        loss = wrapped(randn(3, 4)).sum()
        assert [size > 0 for size in sizes()] == [not reshard] * 3
        loss.backward()
        assert sizes() == [0, 0, 0]
    with torch.no_grad():
        wrapped(randn(3, 4))
    assert sizes() == [0, 0, 0]


@on_ranks(2)
def test_full_gradients_do_not_outlive_the_backward():
    """After a backward no leaf holds a full gradient: only the shard's is left."""
    wrapped = wrap_each(mlp(4, 9, 7, 5))
    wrapped(randn(3, 4)).sum().backward()
    leaves = [slot.leaf for _, unit in units_below(wrapped) for fp in unit.flat_params for slot in fp.slots]
    assert all(leaf.grad is None for leaf in leaves)
    assert all(leaf.numel() == 0 for leaf in leaves)


@on_ranks(2)
def test_modules_see_the_same_parameter_object_in_every_pass():
    """Leaves keep their identity forever, so references that modules save stay valid."""
    wrapped = wrap_each(mlp(4, 9, 5))
    seen = set()
    kept = []

    def note(module, *_):
        kept.append(module.weight)
        seen.add(id(module.weight))

    wrapped[0].module.register_forward_pre_hook(note)
    for _ in range(3):
        wrapped(randn(3, 4)).sum().backward()
    assert len(seen) == 1
