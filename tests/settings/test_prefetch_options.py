"""Prefetching can be configured, also by naming units; it changes the time of gathers and nothing else."""

import contextlib
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.engine.tree import units_below
from fairshard.engine.unit import Unit
from fairshard.errors import RanksDisagreeError
from fairshard.nn import BackwardPrefetch
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.utils.collectives import counters, reset_counters
from tests.models import mlp, tiny, tiny_batch, tiny_loss, wrap_each, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, randn, sgd, train_alike

PRE, POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST
AT_CALL = [(name, i) for i in range(3) for name in ("gather", "forward")]
ONE_AHEAD = [("gather", 0), ("gather", 1), ("forward", 0), ("gather", 2), ("forward", 1), ("forward", 2)]


@contextlib.contextmanager
def events(model):
    """A list that records the events of units 0, 1, 2 ... of a Sequential, as ``(what, unit)``."""
    log = []
    layers = [part for part in model.module if isinstance(part, FSDP)]
    number = {id(unit_of(layer)): index for index, layer in enumerate(layers)}
    originals = Unit.unshard, Unit.reshard

    def unshard(unit, in_backward):
        if id(unit) in number:
            log.append(("gather", number[id(unit)]))
        originals[0](unit, in_backward)

    def reshard(unit):
        if id(unit) in number:
            log.append(("free", number[id(unit)]))
        originals[1](unit)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Unit, "unshard", unshard))
        stack.enter_context(mock.patch.object(Unit, "reshard", reshard))
        for index, layer in enumerate(layers):
            hook = layer.module.register_forward_pre_hook(lambda *_, i=index: log.append(("forward", i)))
            stack.callback(hook.remove)
            hook = layer.module.register_full_backward_pre_hook(lambda *_, i=index: log.append(("backward", i)))
            stack.callback(hook.remove)
        yield log


def unit_of(wrapper):
    return units_below(wrapper)[0][1]


def without(log, *names):
    return [event for event in log if event[0] not in names]


def most_gathered(log):
    """The largest number of units that were gathered at the same time."""
    whole, most = set(), 0
    for name, index in log:
        if name == "gather":
            whole.add(index)
        elif name == "free":
            whole.discard(index)
        most = max(most, len(whole))
    return most


def three(**kwargs):
    """Three Linears, each a unit, inside another; the order of a pass is recorded."""
    model = wrap_each(mlp(4, 9, 7, 5), **kwargs)
    with torch.no_grad():
        model(randn(3, 4))
    return model


def forward_events(model):
    with events(model) as log, torch.no_grad():
        model(randn(3, 4))
    return without(log, "free")


def backward_events(model):
    """The events of a backward, with one for the Tanh after unit ``i``."""
    with events(model) as log:
        for index, tanh in enumerate([model[1], model[3]]):
            tanh.register_full_backward_pre_hook(lambda *_, i=index: log.append(("tanh", i)))
        loss = model(randn(3, 4)).sum()
        log.clear()
        loss.backward()
    return log


@on_ranks(2)
@pytest.mark.parametrize(("choice", "expected"), [(None, ONE_AHEAD), (True, ONE_AHEAD), (False, AT_CALL)])
def test_forward_prefetch(choice, expected):
    """None and True gather the unit that followed in the last pass; False gathers each when it is called."""
    assert forward_events(three(forward_prefetch=choice)) == expected


@on_ranks(2)
@pytest.mark.parametrize("choice", [PRE, POST, None])
def test_backward_prefetch(choice):
    """The next unit is gathered before the gradients of the current one, or not before its own turn begins.

    That the gradients of a unit are complete is known when the next turn begins: the Tanh before it comes first.
    """
    log = backward_events(three(backward_prefetch=choice))
    before_turn = {
        PRE: [("gather", 2), ("gather", 1), ("backward", 2), ("tanh", 1), ("free", 2), ("gather", 0), ("backward", 1)],
        POST: [("gather", 2), ("backward", 2), ("tanh", 1), ("free", 2), ("gather", 1), ("backward", 1)],
        None: [("gather", 2), ("backward", 2), ("tanh", 1), ("free", 2), ("gather", 1), ("backward", 1)],
    }[choice]
    assert without(log, "forward")[: len(before_turn)] == before_turn
    assert most_gathered(log) == (2 if choice is PRE else 1)
    assert sorted(i for name, i in log if name == "gather") == [0, 1, 2]


