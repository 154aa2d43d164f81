"""The observer reports on models sharded in place everything that it reports on wrapped ones."""

import copy
import json

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.extras.observe.timeline import LANES, bars, draw_timeline, write_trace
from fairshard.nn import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, observe
from tests.models import loss_of_tiny, mlp, tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, randn, sgd

UNITS = {"", "first", "second, shared"}
EVERY_STEP = {"forward", "backward", "unshard_wait", "write_grads", "reduce", "reduce_wait", "optimizer_step"}
ON_HOST = {"copy_to_host", "copy_wait"}


def sharded(**kwargs):
    """A `tiny` sharded into a unit, a group and the rest."""
    model = tiny()
    fully_shard(model.first, **kwargs)
    fully_shard([model.second, model.shared], **kwargs)
    return fully_shard(model, **kwargs)


def full_state(model):
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def train(model, num_steps=2):
    """Train with accumulation, and return the full weights."""
    optimizer = sgd(model)
    for step in range(num_steps):
        for number in range(2):
            model.set_requires_gradient_sync(number == 1)
            loss_of_tiny(model, (step, number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_state(model)


CASES = {
    "plain": {},
    "unbucketed": {"bucket_cap_mb": 0},
    "kept": {"reshard_after_forward": False},
    "host": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "low precision": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
}


@on_ranks(2)
def test_what_takes_time_has_an_end_and_changes_no_bit():
    """Every begin has an end, each unit gets gradients once per backward, and an unobserved twin the same weights."""
    for case, kwargs in CASES.items():
        events = []
        model = sharded(**kwargs)
        with observe(model, events.append):
            seen = train(model)
        assert_same_state(seen, train(sharded(**kwargs)))
        names = [event.event for event in events]
        begun = {name.removesuffix("_end") for name in names if name.endswith("_end")}
        assert begun == EVERY_STEP | (ON_HOST if case == "host" else set()), case
        assert all(names.count(name) == names.count(f"{name}_end") for name in begun), case
        for fqn in UNITS:
            assert sum(event[:2] == (fqn, "post_backward") for event in events) == 4, (case, fqn)
        reduced = [event.fqn for event in events if event.event == "reduce"]
        assert len(reduced) == (2 * len(UNITS) if case == "unbucketed" else 2), (case, reduced)
        if case != "unbucketed":
            assert {frozenset(fqn.split(", ")) for fqn in reduced} == {frozenset(", ".join(UNITS).split(", "))}, case


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
@pytest.mark.parametrize("offloads", [False, True])
def test_a_copy_of_an_observed_model(offloads):
    """A copy of an observed model is not observed, trains like the original, and can be observed itself."""
    kwargs = CASES["host"] if offloads else {}
    model = sharded(**kwargs)
    events, of_copy = [], []
    with observe(model, events.append):
        train(model)
        copied = copy.deepcopy(model)
        events.clear()
        with observe(copied, of_copy.append):
            after_copy = train(copied)
        assert not events
        num_events = len(of_copy)
        assert_same_state(train(model), after_copy)
        assert events
        assert len(of_copy) == num_events
    assert {event.fqn for event in of_copy if not event.event.startswith("reduce")} == UNITS


@on_ranks(2)
def test_models_beside_each_other():
    """Separate models in one container can be observed together, each under its own names, or alone."""
    models = nn.ModuleDict({"one": mlp(4, 4, 4), "other": mlp(4, 3)})
    for model in models.values():
        fully_shard(model[0])
        fully_shard(model)
    both, alone = [], []
    with observe(models, both.append), observe(models["other"], alone.append):
        for model in models.values():
            model(randn(2, 4)).sum().backward()
    gathered = [event.fqn for event in both if event.event == "unshard"]
    assert gathered == ["", "0", "0", "0", "0"]  # the second model's outermost unit has no parameters of its own
    assert [event.fqn for event in alone if event.event == "unshard"] == ["0", "0"]
    assert [event[:3] for event in both[-len(alone) :]] == [event[:3] for event in alone]


@on_ranks(2)
def test_a_timeline_of_both_ranks(tmp_path):
    """The timeline uses every lane, names units and groups, and can be written as a Chrome trace and a picture."""
    model = sharded(**CASES["host"])
    events = []
    with observe(model, events.append):
        train(model, num_steps=1)
    by_rank = [None, None]
    dist.all_gather_object(by_rank, events)
    for own in by_rank:
        shown = bars(own)
        assert {bar.lane for bar in shown} == set(LANES)
        for kind in ("forward", "backward", "gather"):
            assert {bar.fqn for bar in shown if bar.kind == kind} == UNITS, kind
    if dist.get_rank() == 0:
        write_trace(tmp_path / "trace.json", by_rank)
        entries = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        assert {entry["pid"] for entry in entries} == {0, 1}
        assert "gather second, shared" in {entry["name"] for entry in entries}
        draw_timeline(tmp_path / "trace.png", by_rank, "title")
        assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
