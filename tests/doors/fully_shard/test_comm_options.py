"""Minor options for communication: hooks on means, groups, events, and options that change nothing."""

import contextlib
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
from tests.kit.doors import shard, whole_grads
from tests.models import mlp
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, randn, sgd, squares

pytestmark = pytest.mark.behaviour("options of communication")


def linears(*widths, **kwargs):
    """Each Linear as a unit; the first two of the default widths shard evenly over two ranks, so nothing is padded."""
    model = mlp(*(widths or (4, 8, 6)))
    return shard(model, "fully_shard", *(str(index) for index in range(0, len(model), 2)), **kwargs)


def grads_of(model, num_backwards=1):
    for key in range(num_backwards):
        squares(model, key).backward()
    return whole_grads(model)


def own_grads(module):
    """This rank's gradients, concatenated."""
    return torch.cat([param.grad.to_local().flatten() for param in module.parameters()]).to(rank_device())


def two_by_two():
    return init_device_mesh(rank_device().type, (2, 2), mesh_dim_names=("replicas", "shards"))


# ---- sums


@contextlib.contextmanager
def noted_operations():
    """The operations of all reductions in this context."""
    ops, all_reduce = [], dist.all_reduce

    def noting(original):
        def method(group, *args, **kwargs):
            ops.extend(arg.reduceOp for arg in (*args, *kwargs.values()) if hasattr(arg, "reduceOp"))
            return original(group, *args, **kwargs)

        return method

    def noted_all_reduce(tensor, op=dist.ReduceOp.SUM, **kwargs):
        ops.append(op)
        return all_reduce(tensor, op=op, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(dist, "all_reduce", noted_all_reduce))
        for name in ("allreduce", "reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base"):
            original = getattr(dist.ProcessGroup, name, None)
            if original is not None:
                stack.enter_context(mock.patch.object(dist.ProcessGroup, name, noting(original)))
        yield ops


