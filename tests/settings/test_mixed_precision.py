"""Masters stay fp32; inputs, weights and buffers are cast for compute; no value loses bits permanently."""

import collections
import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import cast_buffers_
from tests.kit import rank_device
from tests.models import mlp, wrap_each
from tests.on_ranks import on_ranks
from tests.reference import average_grads_, randn, sgd

BF16 = {"mixed_precision": True, "compute_dtype": torch.bfloat16}
FP16 = {"mixed_precision": True}
both = pytest.mark.parametrize(
    ("kwargs", "dtype"), [(BF16, torch.bfloat16), (FP16, torch.float16)], ids=["bf16", "fp16"]
)

Pair = collections.namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Record:
    value: torch.Tensor
    index: torch.Tensor


class Spy(nn.Module):
    """A Linear that records the dtypes it computes with."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", torch.full((4,), 1 + 2**-12))  # exact in fp32, not in bf16
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.seen = []

    def forward(self, x):
        self.seen.append((x.dtype, self.layer.weight.dtype, self.table.dtype, self.steps.dtype))
        return self.layer(x) * self.table


@on_ranks(1, 2)
@both
def test_dtypes_of_a_pass(kwargs, dtype):
    """A forward uses and returns the compute dtype, integers are not cast, and shards and their gradients are fp32."""
    wrapped = FSDP(nn.Sequential(FSDP(Spy().to(rank_device()), **kwargs)), **kwargs)
    out = wrapped(randn(3, 4))
    assert wrapped[0].seen == [(dtype, dtype, dtype, torch.int64)]
    assert out.dtype == dtype
    out.sum().backward()
    assert {param.dtype for param in wrapped.parameters()} == {torch.float32}
    assert {param.grad.dtype for param in wrapped.parameters()} == {torch.float32}


@on_ranks(1, 2)
@both
def test_inputs_get_gradients_in_their_own_dtype(kwargs, dtype):
    """The cast of inputs is differentiable."""
    wrapped = wrap_each(mlp(4, 9, 5), **kwargs)
    x = randn(3, 4).requires_grad_()
    wrapped(x).sum().backward()
    assert x.grad.dtype == torch.float32
    assert x.grad.any()


@on_ranks(2)
def test_inputs_of_any_nesting_are_cast():
    """Floating tensors in lists, dicts, namedtuples, dataclasses and packed sequences are cast; nothing else is."""

    class Collect(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.seen = None

        def forward(self, *args, **kwargs):
            self.seen = args, kwargs
            return self.layer(args[0])

    wrapped = FSDP(Collect().to(rank_device()), **BF16)
    x, index = randn(3, 4), torch.arange(3)
    packed = pack_padded_sequence(randn(2, 3, 4), torch.tensor([3, 2], device="cpu"), batch_first=True)
    wrapped(x, [x, index], Pair(x, "text"), Record(x, index), packed, named={"x": x}, flag=True)
    args, kwargs = wrapped.seen
    assert args[0].dtype == args[1][0].dtype == args[2].left.dtype == torch.bfloat16
    assert type(args[2]) is Pair
    assert type(args[3]) is Record
    assert args[3].value.dtype == args[4].data.dtype == kwargs["named"]["x"].dtype == torch.bfloat16
    assert args[1][1].dtype == args[3].index.dtype == torch.int64
    assert args[2].right == "text"
    assert kwargs["flag"] is True
    assert x.dtype == torch.float32


@on_ranks(1, 2)
@both
def test_buffers_lose_no_bits(kwargs, dtype):
    """After passes and state dicts a floating buffer has every bit it had; the forward used a cast copy."""
    wrapped = FSDP(Spy().to(rank_device()), **kwargs)
    table = wrapped.table.clone()
    for _ in range(2):
        wrapped(randn(3, 4)).sum().backward()
        assert wrapped.table.dtype == torch.float32
        assert torch.equal(wrapped.table, table)
        assert torch.equal(wrapped.state_dict()["table"], table)


@on_ranks(1, 2)
@both
def test_written_buffers_are_written_back(kwargs, dtype):
    """What a forward writes into a buffer, in place or by assignment, is kept in the buffer's own dtype."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("total", torch.zeros(()))
            self.register_buffer("last", torch.zeros(()))
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            self.total.add_(2)
            self.last = self.last + 0.5
            self.calls += 1
            return self.layer(x)

    wrapped = FSDP(nn.Sequential(FSDP(Counting().to(rank_device()), **kwargs)), **kwargs)
    for _ in range(3):
        wrapped(randn(3, 4)).sum().backward()
    counting = wrapped[0].module
    assert (counting.total.item(), counting.last.item(), counting.calls.item()) == (6, 1.5, 3)
    assert counting.total.dtype == counting.last.dtype == torch.float32
    assert wrapped.state_dict()["0.total"].item() == 6


