"""Each field of `MixedPrecision` works on its own and with others; PyTorch's object works the same."""

import contextlib
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecision as TorchMixedPrecision

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import MixedPrecision
from tests.kit import fake_group, rank_device
from tests.models import tiny, tiny_batch, tiny_loss, wrap_tiny
from tests.on_ranks import in_full, on_ranks
from tests.reference import Reference, assert_same_state, average_grads_, randn, sgd

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


class Spy(nn.Module):
    """A Linear that records the dtypes of its input, its weight, and a buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", torch.full((4,), 1 + 2**-12))
        self.seen = []

    def forward(self, x):
        self.seen.append((x.dtype, self.layer.weight.dtype, self.table.dtype))
        return self.layer(x.to(self.layer.weight.dtype)) * self.table.to(self.layer.weight.dtype)


def spy(**kwargs):
    return FSDP(Spy().to(rank_device()), **kwargs)


PAIRS = [(BF16, None), (None, BF16), (BF16, FP32), (FP16, BF16), (FP32, None), (None, FP16)]


@on_ranks(1, in_full(2), 3)
@pytest.mark.parametrize(
    ("kind", "pair"), [*((MixedPrecision, pair) for pair in PAIRS), *((TorchMixedPrecision, p) for p in PAIRS[:2])]
)
def test_parameters_and_gradients_have_the_dtypes_asked_for(kind, pair):
    """Training equals a reference that casts by hand, term by term, with `no_sync` and clipping too."""
    param_dtype, reduce_dtype = pair
    if rank_device().type != "cpu" and (reduce_dtype or param_dtype) in (BF16, FP16):
        reduce_dtype = FP32  # collectives of devices add 16 bits in 16 bits
    model = tiny()
    reference = Reference(model, param_dtype or FP32, reduce_dtype or param_dtype or FP32)
    wrapped = wrap_tiny(model, mixed_precision=kind(param_dtype=param_dtype, reduce_dtype=reduce_dtype))
    of_reference, of_wrapped = sgd(reference.master), sgd(wrapped)
    for step in range(3):
        for micro in range(2):
            *inputs, targets = tiny_batch(dist.get_rank(), step, micro)
            expected = tiny_loss(reference(*inputs), targets)
            with contextlib.nullcontext() if micro else wrapped.no_sync():
                actual = tiny_loss(wrapped(*inputs), targets)
                actual.backward()
            assert torch.equal(actual, expected)
            expected.backward()
            if not micro:
                reference.keep_grads()
        reference.reduce_grads()
        norm = wrapped.clip_grad_norm_(0.3)
        torch.testing.assert_close(norm.double(), reference.grad_norm(2.0), rtol=1e-5, atol=1e-8)
        reference.scale_grads(torch.clamp(0.3 / (norm + 1e-6), max=1.0))
        for optimizer in (of_reference, of_wrapped):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(wrapped.state_dict(), reference.master.state_dict())


@on_ranks(in_full(1), 2)
@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_which_inputs_are_cast(root, inner):
    """``cast_root_forward_inputs`` applies to the outermost unit, ``cast_forward_inputs`` to inner units."""
    policy = MixedPrecision(BF16, cast_forward_inputs=inner, cast_root_forward_inputs=root)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = spy(mixed_precision=policy)
            self.seen = None

        def forward(self, x):
            self.seen = x.dtype
            return self.inner(x.float())

    wrapped = FSDP(Outer(), mixed_precision=policy)
    wrapped(randn(2, 4)).sum().backward()
    assert wrapped.module.seen == (BF16 if root else FP32)
    assert wrapped.module.inner.seen[0][0] == (BF16 if inner else FP32)


@on_ranks(in_full(1), 2)
def test_buffers_have_a_dtype_of_their_own():
    """``buffer_dtype`` works alone, with another ``param_dtype``, and as an argument; by default nothing is cast."""
    cases = [
        ({"mixed_precision": MixedPrecision(buffer_dtype=BF16)}, (FP32, FP32, BF16)),
        ({"mixed_precision": MixedPrecision(BF16, buffer_dtype=FP64)}, (BF16, BF16, FP64)),
        ({"mixed_precision": MixedPrecision(BF16)}, (BF16, BF16, FP32)),
        ({"buffer_dtype": BF16}, (FP32, FP32, BF16)),
        ({"mixed_precision": True, "buffer_dtype": BF16}, (FP16, FP16, BF16)),
    ]
    for kwargs, expected in cases:
        wrapped = spy(**kwargs)
        wrapped(randn(2, 4)).float().sum().backward()
        assert wrapped.seen == [expected]
        assert wrapped.table.dtype == FP32
        assert torch.equal(wrapped.table, torch.full_like(wrapped.table, 1 + 2**-12))


class Average(nn.Module):
    """Averages its input into a buffer through ``.data``, as codebooks do; rows past the first do not change."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.full((2, 4), 1 + 2**-12))

    def forward(self, x):
        self.mean.data[0].lerp_(x.detach().mean(0).to(self.mean), 0.5)
        return self.layer(x) + self.mean[0]


