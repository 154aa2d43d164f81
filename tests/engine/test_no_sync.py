"""``no_sync`` keeps gradients local and unsharded until a pass outside it reduces the sum."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist

from fairshard.errors import FairshardError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn.data_parallel import TrainingState
from fairshard.utils.collectives import counters, reset_counters
from tests.kit import rank_device
from tests.models import mlp, tiny, tiny_batch, tiny_loss, wrap_each, wrap_tiny
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state, average_grads_, randn, sgd


def loss_of(model, key):
    return model(randn(3, 4, key=key)).square().sum()


def step_both(plain, wrapped):
    """Average the plain model's gradients, step both by SGD, and compare."""
    average_grads_(plain.parameters())
    for one in (plain, wrapped):
        optimizer = sgd(one)
        optimizer.step()
        optimizer.zero_grad()
    assert_same_state(wrapped.state_dict(), plain.state_dict())


@pytest.mark.pairs
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("num_inside", [1, 3])
def test_the_sum_of_all_passes_is_reduced(flatten, reshard, num_inside):
    """After passes inside ``no_sync`` and one outside, a step uses the sum of their gradients, to the bit."""
    plain = tiny()
    wrapped = wrap_tiny(copy.deepcopy(plain), flatten_parameters=flatten, reshard_after_forward=reshard)
    for step in range(2):
        for micro in range(num_inside + 1):
            *inputs, targets = tiny_batch(dist.get_rank(), step, micro)
            tiny_loss(plain(*inputs), targets).backward()
        with wrapped.no_sync():
            for micro in range(num_inside):
                *inputs, targets = tiny_batch(dist.get_rank(), step, micro)
                tiny_loss(wrapped(*inputs), targets).backward()
        *inputs, targets = tiny_batch(dist.get_rank(), step, num_inside)
        tiny_loss(wrapped(*inputs), targets).backward()
        step_both(plain, wrapped)


@on_ranks(1, 2)
def test_accumulating_around_reduced_passes():
    """In passes reduced, accumulated and reduced, shard gradients of earlier passes are kept and added to."""
    plain = mlp(4, 9, 5)
    wrapped = wrap_each(copy.deepcopy(plain))
    loss_of(plain, 0).backward()
    average_grads_(plain.parameters())
    first = [param.grad for param in plain.parameters()]
    plain.zero_grad()
    for key in (1, 2):
        loss_of(plain, key).backward()
    average_grads_(plain.parameters())
    for param, grad in zip(plain.parameters(), first, strict=True):
        param.grad = grad + param.grad

    loss_of(wrapped, 0).backward()
    with wrapped.no_sync():
        loss_of(wrapped, 1).backward()
    loss_of(wrapped, 2).backward()
    sgd(plain).step()
    sgd(wrapped).step()
    assert_same_state(wrapped.state_dict(), plain.state_dict())


@on_ranks(2)
def test_nothing_travels_but_parameters():
    """Inside ``no_sync`` no gradient is sent."""
    wrapped = wrap_each(mlp(4, 9, 5))
    reset_counters()
    with wrapped.no_sync():
        loss_of(wrapped, 0).backward()
    assert "reduce_scatter" not in counters()
    loss_of(wrapped, 1).backward()
    assert counters()["reduce_scatter"][0] == 1


@on_ranks(2)
def test_flags_are_set_for_all_units_and_restored():
    """Inside, ``require_backward_grad_sync`` is False everywhere; afterwards it is what it was."""
    wrapped = wrap_each(mlp(4, 9, 5))
    units = [wrapped, wrapped[0], wrapped[2]]
    with wrapped.no_sync():
        assert not any(unit.require_backward_grad_sync for unit in units)
    assert all(unit.require_backward_grad_sync for unit in units)


@on_ranks(2)
def test_it_may_be_nested():
    """An inner ``no_sync`` ends without ending the outer one."""
    wrapped = wrap_each(mlp(4, 9, 5))
    with wrapped.no_sync():
        with wrapped.no_sync():
            assert not wrapped[0].require_backward_grad_sync
        assert not wrapped[0].require_backward_grad_sync
    assert wrapped[0].require_backward_grad_sync


