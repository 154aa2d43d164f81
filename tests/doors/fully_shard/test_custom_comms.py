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
from tests.kit.doors import shard, whole, whole_grads
from tests.models import mlp
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, randn, run_steps, squares
from tests.torch_gaps import needs_default_comms

pytestmark = pytest.mark.behaviour("communication of users")


class Reused:
    """Memory for each size and dtype that is reused; counts calls, and multiplies by ``scale``."""

    def __init__(self, scale=1.0):
        self.scale, self.num_calls, self.sizes, self._memory = scale, 0, set(), {}

    def allocate(self, size, *, dtype, device):
        return self._memory.setdefault((tuple(size), dtype), torch.empty(*size, dtype=dtype, device=device))


class CountingGather(Reused, AllGather):
    """Plain torch, which waits."""

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        assert not async_op
        self.num_calls += 1
        self.sizes.add(group.size())
        dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)
        if self.scale != 1:
            output_tensor.mul_(self.scale)


class CountingReduce(Reused, ReduceScatter):
    """Plain torch, which returns a handle to wait for."""

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        assert op == dist.ReduceOp.SUM
        self.num_calls += 1
        if self.scale != 1:
            input_tensor.mul_(self.scale)
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=True)


class Short(CountingGather):
    """Gives too little memory."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(size[0] - 1, dtype=dtype, device=device)


def linears():
    return shard(mlp(4, 9, 5, 3), "fully_shard", "0", "2", "4")


def trained(model):
    run_steps(model, lambda net, key: squares(net, key) / 100)
    return whole(model)


def backward(model, size=1.0):
    model(torch.full((1, 4), size, device=rank_device())).sum().backward()


@on_ranks(2)
@pytest.mark.parametrize("when", ["before the first forward", "later"])
def test_the_user_s_own_are_called_for_every_gather_and_reduction(when):
    """Custom gathers and reductions run every time, give the same bits, and leave other modules unchanged."""
    expected, model = trained(linears()), linears()
    if when == "later":
        model(randn(3, 4)).sum()
    gather, scatter = CountingGather(), CountingReduce()
    model[0].set_custom_all_gather(gather)
    model[0].set_custom_reduce_scatter(scatter)
    model[2].set_custom_reduce_scatter(scatter)
    reset_counters()
    assert_same_state(trained(model), expected)
    assert gather.num_calls == 3 * 2  # forward and backward
    assert scatter.num_calls == 3 * 2  # modules
    assert counters()["all_gather"][0] == 3 * 3 * 2  # of all three modules, custom or not
    assert counters()["reduce_scatter"][0] == 3 * 3  # one for each of these two, one bucket for the rest


@needs_default_comms
@on_ranks(2)
def test_torchs_own_classes_are_accepted():
    """PyTorch's own communication classes are accepted, although they are not subclasses of ours."""
    expected, model = trained(linears()), linears()
    for layer in list(model)[::2]:
        layer.set_custom_all_gather(theirs.DefaultAllGather())
        layer.set_custom_reduce_scatter(theirs.DefaultReduceScatter())
    assert_same_state(trained(model), expected)


@on_ranks(2)
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_their_results_are_used(scale):
    """Weights and gradients that a custom gather or reduction scales come out scaled."""
    model, inputs = fully_shard(mlp(4, 3)), randn(3, 4)
    model.set_custom_all_gather(CountingGather(scale))
    weight, bias = whole(model).values()
    torch.testing.assert_close(model(inputs), inputs @ (scale * weight).t() + scale * bias)
    model = fully_shard(mlp(4, 3))
    model.set_custom_reduce_scatter(CountingReduce(scale))
    backward(model)
    assert model[0].weight.grad.full_tensor().unique().tolist() == [scale]


@on_ranks(2)
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (None, torch.float16)])
def test_narrow_dtypes(dtypes):
    """bf16 gathers, and fp16 sums that would overflow, give the default's results."""
    results = []
    for custom in (False, True):
        model = fully_shard(mlp(4, 3), mp_policy=MixedPrecisionPolicy(*dtypes))
        if custom:
            model.set_custom_all_gather(CountingGather())
            model.set_custom_reduce_scatter(CountingReduce())
        backward(model, 60000.0)
        results.append(whole_grads(model))
    assert_same_state(*results)
    assert results[0]["0.weight"].isfinite().all()


