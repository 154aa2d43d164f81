"""torch.compile around a wrapper is refused before any collective; inside wrappers it works."""

import copy

import pytest
import torch
from torch import nn

from fairshard.engine.tree import units_below
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.utils.testing import CollectiveCounter
from tests.models import mlp, wrap_each
from tests.on_ranks import on_ranks
from tests.reference import randn, train_alike

WAYS = {
    "the wrapper": lambda model: torch.compile(model, backend="eager"),
    "a module around it": lambda model: torch.compile(nn.Sequential(model, nn.Tanh()), backend="eager"),
    "a function": lambda model: torch.compile(lambda x: model(x).tanh(), backend="eager"),
    "in place": lambda model: (model.compile(backend="eager"), model)[1],
}


@on_ranks(2, timeout=180.0)  # the first import of the compiler takes a while
@pytest.mark.parametrize("used_before", [False, True])
def test_compiling_around_a_wrapper_is_refused(used_before):
    """Compiling around a wrapper raises an error that names the fix, sends nothing, and the wrapper still works."""
    for name, way in WAYS.items():
        model = wrap_each(mlp(4, 9, 5))
        x = randn(3, 4)
        expected = model(x) if used_before else None
        uncompiled = copy.deepcopy(model)
        with CollectiveCounter() as counter, pytest.raises(Exception, match=r"torch\.compile\(block\)"):
            way(model)(x)
        assert counter.calls == [], name
        assert not any(unit.is_gathered for _, unit in units_below(uncompiled))
        assert uncompiled(x).shape == (3, 5)
        if expected is not None:
            assert torch.equal(uncompiled(x), expected)


@on_ranks(2, timeout=180.0)
def test_compiling_inside_of_wrappers():
    """Blocks that are compiled first and then wrapped, as the error suggests, train as plain ones do."""

    def wrap(model):
        for index in (0, 2):
            model[index] = FSDP(torch.compile(model[index], backend="eager"))
        return FSDP(model)

    train_alike(mlp(4, 9, 5), wrap, lambda model, key: model(randn(3, 4, key=key)).square().sum())
