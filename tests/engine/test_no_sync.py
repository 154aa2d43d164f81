"""``no_sync`` keeps gradients local and unsharded until a pass outside it reduces the sum."""

import copy
import itertools

import pytest
import torch
from torch import nn

from fairshard.errors import FairshardError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn.data_parallel import TrainingState
from tests.kit import rank_device
from tests.models import loss_of_tiny, mlp, tiny, wrap_each, wrap_tiny
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_step, average_grads_, randn, squares, train_both

pytestmark = pytest.mark.behaviour("no_sync")


class Accumulated:
    """Gives `train_both` a loss whose backward is the last of several; the wrapped model's others are not reduced."""

    def __init__(self, loss_of, num_inside):
        self.loss_of, self.num_inside = loss_of, num_inside

    def __call__(self, model, key):
        for number in range(self.num_inside):
            if isinstance(model, FSDP):
                with model.no_sync():
                    self.loss_of(model, (*key, number)).backward()
            else:
                self.loss_of(model, (*key, number)).backward()
        return self.loss_of(model, key)


@pytest.mark.pairs
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("num_inside", [1, 3])
def test_the_sum_of_all_passes_is_reduced(flatten, reshard, num_inside):
    """After passes inside ``no_sync`` and one outside, a step uses the sum of their gradients, to the bit."""
    wrapped = wrap_tiny(tiny(), flatten_parameters=flatten, reshard_after_forward=reshard)
    train_both(tiny(), wrapped, Accumulated(loss_of_tiny, num_inside), num_steps=2)


@on_ranks(1, 2)
def test_accumulating_around_reduced_passes():
    """In passes reduced, accumulated and reduced, shard gradients of earlier passes are kept and added to."""
    plain, wrapped = mlp(4, 9, 5), wrap_each(mlp(4, 9, 5))
    squares(plain, 0).backward()
    average_grads_(plain.parameters())
    first = [param.grad for param in plain.parameters()]
    plain.zero_grad()
    for key in (1, 2):
        squares(plain, key).backward()
    average_grads_(plain.parameters())
    for param, grad in zip(plain.parameters(), first, strict=True):
        param.grad = grad + param.grad
    squares(wrapped, 0).backward()
    with wrapped.no_sync():
        squares(wrapped, 1).backward()
    squares(wrapped, 2).backward()
    assert_same_step(plain, wrapped, averages=False)


@on_ranks(2)
def test_flags_are_set_for_all_units_and_restored():
    """``require_backward_grad_sync`` is False everywhere inside, also after an inner ``no_sync``; then as before."""
    wrapped = wrap_each(mlp(4, 9, 5))
    units = [wrapped, wrapped[0], wrapped[2]]
    with wrapped.no_sync():
        with wrapped.no_sync():
            assert not any(unit.require_backward_grad_sync for unit in units)
        assert not any(unit.require_backward_grad_sync for unit in units)
    assert all(unit.require_backward_grad_sync for unit in units)


@on_ranks(2)
@pytest.mark.parametrize("when", ["before", "after"])
def test_flags_are_restored_after_an_exception(when):
    """An exception inside leaves the model syncing, and does not drop what an earlier pass accumulated."""
    plain, wrapped = mlp(4, 9, 5), wrap_each(mlp(4, 9, 5))

    def fail():
        with wrapped.no_sync():
            if when == "after":
                squares(wrapped, 0).backward()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert wrapped.require_backward_grad_sync
    assert wrapped[0].require_backward_grad_sync
    squares(wrapped, 1).backward()
    for key in (0, 1) if when == "after" else (1,):
        squares(plain, key).backward()
    assert_same_step(plain, wrapped)


@on_ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_what_was_accumulated(set_to_none):
    """``zero_grad`` after ``no_sync`` passes also discards their gradients."""
    plain, wrapped = mlp(4, 9, 5), wrap_each(mlp(4, 9, 5))
    with wrapped.no_sync():
        squares(wrapped, 0).backward()
    wrapped.zero_grad(set_to_none=set_to_none)
    for model in (wrapped, plain):
        squares(model, 1).backward()
    assert_same_step(plain, wrapped)