@on_ranks(2)
@pytest.mark.parametrize(
    ("last", "turns"),
    [
        (PRE, [("gather", 2), ("gather", 1), ("tanh", 1), ("tanh", 0), ("gather", 0)]),
        (POST, [("gather", 2), ("tanh", 1), ("gather", 1), ("tanh", 0), ("gather", 0)]),
    ],
)
def test_each_unit_has_its_own_choice(last, turns):
    """As in FSDP1, each unit uses its own prefetch setting, not the outermost unit's."""
    layers = mlp(4, 9, 7, 5)
    layers[0] = FSDP(layers[0], forward_prefetch=False, backward_prefetch=PRE)
    layers[2] = FSDP(layers[2], forward_prefetch=True, backward_prefetch=None)
    layers[4] = FSDP(layers[4], forward_prefetch=True, backward_prefetch=last)
    model = FSDP(layers, forward_prefetch=False, backward_prefetch=None)
    with torch.no_grad():
        model(randn(3, 4))
    assert forward_events(model) == [*AT_CALL[:3], ("gather", 2), *AT_CALL[3::2]]
    assert [event for event in backward_events(model) if event[0] in ("gather", "tanh")] == turns


def trained(**kwargs):
    """Weights after three steps of the tiny model with inner and outer units, and the collectives of the last."""
    model = wrap_tiny(tiny(), **kwargs)
    optimizer = sgd(model)
    for step in range(3):
        reset_counters()
        *inputs, targets = tiny_batch(dist.get_rank(), step)
        tiny_loss(model(*inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    counted = counters()
    assert not any(unit.is_gathered for _, unit in units_below(model))
    return model.state_dict(), counted


@on_ranks(2)
def test_no_choice_changes_a_bit_or_a_collective():
    """All settings give the same weights, bit for bit, from the same collectives."""
    state, counted = trained()
    for ahead, back in itertools.product((None, True, False), (PRE, POST, None)):
        other, collectives = trained(forward_prefetch=ahead, backward_prefetch=back, limit_all_gathers=back is PRE)
        assert_same_state(other, state)
        assert collectives == counted, (ahead, back)


@on_ranks(2)
@pytest.mark.parametrize("case", ["reentrant", "not_reentrant", "offload", "frozen", "unflattened"])
def test_backward_prefetch_with_other_features(case):
    """Prefetching is right with recomputed, offloaded, frozen and unflattened units, and with `no_sync`."""
    kwargs = {"offload": {"cpu_offload": True}, "unflattened": {"flatten_parameters": False}}.get(case, {})
    state = trained_by_case(case, **kwargs)
    for choice in (POST, None):
        assert_same_state(trained_by_case(case, backward_prefetch=choice, **kwargs), state)


def trained_by_case(case, **kwargs):
    model = tiny(case if case.endswith("reentrant") else None)
    if case == "frozen":
        model.first.requires_grad_(False)
        model.shared.bias.requires_grad_(False)
    model = wrap_tiny(model, **kwargs)
    optimizer = sgd(model)
    for step in range(2):
        *inputs, targets = tiny_batch(dist.get_rank(), step)
        for context in (model.no_sync(), contextlib.nullcontext()):
            with context:
                tiny_loss(model(*inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@on_ranks(2)
@pytest.mark.parametrize("depth", [4, 9])
@pytest.mark.parametrize("limit", [True, False])
def test_memory_is_bounded_whatever_the_limit(limit, depth):
    """At most two inner units are whole at a time, in a model of any depth, with and without ``limit_all_gathers``."""
    model = wrap_each(mlp(*[4] * (depth + 1)), limit_all_gathers=limit)
    for _ in range(2):
        with events(model) as log:
            model(randn(3, 4)).sum().backward()
        assert sum(name == "gather" for name, _ in log) == 2 * depth
        assert most_gathered(log) == 2


@on_ranks(2)
@pytest.mark.parametrize("when", ["before use", "after use"])
def test_named_units_are_gathered_instead(when):
    """Named units replace the default prefetch of one unit; an empty list restores the default."""
    model = wrap_each(mlp(4, 9, 7, 5))
    first, second, third = model[0], model[2], model[4]
    if when == "after use":
        model(randn(3, 4)).sum().backward()
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    with torch.no_grad():
        model(randn(3, 4))
    assert forward_events(model)[:4] == [("gather", 0), ("gather", 1), ("gather", 2), ("forward", 0)]
    assert without(backward_events(model), "free", "forward")[:4] == [
        *[("gather", i) for i in (2, 1, 0)],
        ("backward", 2),
    ]
    first.set_modules_to_forward_prefetch([])
    third.set_modules_to_backward_prefetch([])
    assert forward_events(model) == ONE_AHEAD
    assert backward_events(model)[:3] == [("gather", 2), ("gather", 1), ("backward", 2)]


@on_ranks(2)
def test_named_units_come_where_the_default_is_off():
    """Named units are gathered whatever the flags say: after the gradients with POST, else before the unit computes.

    With POST, too, all of them come before the next unit computes.
    """
    model = three(forward_prefetch=False, backward_prefetch=None)
    model[0].set_modules_to_forward_prefetch([model[4]])
    model[4].set_modules_to_backward_prefetch([model[0]])
    assert forward_events(model)[:3] == [("gather", 0), ("gather", 2), ("forward", 0)]
    assert backward_events(model)[:3] == [("gather", 2), ("gather", 0), ("backward", 2)]
    model = three(backward_prefetch=POST)
    model[4].set_modules_to_backward_prefetch([model[2], model[0]])
    assert backward_events(model)[:7] == [
        *[("gather", 2), ("backward", 2), ("tanh", 1), ("free", 2)],
        *[("gather", 1), ("gather", 0), ("backward", 1)],
    ]


@on_ranks(2)
def test_wrong_names_cost_memory_only():
    """Units named too late, or that do not run, are freed at the end of the pass; the numbers are the same."""

    class Skips(nn.Sequential):
        def forward(self, x):
            return self[2](torch.tanh(self[0](x)))

    def wrap(model):
        for index in range(4):
            model[index] = FSDP(model[index])
        model[0].set_modules_to_forward_prefetch([model[3], model[1]])
        model[2].set_modules_to_forward_prefetch([model[0], model[3]])
        model[2].set_modules_to_backward_prefetch([model[3], model[2]])
        model[0].set_modules_to_backward_prefetch([model[2], model[1]])
        return FSDP(model)

    plain = Skips(*[nn.Linear(4, 4) for _ in range(4)])
    for param in plain.parameters():
        dist.broadcast(param.data, 0)

    def loss_of(model, key):
        if isinstance(model, FSDP):
            with torch.no_grad():
                model(randn(2, 4))
            assert not any(unit.is_gathered for _, unit in units_below(model))
        return model(randn(2, 4, key=key)).square().sum()

    wrapped = train_alike(plain, wrap, loss_of)
    assert not any(unit.is_gathered for _, unit in units_below(wrapped))


@on_ranks(1)
def test_what_is_not_a_list_of_wrappers_is_refused():
    """Modules without a unit, a single wrapper, and None raise a TypeError that says what to pass."""
    model = wrap_each(mlp(4, 9, 5))
    for method in (model[0].set_modules_to_forward_prefetch, model[0].set_modules_to_backward_prefetch):
        for wrong in (model[2], None, [model[2].module], [model[2], None]):
            with pytest.raises(TypeError, match="list of FullyShardedDataParallel"):
                method(wrong)


@on_ranks(2)
def test_units_of_another_model_are_left_alone():
    """A unit that runs alone, outside the model of the units that it names, gathers none of them."""
    model = wrap_each(mlp(4, 4, 4))
    model[0].set_modules_to_forward_prefetch([model[2]])
    assert model[0](randn(2, 4)).shape == (2, 4)
    assert not units_below(model[2])[0][1].is_gathered
    assert model(randn(2, 4)).shape == (2, 4)


@on_ranks(2)
def test_ranks_that_name_other_units_all_raise():
    """Names that differ between ranks before their first use raise at that use."""
    model = wrap_each(mlp(4, 9, 5))
    if dist.get_rank():
        model[0].set_modules_to_forward_prefetch([model[2]])
    with pytest.raises(RanksDisagreeError, match="gathered ahead"):
        model(randn(3, 4))
