"""Steps taken during the backward: taken early, checked."""

import contextlib
from unittest import mock

import pytest
import torch

from fairshard.errors import FairshardError
from fairshard.nn import CPUOffloadPolicy, fully_shard
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.optim import CPUOptimizer, ShardedGradScaler
from fairshard.optim.shard_step import Twin
from fairshard.params.grads import grads_of
from tests.models import mlp, wrap_each
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, randn

OFFLOAD = {"cpu_offload": True}
HELD = {"cpu_offload": True, "move_grads_to_cpu": False}


def build(**placement):
    model = wrap_each(mlp(4, 9, 7, 5), bucket_cap_mb=0, **(placement or OFFLOAD))
    return model, CPUOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9, overlap=True)


def loss_of(model, step):
    return model(randn(3, 4, key=step)).square().sum()


def bits(model, optimizer):
    """Weights and momenta, copied."""
    momenta = [optimizer.state[param]["momentum_buffer"].clone() for param in model.parameters() if optimizer.state]
    return [param.detach().clone() for param in model.parameters()] + momenta


def assert_same_bits(one, other):
    assert len(one) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@on_ranks(2)
def test_shards_are_stepped_while_the_backward_runs():
    """The last layer's shard is stepped before the first layer's gradient is ready."""
    model, optimizer = build()
    loss_of(model, 0).backward()  # the first forward records how often each unit is called
    optimizer.step()
    optimizer.zero_grad()
    stepped = []
    original = Twin.step_one

    def noting(twin, shard, *args):
        original(twin, shard, *args)
        stepped.append(shard)

    early = []

    def look(*_):
        optimizer._worker.wait_idle()
        early.extend(stepped)

    model[0].module.register_full_backward_pre_hook(look)
    loss = loss_of(model, 1)
    with mock.patch.object(Twin, "step_one", noting), optimizer.last_backward():
        loss.backward()
    assert early[0] is model[4].params[0]
    assert len(early) < len(stepped) == 3
    optimizer.step()


@on_ranks(2)
def test_what_is_not_stepped_early_is_stepped_by_step():
    """A parameter outside all units is not stepped in the backward; `step` steps it."""
    model = wrap_each(mlp(4, 9, 5), **OFFLOAD)
    extra = torch.nn.Parameter(torch.ones(3))
    optimizer = CPUOptimizer(model, torch.optim.SGD, params=[*model.parameters(), extra], lr=0.5, overlap=True)
    extra.grad = torch.full((3,), 2.0)
    with optimizer.last_backward():
        loss_of(model, 0).backward()
    optimizer.step()
    assert extra.tolist() == [0.0, 0.0, 0.0]


