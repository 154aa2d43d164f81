"""Profiles of torch show what each unit does, by name, in regions that lie inside one another."""

import pytest
import torch

from fairshard.checks.profile_regions import open_regions
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import fully_shard, observe
from tests.models import mlp
from tests.on_ranks import on_ranks
from tests.reference import randn, sgd

UNITS = ("0", "2", "root")


def sharded(door):
    """Two units inside a third, each with a bucket of its own."""
    model = mlp(4, 6, 2)
    shard = FSDP if door == "wrapper" else fully_shard
    for index in (0, 2):
        model[index] = shard(model[index], bucket_cap_mb=0)
    model.append(torch.nn.Linear(2, 2))
    return shard(model, bucket_cap_mb=0)


def profiled(function):
    """The regions of ``function()`` in order, as ``(name, name of the region around it or None)``."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    events = [event for event in profile.events() if event.name.startswith("fairshard::")]
    events.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
    return [(_short(event), _around(event)) for event in events]


def _short(event):
    return event.name.removeprefix("fairshard::")


def _around(event):
    parent = event.cpu_parent
    while parent is not None and not parent.name.startswith("fairshard::"):
        parent = parent.cpu_parent
    return None if parent is None else _short(parent)


def step_of(model):
    optimizer = sgd(model)

    def step():
        model(randn(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@on_ranks(2)
@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
def test_a_longer_profile_shows_each_call_once(door):
    """Regions are opened once for a model, and a unit that is gathered already has none for its gather."""
    model = sharded(door)
    step = step_of(model)
    step()
    found = [name for name, _ in profiled(lambda: [step() for _ in range(3)])]
    assert len(open_regions) == 1
    for unit in UNITS:
        assert found.count(f"pre_forward ({unit})") == found.count(f"reduce_scatter ({unit})") == 3
    if door == "fully_shard":
        with torch.no_grad():
            model.unshard()
        names = [name for name, _ in profiled(model.unshard)]
        assert not any(name.startswith("all_gather (") for name in names)


@on_ranks(2)
@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
def test_a_profile_shows_each_unit_and_phase(door):
    """Each unit is gathered ahead by the one before it, and its phases are in the order of a step."""
    step = step_of(sharded(door))
    step()  # the order of the units is known from now on
    found = profiled(step)
    for unit in UNITS:
        for phase in ("pre_forward", "post_forward", "pre_backward"):
            assert found.count((f"{phase} ({unit})", None)) == 1
        names = [name for name, _ in found]
        forward, sent = f"pre_forward ({unit})", f"post_backward ({unit})"
        order = [forward, f"post_forward ({unit})", f"pre_backward ({unit})", sent, f"reduce_scatter ({unit})"]
        assert [names.index(name) for name in order] == sorted(names.index(name) for name in order)
        assert names.count(sent) == names.count(f"reduce_scatter ({unit})") == 1
        assert names.count(f"reduce_scatter_wait ({unit})") == 1
        assert (f"reduce_scatter ({unit})", sent) in found
        assert (f"all_gather_wait ({unit})", forward) in found
        assert f"reshard ({unit})" in names
    assert ("all_gather (root)", "pre_forward (root)") in found
    assert ("all_gather (0)", "pre_forward (root)") in found
    assert ("all_gather (2)", "pre_forward (0)") in found
    assert ("reshard (0)", "post_forward (0)") in found
    assert ("all_gather (0)", "pre_backward (2)") in found
    assert ("end_backward", None) in found
    assert profiled(step) == found


@on_ranks(2)
@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
def test_nothing_is_wrapped_without_a_profiler(door):
    """After a profile the next step removes every region, also beside a user's observation."""
    model, events = sharded(door), []
    step = step_of(model)
    step()
    with observe(model, events.append):
        expected = profiled(step)
        seen = len(events)
        step()
        assert not open_regions
        assert len(events) == 2 * seen
    root = (model._unit if door == "wrapper" else model._fairshard_unit).root
    for owner in (root, root.engine, root.shared.bucketer, *root.units):
        assert not any(type(value).__name__ == "_Tap" for value in vars(owner).values())
    assert profiled(step) == expected


@on_ranks(1)
def test_a_profile_of_a_backward_alone_shows_it():
    """A profile that starts between forward and backward shows all units but the phase that had begun."""
    model = sharded("wrapper")
    loss = model(randn(3, 4)).sum()
    names = [name for name, _ in profiled(loss.backward)]
    assert [f"pre_backward ({unit})" in names for unit in UNITS] == [True, True, False]
    assert all(f"post_backward ({unit})" in names for unit in UNITS)


@on_ranks(2)
def test_models_of_the_same_ranks_have_one_region_for_each_event():
    """A profile of two models, which share an engine, shows each call and each end of a backward once."""
    models = [sharded("wrapper") for _ in range(2)]

    def run():
        for model in models:
            model(randn(3, 4)).square().sum().backward()

    run()
    for model in models:
        model.zero_grad()
    found = [name for name, _ in profiled(run)]
    for phase in ("pre_forward", "post_forward", "pre_backward", "reduce_scatter"):
        for unit in UNITS:
            assert found.count(f"{phase} ({unit})") == 2, (phase, unit)
    assert found.count("end_backward") == 2
    assert len(open_regions) == 2
    # The profile above would hide a region right inside another of the same name; a trace on disk shows both.
    taps = [value for value in vars(models[0]._unit.root.engine).values() if type(value).__name__ == "_Tap"]
    assert [len(each.arounds) for each in taps] == [1] * 4
