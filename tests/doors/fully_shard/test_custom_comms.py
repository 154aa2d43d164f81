"""A user's own gathers and reductions run for all parameters of a module, and their results are used."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as theirs

from fairshard.errors import FairshardError, OptionsExcludeError
from fairshard.nn import AllGather, MixedPrecisionPolicy, ReduceScatter, fully_shard
from fairshard.params.route import Route
from fairshard.utils import custom_comms
from fairshard.utils.collectives import counters, reset_counters
from tests.kit import rank_device
from tests.models import mlp
from tests.on_ranks import on_ranks
from tests.reference import randn, sgd
from tests.torch_gaps import needs_default_comms


class CountingGather(AllGather):
    """Plain torch, into one buffer per size and dtype that is reused; multiplies what it gathers by ``scale``."""

    def __init__(self, scale=1.0):
        self.scale, self.num_calls, self.sizes, self._memory = scale, 0, set(), {}

    def allocate(self, size, *, dtype, device):
        return self._memory.setdefault((tuple(size), dtype), torch.empty(*size, dtype=dtype, device=device))

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        assert not async_op
        self.num_calls += 1
        self.sizes.add(group.size())
        dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)
        if self.scale != 1:
            output_tensor.mul_(self.scale)


class CountingReduce(ReduceScatter):
    """Like `CountingGather`; returns a handle to wait for."""

    def __init__(self, scale=1.0):
        self.scale, self.num_calls, self._memory = scale, 0, {}

    def allocate(self, size, *, dtype, device):
        return self._memory.setdefault((tuple(size), dtype), torch.empty(*size, dtype=dtype, device=device))

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        assert op == dist.ReduceOp.SUM
        self.num_calls += 1
        if self.scale != 1:
            input_tensor.mul_(self.scale)
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=True)


def linears(model, **kwargs):
    for layer in list(model)[::2]:
        fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


def train(model, num_steps=3):
    optimizer = sgd(model, lr=0.01)
    for step in range(num_steps):
        model(randn(3, 4, key=(step,))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.full_tensor() for param in model.parameters()]


def assert_equal(actual, expected, rtol=0.0):
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol)


@on_ranks(2)
@pytest.mark.parametrize("when", ["before the first forward", "later"])
def test_the_user_s_own_are_called_for_every_gather_and_reduction(when):
    """Custom gathers and reductions run every time, give the same bits, and leave other modules unchanged."""
    plain = mlp(4, 9, 5, 3)
    expected = train(linears(copy.deepcopy(plain)))
    model = linears(copy.deepcopy(plain))
    if when == "later":
        model(randn(3, 4)).sum()
    gather, scatter = CountingGather(), CountingReduce()
    model[0].set_custom_all_gather(gather)
    model[0].set_custom_reduce_scatter(scatter)
    model[2].set_custom_reduce_scatter(scatter)
    reset_counters()
    assert_equal(train(model), expected)
    assert gather.num_calls == 3 * 2  # forward and backward
    assert scatter.num_calls == 3 * 2  # modules
    assert counters()["all_gather"][0] == 3 * 3 * 2  # of all three modules, custom or not
    assert counters()["reduce_scatter"][0] == 3 * 3  # one for each of these two, one bucket for the rest


@needs_default_comms
@on_ranks(2)
def test_torchs_own_classes_are_accepted():
    """PyTorch's own communication classes are accepted, although they are not subclasses of ours."""
    plain = mlp(4, 9, 5, 3)
    expected = train(linears(copy.deepcopy(plain)))
    model = linears(plain)
    for layer in list(model)[::2]:
        layer.set_custom_all_gather(theirs.DefaultAllGather())
        layer.set_custom_reduce_scatter(theirs.DefaultReduceScatter())
    assert_equal(train(model), expected)


@on_ranks(2)
def test_their_results_are_used():
    """Weights and gradients that a custom gather or reduction scales come out scaled."""
    for scale in (1.0, 2.0):
        model = fully_shard(mlp(4, 3))
        model.set_custom_all_gather(CountingGather(scale))
        inputs = randn(3, 4)
        weight, bias = (param.full_tensor() for param in (model[0].weight, model[0].bias))
        torch.testing.assert_close(model(inputs), inputs @ (scale * weight).t() + scale * bias)
        model = fully_shard(mlp(4, 3))
        model.set_custom_reduce_scatter(CountingReduce(scale))
        model(torch.ones(1, 4, device=rank_device())).sum().backward()
        assert model[0].weight.grad.full_tensor().unique().tolist() == [scale]


@on_ranks(2)
def test_narrow_dtypes_and_several_in_one_module():
    """bf16 gathers, fp16 sums that would overflow, and two dtypes in one gather give the default's results."""
    for policy in (MixedPrecisionPolicy(torch.bfloat16, torch.float32), MixedPrecisionPolicy(None, torch.float16)):
        results = []
        for custom in (False, True):
            model = fully_shard(mlp(4, 3), mp_policy=policy)
            if custom:
                model.set_custom_all_gather(CountingGather())
                model.set_custom_reduce_scatter(CountingReduce())
            model(torch.full((1, 4), 60000.0, device=rank_device())).sum().backward()
            results.append([param.grad.full_tensor() for param in model.parameters()])
        assert_equal(*results)
        assert results[0][0].isfinite().all()
    model = mlp(4, 3, 2)
    model[2].double()
    inputs = randn(3, 4)
    model[1].register_forward_hook(lambda module, args, out: out.double())
    expected = copy.deepcopy(model)(inputs)
    fully_shard(model)
    gather = CountingGather()
    model.set_custom_all_gather(gather)
    assert torch.equal(model(inputs), expected)
    assert gather.num_calls == 1