@on_ranks(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_only_sums_are_launched(dtype):
    """With replicas, fp16 and a divisor all reductions are sums; gradients are the same with or without the option."""
    results = []
    for force in (False, True):
        model = linears(4, 9, 5, mesh=two_by_two(), mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        model.set_force_sum_reduction_for_comms(force)
        model.set_gradient_divide_factor(3)
        model(randn(3, 4))  # here ranks compare their models, by a maximum
        with noted_operations() as ops:
            squares(model).backward()
        assert set(ops) <= {dist.ReduceOp.SUM}  # ranks that exchange their rows directly need no operation
        results.append(whole_grads(model))
    assert_same_state(*results)


# ---- the hook on means


@on_ranks(2)
@pytest.mark.parametrize("offload_policy", [OffloadPolicy(), CPUOffloadPolicy()], ids=["", "offloaded"])
def test_the_hook_gets_the_mean_and_may_change_it(offload_policy):
    """Each module's hook gets its own mean, before it is added to the gradients of earlier backwards."""
    expected = grads_of(linears(), 2)
    model, seen = linears(offload_policy=offload_policy), []

    def double(mean):
        seen.append(mean.clone())
        mean.mul_(2)

    model[0].set_all_reduce_hook(double)
    found = grads_of(model, 2)
    doubled = {name: grad * (2 if name.startswith("0") else 1) for name, grad in expected.items()}
    assert_same_state(found, doubled)
    assert len(seen) == 2
    assert torch.equal(2 * sum(seen), own_grads(model[0]))


@on_ranks(4)
def test_the_hook_may_reduce_over_replicas():
    """With a hook two pairs of ranks act as a 2 x 2 mesh; on such a mesh the hook runs after the sum over replicas."""
    mesh, seen = two_by_two(), []
    by_mesh, model = linears(mesh=mesh), linears(mesh=mesh["shards"])
    by_mesh[0].set_all_reduce_hook(lambda mean: seen.append(mean.clone()))
    expected = grads_of(by_mesh)
    assert torch.equal(*seen, own_grads(by_mesh[0]))

    def average(mean):
        dist.all_reduce(mean, group=mesh.get_group("replicas"))
        mean.div_(2)

    for module in (*list(model)[::2], model):
        module.set_all_reduce_hook(average)
    assert_same_state(grads_of(model), expected, rtol=1e-6, atol=1e-6)


@on_ranks(3)
def test_hooks_that_communicate_meet_on_all_ranks():
    """Collectives in hooks match in the group that gathers and reduces, even if one rank is late each time."""
    model, totals = linears(4, 9, 5, 7, 3, bucket_cap_mb=0), []
    for number, module in enumerate(list(model)[::2]):

        def total(mean, number=number):
            own = torch.tensor([float(number), dist.get_rank()], device=mean.device)
            dist.all_reduce(own)
            totals.append(own.tolist())

        module.set_all_reduce_hook(total)
    for late in range(3):
        if dist.get_rank() == late:
            torch.randn(400, 400).matmul(torch.randn(400, 400))
        squares(model).backward()
    assert totals == [[3.0 * number, 3.0] for number in (3, 2, 1, 0)] * 3


@on_ranks(2)
def test_a_hook_that_raises_leaves_a_model_that_can_go_on():
    """The user's error is raised as it is, and the next backward works as if the failed one had not run."""
    model, expected = linears(), grads_of(linears())

    def fail(mean):
        raise KeyError("mine")

    model[2].set_all_reduce_hook(fail)
    with pytest.raises(KeyError, match="mine"):
        squares(model).backward()
    model[2].set_all_reduce_hook(lambda mean: None)
    model.zero_grad()
    assert_same_state(grads_of(model), expected)


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
@pytest.mark.parametrize("flag", [False, True, None])
def test_unused_parameters_count_as_zeros(flag):
    """Ranks that use different parameters agree on the mean, with or without the option."""
    model = fully_shard(Branches())
    if flag is not None:
        model.set_reduce_scatter_unused_params(flag)
    model(torch.ones(1, 4, device=rank_device()), dist.get_rank()).sum().backward()
    assert all(grad.unique().tolist() == [0.5] for grad in whole_grads(model).values())


@on_ranks(2)
@pytest.mark.parametrize("number", [None, 1, 100])
def test_two_buckets_have_memory_at_a_time(number):
    """At most two buckets have memory at a time, for any number of modules and any ``max_input_buffers``."""
    most, launch = [], Bucketer.launch

    def counting(self, *bucket):
        launch(self, *bucket)
        most.append(len(self._flying))

    model = linears(4, *[5] * 12, 3, bucket_cap_mb=0)
    if number is not None:
        model.set_reduce_scatter_max_input_buffers(number)
    with mock.patch.object(Bucketer, "launch", counting):
        squares(model).backward()
    assert len(most) == 13
    assert max(most) <= 2


# ---- groups and streams


@on_ranks(2)
@pytest.mark.parametrize("when", ["before the first forward", "later"])
def test_reductions_can_have_a_separate_group(when):
    """A group for reductions is created once; gradients are the same with it, and after it is disabled."""
    expected, model = grads_of(linears()), linears()
    if when == "later":
        model(randn(3, 4)).sum()
    model.set_separate_reduce_scatter_group()
    assert_same_state(grads_of(model), expected)
    own = model._fairshard_unit.groups
    assert copy.deepcopy(own).reduce.group is own.reduce.group
    assert own.reduce.group != own.shard.group
    units = root_of(model).units
    assert {unit.groups.reduce.group for unit in units} == {own.reduce.group}
    for comm in {flat_param.comms.reduce for unit in units for flat_param in unit.flat_params}:
        assert comm.group == own.reduce.group
        assert comm.counts["reduce_scatter"][0] == 1
    model.set_separate_reduce_scatter_group(False, recurse=False)
    model.zero_grad()
    assert_same_state(grads_of(model), expected)


@on_ranks(4)
def test_a_group_for_reductions_beside_replicas():
    """On a 2 x 2 mesh the sum over shards uses the separate group; the sum over replicas does not change."""
    mesh = two_by_two()
    expected, model = grads_of(linears(mesh=mesh)), linears(mesh=mesh)
    model.set_separate_reduce_scatter_group()
    assert_same_state(grads_of(model), expected)


@on_ranks(2)
def test_the_event_of_a_step_is_waited_for_once():
    """Gathers of the next pass wait for the event instead of the current stream; later passes wait as usual."""
    model, expected = linears(), grads_of(linears())
    stream = root_of(model).shared.unshard_stream
    is_asynchronous = rank_device().type != "cpu"
    event = torch.Event(device=rank_device().type)
    if is_asynchronous:
        event.record()
    waited, wait = [], Stream.wait

    def noting(self, one):
        if self is stream:
            waited.append(one.real)
        wait(self, one)

    model.set_post_optim_event(event)
    given = root_of(model).shared.after_step
    with mock.patch.object(Stream, "wait", noting):
        with mock.patch("fairshard.engine.shared.now", side_effect=now) as moment:
            model(randn(3, 4))
            assert given is not None
            assert moment.call_count == 0 or is_asynchronous
        assert root_of(model).shared.after_step is None
        assert_same_state(grads_of(model), expected)
    assert len(waited) >= 2  # at the start of each pass; on asynchronous streams each gather also waits
    sgd(model).step()
    model.set_post_optim_event(event)
    model(randn(3, 4))


# ---- arguments

WRONG = [  # a method, its arguments, and the error
    *(
        (f"set_{name}", [1], ValueError, "must be True or False, but is 1")
        for name in (
            "force_sum_reduction_for_comms",
            "reduce_scatter_unused_params",
            "separate_reduce_scatter_group",
            "allocate_memory_from_process_group_for_comm",
        )
    ),
    *(
        ("set_reduce_scatter_max_input_buffers", [wrong], ValueError, "`max_input_buffers` must be 1 or more")
        for wrong in (0, -1)
    ),
    *(
        ("set_reduce_scatter_max_input_buffers", [wrong], TypeError, "`max_input_buffers` must be an int")
        for wrong in (True, 1.0, None)
    ),
    ("set_all_reduce_hook", [None], TypeError, "`hook` must be callable"),
    *(("set_post_optim_event", [wrong], TypeError, "`event` must be a") for wrong in (None, threading.Event())),
    ("set_symm_mem_for_comm", ["NVSHMEM"], ValueError, '`backend` must be "NCCL"'),
    ("set_symm_mem_for_comm", [], NotImplementedError, "`set_symm_mem_for_comm` is not supported"),
]


@on_ranks(1)
def test_wrong_arguments_are_named():
    """A wrong argument raises an error that says what the method takes, before anything changes."""
    model, seen = fully_shard(mlp(4, 2)), []
    for method, arguments, error, match in WRONG:
        with pytest.raises(error, match=match):
            getattr(model, method)(*arguments)
    with pytest.raises(TypeError, match="`stream` must be a stream of the device"):
        model.set_all_reduce_hook(print, stream=1)
    hybrid = fully_shard(mlp(2, 2), mesh=init_device_mesh(rank_device().type, (1, 1)))
    with pytest.raises(ValueError, match="`stream` must be None on a mesh with replicas"):
        hybrid.set_all_reduce_hook(print, stream=object())
    model.set_separate_reduce_scatter_group()
    model.set_all_reduce_hook(seen.append)
    handle = model.register_forward_hook(lambda *_: model.set_all_reduce_hook(print))
    with pytest.raises(TrainingStateError, match="`set_all_reduce_hook` must be called between passes"):
        model(randn(1, 4))
    handle.remove()
    squares(model).backward()
    assert len(seen) == 1
