"""``set_gradient_divide_factor`` divides gradients by a factor instead of the number of ranks."""

import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from fairshard.nn import MixedPrecisionPolicy, fully_shard
from tests.doors.test_matrix import Run, tolerances
from tests.kit import rank_device
from tests.kit.doors import shard, whole
from tests.models import mlp, tiny
from tests.on_ranks import on_ranks
from tests.reference import Reference, assert_same_state, mean_over_ranks, sgd

pytestmark = pytest.mark.behaviour("divide factor")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("param_dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_the_sum_is_divided_by_the_factor_alone(param_dtype):
    """SGD with momentum moves weights exactly as on a replica whose summed fp32 gradients are divided.

    The factor is set as torchtitan does it, on every FSDPModule of torch.
    """
    world_size = dist.get_world_size()
    for factor in (2 * world_size, world_size, 1, 0.3):
        mean = functools.partial(mean_over_ranks, divisor=factor)
        reference = Reference(tiny(), param_dtype, FP32, mean, keeps_none=True)
        policy = MixedPrecisionPolicy(param_dtype, FP32)
        model = shard(tiny(), "fully_shard", "first", "second", "shared", mp_policy=policy)
        for module in model.modules():
            if isinstance(module, TorchFSDPModule):
                module.set_gradient_divide_factor(factor)
        cell = {"accumulate": "once", "raises": None, "clip": None}
        run, optimizer = Run(cell, reference, sgd(reference.master, lr=0.01), tolerances(FP32)), sgd(model, lr=0.01)
        for step in range(3):
            run.step(model, optimizer, step)
        assert_same_state(whole(model), reference.master.state_dict(), *run.tolerances)


def weight_grads(model):
    """The different values in the gradient of the first weight."""
    return model[0].weight.grad.full_tensor().unique().tolist()


def backward(model, size):
    model(torch.full((1, model[0].in_features), size, device=rank_device())).sum().backward()


@on_ranks(4)
def test_replicas_are_summed_too():
    """In every reduce dtype, 4 ranks on a 2 x 2 mesh sum over all ranks and then divide by 3."""
    mesh = init_device_mesh(rank_device().type, (2, 2))
    dtypes = (FP32, BF16, FP16) if rank_device().type == "cpu" else (FP32,)  # devices add 16 bits in 16 bits
    for dtype in dtypes:
        model = fully_shard(mlp(4, 3), mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        model.set_gradient_divide_factor(3)
        for _ in range(2):
            backward(model, dist.get_rank() + 1.0)
        each = torch.tensor(1.0 + 2 + 3 + 4) / 3
        assert weight_grads(model) == [(each + each).item()]


@on_ranks(2)
def test_large_gradients_of_fp16_do_not_overflow():
    """Gradients reduced in fp16 are summed in a wider dtype, so large ones do not overflow."""
    model = fully_shard(mlp(2, 2), mp_policy=MixedPrecisionPolicy(reduce_dtype=FP16))
    model.set_gradient_divide_factor(64)
    backward(model, 60000.0)
    assert weight_grads(model) == [(torch.tensor(60000.0).half().float() * 2 / 64).item()]


@on_ranks(2)
def test_it_counts_for_one_module_from_then_on():
    """A factor covers one module's accumulated and later gradients; inner units keep theirs; the old name warns."""
    model = shard(mlp(2, 2, 2), "fully_shard", "0")
    with pytest.warns(FutureWarning, match="call `set_gradient_divide_factor`"):
        model.set_reduce_scatter_divide_factor(1)
    for syncs in (False, True):
        model.set_requires_gradient_sync(syncs)
        backward(model, 1.0)
    assert model[2].bias.grad.full_tensor().tolist() == [4.0, 4.0]  # 2 ranks x 2 backwards
    inner = model[0].bias.grad.full_tensor()
    model.set_gradient_divide_factor(4)
    model[0].set_gradient_divide_factor(4)
    model.zero_grad()
    backward(model, 1.0)
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
