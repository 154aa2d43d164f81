"""``clip_grad_norm_`` is torch's, over shards: same norm, same scaling, the same on every rank."""

import copy
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.kit import rank_device
from tests.models import mlp, tiny, tiny_batch, tiny_loss, wrap_each, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import average_grads_, randn


def loss_of(model, key):
    return model(randn(3, 4, key=key)).square().sum()


def pair_with_grads(wrap=wrap_each):
    """A plain model with averaged gradients, and a wrapped one with the same gradients as shards."""
    plain = mlp(4, 9, 7, 5)
    wrapped = wrap(copy.deepcopy(plain))
    for one in (plain, wrapped):
        loss_of(one, 0).backward()
    average_grads_(plain.parameters())
    return plain, wrapped


def full_grads(wrapped):
    """The whole gradients of all units: what an SGD step with ``lr=1`` subtracts from the weights."""
    before = wrapped.state_dict()
    torch.optim.SGD(wrapped.parameters(), lr=1.0).step()
    after = wrapped.state_dict()
    return {name: before[name].double() - after[name].double() for name in before}


@pytest.mark.pairs
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("norm_type", [1, 2, 2.0, 3.5, math.inf, "inf"])
@pytest.mark.parametrize("max_norm", [0.5, 1, 1e6])
def test_norm_and_gradients_are_torchs(norm_type, max_norm):
    """The norm and the clipped gradients equal torch's on the averaged gradients of the plain model."""
    plain, wrapped = pair_with_grads()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm, float(norm_type))
    norm = wrapped.clip_grad_norm_(max_norm, norm_type)
    assert isinstance(norm, torch.Tensor)
    assert norm.shape == ()
    assert norm.dtype == torch.float32
    assert norm.device.type == rank_device().type
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    for (name, grad), param in zip(full_grads(wrapped).items(), plain.parameters(), strict=True):
        # The difference of the weights is rounded once at the magnitude of the weights, below 4.
        torch.testing.assert_close(grad, param.grad.double(), rtol=1e-6, atol=1e-6, msg=name)


@on_ranks(2, 3)
def test_the_norm_is_the_same_on_all_ranks():
    """Every rank returns the same bits, whatever its shards hold."""
    _, wrapped = pair_with_grads()
    norm = wrapped.clip_grad_norm_(1.0)
    norms = [torch.empty_like(norm) for _ in range(dist.get_world_size())]
    dist.all_gather(norms, norm)
    assert all(torch.equal(norm, other) for other in norms)


@on_ranks(2)
def test_a_small_norm_changes_nothing():
    """Below ``max_norm`` no gradient changes, not even in its last bit."""
    _, wrapped = pair_with_grads()
    before = [param.grad.clone() for param in wrapped.params_with_grad]
    norm = wrapped.clip_grad_norm_(1e9)
    assert norm > 0
    for grad, param in zip(before, wrapped.params_with_grad, strict=True):
        assert torch.equal(grad, param.grad)


@on_ranks(2)
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_the_scale_is_max_norm_over_the_norm(norm_type):
    """Every gradient is multiplied by ``max_norm / (norm + 1e-6)``, to the bit."""
    _, wrapped = pair_with_grads()
    before = [param.grad.clone() for param in wrapped.params_with_grad]
    norm = wrapped.clip_grad_norm_(0.25, norm_type)
    for grad, param in zip(before, wrapped.params_with_grad, strict=True):
        assert torch.equal(param.grad, grad * (0.25 / (norm + 1e-6)))


@on_ranks(3)
def test_padding_does_not_count():
    """Padding does not count in the norm, even if it was written to."""
    plain = mlp(4, 1)  # 5 elements on 3 ranks: one of padding on the last
    wrapped = FSDP(copy.deepcopy(plain))
    for one in (plain, wrapped):
        loss_of(one, 0).backward()
    average_grads_(plain.parameters())
    if dist.get_rank() == 2:
        wrapped.params[0].grad[-1] = 1e6
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    torch.testing.assert_close(wrapped.clip_grad_norm_(1e9), expected, rtol=1e-6, atol=0)


@on_ranks(2)
def test_a_rank_without_gradients_takes_part():
    """A rank without gradients contributes 0 and gets the same norm."""
    _, wrapped = pair_with_grads()
    whole = wrapped.clip_grad_norm_(1e9)
    if dist.get_rank() == 1:
        wrapped.zero_grad()
    norm = wrapped.clip_grad_norm_(1e9)
    both = [torch.empty_like(norm) for _ in range(2)]
    dist.all_gather(both, norm)
    assert torch.equal(both[0], both[1])
    assert 0 < norm < whole
    wrapped.zero_grad()
    assert wrapped.clip_grad_norm_(1e9) == 0


