"""What the observer reports besides the order of units, and that it leaves no trace."""

import contextlib
import copy
import gc
import itertools
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import optimizer as torch_optimizer

from fairshard.checks import method_tap
from fairshard.engine.tree import units_below
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import comm_hooks, observe
from fairshard.optim import CPUOptimizer
from tests.models import loss_of_tiny, mlp, tiny, wrap_each, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, randn, sgd

UNITS = {"", "first", "first.up", "second", "shared"}
ON_HOST = {"copy_to_host", "copy_wait"}
EVERY_STEP = {"forward", "backward", "unshard_wait", "write_grads", "reduce", "reduce_wait", "optimizer_step"}


def train(model, optimizer=None, num_steps=2):
    """Train with accumulation; return the weights."""
    optimizer = sgd(model) if optimizer is None else optimizer
    for step in range(num_steps):
        for number, context in enumerate((model.no_sync(), contextlib.nullcontext())):
            with context:
                loss_of_tiny(model, (step, number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def assert_paired(events):
    """For each unit, begins and ends of an event alternate; times never decrease."""
    assert all(before.time <= after.time for before, after in itertools.pairwise(events))
    ends = {event.event for event in events if event.event.endswith("_end")}
    for end in ends:
        name = end.removesuffix("_end")
        for fqn in {event.fqn for event in events}:
            turns = [event.event for event in events if event.fqn == fqn and event.event in (name, end)]
            if turns and name not in ("forward", "reduce"):  # a unit may call itself; reductions overlap
                assert turns == [name, end] * (len(turns) // 2), (fqn, turns)
            assert turns.count(name) == turns.count(end), (fqn, turns)
    return {end.removesuffix("_end") for end in ends}


CASES = {
    "plain": {},
    "unflattened": {"flatten_parameters": False},
    "original parameters": {"use_orig_params": True},
    "unbucketed": {"bucket_cap_mb": 0},
    "host": {"cpu_offload": True},
    "kept": {"reshard_after_forward": False},
}


@on_ranks(2)
def test_what_takes_time_has_an_end_and_changes_no_bit():
    """With any feature, each unit has one end of gradients per pass, and weights equal those of an unobserved run."""
    for case, kwargs in CASES.items():
        events = []
        model = wrap_tiny(tiny(), **kwargs)
        with observe(model, events.append):
            seen = train(model)
        assert_same_state(seen, train(wrap_tiny(tiny(), **kwargs)))
        assert assert_paired(events) == EVERY_STEP | (ON_HOST if case == "host" else set()), case
        for fqn in UNITS:
            assert sum(event[:2] == (fqn, "post_backward") for event in events) == 4, (case, fqn)
        reduced = [event.fqn for event in events if event.event == "reduce"]
        assert len(reduced) == (2 * len(UNITS) if case == "unbucketed" else 2), (case, reduced)
        assert {name for fqn in reduced for name in fqn.split(", ")} == UNITS


@on_ranks(2)
def test_frozen_checkpointed_and_hooked_units_are_told_once_a_backward():
    """With frozen parameters, checkpoints or a communication hook, every unit has one end of gradients."""
    for case in ("frozen", "reentrant", "not_reentrant", "hooked"):
        model = tiny(case if case.endswith("reentrant") else None)
        if case == "frozen":
            model.first.requires_grad_(False)
        model = wrap_tiny(model)
        if case == "hooked":
            model.register_comm_hook(comm_hooks.DefaultState(dist.group.WORLD), comm_hooks.reduce_scatter_hook)
        events = []
        with observe(model, events.append):
            loss_of_tiny(model, (0,)).backward()
        told = [event.fqn for event in events if event.event == "post_backward"]
        assert sorted(told) == sorted(UNITS), case
        assert {"forward", "backward", "reduce"} <= assert_paired(events), case


@on_ranks(2)
def test_nothing_is_left_when_it_is_removed():
    """In whatever order observers are removed, objects get their own methods back, and optimizer hooks are gone."""
    train(wrap_tiny(tiny()), num_steps=1)  # registers the engine's own hooks, once in a process
    hooks = len(torch_optimizer._global_optimizer_pre_hooks), len(torch_optimizer._global_optimizer_post_hooks)
    for is_used in (False, True):
        model = wrap_tiny(tiny())
        if is_used:
            train(model, num_steps=1)
        first, second = [], []
        one, two = observe(model, first.append), observe(model, second.append)
        train(model, num_steps=1)
        assert [event[:3] for event in first] == [event[:3] for event in second]
        one.remove()
        one.remove()
        first.clear()
        train(model, num_steps=1)
        two.remove()
        assert not first
        units = [unit for _, unit in units_below(model)]
        grads = [flat_param.grad for unit in units for flat_param in unit.flat_params]
        root = model._unit.root
        for watched in (*units, *grads, root, root.engine, root.shared.bucketer):
            assert not any(type(value).__module__ == method_tap.__name__ for value in vars(watched).values())
    assert hooks == (
        len(torch_optimizer._global_optimizer_pre_hooks),
        len(torch_optimizer._global_optimizer_post_hooks),
    )


@on_ranks(1)
def test_a_model_that_is_dropped_takes_its_observation_along():
    """Neither the model nor an optimizer hook survives; a copy of the model is not observed."""
    wrap_each(mlp(4, 4, 4))(randn(2, 4)).sum().backward()  # registers the engine's own hooks, once in a process
    hooks = len(torch_optimizer._global_optimizer_pre_hooks)
    events = []
    model = wrap_each(mlp(4, 4, 4))
    observe(model, events.append)
    copied = copy.deepcopy(model)
    copied(randn(2, 4)).sum().backward()
    assert not events
    model(randn(2, 4)).sum().backward()
    assert events
    gone = weakref.ref(model)
    del model
    deadline = time.monotonic() + 20  # autograd's thread of a device drops its references after `backward` has returned
    while (gone(), len(torch_optimizer._global_optimizer_pre_hooks)) != (None, hooks) and time.monotonic() < deadline:
        gc.collect()
    assert gone() is None
    assert len(torch_optimizer._global_optimizer_pre_hooks) == hooks


@on_ranks(1)
def test_what_outlives_a_model_keeps_no_observation():
    """The engine, which serves all models of its ranks, has no method of a dropped model's observation left."""
    events = []
    model = wrap_each(mlp(4, 4, 4))
    observe(model, events.append)
    with torch.no_grad():
        model(randn(2, 4))
    assert events
    engine, gone = model._unit.root.engine, weakref.ref(model)
    assert any(type(value).__module__ == method_tap.__name__ for value in vars(engine).values())
    del model
    gc.collect()
    assert gone() is None
    assert not any(type(value).__module__ == method_tap.__name__ for value in vars(engine).values())


@on_ranks(2)
def test_part_of_a_model():
    """Observing a part reports only its own units, by their names in the whole model, and no other optimizers."""
    model = wrap_tiny(tiny())
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    events = []
    with observe(model.first, events.append):
        train(model, num_steps=1)
        num_events = len(events)
        torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert {event.fqn for event in events if event.event != "optimizer_step"} - {""} == {
        "first",
        "first.up",
        *(event.fqn for event in events if event.event.startswith("reduce")),
    }
    assert {name for event in events for name in event.fqn.split(", ")} == {"first", "first.up", ""}
    assert len(events) == num_events


@on_ranks(2)
def test_a_pass_that_raises():
    """Every event that a failed pass began has an end, and the next pass is reported as if it had not happened."""
    model = wrap_each(mlp(4, 4, 4))
    events = []

    def fail(*_):
        raise ZeroDivisionError

    with observe(model, events.append):
        model(randn(2, 4)).sum().backward()
        events.clear()
        model(randn(2, 4)).sum().backward()
        expected = [event[:3] for event in events]
        for register in (nn.Module.register_forward_pre_hook, nn.Module.register_full_backward_pre_hook):
            hook = register(model[2].module, fail)
            events.clear()
            with pytest.raises(ZeroDivisionError):
                model(randn(2, 4)).sum().backward()
            hook.remove()
            turns = [event.event for event in events if event.event.startswith("forward")]
            assert turns.count("forward") == turns.count("forward_end")
            model(randn(2, 4)).sum().backward()  # cleans up and records the order of forwards with gradients again
            events.clear()
            model(randn(2, 4)).sum().backward()
            assert [event[:3] for event in events] == expected


@on_ranks(2)
@pytest.mark.parametrize("overlap", [False, True])
def test_the_cpu_optimizer_steps_once(overlap):
    """However many steps it splits a step into, and wherever they run, one step is reported."""
    model = wrap_tiny(tiny(), cpu_offload=True)
    optimizer = CPUOptimizer(model, torch.optim.AdamW, lr=0.01, overlap=overlap)
    events = []
    with observe(model, events.append):
        with optimizer.last_backward() if overlap else contextlib.nullcontext():
            loss_of_tiny(model, (dist.get_rank(),)).backward()
        optimizer.step()
    assert [event.event for event in events[-2:]] == ["optimizer_step", "optimizer_step_end"]
    assert sum(event.event == "optimizer_step" for event in events) == 1


@on_ranks(1)
def test_what_cannot_be_observed_is_refused():
    """A model without units is refused, and so is anything that is not a function."""
    with pytest.raises(ValueError, match="must contain sharded modules to be observed, but Linear"):
        observe(nn.Linear(2, 2), print)
    with pytest.raises(TypeError, match="`fn` must be a function of one event, but is a NoneType"):
        observe(FSDP(nn.Linear(2, 2)), None)