@on_ranks(2)
@pytest.mark.parametrize("when", ["before", "after"])
def test_flags_are_restored_after_an_exception(when):
    """An exception inside leaves the model syncing, and does not drop what an earlier pass accumulated."""
    plain = mlp(4, 9, 5)
    wrapped = wrap_each(copy.deepcopy(plain))

    def fail():
        with wrapped.no_sync():
            if when == "after":
                loss_of(wrapped, 0).backward()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert wrapped.require_backward_grad_sync
    assert wrapped[0].require_backward_grad_sync
    loss_of(wrapped, 1).backward()
    if when == "after":
        loss_of(plain, 0).backward()
    loss_of(plain, 1).backward()
    step_both(plain, wrapped)


@on_ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_what_was_accumulated(set_to_none):
    """``zero_grad`` after ``no_sync`` passes also discards their gradients."""
    plain = mlp(4, 9, 5)
    wrapped = wrap_each(copy.deepcopy(plain))
    with wrapped.no_sync():
        loss_of(wrapped, 0).backward()
    wrapped.zero_grad(set_to_none=set_to_none)
    loss_of(wrapped, 1).backward()
    loss_of(plain, 1).backward()
    step_both(plain, wrapped)


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
        plain = torch.nn.Sequential(mlp(4, 1), torch.nn.LayerNorm(1), mlp(1, 5)).to(rank_device())
        wrapped = copy.deepcopy(plain)
        wrapped[1] = FSDP(wrapped[1], flatten_parameters=False, **kwargs)  # a rank with padding only
        wrapped = FSDP(wrapped, **kwargs)
        if is_reduced:
            (loss_of(wrapped, 0) * 0).backward()
        with wrapped.no_sync():
            loss_of(wrapped, 1).backward()
        params = [param for param in wrapped.parameters() if param.grad is not None]
        if number >= len(zeroings):
            if change is changes[1]:
                change(params)
                with pytest.raises(FairshardError, match="while gradients of no_sync passes wait"):
                    loss_of(wrapped, 2).backward()
            elif rank_device().type != "sim":  # whose operators do not look for elements that share memory
                with pytest.raises(RuntimeError, match="single memory location"):
                    change(params)
            wrapped.zero_grad()
        else:
            change(params)
        loss_of(wrapped, 3).backward()
        loss_of(plain, 3).backward()
        step_both(plain, wrapped)


@on_ranks(2)
def test_a_forward_inside_with_its_backward_outside():
    """Only the place of the backward counts: outside ``no_sync`` it reduces."""
    plain = mlp(4, 9, 5)
    wrapped = wrap_each(copy.deepcopy(plain))
    with wrapped.no_sync():
        loss = loss_of(wrapped, 0)
    loss.backward()
    loss_of(plain, 0).backward()
    step_both(plain, wrapped)


@on_ranks(2)
def test_units_that_only_accumulating_passes_reach():
    """A unit that the reducing pass does not reach still sends what it accumulated."""

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = mlp(4, 5, seed=1), mlp(4, 5, seed=2)

        def forward(self, x, name):
            return getattr(self, name)(x)

    plain, wrapped = Two(), Two()
    wrapped.a, wrapped.b = FSDP(wrapped.a), FSDP(wrapped.b)
    wrapped = FSDP(wrapped)
    with wrapped.no_sync():
        wrapped(randn(3, 4, key=0), "a").sum().backward()
    wrapped(randn(3, 4, key=1), "b").sum().backward()
    plain(randn(3, 4, key=0), "a").sum().backward()
    plain(randn(3, 4, key=1), "b").sum().backward()
    step_both(plain, wrapped)


@on_ranks(2)
def test_it_is_for_the_root_only():
    """On an inner unit it raises (both AssertionError and RuntimeError), and says where to call it."""
    wrapped = wrap_each(mlp(4, 9, 5))
    for kind in (AssertionError, RuntimeError):
        with pytest.raises(kind, match="outermost"), wrapped[0].no_sync():
            pass


@on_ranks(2)
def test_it_needs_an_idle_model():
    """Inside a backward it raises (both ValueError and AssertionError)."""
    wrapped = wrap_each(mlp(4, 9, 5))
    seen = []

    def enter(module, *_):
        for kind in (ValueError, AssertionError):
            with pytest.raises(kind, match="IDLE"), wrapped.no_sync():
                pass
        seen.append(wrapped.training_state)

    wrapped[0].module.register_forward_hook(enter)
    wrapped(randn(3, 4))
    assert seen == [TrainingState.FORWARD]