@on_ranks(1)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_what_is_written_through_data_of_a_buffer_is_kept(mode):
    """Writes are kept by element: the forward's to the cast copy, and the user's to the original between passes."""
    wrapped = FSDP(Average().to(rank_device()), buffer_dtype=BF16)
    mean = wrapped.module.mean
    x = torch.ones(2, 4, device=rank_device())
    with mode():
        wrapped(3 * x)
    assert torch.equal(mean[0], 2 * x[0])
    assert torch.equal(mean[1], torch.full_like(x[0], 1 + 2**-12)), "what nobody wrote keeps its bits"
    mean.data.fill_(4.0)
    wrapped(2 * x).sum().backward()
    assert torch.equal(mean[0], 3 * x[0])
    assert wrapped.module.mean is mean


@on_ranks(in_full(1), 2)
def test_a_reduce_dtype_alone_casts_nothing_in_forward():
    """Inputs, parameters and buffers are not cast; gradients are rounded once, when they are sent."""
    wrapped = spy(mixed_precision=MixedPrecision(reduce_dtype=BF16))
    wrapped(randn(2, 4)).sum().backward()
    assert wrapped.seen == [(FP32, FP32, FP32)]
    assert wrapped.params[0].grad.dtype == FP32


@on_ranks(2)
def test_full_precision_units_cast_inputs_up_when_asked():
    """``force_input_to_fp32`` casts low-precision inputs of a unit that computes in its own dtype."""
    for kwargs in ({}, {"mixed_precision": MixedPrecision(reduce_dtype=BF16)}):
        wrapped = spy(force_input_to_fp32=True, **kwargs)
        wrapped(randn(2, 4).bfloat16()).sum().backward()
        assert wrapped.seen[0][0] == FP32
        assert spy(**kwargs)(randn(2, 4).bfloat16()).dtype == FP32


@on_ranks(in_full(1), 2)
@pytest.mark.parametrize("flatten", [True, False])
def test_batch_norm_computes_in_its_own_dtype(flatten):
    """Weights, biases and statistics of BatchNorm are not cast; their gradients travel in fp32, or as asked."""
    seen = {}
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).to(rank_device())
    for name, part in model.named_children():
        part.register_forward_pre_hook(lambda m, x, name=name: seen.update({name: (x[0].dtype, m.weight.dtype)}))
    wrapped = FSDP(model, mixed_precision=MixedPrecision(BF16), flatten_parameters=flatten)
    wrapped(randn(8, 4)).float().sum().backward()
    assert seen == {"0": (BF16, BF16), "1": (BF16, FP32), "2": (BF16, BF16)}
    assert wrapped[1].running_mean.dtype == FP32
    assert {param.grad.dtype for param in wrapped.params} == {FP32}