@on_ranks(2, in_full(3))
@pytest.mark.parametrize("kwargs", [{}, {"use_orig_params": True}, {"cpu_offload": True}], ids=str)
def test_gradients_changed_in_between(kwargs):
    """While ``no_sync`` gradients wait, zeroing ``.grad`` also zeroes them; any other change raises on all ranks.

    Scaling raises at once, in torch, because the elements of a placeholder share memory; the next backward raises for
    another gradient in its place.

    This holds even if ``.grad`` is zero or the rank owns only padding, before a reduced pass and after one.
    """

    def each(change):
        return lambda params: [change(param) for param in params]

    def assign(param, value):
        param.grad = value

    zeroings = [
        each(lambda param: param.grad.zero_()),
        each(lambda param: assign(param, torch.zeros_like(param))),
        lambda params: torch._foreach_zero_([param.grad for param in params]),
    ]
    changes = [
        each(lambda param: param.grad.mul_(0.5)),
        each(lambda param: assign(param, torch.ones_like(param))),
        lambda params: torch._foreach_mul_([param.grad for param in params], 0.5),
    ]
    for is_reduced, (number, change) in itertools.product((False, True), enumerate([*zeroings, *changes])):
        plain = nn.Sequential(mlp(4, 1), nn.LayerNorm(1), mlp(1, 5)).to(rank_device())
        wrapped = copy.deepcopy(plain)
        wrapped[1] = FSDP(wrapped[1], flatten_parameters=False, **kwargs)  # a rank with padding only
        wrapped = FSDP(wrapped, **kwargs)
        if is_reduced:
            (squares(wrapped, 0) * 0).backward()
        with wrapped.no_sync():
            squares(wrapped, 1).backward()
        params = [param for param in wrapped.parameters() if param.grad is not None]
        if number >= len(zeroings):
            if change is changes[1]:
                change(params)
                with pytest.raises(FairshardError, match="while gradients of no_sync passes wait"):
                    squares(wrapped, 2).backward()
            elif rank_device().type != "sim":  # whose operators do not look for elements that share memory
                with pytest.raises(RuntimeError, match="single memory location"):
                    change(params)
            wrapped.zero_grad()
        else:
            change(params)
        squares(wrapped, 3).backward()
        squares(plain, 3).backward()
        assert_same_step(plain, wrapped)


@on_ranks(2)
def test_a_forward_inside_with_its_backward_outside():
    """Only the place of the backward counts: outside ``no_sync`` it reduces."""
    plain, wrapped = mlp(4, 9, 5), wrap_each(mlp(4, 9, 5))
    with wrapped.no_sync():
        loss = squares(wrapped, 0)
    loss.backward()
    squares(plain, 0).backward()
    assert_same_step(plain, wrapped)


class Two(nn.Module):
    """Calls one of two models."""

    def __init__(self, wrap=lambda model: model):
        super().__init__()
        self.a, self.b = wrap(mlp(4, 5, seed=1)), wrap(mlp(4, 5, seed=2))

    def forward(self, x, name):
        return getattr(self, name)(x)


@on_ranks(2)
def test_units_that_only_accumulating_passes_reach():
    """A unit that the reducing pass does not reach still sends what it accumulated."""
    plain, wrapped = Two(), FSDP(Two(FSDP))
    with wrapped.no_sync():
        wrapped(randn(3, 4, key=0), "a").sum().backward()
    wrapped(randn(3, 4, key=1), "b").sum().backward()
    for key, name in enumerate("ab"):
        plain(randn(3, 4, key=key), name).sum().backward()
    assert_same_step(plain, wrapped)


@on_ranks(2)
def test_it_is_for_an_idle_root_only():
    """On an inner unit and inside a pass it raises, with the types of both seeds, and says where to call it."""
    wrapped, seen = wrap_each(mlp(4, 9, 5)), []

    def refused(model, kinds, match):
        for kind in kinds:
            with pytest.raises(kind, match=match), model.no_sync():
                pass

    def enter(module, *_):
        refused(wrapped, (ValueError, AssertionError), "IDLE")
        seen.append(wrapped.training_state)

    refused(wrapped[0], (AssertionError, RuntimeError), "outermost")
    wrapped[0].module.register_forward_hook(enter)
    wrapped(randn(3, 4))
    assert seen == [TrainingState.FORWARD]