@on_ranks(4)
def test_parts_and_replicas():
    """The same object gathers among 2 of 4 ranks that keep parameters; the engine itself sums over replicas."""
    gather = CountingGather()
    model = mlp(4, 9, 5)
    fully_shard(model[0], reshard_after_forward=2)
    fully_shard(model)
    model[0].set_custom_all_gather(gather)
    model(randn(3, 4)).sum().backward()
    assert gather.sizes == {2, 4}
    mesh = init_device_mesh(rank_device().type, (2, 2))
    model, scatter = fully_shard(mlp(4, 3), mesh=mesh), CountingReduce()
    model.set_custom_reduce_scatter(scatter)
    model(torch.full((1, 4), dist.get_rank() + 1.0, device=rank_device())).sum().backward()
    assert scatter.num_calls == 1
    assert model[0].weight.grad.full_tensor().unique().tolist() == [2.5]


@on_ranks(1)
def test_what_cannot_be_used_is_named():
    """Objects without the methods, and pickling, raise errors; on one rank nothing is called."""
    model = fully_shard(mlp(2, 2))
    for method in ("set_custom_all_gather", "set_custom_reduce_scatter"):
        for wrong in (None, lambda *_: None, torch.ones(1)):
            with pytest.raises(TypeError, match="`comm` must have `__call__` and `allocate`"):
                getattr(model, method)(wrong)
    gather = CountingGather()
    model.set_custom_all_gather(gather)
    model.set_custom_reduce_scatter(CountingReduce())
    model(torch.ones(1, 2, device=rank_device())).sum().backward()
    assert gather.num_calls == 0
    route = Route(gather=gather)
    assert copy.deepcopy(route).gather is gather
    with pytest.raises(FairshardError, match="must not be pickled"):
        pickle.dumps(route)


@on_ranks(2)
def test_memory_of_the_wrong_size_is_refused():
    """Memory of the wrong size raises on all ranks, before anything is sent."""

    class Short(CountingGather):
        def allocate(self, size, *, dtype, device):
            return torch.empty(size[0] - 1, dtype=dtype, device=device)

    model = fully_shard(mlp(4, 3))
    model.set_custom_all_gather(Short())
    with pytest.raises(ValueError, match="`allocate` of Short must return a contiguous tensor of"):
        model(randn(3, 4))
    model.set_custom_all_gather(CountingGather())
    model(randn(3, 4))


@pytest.mark.cpu_only("gloo is the backend without an allocator")
@on_ranks(2)
def test_memory_of_the_group_is_refused_where_there_is_none():
    """Group memory is refused on gloo, which has no allocator, and together with custom communication."""
    model = fully_shard(mlp(4, 3))
    with pytest.raises(ValueError, match="but gloo has no allocator on cpu"):
        model.set_allocate_memory_from_process_group_for_comm(True)
    with pytest.raises(ValueError, match="`enable` must be True or False"):
        model.set_allocate_memory_from_process_group_for_comm("yes")
    model.set_custom_all_gather(CountingGather())
    for kind in (OptionsExcludeError, AssertionError, ValueError):
        with pytest.raises(kind, match="Custom communication cannot use memory of the process group"):
            model.set_allocate_memory_from_process_group_for_comm(True)


@pytest.mark.cpu_only("gloo is the backend without an allocator")
@on_ranks(2)
def test_memory_of_the_group_is_used_where_there_is_some():
    """With a mocked allocator, each gather and reduction uses group memory, and results are the same."""
    made = []

    def allocate(group, size, dtype, device):
        made.append(tuple(size))
        return torch.empty(*size, dtype=dtype, device=device)

    with pytest.MonkeyPatch.context() as patch:
        plain = mlp(4, 9, 5, 3)
        expected = train(linears(copy.deepcopy(plain)))
        model = linears(plain)
        patch.setattr("fairshard.nn.data_parallel.in_place.comm.check_allocates", lambda group, device: None)
        patch.setattr(custom_comms, "_of_backend", allocate)
        model[0].set_allocate_memory_from_process_group_for_comm(True)
        with pytest.raises(OptionsExcludeError, match="cannot be combined with memory of the process group"):
            model[0].set_custom_all_gather(CountingGather())
        with pytest.raises(OptionsExcludeError, match="cannot be combined with memory of the process group"):
            model[0].set_custom_reduce_scatter(CountingReduce())
        patch.setattr(custom_comms, "SCATTER", "fake_scatter")
        patch.setattr(dist.ProcessGroup, "fake_scatter", _scatter, raising=False)
        assert_equal(train(model), expected)
        assert len(made) == 3 * (2 + 2)  # two gathers; input and output of the reduction
        model[0].set_allocate_memory_from_process_group_for_comm(False)
        model[0].set_custom_all_gather(CountingGather())


def _scatter(group, output, given):
    return dist.reduce_scatter_tensor(output, given, group=group, async_op=True)
