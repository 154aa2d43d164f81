"""Training while ranks run out of batches at different times matches DistributedDataParallel's ``join``."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from fairshard.engine.tree import units_below
from fairshard.errors import FairshardError, NonFiniteGradientError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn.comm_hooks import LowPrecisionState, fp16_compress_hook
from fairshard.optim import CPUOptimizer, ShardedGradScaler
from fairshard.utils.collectives import counters, reset_counters
from tests.models import mlp, tiny, tiny_batch, tiny_loss, wrap_each, wrap_tiny
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state, randn, sgd


def num_batches(most):
    """``most`` for the last rank, two less for each rank before it; never below 0."""
    return max(most - 2 * (dist.get_world_size() - 1 - dist.get_rank()), 0)


def run(model, optimizer, num_steps, *, key=0, num_micro=1, zero="after", clip=None, schedule=None, num_useful=99):
    """A training loop as users write it; after ``num_useful`` steps the loss is zero."""
    for step in range(num_steps):
        if zero == "before":
            optimizer.zero_grad()
        for micro in range(num_micro):
            *inputs, targets = tiny_batch(dist.get_rank(), key, step, micro)
            with model.no_sync() if micro + 1 < num_micro else contextlib.nullcontext():
                (tiny_loss(model(*inputs), targets) * float(step < num_useful)).backward()
        if clip:
            model.clip_grad_norm_(clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        if zero in ("after", "zeros"):
            optimizer.zero_grad(set_to_none=zero == "after")


def assert_as_ddp(wrapped, ddp):
    """The weights are those of DDP on every rank; exactly, if two ranks add up."""
    rtol = 0.0 if dist.get_world_size() < 3 else 1e-5
    assert_same_state(wrapped.state_dict(), ddp.module.state_dict(), rtol=rtol, atol=rtol / 10)


WAYS = {
    "plain": ({}, {}, {}),
    "zeroed before": ({}, {"zero": "before"}, {}),
    "set to zeros": ({"flatten_parameters": False}, {"zero": "zeros"}, {}),
    "accumulated": ({"reshard_after_forward": False}, {"num_micro": 2, "zero": "before"}, {}),
    "divided by those that compute": ({"cpu_offload": True}, {}, {"divide_by_initial_world_size": False}),
    "checked": ({"bucket_cap_mb": 0, "order_check": "always", "nan_check": True}, {}, {}),
    "original parameters": ({"use_orig_params": True}, {"zero": "before", "num_micro": 2}, {}),
}
COMMON = ("plain", "zeroed before", "accumulated", "divided by those that compute", "checked")


@on_ranks(in_full(1), 2, in_full(3), in_full(4))
@pytest.mark.parametrize("way", [way if way in COMMON else in_full(way) for way in WAYS])
def test_weights_are_those_of_ddp(way):
    """Weights equal DDP's after each of three blocks, bit for bit on two ranks; all ranks train between blocks.

    DDP does not update the momentum of a rank that is done; here the last rank's is broadcast to it.
    """
    kwargs, loop, joins = WAYS[way]
    wrapped, ddp = wrap_tiny(tiny(), **kwargs), DistributedDataParallel(tiny())
    of_wrapped, of_ddp = sgd(wrapped), sgd(ddp)
    for key, most in enumerate([5, 3, 6]):
        for model, optimizer in ((wrapped, of_wrapped), (ddp, of_ddp)):
            run(model, optimizer, 1, key=("all", key), **loop)
            with model.join(**joins):
                run(model, optimizer, num_batches(most), key=key, **loop)
            optimizer.zero_grad()
        for param in ddp.parameters():
            dist.broadcast(of_ddp.state[param]["momentum_buffer"], dist.get_world_size() - 1)
        assert_as_ddp(wrapped, ddp)
        assert not any(unit.is_gathered for _, unit in units_below(wrapped))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def on_the_cpu(model):
    return CPUOptimizer(model, torch.optim.AdamW, lr=1e-2, clip_grad_norm=0.1)


BF16 = {"mixed_precision": True, "compute_dtype": torch.bfloat16}
CASES = {
    "never zeroed": ({"use_orig_params": True}, sgd, {"zero": "never"}),
    "clipped": ({"use_orig_params": True}, adamw, {"clip": 0.1, "zero": "zeros"}),
    "bf16": ({**BF16, "reshard_after_forward": False}, sgd, {"num_micro": 2}),
    "held gradients": ({"cpu_offload": True, "move_grads_to_cpu": False}, on_the_cpu, {"num_micro": 2}),
    "masters in host memory": ({"move_grads_to_cpu": True}, on_the_cpu, {"zero": "zeros"}),
    "bf16, unflattened": ({**BF16, "flatten_parameters": False}, adamw, {"clip": 0.1, "num_micro": 2}),
    "reentrant": ({"bucket_cap_mb": 0.001}, sgd, {"checkpointing": "reentrant"}),
    "not reentrant": ({}, sgd, {"checkpointing": "not_reentrant", "num_micro": 2}),
    "frozen": ({"use_orig_params": True}, adamw, {"frozen": True, "clip": 0.1}),
    "hook": ({}, sgd, {"hook": fp16_compress_hook}),
}
TELLING = ("never zeroed", "clipped", "held gradients")


@on_ranks(3, in_full(2))
@pytest.mark.parametrize("case", [case if case in TELLING else in_full(case) for case in CASES])
def test_a_rank_that_is_done_gives_zeros(case):
    """A rank that is done acts, bit for bit, as if it continued with a loss of zero."""
    kwargs, make, loop = CASES[case]
    loop = dict(loop)
    checkpointing, frozen, hook = (loop.pop(name, None) for name in ("checkpointing", "frozen", "hook"))
    states = []
    for joins in (True, False):
        model = tiny(checkpointing)
        if frozen:
            model.first.requires_grad_(False)
        model = wrap_tiny(model, **kwargs)
        if hook is not None:
            model.register_comm_hook(LowPrecisionState(), hook)
        optimizer = make(model)
        for key, most in enumerate([4, 5]):
            with model.join(enable=joins, stateful=[optimizer]):
                own = num_batches(most)
                run(model, optimizer, own if joins else most, key=key, num_useful=own, **loop)
        states.append(model.state_dict())
    assert_same_state(*states)


@on_ranks(2, in_full(3))
def test_a_rank_without_any_batch_needs_to_be_told_the_optimizer():
    """An optimizer that has never stepped is not found; passed in ``stateful`` it steps, and all weights are DDP's."""
    wrapped, ddp = wrap_tiny(tiny()), DistributedDataParallel(tiny())
    of_wrapped, of_ddp = sgd(wrapped), sgd(ddp)
    for model, optimizer, stateful in ((wrapped, of_wrapped, {"stateful": [of_wrapped]}), (ddp, of_ddp, {})):
        with model.join(**stateful):
            run(model, optimizer, num_batches(2))
    assert_as_ddp(wrapped, ddp)
    before = wrapped.state_dict()
    another = sgd(wrapped)
    with pytest.raises(FairshardError, match=r"none has stepped.*join\(stateful=\[optimizer\]\)"), wrapped.join():
        run(wrapped, another, num_batches(2))
    assert_same_state(wrapped.state_dict(), before)


