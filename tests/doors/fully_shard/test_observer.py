"""The observer reports on models sharded in place everything that it reports on wrapped ones."""

import copy

import pytest
import torch
from torch import nn

from fairshard.nn import CPUOffloadPolicy, fully_shard, observe
from tests.kit.doors import shard, whole
from tests.models import loss_of_tiny, mlp, tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, randn, run_steps

pytestmark = pytest.mark.behaviour("observers of fully_shard")

UNITS = {"", "first", "second, shared"}
EVERY_STEP = {"forward", "backward", "unshard_wait", "write_grads", "reduce", "reduce_wait", "optimizer_step"}
CASES = {  # settings, what else takes time, and the number of buckets in two steps
    "plain": ({}, set(), 2),
    "unbucketed": ({"bucket_cap_mb": 0}, set(), 2 * len(UNITS)),
    "host": ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {"copy_to_host", "copy_wait"}, 2),
}


def sharded(case="plain"):
    """A `tiny` sharded into a unit, a group and the rest."""
    model, kwargs = tiny(), CASES[case][0]
    fully_shard(model.first, **kwargs)
    fully_shard([model.second, model.shared], **kwargs)
    return fully_shard(model, **kwargs)


def trained(model):
    """The whole weights after training with accumulation."""
    run_steps(model, loss_of_tiny, 2, 2)
    return whole(model)


@on_ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_what_takes_time_has_an_end_and_changes_no_bit(case):
    """Every begin has an end, each unit gets gradients once per backward, and an unobserved twin the same weights.

    A copy of an observed model is not observed, trains like the original, and can be observed itself.
    """
    events, of_copy, model = [], [], sharded(case)
    with observe(model, events.append):
        seen = trained(model)
        assert_same_state(seen, trained(sharded(case)))
        names = [event.event for event in events]
        begun = {name.removesuffix("_end") for name in names if name.endswith("_end")}
        assert begun == EVERY_STEP | CASES[case][1]
        assert all(names.count(name) == names.count(f"{name}_end") for name in begun)
        for fqn in UNITS:
            assert sum(event[:2] == (fqn, "post_backward") for event in events) == 4, fqn
        reduced = [event.fqn for event in events if event.event == "reduce"]
        assert len(reduced) == CASES[case][2]
        if case != "unbucketed":
            assert {frozenset(fqn.split(", ")) for fqn in reduced} == {frozenset(", ".join(UNITS).split(", "))}
        copied = copy.deepcopy(model)
        events.clear()
        with observe(copied, of_copy.append):
            after_copy = trained(copied)
        assert not events
        num_events = len(of_copy)
        assert_same_state(trained(model), after_copy)
        assert events
        assert len(of_copy) == num_events
    assert {event.fqn for event in of_copy if not event.event.startswith("reduce")} == UNITS


@on_ranks(2)
def test_optimizers_of_dtensors():
    """Only steps of optimizers that hold a parameter of the model are reported, even before the first forward."""
    model, other = sharded(), fully_shard(mlp(3, 3))
    of_both = torch.optim.AdamW([*other.parameters(), *model.second.parameters()])
    of_other = torch.optim.AdamW(other.parameters())
    for is_used in (False, True):
        if is_used:
            loss_of_tiny(model, ()).backward()
            other(randn(2, 3)).sum().backward()
        events = []
        with observe(model, events.append):
            of_other.step()
            assert not events
            of_both.step()
        assert [event.event for event in events] == ["optimizer_step", "optimizer_step_end"]


@on_ranks(2)
def test_models_beside_each_other():
    """Separate models in one container can be observed together, each under its own names, or alone."""
    parts = {"one": mlp(4, 4, 4), "other": mlp(4, 3)}
    models = nn.ModuleDict({name: shard(part, "fully_shard", "0") for name, part in parts.items()})
    both, alone = [], []
    with observe(models, both.append), observe(models["other"], alone.append):
        for model in models.values():
            model(randn(2, 4)).sum().backward()
    gathered = [event.fqn for event in both if event.event == "unshard"]
    assert gathered == ["", "0", "0", "0", "0"]  # the second model's outermost unit has no parameters of its own
    assert [event.fqn for event in alone if event.event == "unshard"] == ["0", "0"]
    assert [event[:3] for event in both[-len(alone) :]] == [event[:3] for event in alone]
