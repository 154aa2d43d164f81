"""``set_gradient_divide_factor`` divides gradients by a factor instead of the number of ranks."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fairshard.nn import MixedPrecisionPolicy, fully_shard
from tests.kit import rank_device
from tests.models import mlp, tiny, tiny_batch, tiny_loss
from tests.on_ranks import on_ranks
from tests.reference import randn, sgd

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def set_factor(model, factor):
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(factor)


def shard_tiny(model, **kwargs):
    for part in (model.first, model.second, model.shared):
        fully_shard(part, **kwargs)
    return fully_shard(model, **kwargs)


def assert_params(model, plain):
    rtol = 0.0 if rank_device().type == "cpu" else 1e-5
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), expected, rtol=rtol, atol=rtol)


@on_ranks(2, 3)
def test_the_sum_is_divided_by_the_factor_alone():
    """SGD with momentum moves weights exactly as on a plain replica whose summed gradients are divided."""
    world_size = dist.get_world_size()
    for factor in (2 * world_size, world_size, 1, 0.3):
        plain = tiny()
        model = shard_tiny(copy.deepcopy(plain), reshard_after_forward=False)
        set_factor(model, factor)
        of_plain, of_model = sgd(plain, lr=0.01), sgd(model, lr=0.01)
        for step in range(3):
            *inputs, targets = tiny_batch(dist.get_rank(), step)
            expected, loss = tiny_loss(plain(*inputs), targets), tiny_loss(model(*inputs), targets)
            assert torch.equal(loss, expected)
            expected.backward()
            loss.backward()
            for param in plain.parameters():
                param.grad = _sum(param) / factor
            for optimizer in (of_plain, of_model):
                optimizer.step()
                optimizer.zero_grad()
        assert_params(model, plain)


def _sum(param):
    """The sum of the gradient over ranks, in rank order."""
    every = [torch.empty_like(param) for _ in range(dist.get_world_size())]
    dist.all_gather(every, param.grad)
    total = every[0].clone()
    for one in every[1:]:
        total += one
    return total


@on_ranks(2)
def test_with_mixed_precision_the_sum_is_divided_once():
    """bf16 parameters reduced in fp32 train as a bf16 replica with fp32 masters and summed fp32 gradients."""
    masters = nn.Sequential(*[mlp(16, 32, 16) for _ in range(3)])
    model, replica = copy.deepcopy(masters), copy.deepcopy(masters).to(BF16)
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    for part in model:
        fully_shard(part, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    set_factor(model, 2 * dist.get_world_size())
    of_model, of_masters = sgd(model, lr=0.01), sgd(masters, lr=0.01)
    for step in range(5):
        inputs = randn(4, 16, key=(step,)).to(BF16)
        loss, expected = model(inputs).sum(), replica(inputs).sum()
        assert torch.equal(loss, expected)
        loss.backward()
        expected.backward()
        for master, param in zip(masters.parameters(), replica.parameters(), strict=True):
            wide = nn.Parameter(param.detach().float())
            wide.grad, param.grad = param.grad.float(), None
            master.grad = _sum(wide) / (2 * dist.get_world_size())
        for optimizer in (of_model, of_masters):
            optimizer.step()
            optimizer.zero_grad()
        for master, param in zip(masters.parameters(), replica.parameters(), strict=True):
            param.detach().copy_(master)
        assert_params(model, masters)


@on_ranks(4)
def test_replicas_are_summed_too():
    """In every reduce dtype, 4 ranks on a 2 x 2 mesh sum over all ranks and then divide by 3."""
    mesh = init_device_mesh(rank_device().type, (2, 2))
    own = dist.get_rank() + 1.0
    dtypes = (FP32, BF16, FP16) if rank_device().type == "cpu" else (FP32,)  # devices add 16 bits in 16 bits
    for dtype in dtypes:
        model = fully_shard(mlp(4, 3), mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        model.set_gradient_divide_factor(3)
        for _ in range(2):
            model(torch.full((1, 4), own, device=rank_device())).sum().backward()
        each = torch.tensor(1.0 + 2 + 3 + 4) / 3
        assert model[0].weight.grad.full_tensor().unique().tolist() == [(each + each).item()]


@on_ranks(2)
def test_large_gradients_of_fp16_do_not_overflow():
    """Gradients reduced in fp16 are summed in a wider dtype, so large ones do not overflow."""
    model = fully_shard(mlp(2, 2), mp_policy=MixedPrecisionPolicy(reduce_dtype=FP16))
    model.set_gradient_divide_factor(64)
    model(torch.full((1, 2), 60000.0, device=rank_device())).sum().backward()
    expected = torch.tensor(60000.0).half().float() * 2 / 64
    assert model[0].weight.grad.full_tensor().unique().tolist() == [expected.item()]


@on_ranks(2)
def test_it_counts_for_one_module_from_then_on():
    """A factor covers one module's accumulated and later gradients; inner units keep theirs; the old name warns."""
    model = mlp(2, 2, 2)
    fully_shard(model[0])
    fully_shard(model)
    with pytest.warns(FutureWarning, match="call `set_gradient_divide_factor`"):
        model.set_reduce_scatter_divide_factor(1)
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 2, device=rank_device())).sum().backward()
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, 2, device=rank_device())).sum().backward()
    assert model[2].bias.grad.full_tensor().tolist() == [4.0, 4.0]  # 2 ranks x 2 backwards
    inner = model[0].bias.grad.full_tensor()
    model.set_gradient_divide_factor(4)
    model[0].set_gradient_divide_factor(4)
    model.zero_grad()
    model(torch.ones(1, 2, device=rank_device())).sum().backward()
    assert model[2].bias.grad.full_tensor().tolist() == [0.5, 0.5]
    torch.testing.assert_close(model[0].bias.grad.full_tensor() * 4, inner, rtol=1e-6, atol=0)


@on_ranks(1)
def test_wrong_factors_are_named():
    """A factor that is not a positive, finite number raises an error."""
    model = fully_shard(mlp(2, 2))
    for wrong in (0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="`factor` must be positive and finite"):
            model.set_gradient_divide_factor(wrong)
    for wrong in (None, "2", True):
        with pytest.raises(TypeError, match="`factor` must be a number"):
            model.set_gradient_divide_factor(wrong)
    model.set_gradient_divide_factor(2)
    model(torch.ones(1, 2, device=rank_device())).sum().backward()
    assert model[0].bias.grad.full_tensor().tolist() == [0.5, 0.5]