@on_ranks(2, in_full(3))
def test_schedulers_are_taken_along_or_asked_for():
    """A rate that changes each step differs on a rank that is done: all raise unless given the scheduler."""
    wrapped, ddp = wrap_tiny(tiny()), DistributedDataParallel(tiny())
    pairs = []
    for model in (wrapped, ddp):
        optimizer = sgd(model)
        pairs.append((model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)))
        run(*pairs[-1][:2], 1, key="all", schedule=pairs[-1][2])
    for model, optimizer, schedule in pairs:
        with model.join(**({"stateful": [schedule]} if model is wrapped else {})):
            run(model, optimizer, num_batches(4), schedule=schedule)
    assert_as_ddp(wrapped, ddp)
    model, optimizer, schedule = pairs[0]
    assert schedule.last_epoch == 1 + 4
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**5
    for short in (1, 2):  # noticed at the end of the block, or at the second step
        with pytest.raises(FairshardError, match=r"`lr` is .* on ranks .*join\(stateful=\[scheduler\]\)"), model.join():
            run(model, optimizer, 1 + short * dist.get_rank(), schedule=schedule)
        schedule.load_state_dict({**schedule.state_dict(), "last_epoch": 5})
        optimizer.param_groups[0]["lr"] = 0.1 * 0.5**5


@on_ranks(2, in_full(3))
def test_torchs_own_join():
    """``torch.distributed.algorithms.Join([model])`` does the same, with validation and more training after it."""
    states = []
    for join in (FSDP.join, lambda model: Join([model])):
        model = wrap_tiny(tiny())
        optimizer = sgd(model)
        for key in range(2):
            run(model, optimizer, 1, key=("all", key))
            with join(model):
                run(model, optimizer, num_batches(4), key=key)
            with join(model), torch.no_grad():
                for _ in range(num_batches(3)):
                    model(*tiny_batch(0)[:2])
        states.append(model.state_dict())
    assert_same_state(*states)

    def messages_of_a_step():
        reset_counters()
        run(model, optimizer, 1)
        return counters()

    expected = messages_of_a_step()
    ended = Join([model], throw_on_early_termination=True)
    with pytest.raises(RuntimeError, match=r"run out|exhausted"), ended:
        run(model, optimizer, num_batches(3))
    with Join([model], enable=False):
        assert messages_of_a_step() == expected, "no join sends any, not even `ended`, which still exists"
    assert_same_state(model.state_dict(), model.state_dict())


