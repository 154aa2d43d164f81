"""A tensor with one run of its elements on this rank: it can be filled, moved and stored, but not computed with."""

import copy
import io
import pickle

import pytest
import torch

from fairshard.errors import ParameterShardedError
from fairshard.utils.span_tensor import SpanTensor


def half(dtype=torch.float32):
    """Elements 2 to 5 of a tensor of shape (2, 3)."""
    return SpanTensor(torch.arange(2, 5).to(dtype), 2, (2, 3))


def test_shape_of_the_whole_memory_of_the_run():
    """The shape is the whole tensor's, dtype and device are the run's, and the repr shows the run."""
    span = half(torch.float64)
    assert (span.shape, span.dtype, span.device.type) == ((2, 3), torch.float64, "cpu")
    assert tuple(span.span) == (2, 5)
    assert repr(half()) == "SpanTensor(tensor([2., 3., 4.]), start=2, shape=(2, 3))"


def test_what_is_copied_arrives_in_the_run():
    """The run takes its part of whole values, cast, or of spans that contain it; an empty run takes nothing."""
    whole = torch.arange(10.0, 16.0).view(2, 3)
    run = torch.zeros(3)
    span = SpanTensor(run, 2, (2, 3))
    span.copy_(whole)
    assert run.tolist() == [12, 13, 14]
    span.copy_(whole.double().t().contiguous().t() * 2)
    assert run.tolist() == [24, 26, 28]
    span.copy_(SpanTensor(whole.flatten()[1:], 1, (2, 3)))
    assert run.tolist() == [12, 13, 14]
    empty = SpanTensor(torch.zeros(0), 0, (2, 3))
    empty.copy_(span)
    empty.copy_(SpanTensor(torch.zeros(0), 0, (2, 3)))


def test_what_cannot_be_copied_is_refused():
    """Copying from elements that are not there, from another shape, or into a whole tensor raises."""
    with pytest.raises(ValueError, match="this rank owns, 2 to 5, but holds 3 to 5"):
        half().copy_(SpanTensor(torch.zeros(2), 3, (2, 3)))
    with pytest.raises(ValueError, match=r"Shapes must be equal, but \(3, 2\) would go into \(2, 3\)"):
        half().copy_(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="Shapes must be equal"):
        half().copy_(torch.tensor(1.0))
    with pytest.raises(TypeError, match="this rank has elements 2 to 5"):
        torch.zeros(2, 3).copy_(half())


@pytest.mark.parametrize(
    "compute",
    [lambda s: s + 1, lambda s: s.sum(), lambda s: s[0], lambda s: s.view(6), lambda s: s.t(), torch.isnan],
)
def test_it_is_not_computed_with(compute):
    """Anything that would need other ranks' elements raises and names the operator."""
    with pytest.raises(ParameterShardedError, match=r"not used in computation \(`\w+`\)"):
        compute(half())


def test_what_needs_no_other_elements_works():
    """Copies, casts, moves and ``zeros_like`` act on the run and keep its position."""
    span = half()
    for made, expected in (
        (span.clone(), [2, 3, 4]),
        (span.detach(), [2, 3, 4]),
        (span.cpu(), [2, 3, 4]),
        (span.to(torch.bfloat16), [2, 3, 4]),
        (span.half(), [2, 3, 4]),
        (torch.zeros_like(span), [0, 0, 0]),
        (span.clone().zero_(), [0, 0, 0]),
        (copy.deepcopy(span), [2, 3, 4]),
        (copy.copy(span), [2, 3, 4]),
    ):
        assert isinstance(made, SpanTensor)
        assert (made.run.tolist(), made.start, made.shape) == (expected, 2, (2, 3))
    assert span.to(torch.bfloat16).run.dtype == torch.bfloat16
    assert span.detach().run.data_ptr() == span.run.data_ptr()
    assert span.clone().run.data_ptr() != span.run.data_ptr()
    assert torch.empty_like(span, device="meta").run.is_meta
    param = torch.nn.Parameter(span)
    assert isinstance(param, SpanTensor)
    assert param.requires_grad


def test_pickles_hold_the_run_alone():
    """Pickling a run of a large shard stores the run only, and ``weights_only=True`` loads it."""
    shard = torch.arange(100_000.0)
    span = SpanTensor(shard[10:13], 4, (3, 3))
    assert len(pickle.dumps(span)) < 2000
    file = io.BytesIO()
    torch.save({"a": span}, file)
    file.seek(0)
    for loaded in (torch.load(file, weights_only=True)["a"], pickle.loads(pickle.dumps(span))):
        assert (loaded.run.tolist(), loaded.start, loaded.shape) == ([10, 11, 12], 4, (3, 3))
