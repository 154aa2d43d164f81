"""Stages sharded by `fully_shard` in torch's pipeline schedules train like unsharded ones."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor

from fairshard.errors import FairshardError
from fairshard.nn import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fairshard.utils.collectives import counters, reset_counters
from tests.doors.fully_shard.models import torch_fully_shard
from tests.kit import rank_device
from tests.on_ranks import in_full, on_ranks
from tests.reference import sgd
from tests.torch_gaps import needs_1f1b_on_gloo, needs_fsdp2_on_cpu

pytestmark = pytest.mark.behaviour("pipelining")

WIDTH, NUM_MICROBATCHES, NUM_STEPS = 5, 4, 2


class Block(nn.Module):
    """Two layers, one with a frozen bias, with a path around them; and a parameter that nothing uses."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.up.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def meshes(num_stages):
    shape = (num_stages, dist.get_world_size() // num_stages)
    return init_device_mesh(rank_device().type, shape, mesh_dim_names=("pp", "dp"))


def train(name, mesh, shard, num_on_rank=1, loss_fn=nn.functional.mse_loss, interrupt=None):
    """Losses and gradients of this rank's stages; data-parallel ranks have different batches."""
    torch.manual_seed(0)
    place, num_places = mesh.get_local_rank("pp"), mesh.size(0)
    blocks = [Block() for _ in range(4)]
    num_stages = num_places * num_on_rank
    length = len(blocks) // num_stages
    indexes = range(place, num_stages, num_places)
    modules = [nn.Sequential(*blocks[index * length : (index + 1) * length]) for index in indexes]
    for module in modules:
        shard(module)
    group = mesh.get_group("pp")
    stages = [
        PipelineStage(module, index, num_stages, rank_device(), group=group)
        for module, index in zip(modules, indexes, strict=True)
    ]

    def new_schedule():
        return getattr(schedules, name)(stages[0] if num_on_rank == 1 else stages, NUM_MICROBATCHES, loss_fn=loss_fn)

    schedule = new_schedule()
    optimizers = [sgd(module) for module in modules]
    found = []

    def step(number):
        generator = torch.Generator().manual_seed(100 * number + mesh.get_local_rank("dp"))
        batch = torch.randn(2, 2 * NUM_MICROBATCHES, WIDTH, generator=generator, device="cpu")
        inputs, targets = batch.to(rank_device())
        losses = []
        given = (inputs,) if place == 0 else ()
        wanted = {"target": targets, "losses": losses} if num_stages - 1 in indexes else {}
        schedule.step(*given, **wanted)
        found.extend(loss.detach() for loss in losses)

    for number in range(NUM_STEPS):
        if interrupt is not None and number == NUM_STEPS - 1:
            interrupt(lambda: step(-1))
            schedule = new_schedule()  # torch's keeps the losses of a step that raised
            for module in modules:
                module.zero_grad()
        step(number)
        found += [grad_of(param, mesh) for module in modules for param in module.parameters()]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return found


def grad_of(param, mesh):
    """The whole gradient; that of an unsharded parameter is averaged over the data-parallel ranks first."""
    if param.grad is None or isinstance(param, DTensor):
        return None if param.grad is None else param.grad.full_tensor()
    dist.all_reduce(param.grad, group=mesh.get_group("dp"))
    param.grad /= mesh.size(1)
    return param.grad.clone()


def sharding(door, mesh, **how):
    def shard(module):
        for block in module:
            door(block, mesh=mesh["dp"], **how)
        door(module, mesh=mesh["dp"], **how)

    return shard


def whole(_module):
    """Leaves a stage as it is."""


@on_ranks(2)
@pytest.mark.parametrize("name", ["ScheduleGPipe", pytest.param("Schedule1F1B", marks=needs_1f1b_on_gloo)])
def test_stages_train_like_whole_ones(name):
    """Losses and gradients are those of unsharded stages, kept gathered between microbatches or not."""
    mesh = meshes(2)
    expected = train(name, mesh, whole)
    for how in ({}, {"reshard_after_forward": False}, {"offload_policy": CPUOffloadPolicy()}):
        assert_equal(train(name, mesh, sharding(fully_shard, mesh, **how)), expected)


@needs_1f1b_on_gloo
@on_ranks(2)
def test_several_stages_on_a_rank():
    """The stages of a rank are models of their own."""
    mesh = meshes(2)
    expected = train("ScheduleInterleaved1F1B", mesh, whole, num_on_rank=2)
    assert_equal(train("ScheduleInterleaved1F1B", mesh, sharding(fully_shard, mesh), num_on_rank=2), expected)


@needs_1f1b_on_gloo
@on_ranks(4)
@pytest.mark.parametrize("name", ["Schedule1F1B", in_full("ScheduleGPipe")])
def test_replicated_stages_average_gradients(name):
    """With two data-parallel ranks a stage, gradients are the mean, bit for bit: a sum of two, halved."""
    mesh = meshes(2)
    expected = train(name, mesh, whole)
    for how in ({}, {"reshard_after_forward": False}, {"bucket_cap_mb": 0}):
        assert_equal(train(name, mesh, sharding(fully_shard, mesh, **how)), expected)


@needs_1f1b_on_gloo
@on_ranks(2)
def test_gradients_are_reduced_once_a_step():
    """With two ranks and one stage, microbatches only keep gradients; the step sends one bucket."""
    mesh = meshes(1)
    expected = train("Schedule1F1B", mesh, whole)
    reset_counters()
    assert_equal(train("Schedule1F1B", mesh, sharding(fully_shard, mesh)), expected)
    assert counters()["reduce_scatter"][0] == NUM_STEPS


@needs_1f1b_on_gloo
@on_ranks(2)
def test_after_an_exception_in_a_microbatch():
    """A step that raised after some backwards, and whose gradients were zeroed, leaves nothing behind."""
    mesh = meshes(1)
    fails = []

    def loss_fn(outputs, targets):
        if fails and fails.pop():
            raise ArithmeticError
        return nn.functional.mse_loss(outputs, targets)

    def interrupt(step):
        fails[:] = [True, False, False]
        with pytest.raises(ArithmeticError):
            step()

    expected = train("Schedule1F1B", mesh, whole)
    found = train("Schedule1F1B", mesh, sharding(fully_shard, mesh), loss_fn=loss_fn, interrupt=interrupt)
    assert_equal(found, expected)


@needs_fsdp2_on_cpu
@on_ranks(2)
def test_a_mixed_precision_keeps_gradients_in_the_wider_dtype():
    """Microbatches in bf16 with fp32 reduction add up in fp32: equal to the same stages on PyTorch's engine."""
    mesh = meshes(2)
    how = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    expected = train("Schedule1F1B", mesh, sharding(torch_fully_shard, mesh, **how))
    assert_equal(train("Schedule1F1B", mesh, sharding(fully_shard, mesh, **how)), expected)


@on_ranks(1)
def test_a_split_backward_is_refused():
    """A schedule that computes gradients of inputs first would leave the parameters without any: it raises."""
    model = nn.Sequential(Block(), Block())
    for block in model:
        fully_shard(block)
    fully_shard(model)
    stage = PipelineStage(model, 1, 2, rank_device())
    inputs = torch.randn(2, WIDTH, requires_grad=True)
    outputs = model(inputs)
    given = {"stage_output": (outputs,), "output_grads": (torch.ones_like(outputs),), "input_values": [inputs]}
    with pytest.raises(RuntimeError) as raised:
        stage.backward_maybe_with_nosync("input", given)
    error = raised.value.__cause__ or raised.value  # torch 2.6 raises it as it is
    assert isinstance(error, FairshardError)
    assert "ScheduleInterleaved1F1B" in str(error)


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one is other is None or torch.equal(one, other)
