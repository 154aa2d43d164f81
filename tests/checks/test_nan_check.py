"""Non-finite gradients are reported by name, with the rank that they come from."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.errors import NonFiniteGradientError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.optim import CPUOptimizer
from tests.models import mlp, wrap_each
from tests.on_ranks import on_ranks
from tests.reference import randn, sgd

PLACES = {
    "shard": {},
    "host": {"cpu_offload": True},
    "held": {"cpu_offload": True, "move_grads_to_cpu": False},
    "unflattened": {"flatten_parameters": False},
}


class Poison(nn.Module):
    """Layer whose backward gives NaN while ``is_on``."""

    def __init__(self):
        super().__init__()
        self.is_on = False

    def forward(self, x):
        if self.is_on:
            x.register_hook(lambda grad: grad * float("nan"))
        return x


def poisoned(**kwargs):
    """Linears with a `Poison` after the first: the backward reaches the others first, with finite gradients."""
    layers = list(mlp(4, 6, 5, 3))
    layers.insert(1, Poison())
    return wrap_each(nn.Sequential(*layers), **kwargs)


def backward(model, key=0):
    model(randn(3, 4, key=key)).square().sum().backward()


@pytest.mark.pairs
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("accumulate", [False, True])
def test_all_ranks_name_the_parameter_and_the_rank(place, accumulate):
    """If only the last rank has NaN, all ranks raise before a step, with that rank and the parameters."""
    model = poisoned(nan_check=True, **PLACES[place])
    backward(model)
    model.zero_grad()
    before = [param.detach().clone() for param in model.parameters()]
    guilty = dist.get_world_size() - 1
    model.module[1].is_on = dist.get_rank() == guilty
    if accumulate:
        with model.no_sync():
            backward(model, 1)
        model.module[1].is_on = False
    with pytest.raises(NonFiniteGradientError) as raised:
        backward(model, 2)
    assert f"`0.weight`, `0.bias` on rank {guilty}" in str(raised.value)
    assert "`2." not in str(raised.value)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    model.module[1].is_on = False
    model.zero_grad()
    backward(model, 3)


@on_ranks(2)
def test_a_sum_that_overflows_is_named():
    """Each rank's gradient is finite, their sum is not."""
    model = FSDP(nn.Linear(1, 1, bias=False), nan_check=True)
    with pytest.raises(NonFiniteGradientError, match=r"the sum over ranks of `weight` on rank 0"):
        (model(torch.full((1, 1), 2.5e38)) * 1.0).sum().backward()


@on_ranks(2)
def test_early_steps_are_refused():
    """An optimizer that steps during the backward raises, because the check comes after it."""
    model = wrap_each(mlp(4, 6, 3), cpu_offload=True, nan_check=True)
    optimizer = CPUOptimizer(model, torch.optim.SGD, overlap=True, lr=0.1)
    backward(model)
    with pytest.raises(ValueError, match="nan_check=True"), optimizer.last_backward():
        pass


@on_ranks(2, 3)
def test_clipping_warns_once_and_names_the_parameters():
    """A norm that is not finite is returned unchanged, with one warning that names parameters and ranks."""
    model = poisoned()
    model.module[1].is_on = dist.get_rank() == 0
    optimizer = sgd(model)
    for attempt in range(2):
        backward(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            norm = model.clip_grad_norm_(1.0)
        assert torch.isnan(norm)
        found = [entry for entry in caught if "gradient norm" in str(entry.message)]
        assert {entry.filename for entry in found} <= {__file__}  # the line of the user's call
        said = [str(entry.message) for entry in found]
        assert len(said) == (attempt == 0)
        assert all("`0.weight`" in text and "rank 0" in text and "`2." not in text for text in said)
        optimizer.zero_grad()
