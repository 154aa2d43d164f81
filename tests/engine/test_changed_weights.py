"""The next pass uses weights that changed between passes; weights that change inside a pass are noticed."""

import copy

import pytest
import torch
from torch import nn

from fairshard.errors import FairshardError
from tests.kit import rank_device
from tests.models import mlp, wrap_each
from tests.on_ranks import on_ranks
from tests.reference import await_device, randn

pytestmark = pytest.mark.behaviour("changed weights")


def output_of(model, grad=False):
    with torch.set_grad_enabled(grad):
        return model(randn(3, 4)).detach().clone()


def with_state_of(wrapped, plain):
    plain.load_state_dict(wrapped.state_dict())
    return plain


CHANGES = {
    "init on data": lambda wrapped: nn.init.normal_(next(wrapped.parameters()).data),
    "in place": lambda wrapped: [param.data.mul_(2) for param in wrapped.parameters()],
    "in place without grad": torch.no_grad()(lambda wrapped: [param.add_(1) for param in wrapped.parameters()]),
    "assigned data": lambda wrapped: setattr(
        next(wrapped.parameters()), "data", torch.ones_like(next(wrapped.parameters()))
    ),
    "copied": torch.no_grad()(lambda wrapped: next(wrapped.parameters()).copy_(torch.tensor(0.5))),
    "foreach": torch.no_grad()(lambda wrapped: torch._foreach_add_(list(wrapped.parameters()), 0.25)),
    "loaded": lambda wrapped: wrapped.load_state_dict(mlp(4, 9, 5, seed=9).state_dict()),
    "loaded locally": lambda wrapped: wrapped.load_local_state_dict(wrap_each(mlp(4, 9, 5, seed=9)).local_state_dict()),
}


@pytest.mark.pairs
@on_ranks(1, 2)
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("before", ["nothing", "eval", "forward", "backward"])
@pytest.mark.parametrize("reshard", [True, False])
def test_the_next_forward_uses_changed_weights(name, before, reshard):
    """However weights are changed, and whatever was gathered before, the next forward computes with the new ones."""
    wrapped = wrap_each(mlp(4, 9, 5), reshard_after_forward=reshard)
    old = output_of(mlp(4, 9, 5))
    if before == "eval":
        output_of(wrapped)
    elif before == "forward":
        output_of(wrapped, grad=True)
    elif before == "backward":
        wrapped(randn(3, 4)).sum().backward()
    CHANGES[name](wrapped)
    new = output_of(wrapped)
    assert not torch.equal(new, old)
    assert torch.equal(new, output_of(with_state_of(wrapped, mlp(4, 9, 5))))


@on_ranks(1, 2)
@pytest.mark.parametrize("reshard", [True, False])
def test_a_step_under_no_sync_is_seen(reshard):
    """The next forward uses weights that were stepped while gradients accumulate, even if units stay gathered."""
    plain = mlp(4, 9, 5)
    wrapped = wrap_each(copy.deepcopy(plain), reshard_after_forward=reshard)
    with wrapped.no_sync():
        wrapped(randn(3, 4)).sum().backward()
        with torch.no_grad():
            for param in wrapped.parameters():
                param.mul_(0.5)
        new = output_of(wrapped, grad=True)
    assert torch.equal(new, output_of(with_state_of(wrapped, plain)))


@on_ranks(1, 2)
@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("reshard", [True, False])
def test_weights_changed_between_forward_and_backward_raise(index, reshard):
    """A shard written after a forward would give the backward other weights: it raises and names the unit."""
    wrapped = wrap_each(mlp(4, 9, 5), reshard_after_forward=reshard)
    loss = wrapped(randn(3, 4)).sum()
    with torch.no_grad():
        wrapped[index].params[0].add_(1)
    await_device()  # the backward's gather, whose result is refused, does not wait for the write
    with pytest.raises(FairshardError, match=rf"between its forward and its backward.*`{index}\."):
        loss.backward()
    wrapped.zero_grad()
    wrapped(randn(3, 4)).sum().backward()
    assert wrapped[index].params[0].grad is not None


@on_ranks(1, 2)
@pytest.mark.parametrize("convert", ["double", "half", "bfloat16", "to"])
def test_converting_before_the_first_forward(convert):
    """On a wrapped model before its first forward, ``.double()`` and the like work as on the plain one."""
    plain = mlp(4, 9, 5)
    wrapped = wrap_each(copy.deepcopy(plain))
    for model in (plain, wrapped):
        model.to(torch.float64) if convert == "to" else getattr(model, convert)()
    dtype = next(plain.parameters()).dtype
    assert {param.dtype for param in wrapped.parameters()} == {dtype}
    x = randn(3, 4).to(dtype)
    assert torch.equal(wrapped(x), plain(x))
    wrapped(x).sum().backward()
    assert {param.grad.dtype for param in wrapped.parameters()} == {dtype}
    assert {value.dtype for value in wrapped.state_dict().values()} == {dtype}


@on_ranks(2)
def test_converting_after_the_first_forward_is_refused():
    """After a forward, a change of dtype raises and names the argument to use; calls that change nothing pass."""
    wrapped = wrap_each(mlp(4, 9, 5))
    wrapped(randn(3, 4)).sum().backward()
    with pytest.raises((TypeError, ValueError, FairshardError), match="mixed_precision"):
        wrapped.half()
    assert wrapped.float() is wrapped
    assert wrapped.to(rank_device()) is wrapped
    wrapped(randn(3, 4)).sum().backward()
