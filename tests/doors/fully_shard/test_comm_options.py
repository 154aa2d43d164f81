"""Minor options for communication: hooks on means, groups, events, and options that change nothing."""

import copy
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fairshard.errors import TrainingStateError
from fairshard.nn import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from fairshard.nn.data_parallel.in_place.module import root_of
from fairshard.utils.buckets import Bucketer
from fairshard.utils.streams import Stream, now
from tests.kit import rank_device
from tests.models import mlp
from tests.on_ranks import on_ranks
from tests.reference import randn, sgd


def linears(model, **kwargs):
    for layer in list(model)[::2]:
        fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


def grads_of(model, num_backwards=1):
    for key in range(num_backwards):
        model(randn(3, 4, key=(key,))).square().sum().backward()
    return [param.grad.full_tensor() for param in model.parameters()]


def own_grads(module):
    """This rank's gradients, concatenated."""
    return torch.cat([param.grad.to_local().flatten() for param in module.parameters()]).to(rank_device())


def assert_equal(actual, expected, rtol=0.0):
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol, check_device=False)


# ---- sums


@on_ranks(4)
def test_only_sums_are_launched():
    """With replicas, fp16 and a divisor all reductions are sums; gradients are the same with or without the option."""
    ops = []

    def noting(name):
        original = getattr(dist.ProcessGroup, name)

        def method(group, *args, **kwargs):
            ops.extend(arg.reduceOp for arg in (*args, *kwargs.values()) if hasattr(arg, "reduceOp"))
            return original(group, *args, **kwargs)

        return mock.patch.object(dist.ProcessGroup, name, method)

    names = ("allreduce", "reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base")
    mesh = init_device_mesh(rank_device().type, (2, 2))
    for dtype in (torch.float32, torch.float16):
        results = []
        for force in (False, True):
            model = linears(mlp(4, 9, 5), mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
            model.set_force_sum_reduction_for_comms(force)
            model.set_gradient_divide_factor(3)
            model(randn(3, 4))  # here ranks compare their models, by a maximum
            patches = [noting(name) for name in names if hasattr(dist.ProcessGroup, name)]
            with mock.patch.object(dist, "all_reduce", _only_sums(dist.all_reduce)):
                for patch in patches:
                    patch.start()
                results.append(grads_of(model))
                for patch in patches:
                    patch.stop()
        assert_equal(*results)
    assert all(op == dist.ReduceOp.SUM for op in ops)


def _only_sums(original):
    def all_reduce(tensor, op=dist.ReduceOp.SUM, **kwargs):
        assert op == dist.ReduceOp.SUM
        return original(tensor, op=op, **kwargs)

    return all_reduce


# ---- the hook on means


@on_ranks(2)
@pytest.mark.parametrize("offload_policy", [OffloadPolicy(), CPUOffloadPolicy()], ids=["", "offloaded"])
def test_the_hook_gets_the_mean_and_may_change_it(offload_policy):
    """Each module's hook gets its own mean, before it is added to the gradients of earlier backwards."""
    plain = mlp(4, 8, 6)  # shards evenly: nothing is padded
    expected = grads_of(linears(copy.deepcopy(plain)), 2)
    model = linears(copy.deepcopy(plain), offload_policy=offload_policy)
    seen = []

    def double(mean):
        seen.append(mean.clone())
        mean.mul_(2)

    model[0].set_all_reduce_hook(double)
    found = grads_of(model, 2)
    assert_equal(found[:2], [2 * grad for grad in expected[:2]])
    assert_equal(found[2:], expected[2:])
    assert len(seen) == 2
    assert_equal([2 * sum(seen)], [own_grads(model[0])])


@on_ranks(4)
def test_the_hook_may_reduce_over_replicas():
    """With a hook two pairs of ranks act as a 2 x 2 mesh; on such a mesh the hook runs after the sum over replicas."""
    plain = mlp(4, 8, 6)  # shards evenly: nothing is padded
    mesh = init_device_mesh(rank_device().type, (2, 2))
    by_mesh = linears(copy.deepcopy(plain), mesh=mesh)
    seen = []
    by_mesh[0].set_all_reduce_hook(lambda mean: seen.append(mean.clone()))
    expected = grads_of(by_mesh)
    assert_equal(seen, [own_grads(by_mesh[0])])

    replicas = init_device_mesh(rank_device().type, (2, 2), mesh_dim_names=("replicas", "shards"))
    model = linears(copy.deepcopy(plain), mesh=replicas["shards"])

    def average(mean):
        dist.all_reduce(mean, group=replicas.get_group("replicas"))
        mean.div_(2)

    for module in (*list(model)[::2], model):
        module.set_all_reduce_hook(average)
    assert_equal(grads_of(model), expected, rtol=1e-6)


@on_ranks(3)
def test_hooks_that_communicate_meet_on_all_ranks():
    """Collectives in hooks match in the group that gathers and reduces, even if one rank is late each time."""
    model = linears(mlp(4, 9, 5, 7, 3), bucket_cap_mb=0)
    totals = []
    for number, module in enumerate(list(model)[::2]):

        def total(mean, number=number):
            own = torch.tensor([float(number), dist.get_rank()], device=mean.device)
            dist.all_reduce(own)
            totals.append(own.tolist())

        module.set_all_reduce_hook(total)
    for late in range(3):
        if dist.get_rank() == late:
            torch.randn(400, 400).matmul(torch.randn(400, 400))
        model(randn(3, 4)).sum().backward()
    assert totals == [[3.0 * number, 3.0] for number in (3, 2, 1, 0)] * 3


@on_ranks(2)
def test_a_hook_that_raises_leaves_a_model_that_can_go_on():
    """The user's error is raised as it is, and the next backward works as if the failed one had not run."""
    model = linears(mlp(4, 9, 5))
    expected = grads_of(linears(mlp(4, 9, 5)))

    def fail(mean):
        raise KeyError("mine")

    model[2].set_all_reduce_hook(fail)
    with pytest.raises(KeyError, match="mine"):
        grads_of(model)
    model[2].set_all_reduce_hook(lambda mean: None)
    model.zero_grad()
    assert_equal(grads_of(model), expected)


# ---- options that change nothing


class Branches(nn.Module):
    """Uses one of two Linears."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]).to(rank_device())

    def forward(self, x, which):
        return self.parts[which](x)


@on_ranks(2)
def test_unused_parameters_count_as_zeros():
    """Ranks that use different parameters agree on the mean, with or without the option."""
    results = []
    for flag in (False, True, None):
        model = fully_shard(Branches())
        if flag is not None:
            model.set_reduce_scatter_unused_params(flag)
        model(torch.ones(1, 4, device=rank_device()), dist.get_rank()).sum().backward()
        results.append([param.grad.full_tensor() for param in model.parameters()])
    assert all(grad.unique().tolist() == [0.5] for grad in results[0])
    assert_equal(results[0], results[1])
    assert_equal(results[0], results[2])


@on_ranks(2)
def test_two_buckets_have_memory_at_a_time():
    """At most two buckets have memory at a time, for any number of modules and any ``max_input_buffers``."""
    most = []
    launch = Bucketer.launch

    def counting(self, *bucket):
        launch(self, *bucket)
        most.append(len(self._flying))

    for number in (None, 1, 100):
        model = linears(mlp(4, *[5] * 12, 3), bucket_cap_mb=0)
        if number is not None:
            model.set_reduce_scatter_max_input_buffers(number)
        with mock.patch.object(Bucketer, "launch", counting):
            model(randn(3, 4)).sum().backward()
    assert len(most) == 3 * 13
    assert max(most) <= 2


# ---- groups and streams


@on_ranks(2)
@pytest.mark.parametrize("when", ["before the first forward", "later"])
def test_reductions_can_have_a_separate_group(when):
    """A group for reductions is created once; gradients are the same with it, and after it is disabled."""
    plain = mlp(4, 9, 5)
    expected = grads_of(linears(copy.deepcopy(plain)))
    model = linears(copy.deepcopy(plain))
    if when == "later":
        model(randn(3, 4)).sum()
    model.set_separate_reduce_scatter_group()
    assert_equal(grads_of(model), expected)
    assert copy.deepcopy(model._fairshard_unit.groups).reduce.group is model._fairshard_unit.groups.reduce.group
    groups = {unit.groups.reduce.group for unit in root_of(model).units}
    assert len(groups) == 1
    assert groups != {model._fairshard_unit.groups.shard.group}
    for comm in {flat_param.comms.reduce for unit in root_of(model).units for flat_param in unit.flat_params}:
        assert comm.group in groups
        assert comm.counts["reduce_scatter"][0] == 1
    model.set_separate_reduce_scatter_group(False, recurse=False)
    model.zero_grad()
    assert_equal(grads_of(model), expected)


@on_ranks(4)
def test_a_group_for_reductions_beside_replicas():
    """On a 2 x 2 mesh the sum over shards uses the separate group; the sum over replicas does not change."""
    mesh = init_device_mesh(rank_device().type, (2, 2))
    plain = mlp(4, 9, 5)
    expected = grads_of(linears(copy.deepcopy(plain), mesh=mesh))
    model = linears(plain, mesh=mesh)
    model.set_separate_reduce_scatter_group()
    assert_equal(grads_of(model), expected)


@on_ranks(2)
def test_the_event_of_a_step_is_waited_for_once():
    """Gathers of the next pass wait for the event instead of the current stream; later passes wait as usual."""
    model = linears(mlp(4, 9, 5))
    expected = grads_of(linears(mlp(4, 9, 5)))
    stream = root_of(model).shared.unshard_stream
    event = torch.Event(device=rank_device().type)
    if rank_device().type != "cpu":
        event.record()
    waited = []
    wait = Stream.wait

    def noting(self, one):
        if self is stream:
            waited.append(one.real)
        wait(self, one)

    model.set_post_optim_event(event)
    given = root_of(model).shared.after_step
    with mock.patch.object(Stream, "wait", noting):
        with mock.patch("fairshard.engine.shared.now", side_effect=now) as moment:
            model(randn(3, 4, key=(0,)))
            is_asynchronous = rank_device().type != "cpu"
            assert given is not None
            assert moment.call_count == 0 or is_asynchronous
        assert root_of(model).shared.after_step is None
        assert_equal(grads_of(model), expected)
    assert len(waited) >= 2  # at the start of each pass; on asynchronous streams each gather also waits
    optimizer = sgd(model)
    optimizer.step()
    model.set_post_optim_event(event)
    model(randn(3, 4))


# ---- arguments


@on_ranks(1)
def test_wrong_arguments_are_named():
    """A wrong argument raises an error that says what the method takes, before anything changes."""
    model = fully_shard(mlp(2, 2))
    flags = (
        "set_force_sum_reduction_for_comms",
        "set_reduce_scatter_unused_params",
        "set_separate_reduce_scatter_group",
        "set_allocate_memory_from_process_group_for_comm",
    )
    for method in flags:
        with pytest.raises(ValueError, match="must be True or False, but is 1"):
            getattr(model, method)(1)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="`max_input_buffers` must be 1 or more"):
            model.set_reduce_scatter_max_input_buffers(wrong)
    for wrong in (True, 1.0, None):
        with pytest.raises(TypeError, match="`max_input_buffers` must be an int"):
            model.set_reduce_scatter_max_input_buffers(wrong)
    with pytest.raises(TypeError, match="`hook` must be callable"):
        model.set_all_reduce_hook(None)
    with pytest.raises(TypeError, match="`stream` must be a stream of the device"):
        model.set_all_reduce_hook(print, stream=1)
    for wrong in (None, threading.Event()):
        with pytest.raises(TypeError, match="`event` must be a"):
            model.set_post_optim_event(wrong)
    with pytest.raises(ValueError, match='`backend` must be "NCCL"'):
        model.set_symm_mem_for_comm("NVSHMEM")
    with pytest.raises(NotImplementedError, match="`set_symm_mem_for_comm` is not supported"):
        model.set_symm_mem_for_comm()
    hybrid = fully_shard(mlp(2, 2), mesh=init_device_mesh(rank_device().type, (1, 1)))
    with pytest.raises(ValueError, match="`stream` must be None on a mesh with replicas"):
        hybrid.set_all_reduce_hook(print, stream=object())
    model.set_separate_reduce_scatter_group()
    seen = []
    model.set_all_reduce_hook(seen.append)
    model.register_forward_hook(lambda *_: model.set_all_reduce_hook(print))
    with pytest.raises(TrainingStateError, match="`set_all_reduce_hook` must be called between passes"):
        model(torch.ones(1, 2, device=rank_device()))
    model._forward_hooks.clear()
    model(torch.ones(1, 2, device=rank_device())).sum().backward()
    assert len(seen) == 1