class Mixed(nn.Module):
    """Linears in three dtypes, and casts between them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.second = nn.Linear(5, 7).bfloat16()
        self.third = nn.Linear(7, 3).half()

    def forward(self, x):
        x = self.second(torch.tanh(self.first(x)).to(self.second.weight.dtype))
        return self.third(torch.tanh(x).to(self.third.weight.dtype)).float()


def mixed():
    torch.manual_seed(3)
    return Mixed().to(rank_device())


@pytest.mark.cpu_only("collectives of devices add bf16 and fp16 as they are; ours on gloo in fp32")
@on_ranks(1, in_full(2), 3)
@pytest.mark.parametrize("flatten", [True, False])
def test_parameters_of_several_dtypes_in_one_unit(flatten):
    """Each parameter keeps its dtype and the gradient that it has unwrapped; the state dict shows each in its dtype."""
    plain, wrapped = mixed(), FSDP(mixed(), flatten_parameters=flatten)
    for step in range(2):
        for model in (plain, wrapped):
            model.zero_grad()
            model(randn(3, 4, key=step)).square().sum().backward()
        average_grads_(plain.parameters())
        with wrapped.summon_full_params(with_grads=True):
            for (name, actual), expected in zip(wrapped.named_parameters(), plain.parameters(), strict=True):
                assert actual.dtype == expected.dtype == actual.grad.dtype
                assert torch.equal(actual.grad, expected.grad), name
    sgd(wrapped).step()
    state = wrapped.state_dict()
    assert [state[f"{name}.weight"].dtype for name in ("first", "second", "third")] == [FP32, BF16, FP16]
    assert not torch.equal(state["second.weight"], plain.second.weight)
    wrapped.load_state_dict(plain.state_dict())
    assert_same_state(wrapped.state_dict(), plain.state_dict())


@on_ranks(in_full(1), 2)
def test_clipping_gradients_of_several_dtypes():
    """The norm is that of all gradients, in fp32; each gradient is scaled in its own dtype."""
    plain, wrapped = mixed(), FSDP(mixed())
    for model in (plain, wrapped):
        model(torch.ones(3, 4, device=rank_device())).square().sum().backward()
    expected = torch.cat([param.grad.float().flatten() for param in plain.parameters()]).norm()
    norm = wrapped.clip_grad_norm_(0.1)
    torch.testing.assert_close(norm, expected)
    again = wrapped.clip_grad_norm_(math.inf)
    torch.testing.assert_close(again, torch.full_like(again, 0.1), rtol=1e-2, atol=0.0)


@on_ranks(in_full(1), 2)
def test_parameters_of_several_dtypes_compute_in_one():
    """With a ``param_dtype`` all parameters compute in it; shards and their gradients keep their own dtypes."""
    wrapped = FSDP(mixed(), mixed_precision=MixedPrecision(BF16, FP32))
    dtypes = []
    for part in (wrapped.first, wrapped.second, wrapped.third):
        part.register_forward_pre_hook(lambda m, x: dtypes.append((x[0].dtype, m.weight.dtype)))
    wrapped(randn(3, 4)).sum().backward()
    assert dtypes == [(BF16, BF16)] * 3
    assert [param.grad.dtype for param in wrapped.params] == [FP32, BF16, FP16]


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"mixed_precision": True, "force_input_to_fp32": True}, "force_input_to_fp32"),
        ({"mixed_precision": MixedPrecision(cast_forward_inputs=True)}, "cast_forward_inputs"),
        ({"mixed_precision": MixedPrecision(keep_low_precision_grads=True)}, "keep_low_precision_grads"),
    ],
    ids=str,
)
def test_what_has_no_effect_warns(kwargs, match):
    """A setting without effect beside the others warns."""
    with fake_group(2), pytest.warns(UserWarning, match=f"{match}.*no effect"):
        FSDP(nn.Linear(2, 2), **kwargs)