@on_ranks(1, 2)
def test_batch_norm_keeps_its_statistics_in_fp32():
    """BatchNorm's buffers are never cast, and are those of an fp32 BatchNorm fed with the cast activations."""
    norm = nn.BatchNorm1d(4).to(rank_device())
    wrapped = FSDP(nn.Sequential(FSDP(norm)), **BF16)
    x = randn(64, 4)
    wrapped(x)
    reference = nn.BatchNorm1d(4).to(rank_device())
    reference(x.bfloat16().float() if norm.running_mean.dtype == torch.float32 else x)
    assert norm.running_mean.dtype == norm.running_var.dtype == torch.float32
    torch.testing.assert_close(norm.running_mean, reference.running_mean, rtol=1e-2, atol=1e-3)
    assert norm.num_batches_tracked == 1


@on_ranks(1, 2)
def test_every_unit_casts_its_own_inputs():
    """A unit inside a wrapper of another dtype gets its inputs cast."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = FSDP(Spy().to(rank_device()), **BF16)
            self.outer = nn.Linear(4, 2).to(rank_device())

        def forward(self, x):
            return self.outer(self.inner(x).float())

    wrapped = FSDP(Mixed())
    out = wrapped(randn(3, 4))
    assert wrapped.inner.seen[0][:2] == (torch.bfloat16, torch.bfloat16)
    assert out.dtype == torch.float32
    out.sum().backward()
    assert {param.grad.dtype for param in wrapped.parameters()} == {torch.float32}


@on_ranks(1, 2)
def test_tiny_gradients_survive_with_fp32_reduce():
    """Sums of gradients that bf16 would round are exact with ``fp32_reduce_scatter``, and with our local sums."""
    layer = nn.Linear(1, 1, bias=False).to(rank_device())
    nn.init.ones_(layer.weight)
    wrapped = FSDP(layer, fp32_reduce_scatter=True, **BF16)
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    x = torch.tensor([[1.0 if rank == 0 else 2**-9]], device=rank_device())  # 1 + 2**-9 is not a bf16
    wrapped(x).sum().backward()
    expected = (1 + (world_size - 1) * 2**-9) / world_size
    assert wrapped.state_dict()["weight"].item() == 1
    grads = [torch.empty_like(wrapped.params[0]) for _ in range(world_size)]
    torch.distributed.all_gather(grads, wrapped.params[0].grad)
    assert grads[0].item() == expected


@on_ranks(1, 2)
def test_updates_below_the_compute_dtype_add_up():
    """Steps too small for bf16 change the fp32 masters, and once they add up also the compute weights."""
    layer = nn.Linear(1, 1, bias=False).to(rank_device())
    nn.init.ones_(layer.weight)
    wrapped = FSDP(layer, **BF16)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=2**-12)
    x = torch.ones(1, 1, device=rank_device())
    for _ in range(32):
        (-wrapped(x).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert wrapped.state_dict()["weight"].item() == 1 + 32 * 2**-12
    assert wrapped(x).item() == 1 + 2**-7  # the next bf16 above 1


@on_ranks(1, 2)
def test_autocast_with_fp32_parameters():
    """``compute_dtype=torch.float32`` under autocast equals the plain model under autocast, and warns."""
    plain = mlp(4, 9, 5)
    wrapped = wrap_each(copy.deepcopy(plain), mixed_precision=True, compute_dtype=torch.float32)
    device = rank_device().type
    of_plain, of_wrapped = sgd(plain), sgd(wrapped)
    for step in range(2):
        with torch.autocast(device, torch.bfloat16):
            expected = plain(randn(3, 4, key=step))
            if step == 0:
                with pytest.warns(UserWarning, match="autocast"):
                    actual = wrapped(randn(3, 4, key=step))
            else:
                actual = wrapped(randn(3, 4, key=step))
        assert torch.equal(actual, expected)
        assert actual.dtype == torch.bfloat16
        expected.float().sum().backward()
        actual.float().sum().backward()
        average_grads_(plain.parameters())
        for optimizer in (of_plain, of_wrapped):
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_autocast_sees_new_weights_after_a_reshard_inside():
    """Two passes in one autocast region, with a step between them, each compute with the current weights."""
    plain = mlp(4, 5)
    wrapped = FSDP(nn.Sequential(FSDP(copy.deepcopy(plain))), reshard_after_forward=True)
    with torch.autocast(rank_device().type, torch.bfloat16), torch.no_grad():
        wrapped(randn(3, 4))
        for param in (*plain.parameters(), *wrapped.parameters()):
            param.mul_(3)
        actual = wrapped(randn(3, 4))
    with torch.autocast(rank_device().type, torch.bfloat16), torch.no_grad():
        assert torch.equal(actual, plain(randn(3, 4)))


@on_ranks(1)
def test_cast_buffers_leaves_batch_norm_and_integers_alone():
    """`cast_buffers_` casts floating buffers of one module in place, but not BatchNorm's or integers."""
    spy, norm = Spy(), nn.BatchNorm1d(3)
    cast_buffers_(spy, dtype=torch.float16)
    cast_buffers_(norm, dtype=torch.float16)
    assert spy.table.dtype == torch.float16
    assert spy.steps.dtype == torch.int64
    assert spy.layer.weight.dtype == torch.float32
    assert norm.running_mean.dtype == torch.float32
