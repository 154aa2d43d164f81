"""Warnings of a forward point at the user's call, for either API and with anything in between."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import fully_shard, observe
from tests.kit import rank_device
from tests.on_ranks import on_ranks

pytestmark = pytest.mark.behaviour("lines of warnings")


class Opaque(nn.Linear):
    """Returns an iterator, whose content cannot be hooked."""

    def forward(self, x):
        return iter([super().forward(x)])


def lines_of(call, text):
    """The files and lines that warnings with ``text`` point at."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    found = [warning for warning in caught if text in str(warning.message)]
    assert found
    return {(warning.filename, warning.lineno) for warning in found}


def line_of(function):
    return function.__code__.co_filename, function.__code__.co_firstlineno


def caller(model):
    return lambda: model(torch.ones(2, 3))


@on_ranks(2)
@pytest.mark.parametrize("shard", [FSDP, fully_shard])
def test_the_line_of_the_call(shard):
    """Warnings about outputs (root's or inner, observed or not), weights and autocast name the line of the call."""
    for is_observed in (False, True):
        for model in (shard(Opaque(3, 3)), shard(nn.Sequential(nn.Linear(3, 3), shard(Opaque(3, 3))))):
            if is_observed:
                observe(model, lambda event: None)
            call = caller(model)
            assert lines_of(call, "cannot look into") == {line_of(call)}
    torch.manual_seed(dist.get_rank())
    call = caller(shard(nn.Linear(3, 3)))
    assert lines_of(call, "begin with the same weights") == {line_of(call)}
    with torch.autocast(rank_device().type, torch.bfloat16):
        assert lines_of(call, "Under autocast") == {line_of(call)}
