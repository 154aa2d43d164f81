"""The next unit's gather starts before the current unit computes, in forward and in backward."""

import contextlib
from unittest import mock

import pytest
import torch

from fairshard.engine.record import ForwardOrder
from fairshard.engine.tree import units_below
from fairshard.engine.unit import Unit
from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.models import mlp, tiny, tiny_batch, tiny_loss, wrap_each, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import randn, sgd


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


@on_ranks(2)
def test_first_forward_gathers_each_unit_when_it_is_called():
    """Without a known order, no unit is gathered early or needlessly."""
    model = wrap_each(mlp(4, 9, 7, 5))
    with events(model) as log, torch.no_grad():
        model(randn(3, 4))
    expected = [(name, i) for i in range(3) for name in ("gather", "forward", "free")]
    assert log == expected


@on_ranks(2)
def test_later_forwards_gather_one_unit_ahead():
    """From the second pass on, unit ``i + 1`` is gathered before unit ``i`` computes; at most two are gathered."""
    model = wrap_each(mlp(4, 9, 7, 5))
    with torch.no_grad():
        model(randn(3, 4))
        with events(model) as log:
            model(randn(3, 4))
    assert without(log, "free") == [
        ("gather", 0),
        ("gather", 1),
        ("forward", 0),
        ("gather", 2),
        ("forward", 1),
        ("forward", 2),
    ]
    assert most_gathered(log) == 2


@on_ranks(2)
@pytest.mark.parametrize("num_before", [0, 2])
def test_backward_gathers_one_unit_ahead(num_before):
    """Even in the first backward, unit ``i - 1`` is gathered before the backward of unit ``i``."""
    model = wrap_each(mlp(4, 9, 7, 5))
    for _ in range(num_before):
        model(randn(3, 4)).sum().backward()
    with events(model) as log:
        loss = model(randn(3, 4)).sum()
        log.clear()
        loss.backward()
    assert without(log, "free", "forward") == [
        ("gather", 2),
        ("gather", 1),
        ("backward", 2),
        ("gather", 0),
        ("backward", 1),
        ("backward", 0),
    ]
    assert most_gathered(log) == 2


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


@on_ranks(2)
def test_a_changed_order_is_followed():
    """A pass in another order than the last one gives the right result; afterwards nothing stays gathered."""

    class Either(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (mlp(4, 4, seed=seed) for seed in range(3))
            self.order = "abc"

        def forward(self, x):
            for name in self.order:
                x = getattr(self, name)(x)
            return x

    plain, wrapped = Either(), Either()
    for name in "abc":
        setattr(wrapped, name, FSDP(getattr(wrapped, name)))
    wrapped = FSDP(wrapped)
    for order in ("abc", "cab", "b", "ba", "abc"):
        plain.order = wrapped.module.order = order
        with torch.no_grad():
            assert torch.equal(wrapped(randn(2, 4)), plain(randn(2, 4))), order
        assert not any(unit.is_gathered for _, unit in units_below(wrapped)), order


@on_ranks(2)
def test_prefetch_changes_no_bit():
    """The same training with every look-ahead switched off gives the same weights."""
    states = []
    for ahead in (True, False):
        model = wrap_tiny(tiny(), **({} if ahead else {"backward_prefetch": None}))
        optimizer = sgd(model)
        nothing = mock.patch.object(ForwardOrder, "enter", return_value=None)
        with contextlib.nullcontext() if ahead else nothing:
            for step in range(3):
                *inputs, targets = tiny_batch(torch.distributed.get_rank(), step)
                tiny_loss(model(*inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
        states.append(model.state_dict())
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
