"""Steps taken during the backward: taken early, checked, undone."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fairshard.errors import FairshardError
from fairshard.nn import CPUOffloadPolicy, fully_shard
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.optim import CPUOptimizer, ShardedGradScaler
from fairshard.optim.early_steps import EarlySteps
from fairshard.optim.shard_step import ShardStep
from tests.kit import rank_device
from tests.models import mlp, wrap_each
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, randn

OFFLOAD = {"cpu_offload": True}
HELD = {"cpu_offload": True, "move_grads_to_cpu": False}


def build(clip_mode="wait", clip=None, momentum=0.9, **placement):
    model = wrap_each(mlp(4, 9, 7, 5), bucket_cap_mb=0, **(placement or OFFLOAD))
    return model, CPUOptimizer(
        model, torch.optim.SGD, lr=0.1, momentum=momentum, overlap=True, clip_mode=clip_mode, clip_grad_norm=clip
    )


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
    original = ShardStep.run

    def noting(step, *args):
        original(step, *args)
        stepped.append(step._shard)

    early = []

    def look(*_):
        optimizer._worker.wait_idle()
        early.extend(stepped)

    model[0].module.register_full_backward_pre_hook(look)
    loss = loss_of(model, 1)
    with mock.patch.object(ShardStep, "run", noting), optimizer.last_backward():
        loss.backward()
    assert early[0] is model[4].params[0]
    assert len(early) < len(stepped) == 3
    optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("clip", [None, 0.1])
def test_what_is_not_stepped_early_is_stepped_by_step(clip):
    """A parameter outside all units is not stepped in the backward; `step` steps it, clipped or not."""
    model = wrap_each(mlp(4, 9, 5), **OFFLOAD)
    extra = torch.nn.Parameter(torch.ones(3))
    settings = {"lr": 0.5, "overlap": True, "clip_grad_norm": clip, "clip_mode": "speculate"}
    optimizer = CPUOptimizer(model, torch.optim.SGD, params=[*model.parameters(), extra], **settings)
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
@pytest.mark.parametrize("mode", [{}, {"clip_mode": "speculate", "clip_grad_norm": 1e-2}], ids=["plain", "speculates"])
@pytest.mark.parametrize("door", ["views", "fully_shard"])
def test_parameters_without_a_gradient_are_skipped(door, mode):
    """Those of a unit that a step does not use or train have no early step, as they have none after the backward."""
    states = []
    for overlap in (True, False):
        if door == "views":
            model = FSDP(Half(), use_orig_params=True, **OFFLOAD)
        else:
            model = fully_shard(Half(), offload_policy=CPUOffloadPolicy())
        own = mode if overlap else {name: value for name, value in mode.items() if name != "clip_mode"}
        optimizer = CPUOptimizer(model, torch.optim.AdamW, lr=0.1, overlap=overlap, **own)
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
@pytest.mark.parametrize("with_scaler", [False, True])
def test_a_step_after_a_clipped_one_waits_for_the_norm(with_scaler):
    """Of steps whose gradients are clipped only the first is taken early and undone; after one that is not, all are."""
    model, optimizer = build("speculate", clip=1e-3)
    twin = wrap_each(mlp(4, 9, 7, 5), bucket_cap_mb=0, **OFFLOAD)
    waiting = CPUOptimizer(twin, torch.optim.SGD, lr=0.1, momentum=0.9, clip_grad_norm=1e-3)
    scalers = [ShardedGradScaler(rank_device().type, init_scale=8.0, enabled=with_scaler) for _ in range(2)]
    undone, early = [], []
    undo, take = EarlySteps.undo, EarlySteps._take
    with (
        mock.patch.object(EarlySteps, "undo", lambda self: undone.append(len(self.stepped())) or undo(self)),
        mock.patch.object(EarlySteps, "_take", lambda self, one: early.append(one) or take(self, one)),
    ):
        for step, clip in enumerate((1e-3, 1e-3, 1e6, 1e6, 1e-3)):
            optimizer.clip_grad_norm = waiting.clip_grad_norm = clip
            early.clear()
            with optimizer.last_backward(scalers[0]):
                scalers[0].scale(loss_of(model, step)).backward()
            assert len(early) == (3 if step in (0, 3, 4) else 0)
            scalers[1].scale(loss_of(twin, step)).backward()
            for one, scaler in ((optimizer, scalers[0]), (waiting, scalers[1])):
                scaler.step(one)
                scaler.update()
                one.zero_grad()
    assert undone == [3, 0, 3]
    assert_same_state(model.state_dict(), twin.state_dict())


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
    (grad,) = model[2]._unit.shard_grad.values()
    if edit == "in place":
        grad.mul_(2)
    elif placement == OFFLOAD:
        model[2].params[0].grad = grad * 2
    else:
        model[2].zero_grad()
    with pytest.raises(FairshardError, match=r"gradient of `2.flat_param_0` must not change"):
        optimizer.step()


@on_ranks(2)
def test_without_copies_a_backward_that_raises_breaks_the_optimizer_until_a_load():
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
def test_with_copies_a_backward_that_raises_changes_no_bit():
    """Speculative steps of an interrupted backward are undone, including the first step, which created the state."""
    model, optimizer = build("speculate", clip=1.0)
    before = bits(model, optimizer)
    for step in range(2):
        failing = model[0].module.register_full_backward_pre_hook(_fail)
        loss = loss_of(model, step)
        with pytest.raises(ValueError, match="on purpose"), optimizer.last_backward():
            loss.backward()
        failing.remove()
        assert_same_bits(bits(model, optimizer), before)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        before = bits(model, optimizer)


@on_ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_overflow_on_one_rank_undoes_the_steps_of_all(rank):
    """If ``rank`` overflows, both ranks restore their shards and momenta and halve the scale."""
    model, optimizer = build("speculate")
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    for step in range(3):
        before = bits(model, optimizer)
        overflows = step == 1
        with optimizer.last_backward(scaler):
            factor = float("inf") if overflows and dist.get_rank() == rank else 1.0
            scaler.scale(loss_of(model, step) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if overflows:
            assert_same_bits(bits(model, optimizer), before)
            assert scaler.get_scale() == 4.0
        else:
            assert not torch.equal(bits(model, optimizer)[0], before[0])


@on_ranks(2)
def test_a_scaler_must_be_named_and_used():
    """Early steps need the scaler in `last_backward` and in ``scaler.step``; omitting either raises."""
    model, optimizer = build("speculate")
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    with optimizer.last_backward():
        scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(FairshardError, match=r"with optimizer.last_backward\(scaler\)"):
        scaler.step(optimizer)
    model, optimizer = build("speculate")
    with optimizer.last_backward(scaler):
        scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(FairshardError, match=r"followed by scaler\.step"):
        optimizer.step()
    _, waiting = build()
    with pytest.raises(ValueError, match='clip_mode="speculate"'), waiting.last_backward(scaler):
        pass


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
    with mock.patch.object(ShardStep, "run", mock.Mock(side_effect=MemoryError("no more of it"))):
        with optimizer.last_backward():
            loss_of(model, 0).backward()
        with pytest.raises(FairshardError, match=r"CPU step of `\w.flat_param_0` failed.*no more of it"):
            optimizer.step()
    with pytest.raises(FairshardError, match="Load model and optimizer from a checkpoint"):
        optimizer.step()


@on_ranks(2)
def test_undoing_removes_state_that_the_step_has_made():
    """If reading ``optimizer.state[param]`` has created an empty entry, an overflow leaves it empty."""
    model, optimizer = build("speculate")
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    for param in model.parameters():
        assert optimizer.state[param] == {}
    with optimizer.last_backward(scaler):
        scaler.scale(loss_of(model, 0) * float("inf")).backward()
    scaler.step(optimizer)
    assert all(optimizer.state[param] == {} for param in model.parameters())


@on_ranks(2)
def test_a_gradient_edited_before_it_is_unscaled_is_refused():
    """With a scaler, a gradient edited after its early step raises as well."""
    model, optimizer = build("speculate")
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    with optimizer.last_backward(scaler):
        scaler.scale(loss_of(model, 0)).backward()
    model[2].params[0].grad.mul_(0)
    with pytest.raises(FairshardError, match=r"gradient of `2.flat_param_0` must not change"):
        scaler.step(optimizer)


@on_ranks(2)
def test_a_failure_on_one_rank_is_raised_on_all_before_they_clip():
    """If only rank 1 edits a gradient, rank 0 raises too instead of waiting for it in the norm."""
    model, optimizer = build("speculate", clip=1.0)
    before = bits(model, optimizer)
    with optimizer.last_backward():
        loss_of(model, 0).backward()
    if dist.get_rank() == 1:
        model[2].params[0].grad.mul_(2)
    message = "must not change between" if dist.get_rank() == 1 else "steps of another rank"
    with pytest.raises(FairshardError, match=message):
        optimizer.step()
    optimizer.state.clear()
    assert_same_bits(bits(model, optimizer), before)


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