@on_ranks(2)
def test_a_loop_goes_on_after_an_exception():
    """A failed backward is dropped everywhere if the loop continues; if the exception leaves the block, all raise."""

    class Fault(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise KeyError("fault")

    def step(model, optimizer, index):
        loss = model(randn(2, 4, key=index)).sum()
        if index == 3:
            with pytest.raises(KeyError):
                Fault.apply(loss).backward()
            return
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    states = []
    for faulty in (True, False):
        model = wrap_each(mlp(4, 4, 4), bucket_cap_mb=0)
        optimizer = sgd(model)
        with model.join():
            for index in range(2 + 4 * dist.get_rank()):
                if faulty or index != 3:
                    step(model, optimizer, index)
        states.append(model.state_dict())
    assert_same_state(*states)

    def leave():
        with model.join():
            for index in range(2 + 4 * dist.get_rank()):
                step(model, optimizer, 0)
                if index == 4:
                    raise KeyError("batch")

    with pytest.raises((KeyError, FairshardError)) as raised:
        leave()
    assert isinstance(raised.value, KeyError) is (dist.get_rank() == 1)
    step(model, optimizer, 0)
    assert len(model.state_dict()) == 4


@on_ranks(2)
def test_gradients_that_are_not_finite_are_named_on_all_ranks():
    """``nan_check`` checks a step without one of the ranks like any other."""
    model = wrap_each(mlp(4, 4), nan_check=True)
    optimizer = sgd(model)

    def train():
        with model.join():
            for index in range(1 + 2 * dist.get_rank()):
                model(randn(2, 4) / (index < 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    model(randn(2, 4)).sum().backward()
    with pytest.raises(NonFiniteGradientError, match="on rank 1"):
        train()


@on_ranks(2)
def test_what_cannot_be_followed_is_refused():
    """Loss scaling, a closure and an averaging hook are refused by name, on all ranks."""
    model = wrap_each(mlp(4, 4))
    optimizer = sgd(model)
    scaler = ShardedGradScaler("cpu", init_scale=2.0)

    def scaled():
        scaler.scale(model(randn(2, 4)).sum()).backward()
        scaler.step(optimizer)

    def closed():
        optimizer.step(lambda: model(randn(2, 4)).sum())

    for step, says in ((scaled, "ShardedGradScaler.unscale_"), (closed, r"optimizer.step\(closure\)")):
        model(randn(2, 4)).sum().backward()
        own, match = (step, f"{says}.*run out of batches") if dist.get_rank() else (bool, "Another rank made a call")
        with pytest.raises(FairshardError, match=match), model.join():
            own()
        optimizer.zero_grad()
    model = FSDP(mlp(4, 4))
    model.register_comm_hook(None, lambda *_: None)
    with pytest.raises(ValueError, match="communication hook"), model.join(divide_by_initial_world_size=False):
        pass
    with pytest.raises(TypeError, match="str does not have them"), model.join(stateful=["optimizer"]):
        pass


@on_ranks(in_full(4))
def test_kept_parts_are_refused():
    """With ``reshard_after_forward=2`` a rank that is done has kept nothing for the backward: all ranks raise."""
    model = FSDP(mlp(4, 4), reshard_after_forward=2)
    model(randn(2, 4))
    with pytest.raises(ValueError, match=r"unit `root` keeps parameters sharded over 2 ranks"), model.join():
        pass


@on_ranks(2)
def test_what_a_rank_had_accumulated_is_not_lost():
    """A rank's ``no_sync`` gradients are sent with the other ranks' next backward; DDP would drop them."""
    model, plain = wrap_each(mlp(4, 4)), mlp(4, 4)
    optimizer, of_plain = sgd(model), sgd(plain)
    with model.join(stateful=[optimizer]):
        with model.no_sync():
            model(randn(2, 4, key=0)).sum().backward()
        if dist.get_rank():
            model(randn(2, 4, key=1)).sum().backward()
            optimizer.step()
    plain(randn(2, 4, key=0)).sum().backward()
    if dist.get_rank():
        plain(randn(2, 4, key=1)).sum().backward()
    for param in plain.parameters():
        dist.all_reduce(param.grad)
        param.grad /= 2
    of_plain.step()
    assert_same_state(model.state_dict(), plain.state_dict())


@on_ranks(1, 2)
def test_what_it_costs_while_all_compute():
    """A step costs three small all-reduces: one in the forward, one in the backward, one in the optimizer step."""
    model = wrap_each(mlp(4, 4), order_check="off")
    optimizer = sgd(model)
    model(randn(2, 4))
    counts = []
    for joins in (True, False):
        reset_counters()
        with model.join(enable=joins):
            model(randn(2, 4)).sum().backward()
            optimizer.step()
        counts.append(counters().get("all_reduce", (0, 0)))
    more = 4 if dist.get_world_size() > 1 else 0  # and one when each rank leaves
    assert (counts[0][0] - counts[1][0], counts[0][1] - counts[1][1]) == (more, 4 * more)
