"""Backwards that the engine cannot see coming, or that never end."""

import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.utils.collectives import RowGather
from tests.on_ranks import on_ranks
from tests.reference import await_autograd

pytestmark = pytest.mark.behaviour("unseen backwards")


class Box:
    """An object that container functions do not look into."""

    __slots__ = ("tensor",)

    def __init__(self, tensor):
        self.tensor = tensor


class Boxing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return Box(self.linear(x))


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyError("on purpose")


def twin_grads(make, *losses):
    """Gradients of a plain model after a backward of each loss."""
    torch.manual_seed(0)
    plain = make()
    for loss in losses:
        loss(plain).backward()
    return torch.cat([param.grad.reshape(-1) for param in plain.parameters()])


def full_grads(model):
    """The gathered gradients of the root's shards, without padding."""
    (flat_param,) = model._fairshard_unit.flat_params
    line = flat_param.shard.grad.new_empty(flat_param.line.layout.world_size, flat_param.shard_numel)
    line[flat_param.line.rank] = flat_param.shard.grad
    RowGather(flat_param.comm, line).start(0).wait()
    return line.view(-1)[: flat_param.line.layout.numel]


@on_ranks(1, 2, 3)
def test_outputs_in_an_unknown_object_keep_the_unit_gathered():
    """A loss from an object that cannot be hooked gets its gradient, twice, instead of reading freed memory."""
    torch.manual_seed(0)
    model = FSDP(Boxing())
    x = torch.ones(2, 4)
    with pytest.warns(UserWarning, match="Return tensors"):
        first = model(x).tensor.pow(2).sum()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # warned only once
        second = model(2 * x).tensor.sum()
    first.backward()
    second.backward()
    expected = twin_grads(Boxing, lambda m: m(x).tensor.pow(2).sum(), lambda m: m(2 * x).tensor.sum())
    torch.testing.assert_close(full_grads(model), expected)


@on_ranks(2)
def test_a_backward_after_one_that_raised_is_whole():
    """A retained graph gets full gradients after another backward raised, without a forward in between."""
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(nn.Linear(4, 4)))
    x = torch.ones(2, 4)
    good = model(x).pow(2).sum()
    hook = model.module[0].register_forward_hook(lambda module, inputs, output: Fails.apply(output))
    bad = model(x).sum()
    hook.remove()
    with pytest.raises(KeyError, match="on purpose"):
        bad.backward()  # raises after the unit's outputs are reached, before its leaves are
    good.backward()
    expected = twin_grads(lambda: nn.Sequential(nn.Linear(4, 4)), lambda m: m(x).pow(2).sum())
    torch.testing.assert_close(full_grads(model), expected)


@on_ranks(2)
@pytest.mark.parametrize("mixed_precision", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_a_dropped_model_is_freed(mixed_precision, backward):
    """An unreferenced model and its leaves are collected, after a forward and after a backward."""
    inner = FSDP(nn.Linear(4, 4), mixed_precision=mixed_precision)
    model = FSDP(nn.Sequential(inner, nn.Linear(4, 4)), mixed_precision=mixed_precision)
    loss = model(torch.ones(2, 4, requires_grad=True)).sum()
    if backward:
        loss.backward()
    leaf = weakref.ref(model._fairshard_unit.flat_params[0].slots[0].leaf)
    shard = weakref.ref(next(model.parameters()))
    wrapper = weakref.ref(model)
    del model, inner, loss
    await_autograd()
    gc.collect()
    assert (wrapper(), leaf(), shard()) == (None, None, None)


class Storing(nn.Module):
    """Stores a loss besides its output, as mixtures of experts do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.loss = None

    def forward(self, x):
        self.loss = self.linear(x).square().mean()  # not part of the returned output
        return self.linear(2 * x)


@on_ranks(2)
def test_a_stored_loss_added_to_a_returned_one_works():
    """The backward also reaches the returned output: the gradients are those of the plain model."""
    torch.manual_seed(0)
    plain = Storing()
    inner = Storing()
    inner.load_state_dict(plain.state_dict())
    model = FSDP(nn.Sequential(FSDP(inner), nn.Linear(4, 1)))
    head = nn.Linear(4, 1)
    head.load_state_dict(_whole_head(model))
    x = torch.ones(2, 4)
    (head(plain(x)).sum() + plain.loss).backward()
    (model(x).sum() + inner.loss).backward()
    expected = torch.cat([param.grad.reshape(-1) for param in plain.parameters()])
    assert torch.equal(full_grads(model.module[0]), expected)


def _whole_head(model):
    return {name.removeprefix("1."): value for name, value in model.state_dict().items() if name.startswith("1.")}


@on_ranks(2)
@pytest.mark.parametrize(
    ("first", "message"),
    [(nn.Identity, "reached the parameters of unit `1` while they were sharded"), (nn.Tanh, "storage of size 0")],
)
def test_a_stored_loss_differentiated_on_its_own_is_an_error(first, message):
    """A backward that reaches sharded parameters without passing a returned output is an error, never a number.

    The error is ours if only gradients of weights are needed, torch's if the weights themselves would be read.
    """
    inner = Storing()
    model = FSDP(nn.Sequential(first(), FSDP(inner), nn.Linear(4, 1)))
    x = torch.ones(2, 4, requires_grad=first is nn.Tanh)
    model(x)
    with pytest.raises(RuntimeError, match=message):
        inner.loss.backward()
    model(x).sum().backward()