class Half(torch.nn.Module):
    """A layer, a parameter without use, and one that a step may freeze."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = torch.nn.Linear(4, 4), torch.nn.Parameter(torch.ones(4))
        self.unused = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.layer(x) * self.scale


@on_ranks(2)
@pytest.mark.parametrize("door", ["views", "fully_shard"])
def test_parameters_without_a_gradient_are_skipped(door):
    """Those of a unit that a step does not use or train have no early step, as they have none after the backward."""
    states = []
    for overlap in (True, False):
        if door == "views":
            model = FSDP(Half(), use_orig_params=True, **OFFLOAD)
        else:
            model = fully_shard(Half(), offload_policy=CPUOffloadPolicy())
        optimizer = CPUOptimizer(model, torch.optim.AdamW, lr=0.1, overlap=overlap)
        (scale,) = (param for name, param in model.named_parameters() if name.endswith("scale"))
        for step in range(3):
            scale.requires_grad_(step != 1)
            with optimizer.last_backward() if overlap else contextlib.nullcontext():
                loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        values = model.state_dict().items()
        states.append({name: value.full_tensor() if door == "fully_shard" else value for name, value in values})
    assert_same_state(*states)
    assert all(bool((value == 1).all()) for name, value in states[0].items() if name.endswith("unused"))


@on_ranks(2)
@pytest.mark.parametrize("name", ["lr", "momentum"])
def test_a_hyperparameter_changed_before_the_step_is_refused(name):
    """A hyperparameter changed after the early steps raises in `step`, by name: the shards used the old value."""
    model, optimizer = build()
    with optimizer.last_backward():
        loss_of(model, 0).backward()
    optimizer.param_groups[0][name] = 0.5
    with pytest.raises(FairshardError, match=f"Hyperparameter `{name}` must not change"):
        optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("placement", [OFFLOAD, HELD])
@pytest.mark.parametrize("edit", ["in place", "replaced"])
def test_a_gradient_edited_before_the_step_is_refused(placement, edit):
    """A gradient edited after its early step raises in `step`, by name: the edit is too late."""
    model, optimizer = build(**placement)
    with optimizer.last_backward():
        loss_of(model, 0).backward()
    (grad,) = grads_of(model[2]._unit.flat_params).values()
    if edit == "in place":
        grad.mul_(2)
    elif placement == OFFLOAD:
        model[2].params[0].grad = grad * 2
    else:
        model[2].zero_grad()
    with pytest.raises(FairshardError, match=r"gradient of `2.flat_param_0` must not change"):
        optimizer.step()


@on_ranks(2)
def test_a_backward_that_raises_breaks_the_optimizer_until_a_load():
    """An interrupted backward leaves some shards a step ahead: later steps raise and say so until a state is loaded."""
    model, optimizer = build()
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    saved, weights = optimizer.state_dict(), model.state_dict()
    failing = model[0].module.register_full_backward_pre_hook(_fail)
    loss = loss_of(model, 1)
    with pytest.raises(ValueError, match="on purpose"), optimizer.last_backward():
        loss.backward()
    failing.remove()
    with pytest.raises(FairshardError, match=r"[12] of 3 shards had been stepped .* Load model and optimizer"):
        optimizer.step()
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    optimizer.step()


def _fail(*_):
    raise ValueError("on purpose")


@on_ranks(2)
def test_a_scaler_is_refused():
    """A scaler and clipping decide after the backward: neither may be used with early steps."""
    model, optimizer = build()
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    with pytest.raises(ValueError, match="scaler that is enabled"), optimizer.last_backward(scaler):
        pass
    optimizer.clip_grad_norm = 1.0
    with pytest.raises(ValueError, match="must not be used with `clip_grad_norm`"), optimizer.last_backward():
        pass
    optimizer.clip_grad_norm = None
    with optimizer.last_backward(ShardedGradScaler("cpu", enabled=False)):
        scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(FairshardError, match="already stepped shards"):
        scaler.step(optimizer)


@on_ranks(1)
def test_last_backward_needs_overlap_and_a_step_each_time():
    """`last_backward` raises without ``overlap=True``, or if entered twice without a step."""
    model, optimizer = build()
    plain = CPUOptimizer(model, torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="overlap=True"), plain.last_backward():
        pass
    with optimizer.last_backward():
        loss_of(model, 0).backward()
    with pytest.raises(FairshardError, match="twice without a step"), optimizer.last_backward():
        pass


@on_ranks(2)
def test_a_failing_early_step_is_raised_by_step():
    """`step` raises the worker's exception with the unit's name; later steps raise as well."""
    model, optimizer = build()
    with mock.patch.object(Twin, "step_one", mock.Mock(side_effect=MemoryError("no more of it"))):
        with optimizer.last_backward():
            loss_of(model, 0).backward()
        with pytest.raises(FairshardError, match=r"CPU step of `\w.flat_param_0` failed.*no more of it"):
            optimizer.step()
    with pytest.raises(FairshardError, match="Load model and optimizer from a checkpoint"):
        optimizer.step()


class Twice(torch.nn.Module):
    """Calls a Linear inside a reentrant checkpoint, and again outside it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=True))


@on_ranks(1, 2)
@pytest.mark.parametrize("cap", [0, 25])
def test_a_shard_is_stepped_when_all_parts_of_its_gradient_are_there(cap):
    """A unit whose gradients are sent in two parts is stepped once, with their sum."""
    states = []
    for overlap in (False, True):
        torch.manual_seed(0)
        inner = FSDP(torch.nn.Linear(4, 4), cpu_offload=True, bucket_cap_mb=cap)
        model = FSDP(torch.nn.Sequential(torch.nn.Linear(4, 4), Twice(inner)), cpu_offload=True, bucket_cap_mb=cap)
        optimizer = CPUOptimizer(model, torch.optim.SGD, lr=0.1, overlap=overlap)
        for step in range(3):
            with optimizer.last_backward() if overlap else contextlib.nullcontext():
                loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


@on_ranks(1)
def test_what_computes_on_the_shard_itself_is_stepped_after_the_backward():
    """Without offload on one rank, shards are stepped after the backward, which reads the same memory."""
    model = wrap_each(mlp(4, 9, 5))
    optimizer = CPUOptimizer(model, torch.optim.SGD, lr=0.1, overlap=True)
    before = [param.detach().clone() for param in model.parameters()]
    with optimizer.last_backward():
        loss_of(model, 0).backward()
    assert_same_bits([param.detach() for param in model.parameters()], before)
    optimizer.step()
    assert not torch.equal(next(model.parameters()), before[0])
