"""With ``keep_low_precision_grads``, gradients of shards keep the dtype they were reduced in, for all their users."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import MixedPrecision
from fairshard.optim import CPUOptimizer, ShardedGradScaler
from tests.kit import rank_device
from tests.models import mlp, wrap_each
from tests.on_ranks import on_ranks
from tests.reference import mean_over_ranks, randn

pytestmark = pytest.mark.behaviour("gradients of low precision")

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
# Parameters and gradients in one dtype, or gradients in another dtype.
policies = pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype"), [(BF16, None), (None, BF16), (FP16, None), (BF16, FP32)], ids=str
)

IN_FP32 = "collectives of devices add bf16 and fp16 as they are; ours on gloo in fp32"
ON_THREE = pytest.param(3, marks=pytest.mark.cpu_only(IN_FP32))  # a sum of two is rounded once anyway


def wrap(model, param_dtype=BF16, reduce_dtype=None, **kwargs):
    policy = MixedPrecision(param_dtype, reduce_dtype, keep_low_precision_grads=True)
    return wrap_each(model, mixed_precision=policy, **kwargs)


def one_backward(model, key=0):
    model(randn(3, 4, key=key)).float().square().sum().backward()


def whole_grads(model):
    """Every full gradient, on every rank."""
    with FSDP.summon_full_params(model, with_grads=True):
        return [param.grad.clone() for param in model.parameters()]


@pytest.mark.pairs
@on_ranks(1, 2, ON_THREE)
@policies
@pytest.mark.parametrize("flatten", [True, False])
def test_gradients_keep_the_dtype_they_were_reduced_in(param_dtype, reduce_dtype, flatten):
    """Gradients are the mean over ranks, rounded to that dtype once, and add up in it over backwards."""
    dtype = reduce_dtype or param_dtype
    expected = None
    plain = mlp(4, 9, 5).to(param_dtype)
    wrapped = wrap(mlp(4, 9, 5), param_dtype, reduce_dtype, flatten_parameters=flatten)
    for key in range(2):
        plain.zero_grad()
        plain(randn(3, 4, key=key).to(param_dtype or FP32)).float().square().sum().backward()
        means = [mean_over_ranks(param.grad.to(dtype)).to(dtype) for param in plain.parameters()]
        expected = means if expected is None else [old + new for old, new in zip(expected, means, strict=True)]
        one_backward(wrapped, key)
    assert {param.dtype for param in wrapped.parameters()} == {FP32}
    assert {param.grad.dtype for param in wrapped.parameters()} == {dtype}
    for actual, wanted in zip(whole_grads(wrapped), expected, strict=True):
        assert torch.equal(actual, wanted)
    assert {param.grad.dtype for param in wrapped.parameters()} == {dtype}


@on_ranks(1, 2)
def test_no_sync_and_zero_grad():
    """Accumulation without communication and zeroing work in this dtype as with other gradients."""
    wrapped = wrap(mlp(4, 9, 5))
    with wrapped.no_sync():
        one_backward(wrapped)
    one_backward(wrapped)
    once = whole_grads(wrapped)
    for set_to_none in (False, True):
        wrapped.zero_grad(set_to_none=set_to_none)
        assert not any(param.grad is not None and param.grad.any() for param in wrapped.parameters())
        for _ in range(2):
            with wrapped.no_sync():
                one_backward(wrapped, key="dropped")
            wrapped.zero_grad(set_to_none=set_to_none)
        with wrapped.no_sync():
            one_backward(wrapped)
        one_backward(wrapped)
        assert all(map(torch.equal, whole_grads(wrapped), once))
        assert {param.grad.dtype for param in wrapped.parameters()} == {BF16}


@on_ranks(1, 2)
def test_clipping():
    """The norm is fp32; gradients are scaled in their dtype."""
    wrapped = wrap(mlp(4, 9, 5))
    one_backward(wrapped)
    grads = whole_grads(wrapped)
    expected = torch.cat([grad.float().flatten() for grad in grads]).norm()
    norm = wrapped.clip_grad_norm_(0.5)
    assert norm.dtype == FP32
    torch.testing.assert_close(norm, expected)
    factor = 0.5 / (norm + 1e-6)
    for actual, grad in zip(whole_grads(wrapped), grads, strict=True):
        assert torch.equal(actual, grad * factor)
    wrapped.zero_grad()
    assert wrapped.clip_grad_norm_(math.inf) == 0


@on_ranks(1, 2)
def test_an_optimizer_that_can_use_them():
    """A step applies low-precision gradients to fp32 shards, and full weights change accordingly."""
    wrapped = wrap(mlp(4, 9, 5))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5, foreach=False)
    before = wrapped.state_dict()
    one_backward(wrapped)
    grads = whole_grads(wrapped)
    optimizer.step()
    for (name, after), grad in zip(wrapped.state_dict().items(), grads, strict=True):
        torch.testing.assert_close(after, before[name] - 0.5 * grad.float())
    optimizer.zero_grad()
    assert wrapped.params_with_grad == []


@on_ranks(1, 2)
@pytest.mark.parametrize("overflows", [False, True])
def test_loss_scaling(overflows):
    """A scaler unscales fp16 gradients in place, and skips the step on all ranks when one rank's overflowed."""
    wrapped = wrap(mlp(4, 9, 5), FP16)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5, foreach=False)
    scaler = ShardedGradScaler(rank_device().type, init_scale=4.0)
    one_backward(wrapped)
    grads = whole_grads(wrapped)
    wrapped.zero_grad()
    before = wrapped.state_dict()
    loss = wrapped(randn(3, 4, key=0)).float().square().sum()
    scaler.scale(loss * (1e30 if overflows and dist.get_rank() == 0 else 1)).backward()
    scaler.unscale_(optimizer)
    if not overflows:
        for actual, wanted in zip(whole_grads(wrapped), grads, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=2e-3, atol=1e-6)
    scaler.step(optimizer)
    scaler.update()
    after = wrapped.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before) is overflows
    assert scaler.get_scale() == (2.0 if overflows else 4.0)


@on_ranks(2)
def test_one_unit_among_others():
    """The setting is per unit; norms and optimizers see gradients of several dtypes."""
    model = mlp(4, 9, 5)
    model[0] = FSDP(model[0], mixed_precision=MixedPrecision(reduce_dtype=BF16, keep_low_precision_grads=True))
    wrapped = FSDP(model)
    one_backward(wrapped)
    dtypes = [param.grad.dtype for param in wrapped.parameters()]
    assert sorted(map(str, dtypes)) == ["torch.bfloat16", "torch.float32"]
    grads = whole_grads(wrapped)
    norm = wrapped.clip_grad_norm_(1e9)
    torch.testing.assert_close(norm, torch.cat([grad.float().flatten() for grad in grads]).norm())


@on_ranks(1)
def test_cpu_optimizer_refuses_them():
    """`CPUOptimizer`, whose kernels need a single dtype, raises and names the unit when it is built."""
    model = nn.Sequential(wrap(mlp(4, 5)), nn.Linear(5, 2))
    with pytest.raises(ValueError, match=r"`0`.*keep_low_precision_grads"):
        CPUOptimizer(FSDP(model), torch.optim.AdamW)