@on_ranks(2)
def test_frozen_parameters_do_not_count():
    """Frozen parameters have no gradient and do not count in the norm."""
    plain = mlp(4, 9, 5)
    plain[0].requires_grad_(False)
    wrapped = wrap_each(copy.deepcopy(plain))
    for one in (plain, wrapped):
        loss_of(one, 0).backward()
    average_grads_(plain.parameters())
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    torch.testing.assert_close(wrapped.clip_grad_norm_(0.5), expected, rtol=1e-6, atol=0)


@on_ranks(2)
def test_tied_weights_count_once():
    """A tied weight counts once in the norm."""
    plain = tiny()
    wrapped = wrap_tiny(copy.deepcopy(plain))
    *inputs, targets = tiny_batch(0)
    for one in (plain, wrapped):
        tiny_loss(one(*inputs), targets).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    torch.testing.assert_close(wrapped.clip_grad_norm_(0.5), expected, rtol=1e-6, atol=0)


@on_ranks(2)
def test_large_gradients_under_fp16():
    """Gradients whose squares overflow fp16 have a finite norm, because shards are fp32."""
    wrapped = FSDP(nn.Linear(4, 4).to(rank_device()), mixed_precision=True)
    (wrapped(torch.ones(2, 4, device=rank_device())) * 1000).sum().backward()
    norm = wrapped.clip_grad_norm_(1.0)
    expected = math.sqrt(20) * 2000  # 16 weights and 4 biases, each with 2 rows x 1000
    torch.testing.assert_close(norm.item(), expected, rtol=1e-6, atol=0)


@on_ranks(2)
def test_double_gradients_have_a_double_norm():
    """An fp64 model's norm is fp64."""
    wrapped = FSDP(nn.Linear(4, 4).double().to(rank_device()))
    wrapped(randn(3, 4).double()).sum().backward()
    assert wrapped.clip_grad_norm_(1.0).dtype == torch.float64


@on_ranks(2)
def test_it_is_for_the_root_only_and_between_passes():
    """On an inner unit, or inside a pass, it raises what fairscale raises, before any collective."""
    wrapped = wrap_each(mlp(4, 9, 5))
    loss_of(wrapped, 0).backward()
    for kind in (AssertionError, RuntimeError):
        with pytest.raises(kind, match="outermost"):
            wrapped[0].clip_grad_norm_(1.0)
    seen = []

    def clip(*_):
        for kind in (ValueError, AssertionError):
            with pytest.raises(kind, match="IDLE"):
                wrapped.clip_grad_norm_(1.0)
        seen.append(True)

    wrapped[0].module.register_forward_hook(clip)
    wrapped(randn(3, 4))
    assert seen == [True]


@on_ranks(2)
@pytest.mark.parametrize("norm_type", [0, -1.0])
def test_a_norm_type_that_is_none_is_refused(norm_type):
    """A ``norm_type`` that is not positive is a ValueError on all ranks."""
    _, wrapped = pair_with_grads()
    with pytest.raises(ValueError, match="norm_type"):
        wrapped.clip_grad_norm_(1.0, norm_type)


@on_ranks(2)
def test_params_with_grad():
    """`params_with_grad` are the parameters that ``parameters()`` yields and that have a gradient."""
    wrapped = wrap_each(mlp(4, 9, 5))
    assert wrapped.params_with_grad == []
    loss_of(wrapped, 0).backward()
    assert [id(p) for p in wrapped.params_with_grad] == [id(p) for p in wrapped.parameters()]
    wrapped[0].zero_grad()
    assert [id(p) for p in wrapped.params_with_grad] == [id(p) for p in wrapped[2].parameters()]


@on_ranks(2, 3)
def test_an_infinite_norm_is_nan_if_an_element_is_on_any_rank():
    """Backends give a number as the largest of it and NaN, by which NaN on one rank was lost."""
    for bad in range(dist.get_world_size()):
        _, wrapped = pair_with_grads()
        if dist.get_rank() == bad:
            next(param.grad for param in wrapped.parameters() if param.grad is not None)[0] = math.nan
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # which parameter it is
            assert wrapped.clip_grad_norm_(1.0, math.inf).isnan(), bad
