"""Misuse raises before any collective, with the type that fairscale and FSDP1 raise, and names the fix."""

import copy
import math
import warnings
from collections import OrderedDict
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import fairshard
from fairshard import errors
from fairshard.errors import FairshardError, GradRequiresGradError, RanksDisagreeError, StaleOptimizerError
from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.kit import CollectiveCounter, fake_group, rank_device
from tests.models import mlp, wrap_each
from tests.on_ranks import on_ranks
from tests.reference import randn, sgd


def test_no_process_group():
    """Wrapping without a process group raises a ValueError that names ``init_process_group``."""
    with pytest.raises(ValueError, match="init_process_group"):
        FSDP(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("kwargs", "kind", "match"),
    [
        ({"fp32_reduce_scatter": True}, ValueError, "mixed_precision"),
        ({"compute_dtype": torch.bfloat16}, ValueError, "mixed_precision"),
        ({"compute_dtype": torch.int64}, ValueError, "floating"),
        ({"compute_dtype": "bf16"}, (TypeError, ValueError), "compute_dtype"),
        ({"cpu_offload": "yes"}, TypeError, "cpu_offload"),
        ({"move_grads_to_cpu": 1}, TypeError, "move_grads_to_cpu"),
        ({"reshard_after_forward": "yes"}, TypeError, "reshard_after_forward"),
        ({"bucket_cap_mb": "25"}, TypeError, "bucket_cap_mb"),
        ({"bucket_cap_mb": math.nan}, TypeError, "bucket_cap_mb"),
        ({"process_group": "MISSING"}, TypeError, "process_group"),
        ({"nonsense": 1}, TypeError, "nonsense"),
    ],
    ids=str,
)
def test_arguments_are_checked(kwargs, kind, match):
    """Contradictory or invalid arguments raise and leave the module unchanged."""
    layer = nn.Linear(2, 2)
    weight = layer.weight
    with fake_group(2):
        with pytest.raises(kind, match=match):
            FSDP(layer, **kwargs)
        assert layer.weight is weight
        assert weight.shape == (2, 2)


def test_the_own_dtype_is_a_valid_compute_dtype():
    """A ``compute_dtype`` equal to the parameters' dtype changes nothing, as under autocast."""
    with fake_group(2):
        FSDP(nn.Linear(2, 2), compute_dtype=torch.float32)
        FSDP(nn.Linear(2, 2).double(), compute_dtype=torch.float64)


def test_parameters_must_be_floating():
    """An integer parameter cannot be sharded; the TypeError names it."""
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].counts = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    with fake_group(2), pytest.raises(TypeError, match=r"0\.counts.*int64"):
        FSDP(model)


def test_parameters_must_have_shapes():
    """Parameters of a lazy module have no shapes before its first forward; the ValueError names one."""
    with fake_group(2), pytest.raises(ValueError, match=r"`0\.weight` of a lazy module"):
        FSDP(nn.Sequential(nn.LazyLinear(2)))


def test_mixed_precision_needs_fp32_parameters():
    """Masters are fp32: other parameters under mixed precision raise a TypeError that names the first."""
    with fake_group(2), pytest.raises(TypeError, match=r"1\.weight.*bfloat16"):
        FSDP(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()), mixed_precision=True)


@on_ranks(2)
def test_what_is_sharded_already_is_refused():
    """DTensors and modules that another engine has wrapped cannot be sharded again."""
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mesh = dist.init_device_mesh(rank_device().type, (2,))
    fully_shard(other[1], mesh=mesh)
    with pytest.raises(ValueError, match=r"`1|1\.weight"):
        FSDP(other)


def test_what_is_no_module_is_refused():
    """Only modules can be wrapped."""
    with fake_group(2), pytest.raises(TypeError, match="list"):
        FSDP([nn.Linear(2, 2)])


