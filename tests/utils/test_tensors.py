"""The norm of all gradients as one vector."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairshard.utils.storage import set_grad
from fairshard.utils.tensors import calc_grad_norm


def with_grads(*grads):
    params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return params


@given(
    st.lists(st.lists(st.floats(-8, 8, width=16), max_size=5), min_size=1, max_size=4),
    st.sampled_from([1.0, 2.0, 3.0, math.inf]),
)
def test_norm_is_that_of_the_concatenation(values, p):
    """The norm of the norms equals the norm of all elements, up to a few fp32 roundings."""
    grads = [torch.tensor(value, dtype=torch.float32) for value in values]
    whole = torch.cat(grads).double()
    expected = torch.linalg.vector_norm(whole, p) if whole.numel() else torch.zeros(())
    norm = calc_grad_norm(with_grads(*grads), p)
    assert norm.shape == ()
    torch.testing.assert_close(norm.double(), expected.double(), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_is_taken_in_fp32(dtype):
    """Squares that overflow or underflow in the gradients' dtype do neither in the norm."""
    params = with_grads(torch.full((4,), 300.0, dtype=dtype), torch.full((4096,), 1.0, dtype=dtype))
    norm = calc_grad_norm(params, 2)
    assert norm.dtype == torch.float32
    squares = 4 * 300.0**2 + 4096  # 300 and 1 are exact in both dtypes
    torch.testing.assert_close(norm.item(), math.sqrt(squares), rtol=1e-6, atol=0)


def test_double_gradients_have_a_double_norm():
    """fp64 is not narrowed."""
    norm = calc_grad_norm(with_grads(torch.full((3,), 1e-200, dtype=torch.float64)), math.inf)
    assert norm.dtype == torch.float64
    assert norm.item() == 1e-200


def test_parameters_without_gradient_are_left_out():
    """Parameters without a gradient do not count; without any gradient the norm is zero."""
    param = torch.nn.Parameter(torch.ones(3))
    assert calc_grad_norm([param], 2).item() == 0
    assert calc_grad_norm([], 2).item() == 0
    assert calc_grad_norm([param, *with_grads(torch.tensor([3.0, 4.0]))], 2).item() == 5
    assert calc_grad_norm((p for p in with_grads(torch.tensor([3.0, 4.0]))), 2).item() == 5


def test_empty_gradients_count_as_nothing():
    """An empty gradient does not change the norm, not even the maximum."""
    params = with_grads(torch.empty(0), torch.tensor([-3.0]))
    assert calc_grad_norm(params, math.inf).item() == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_gradient_may_have_another_dtype_than_its_parameter(dtype):
    """`set_grad` sets the given tensor itself, also in another dtype, or None."""
    param = torch.nn.Parameter(torch.ones(3))
    for kind in (dtype, torch.float32, dtype):
        grad = torch.full((3,), 2, dtype=kind)
        set_grad(param, grad)
        assert param.grad.dtype == kind
        assert param.grad.data_ptr() == grad.data_ptr()
        param.grad.add_(grad)
        assert torch.equal(grad, torch.full_like(grad, 4))
    set_grad(param, None)
    assert param.grad is None