@on_ranks(2)
def test_several_dtypes_in_one_module():
    """Two dtypes of a unit are gathered at once."""
    model, inputs, gather = mlp(4, 3, 2), randn(3, 4), CountingGather()
    model[2].double()
    model[1].register_forward_hook(lambda module, args, out: out.double())
    expected = copy.deepcopy(model)(inputs)
    fully_shard(model).set_custom_all_gather(gather)
    assert torch.equal(model(inputs), expected)
    assert gather.num_calls == 1


@on_ranks(4)
def test_parts_and_replicas():
    """The same object gathers among 2 of 4 ranks that keep parameters; the engine itself sums over replicas."""
    gather, model = CountingGather(), mlp(4, 9, 5)
    fully_shard(model[0], reshard_after_forward=2)
    fully_shard(model)
    model[0].set_custom_all_gather(gather)
    backward(model)
    assert gather.sizes == {2, 4}
    mesh = init_device_mesh(rank_device().type, (2, 2))
    model, scatter = fully_shard(mlp(4, 3), mesh=mesh), CountingReduce()
    model.set_custom_reduce_scatter(scatter)
    backward(model, dist.get_rank() + 1.0)
    assert scatter.num_calls == 1
    assert model[0].weight.grad.full_tensor().unique().tolist() == [2.5]


@on_ranks(1)
def test_on_one_rank_nothing_is_called():
    """They are not needed there; a route with them is copied, and must not be pickled."""
    model, gather = fully_shard(mlp(4, 2)), CountingGather()
    model.set_custom_all_gather(gather)
    model.set_custom_reduce_scatter(CountingReduce())
    backward(model)
    assert gather.num_calls == 0
    route = Route(gather=gather)
    assert copy.deepcopy(route).gather is gather
    with pytest.raises(FairshardError, match="must not be pickled"):
        pickle.dumps(route)


@pytest.mark.cpu_only("gloo is the backend without an allocator")
@on_ranks(2)
def test_what_cannot_be_used_is_named():
    """Objects without the methods, memory of the wrong size, and memory of a group that has none or is not wanted."""
    model = fully_shard(mlp(4, 3))
    own_memory = model.set_allocate_memory_from_process_group_for_comm
    for method in (model.set_custom_all_gather, model.set_custom_reduce_scatter):
        for wrong in (None, lambda *_: None, torch.ones(1)):
            with pytest.raises(TypeError, match="`comm` must have `__call__` and `allocate`"):
                method(wrong)
    with pytest.raises(ValueError, match="but gloo has no allocator on cpu"):
        own_memory(True)
    with pytest.raises(ValueError, match="`enable` must be True or False"):
        own_memory("yes")
    model.set_custom_all_gather(Short())
    with pytest.raises(ValueError, match="`allocate` of Short must return a contiguous tensor of"):
        model(randn(3, 4))  # on all ranks, before anything is sent
    model.set_custom_all_gather(CountingGather())
    model(randn(3, 4))
    for kind in (OptionsExcludeError, AssertionError, ValueError):
        with pytest.raises(kind, match="Custom communication cannot use memory of the process group"):
            own_memory(True)


def _scatter(group, output, given):
    return dist.reduce_scatter_tensor(output, given, group=group, async_op=True)


@pytest.mark.cpu_only("gloo is the backend without an allocator")
@on_ranks(2)
def test_memory_of_the_group_is_used_where_there_is_some():
    """With a mocked allocator, each gather and reduction uses group memory, and results are the same."""
    made, expected, model = [], trained(linears()), linears()

    def allocate(group, size, dtype, device):
        made.append(tuple(size))
        return torch.empty(*size, dtype=dtype, device=device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fairshard.nn.data_parallel.in_place.comm.check_allocates", lambda group, device: None)
        patch.setattr(custom_comms, "_of_backend", allocate)
        model[0].set_allocate_memory_from_process_group_for_comm(True)
        for method, comm in (("all_gather", CountingGather()), ("reduce_scatter", CountingReduce())):
            with pytest.raises(OptionsExcludeError, match="cannot be combined with memory of the process group"):
                getattr(model[0], f"set_custom_{method}")(comm)
        patch.setattr(custom_comms, "SCATTER", "fake_scatter")
        patch.setattr(dist.ProcessGroup, "fake_scatter", _scatter, raising=False)
        assert_same_state(trained(model), expected)
        assert len(made) == 3 * (2 + 2)  # two gathers; input and output of the reduction
        model[0].set_allocate_memory_from_process_group_for_comm(False)
        model[0].set_custom_all_gather(CountingGather())
