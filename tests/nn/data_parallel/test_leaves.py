"""What the engine relies on in torch: if one of these fails, torch has changed under us."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn.data_parallel import autograd_hooks
from fairshard.nn.data_parallel.tree import units_below
from fairshard.utils.storage import alloc_storage_, free_storage_
from tests.models import mlp, tiny, tiny_batch, tiny_loss, wrap_each, wrap_tiny
from tests.nn.data_parallel.test_unused import Chosen, alternate, loss_of, wrap_all
from tests.on_ranks import on_ranks
from tests.reference import randn, sgd, train_alike


def test_a_data_view_survives_refilling_its_buffer():
    """Views taken through ``.data`` have a version counter of their own: the backward uses the refilled memory."""
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
    """The first gradient of a leaf is not copied: the memory that the backward made is the leaf's ``.grad``."""
    weight = torch.nn.Parameter(torch.ones(3, 4))
    seen = []
    loss = F.linear(torch.ones(2, 4), weight).sum()
    weight.register_hook(lambda grad: seen.append(grad.data_ptr()) and None)
    loss.backward()
    assert seen == [weight.grad.data_ptr()]


def test_the_accumulate_node_is_the_same_as_long_as_it_is_held():
    """`accumulate_node` gives one node for a leaf, so that hooks and reachability speak of the same."""
    leaf = torch.nn.Parameter(torch.ones(2))
    node = autograd_hooks.accumulate_node(leaf)
    assert autograd_hooks.accumulate_node(leaf) is node
    with torch.no_grad():
        assert autograd_hooks.accumulate_node(leaf) is node


def test_outside_of_a_backward_there_is_no_task():
    """The id of the running graph task is that of `NO_BACKWARD` outside, and differs between backwards."""
    assert autograd_hooks.current_task() == autograd_hooks.NO_BACKWARD
    tasks = []
    for _ in range(2):
        x = torch.ones(1, requires_grad=True)
        x.register_hook(lambda _: tasks.append(autograd_hooks.current_task()))
        (x * 2).backward()
    assert len(set(tasks)) == 2
    assert autograd_hooks.NO_BACKWARD not in tasks


@pytest.mark.parametrize("used", [(), (0,), (0, 2), (0, 1, 2)], ids=str)
def test_num_reached_is_exact(used):
    """Inside a backward, `num_reached` counts the leaves that it will come to, executed ones included."""
    leaves = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    nodes = [autograd_hooks.accumulate_node(leaf) for leaf in leaves]
    x = torch.ones(2, requires_grad=True)
    loss = x.sum()
    for index in used:
        loss = loss + (leaves[index] * x).sum()
    counts = []
    for tensor in (x, *(leaves[index] for index in used)):
        tensor.register_hook(lambda _: counts.append(autograd_hooks.num_reached(nodes)))
    loss.backward()
    assert set(counts) == {len(used)}


@on_ranks(1, 2)
def test_the_public_fallback_agrees():
    """Without the private query, every pass gives the same weights: units just finish later."""
    states = []
    for private in (True, False):
        wrapped = wrap_tiny(tiny())
        optimizer = sgd(wrapped)
        query = autograd_hooks._will_execute if private else None
        with mock.patch.object(autograd_hooks, "_will_execute", query):
            for step in range(3):
                *inputs, targets = tiny_batch(torch.distributed.get_rank(), step)
                tiny_loss(wrapped(*inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
        states.append(wrapped.state_dict())
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


@on_ranks(2)
def test_the_public_fallback_copes_with_unused_parameters():
    """A leaf that is never reached only makes its unit wait for the end of the backward."""
    with mock.patch.object(autograd_hooks, "_will_execute", None):
        train_alike(Chosen(alternate), wrap_all, loss_of, num_steps=4, momentum=0.0)
        train_alike(Chosen(alternate), FSDP, loss_of, num_steps=4, momentum=0.0)


@on_ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_memory_is_given_back(reshard):
    """Between forward and backward only the root's buffer, and those not resharded, have memory; then none has."""
    wrapped = wrap_each(mlp(4, 9, 7, 5), reshard_after_forward=reshard)
    buffers = [fp for _, unit in units_below(wrapped) for fp in unit.flat_params]

    def sizes():
        return [fp.buffer.untyped_storage().size() for fp in buffers]

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
    """After a backward no leaf holds a whole gradient: what is left is the shard's."""
    wrapped = wrap_each(mlp(4, 9, 7, 5))
    wrapped(randn(3, 4)).sum().backward()
    leaves = [slot.leaf for _, unit in units_below(wrapped) for fp in unit.flat_params for slot in fp.slots]
    assert all(leaf.grad is None for leaf in leaves)
    assert all(leaf.numel() == 0 for leaf in leaves)


@on_ranks(2)
def test_modules_see_the_same_parameter_object_in_every_pass():
    """Leaves keep their identity for ever, so references that modules save stay valid."""
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