def test_an_error_leaves_the_module_unwrapped():
    """When one parameter cannot be sharded, none is: the module still computes."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    with fake_group(2), pytest.raises(TypeError):
        FSDP(model, mixed_precision=True)
    assert model[0](torch.ones(1, 2)).shape == (1, 2)


@on_ranks(2)
def test_wrapping_communicates_nothing():
    """Wrapping issues no collective, so an error in it cannot hang another rank."""
    with CollectiveCounter() as calls:
        wrap_each(mlp(4, 9, 5))
    assert calls.calls == []


DIFFERENCES = {
    "shape": lambda rank: FSDP(mlp(4, 9 + rank, 5)),
    "same size, other shape": lambda rank: FSDP(nn.Linear(4, 6) if rank else nn.Linear(6, 4, bias=False)),
    "one layer more": lambda rank: FSDP(mlp(*[4] * (3 + rank))),
    "name": lambda rank: FSDP(nn.Sequential(OrderedDict({f"layer{rank}": nn.Linear(4, 4)}))),
    "order": lambda rank: FSDP(nn.Sequential(*[nn.Linear(4, 2), nn.Linear(4, 3)][:: 1 - 2 * rank])),
    "wrapping": lambda rank: (wrap_each if rank else FSDP)(mlp(4, 4)),
    "flatten": lambda rank: FSDP(mlp(4, 4), flatten_parameters=bool(rank)),
    "precision": lambda rank: FSDP(mlp(4, 4), mixed_precision=bool(rank)),
    "frozen": lambda rank: FSDP(mlp(4, 4).requires_grad_(bool(rank))),
    "dtype": lambda rank: FSDP(mlp(4, 4).to(torch.float64 if rank else torch.float32)),
    "bucket": lambda rank: FSDP(mlp(4, 4), bucket_cap_mb=rank),
}


@on_ranks(2, 3)
@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_that_differ_all_raise(name):
    """When one rank builds a different model, the first use raises on every rank, naming rank and difference."""
    odd = dist.get_world_size() - 1
    model = DIFFERENCES[name](int(dist.get_rank() == odd))
    with pytest.raises(RanksDisagreeError, match=rf"rank {odd}"):
        model(randn(3, 4))


@on_ranks(2)
def test_the_first_difference_is_named():
    """The message names unit and parameter, with both shapes."""
    model = wrap_each(mlp(4, 9 + dist.get_rank(), 5))
    with pytest.raises(RanksDisagreeError, match=r"unit `0`.*weight.*9, 4.*10, 4"):
        model(randn(3, 4))


@on_ranks(2)
def test_the_setting_that_differs_is_named_alone():
    """The message has the setting of both ranks, and none of those that are equal."""
    model = DIFFERENCES["bucket"](dist.get_rank())
    with pytest.raises(RanksDisagreeError, match=r"0 has unit `root` with bucket_cap_mb=0; .* bucket_cap_mb=1\. "):
        model(randn(3, 4))


@on_ranks(2)
def test_ranks_that_differ_raise_in_a_state_dict_too():
    """When ranks differ, the first collective raises, even if it is a state dict's."""
    model = FSDP(mlp(4, 9 + dist.get_rank(), 5))
    with pytest.raises(RanksDisagreeError):
        model.state_dict()


@on_ranks(1, 2)
@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("when", ["before use", "after backward"])
def test_an_optimizer_from_before_wrapping_raises(flatten, when):
    """An optimizer built before wrapping raises at its first step, names a stale parameter, and steps nothing."""
    model = mlp(4, 9, 5)
    stale = sgd(model)
    wrapped = wrap_each(model, flatten_parameters=flatten)
    if when == "after backward":
        wrapped(randn(3, 4)).sum().backward()
    with pytest.raises(StaleOptimizerError, match=r"SGD.*0\.weight|0\.weight.*SGD"):
        stale.step()
    fresh = sgd(wrapped)
    if when == "after backward":
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
@pytest.mark.parametrize("door", [FSDP, partial(FSDP, use_orig_params=True), fairshard.nn.fully_shard], ids=range(3))
def test_hooks_that_are_never_called_warn_in_a_forward(door, is_late):
    """Hooks from before sharding run; a hook on a shard, which autograd never reaches, warns in a forward, once."""
    layer, x = nn.Linear(4, 5).to(rank_device()), randn(3, 4)
    layer.weight.register_hook(torch.zeros_like)
    model = door(layer)
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


@on_ranks(2)
def test_a_stale_parameter_group_added_later_raises():
    """A stale parameter is found even if it is added to an optimizer that has stepped before."""
    layer = nn.Linear(4, 5)
    weight = layer.weight
    wrapped = FSDP(layer)
    optimizer = sgd(wrapped)
    wrapped(randn(3, 4)).sum().backward()
    optimizer.step()
    optimizer.add_param_group({"params": [weight]})
    with pytest.raises(StaleOptimizerError, match="weight"):
        optimizer.step()


@on_ranks(1, 2)
def test_gradients_that_require_grad_are_refused():
    """``create_graph=True`` raises a RuntimeError before any gradient is written, and the next step works."""
    wrapped = wrap_each(mlp(4, 9, 5))
    loss = wrapped(randn(3, 4)).square().sum()
    with pytest.raises(GradRequiresGradError, match="create_graph"):
        loss.backward(create_graph=True)
    assert wrapped.params_with_grad == []
    wrapped(randn(3, 4)).sum().backward()
    assert len(wrapped.params_with_grad) == 2


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


@on_ranks(2)
def test_a_wrapped_module_is_an_inner_unit_of_another_model():
    """A wrapped module inside another wrapped model is an inner unit there, not an error."""
    inner = FSDP(mlp(4, 4))
    outer = FSDP(nn.Sequential(inner, copy.deepcopy(mlp(4, 5))))
    assert outer(randn(3, 4)).shape == (3, 5)
