"""Optimizers from before sharding and hooks that are never called are told; the errors have the promised types."""

import warnings

import pytest
import torch
from torch import nn

import fairshard
from fairshard import errors
from fairshard.errors import FairshardError, StaleOptimizerError
from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.kit import rank_device
from tests.kit.doors import DOORS, main_doors, shard
from tests.models import mlp
from tests.on_ranks import on_ranks
from tests.reference import randn, sgd

pytestmark = pytest.mark.behaviour("errors in use")


@pytest.mark.pairs
@on_ranks(1, 2)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("is_late", [False, True], ids=["before use", "after backward"])
def test_an_optimizer_from_before_sharding_raises(door, is_late):
    """An optimizer built before sharding raises at its first step and steps nothing; one built later steps.

    A stale parameter is found even if it is added to an optimizer that has stepped before.
    """
    layers = mlp(4, 9, 5)
    stale, weight = sgd(layers), layers[0].weight
    model = shard(layers, door, "0", "2")
    if is_late:
        model(randn(3, 4)).sum().backward()
    with pytest.raises(StaleOptimizerError, match=r"SGD.*0\.weight|0\.weight.*SGD"):
        stale.step()
    fresh = sgd(model)
    if is_late:
        fresh.step()
        fresh.add_param_group({"params": [weight]})
        with pytest.raises(StaleOptimizerError, match="weight"):
            fresh.step()


@on_ranks(2)
def test_other_optimizers_are_left_alone():
    """Optimizers of plain modules, and of wrapped ones built after wrapping, step as usual."""
    plain, wrapped = mlp(4, 5), FSDP(mlp(4, 5))
    for model in (plain, wrapped):
        optimizer = torch.optim.AdamW(model.parameters())
        model(randn(3, 4)).sum().backward()
        optimizer.step()
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        optimizer.step()


@on_ranks(1)
@pytest.mark.parametrize("is_late", [False, True], ids=["before", "later"])
@main_doors
def test_hooks_that_are_never_called_warn_in_a_forward(is_late, door):
    """Hooks from before sharding run; a hook on a shard, which autograd never reaches, warns in a forward, once."""
    layer, x = nn.Linear(4, 5).to(rank_device()), randn(3, 4)
    layer.weight.register_hook(torch.zeros_like)
    model = shard(layer, door)
    if is_late:
        model(x).sum().backward()
        grads = [getattr(param.grad, "_local_tensor", param.grad) for param in model.parameters()]
        assert sum(grad.count_nonzero() for grad in grads) == layer.out_features  # the bias's
    shards = list(model.parameters())
    shards[-1].register_hook(torch.zeros_like)
    forwards = shards if is_late else [None]  # later forwards look at one parameter of each unit
    with pytest.warns(UserWarning, match="A hook that `register_hook` put on `.*` is never called") as caught:
        [model(x).sum().backward() for _ in forwards]
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in shards:
            model(x).sum().backward()


def test_the_exception_tree():
    """Every error while running is a RuntimeError of ours, and of the types that fairscale and FSDP1 raise."""
    assert fairshard.FairshardError is errors.FairshardError
    assert issubclass(FairshardError, RuntimeError)
    bases = {
        "TrainingStateError": (ValueError, AssertionError),
        "NotRootError": (AssertionError,),
        "MixedGroupsError": (NotImplementedError,),
        "GradRequiresGradError": (),
        "ParameterShardedError": (),
        "ShardChangedError": (),
        "BackwardOrderError": (),
        "PartialGradientError": (),
        "PendingGradientError": (),
        "StaleOptimizerError": (),
        "HeldGradientError": (),
        "ShardOptimizerError": (TypeError,),
        "LocalScalingError": (),
        "HostMemoryError": (MemoryError,),
        "StateDictTypesDifferError": (AssertionError,),
        "CheckpointError": (ValueError,),
        "OptionsExcludeError": (ValueError, AssertionError),
        "NonFiniteGradientError": (),
        "CollectiveFailedError": (),
        "RanksDisagreeError": (),
    }
    ours = [kind for kind in FairshardError.__subclasses__() if kind.__module__ == errors.__name__]
    assert bases.keys() == {kind.__name__ for kind in ours}
    for name, others in bases.items():
        kind = getattr(errors, name)
        assert issubclass(kind, (FairshardError,))
        assert all(issubclass(kind, other) for other in others), name
        assert str(kind("text")) == "text"
