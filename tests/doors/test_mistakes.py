"""Mistakes in arguments and in what is sharded: each error says what is wrong, where, and what to do.

All are raised before any communication, and change nothing.
"""

import math
import warnings
from collections import OrderedDict
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW

from fairshard import Checkpointer, fully_shard
from fairshard import FullyShardedDataParallel as FSDP
from fairshard.errors import RanksDisagreeError
from fairshard.nn import (
    CPUOffload,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from fairshard.nn.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from fairshard.optim import CPUOptimizer, Muon
from tests.doors.mistakes import BATCH, check, layer, loss_of, two
from tests.kit import CollectiveCounter, fake_group, rank_device, run_ranks
from tests.models import mlp, wrap_each
from tests.on_ranks import in_full, on_ranks
from tests.reference import randn, squares
from tests.torch_gaps import needs_fsdp2_on_cpu

pytestmark = pytest.mark.behaviour("mistakes in arguments")

BF16 = torch.bfloat16


def tied():
    model = two()
    model[1].weight = model[0].weight
    return model


class WrapsInForward(nn.Module):
    def __init__(self, shard):
        super().__init__()
        self.layer, self.shard = layer(), shard

    def forward(self, x):
        return self.shard(self.layer)(x)


def after_a_forward(model):
    model(BATCH)
    return model


# By what the user does: the kind of the error, what it says, in this order, and the call.
MISTAKES = {
    "misspelt: wrapper": (
        TypeError,
        ("FullyShardedDataParallel has no argument `bucket_cap`", "Did you mean `bucket_cap_mb`?"),
        lambda: FSDP(layer(), bucket_cap=1),
    ),
    "misspelt: fully_shard": (
        TypeError,
        ("fully_shard has no argument `reshard_after_foward`", "Did you mean `reshard_after_forward`?"),
        lambda: fully_shard(layer(), reshard_after_foward=True),
    ),
    "misspelt: CPUOptimizer": (
        TypeError,
        ("CPUOptimizer (or AdamW) has no argument `clip_grad_nrom`", "Did you mean `clip_grad_norm`?"),
        lambda: CPUOptimizer(FSDP(layer(), cpu_offload=True), AdamW, clip_grad_nrom=1.0),
    ),
    "misspelt: CPUOptimizer, for its class": (
        TypeError,
        ("CPUOptimizer (or AdamW) has no argument `wieght_decay`", "Did you mean `weight_decay`?"),
        lambda: CPUOptimizer(FSDP(layer(), cpu_offload=True), AdamW, wieght_decay=0.1),
    ),
    "misspelt: Checkpointer": (
        TypeError,
        ("Checkpointer has no argument `keep`", "Did you mean `keep_last`?"),
        lambda: Checkpointer("nowhere", keep=1),
    ),
    "misspelt: Muon": (
        TypeError,
        ("Muon has no argument `momentun`", "Did you mean `momentum`?"),
        lambda: Muon(fully_shard(layer()).parameters(), momentun=0.9),
    ),
    "no argument is near": (
        TypeError,
        ("Checkpointer has no argument `device`", "It has", "`every`", "`root`"),
        lambda: Checkpointer("nowhere", device="cpu"),
    ),
    "wrapper: argument of fully_shard": (
        TypeError,
        ("FullyShardedDataParallel has no argument `mp_policy`", "`mixed_precision=MixedPrecision(", "fully_shard"),
        lambda: FSDP(layer(), mp_policy=MixedPrecisionPolicy(BF16)),
    ),
    "fully_shard: argument of the wrapper": (
        TypeError,
        ("fully_shard has no argument `sharding_strategy`", "`reshard_after_forward`", "FullyShardedDataParallel"),
        lambda: fully_shard(layer(), sharding_strategy="FULL_SHARD"),
    ),
    "CPUOptimizer: a string for a norm": (
        TypeError,
        ("`clip_grad_norm` must be the largest norm, a number, or None, but is '1'", "Pass 1.0"),
        lambda: CPUOptimizer(FSDP(layer(), cpu_offload=True), AdamW, clip_grad_norm="1"),
    ),
    "CPUOptimizer of parameters": (
        TypeError,
        ("`model` must be the sharded module, but is generator", "passed as `params`"),
        lambda: CPUOptimizer(FSDP(layer(), cpu_offload=True).parameters(), AdamW),
    ),
    "CPUOptimizer of an optimizer": (
        TypeError,
        ("`optimizer_class` must be a class, but is an object of AdamW", "CPUOptimizer(model, torch.optim.AdamW"),
        lambda: CPUOptimizer(model := FSDP(layer(), cpu_offload=True), AdamW(model.parameters())),
    ),
    "CPUOptimizer of a plain model": (
        ValueError,
        ("this Linear has no units", "Wrap or shard it first"),
        lambda: CPUOptimizer(layer(), AdamW),
    ),
    "Muon of a model": (
        TypeError,
        ("`params` must be parameters or param groups, but is a FSDPLinear", "`model.parameters()`"),
        lambda: Muon(fully_shard(layer())),
    ),
    "wrapper: negative bucket": (
        ValueError,
        ("`bucket_cap_mb` must be 0 or more, but is -1", "Pass 0"),
        lambda: FSDP(layer(), bucket_cap_mb=-1),
    ),
    "fully_shard: negative bucket": (
        ValueError,
        ("`bucket_cap_mb` must be 0 or more, but is -0.5", "Pass 0"),
        lambda: fully_shard(layer(), bucket_cap_mb=-0.5),
    ),
    "wrapper: policy of fully_shard": (
        TypeError,
        ("`mixed_precision` must be", "but is MixedPrecisionPolicy(", "for fully_shard: pass `MixedPrecision("),
        lambda: FSDP(layer(), mixed_precision=MixedPrecisionPolicy(BF16)),
    ),
    "wrapper: torch's policy of fully_shard": (
        TypeError,
        ("`mixed_precision` must be", "but is MixedPrecisionPolicy(", "for fully_shard: pass `MixedPrecision("),
        lambda: FSDP(layer(), mixed_precision=torch_fsdp.MixedPrecisionPolicy(BF16)),
    ),
    "wrapper: offload policy of fully_shard": (
        TypeError,
        ("`cpu_offload` must be True or False, but is CPUOffloadPolicy(", "for fully_shard: pass `cpu_offload=True`"),
        lambda: FSDP(layer(), cpu_offload=CPUOffloadPolicy()),
    ),
    "fully_shard: policy of the wrapper": (
        TypeError,
        ("`mp_policy` must be a MixedPrecisionPolicy, but is MixedPrecision(", "pass `MixedPrecisionPolicy("),
        lambda: fully_shard(layer(), mp_policy=MixedPrecision(BF16)),
    ),
    "fully_shard: offload of the wrapper": (
        TypeError,
        ("`offload_policy` must be", "but is CPUOffload(", "pass `CPUOffloadPolicy()`"),
        lambda: fully_shard(layer(), offload_policy=CPUOffload(True)),
    ),
    "fully_shard: a dtype as policy": (
        TypeError,
        ("`mp_policy` must be a MixedPrecisionPolicy, but is torch.bfloat16", "Pass a MixedPrecisionPolicy"),
        lambda: fully_shard(layer(), mp_policy=BF16),
    ),
    "wrapper: a strategy's name": (
        TypeError,
        ("`sharding_strategy` must be a ShardingStrategy", "is 'NO_SHARD'", "Pass `ShardingStrategy.NO_SHARD` of"),
        lambda: FSDP(layer(), sharding_strategy="NO_SHARD"),
    ),
    "wrapper: a group without this rank": (
        ValueError,
        ("`process_group` must hold this rank, but rank 0 is not in it", "pass each rank its own"),
        lambda: FSDP(layer(), process_group=dist.GroupMember.NON_GROUP_MEMBER),
    ),
    "wrapper: ignored modules by name": (
        TypeError,
        ("`ignored_modules` must be an iterable of nn.Modules", "type str", "not their names"),
        lambda: FSDP(two(), ignored_modules=["0"]),
    ),
    "policy without its classes": (
        TypeError,
        ("transformer_auto_wrap_policy also needs `transformer_layer_cls`", "functools.partial(transformer_auto_wrap"),
        lambda: FSDP(two(), auto_wrap_policy=transformer_auto_wrap_policy),
    ),
    "policy of a size as text": (
        TypeError,
        ("`min_num_params` must be a number of elements, but is '1e7'", "Pass 1e7"),
        lambda: FSDP(two(), auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params="1e7")),
    ),
    "run_ranks: function first": (
        TypeError,
        ("Ranks need their number and a function, but are given function and int", "Call `run_ranks(2, fn)`"),
        lambda: run_ranks(layer, 2),
    ),
    "run_ranks without ranks": (
        ValueError,
        ("`world_size` must be at least 1, but is 0",),
        lambda: run_ranks(0, layer),
    ),
    "wrapper: a ModuleList": (
        ValueError,
        ("must have a forward, but a ModuleList has none", "Wrap the modules in it"),
        lambda: FSDP(nn.ModuleList([layer()])),
    ),
    "wrapper: a ModuleDict": (
        ValueError,
        ("must have a forward, but a ModuleDict has none", "Wrap the modules in it"),
        lambda: FSDP(nn.ModuleDict({"a": layer()})),
    ),
    "fully_shard: a ModuleList": (
        ValueError,
        ("must have a forward, but a ModuleList has none", "Call fully_shard on the modules in it"),
        lambda: fully_shard(nn.ModuleList([layer()])),
    ),
    "fully_shard twice": (
        ValueError,
        ("sharded twice, but this FSDPLinear has been sharded already by fully_shard", "Leave this call out"),
        lambda: fully_shard(fully_shard(layer())),
    ),
    "fully_shard of a wrapper": (
        ValueError,
        ("sharded twice", "by FullyShardedDataParallel", "use one of the two"),
        lambda: fully_shard(FSDP(layer())),
    ),
    "wrapper around fully_shard": (
        ValueError,
        ("not by both, but `0` in this Sequential", "Use one of the two"),
        lambda: FSDP(nn.Sequential(fully_shard(layer()))),
    ),
    "outer wrapper first": (
        ValueError,
        ("Inner modules must be sharded before outer ones", "`0.weight`", "on inner modules first"),
        lambda: FSDP(FSDP(two()).module[0]),
    ),
    "wrapper inside of a forward": (
        ValueError,
        ("Inner modules must be sharded before outer ones", "`layer.weight`", "before anything runs"),
        lambda: loss_of(FSDP(WrapsInForward(FSDP))),
    ),
    "fully_shard inside of a forward": (
        ValueError,
        ("Inner modules must be sharded before outer ones", "`layer.weight`", "before anything runs"),
        lambda: loss_of(fully_shard(WrapsInForward(fully_shard))),
    ),
    "wrapper around DDP": (
        ValueError,
        ("sharded twice", "`0`", "DistributedDataParallel", "without that wrapper"),
        lambda: FSDP(nn.Sequential(DDP(layer()))),
    ),
    "to meta": (
        TypeError,
        ("must keep its values, but `flat_param_0` would go to the meta device", "before wrapping"),
        lambda: FSDP(layer()).to("meta"),
    ),
    "dtype changed late": (
        TypeError,
        ("fixed before the first forward, but `flat_param_0`", "torch.float16", "use mixed precision"),
        lambda: after_a_forward(FSDP(layer())).half(),
    ),
    "fully_shard: dtype changed late": (
        TypeError,
        ("`weight` would go from ", "`mp_policy` of fully_shard"),
        lambda: after_a_forward(fully_shard(layer())).half(),
    ),
    "wrapper: tied weights in two units": (
        ValueError,
        ("`weight` is shared with `weight` of a unit that is sharded already", "one wrapper around both"),
        lambda: FSDP(nn.Sequential(*map(FSDP, tied()))),
    ),
    "a weight of another unit is appended": (
        NotImplementedError,
        ("`append_shared_param` is not supported", "one wrapper around both"),
        lambda: FSDP(layer()).append_shared_param(nn.Parameter(torch.ones(1))),
    ),
    "fully_shard: tied weights in two units": (
        ValueError,
        ("`weight` is shared with `weight` of", "`fully_shard([first, second])`), or call fully_shard on neither"),
        lambda: fully_shard(nn.Sequential(*map(fully_shard, tied()))),
    ),
}


@on_ranks(1)
@pytest.mark.parametrize("name", MISTAKES)
def test_the_message_says_what_to_do(name):
    """The error of each mistake says what is wrong, where, and what to do."""
    check(MISTAKES[name])


# ---- each wrong argument, by door: the error, words of its message, and the argument

SHARD = {"wrapper": FSDP, "fully_shard": fully_shard}


def mesh(*shape):
    return init_device_mesh(rank_device().type, shape)


def placed(placement):
    """Arguments by which weights are placed so, and biases as by default."""
    return {"shard_placement_fn": lambda param: placement if param.dim() > 1 else None}


MUST_RESHARD = "`reshard_after_forward` must be"
ARGUMENTS = {
    "wrapper": [
        (ValueError, "mixed_precision", lambda: {"fp32_reduce_scatter": True}),
        (ValueError, "mixed_precision", lambda: {"compute_dtype": BF16}),
        (ValueError, "floating", lambda: {"compute_dtype": torch.int64}),
        ((TypeError, ValueError), "compute_dtype", lambda: {"compute_dtype": "bf16"}),
        (TypeError, "cpu_offload", lambda: {"cpu_offload": "yes"}),
        (TypeError, "move_grads_to_cpu", lambda: {"move_grads_to_cpu": 1}),
        (TypeError, "reshard_after_forward", lambda: {"reshard_after_forward": "yes"}),
        (TypeError, "bucket_cap_mb", lambda: {"bucket_cap_mb": "25"}),
        (TypeError, "bucket_cap_mb", lambda: {"bucket_cap_mb": math.nan}),
        (TypeError, "process_group", lambda: {"process_group": "MISSING"}),
        (TypeError, "nonsense", lambda: {"nonsense": 1}),
    ],
    "fully_shard": [
        (TypeError, "`mesh` must be a DeviceMesh, but is ProcessGroup", lambda: {"mesh": dist.group.WORLD}),
        (ValueError, "but has 3", lambda: {"mesh": mesh(1, 1, 2)}),
        *(
            (ValueError, MUST_RESHARD, lambda wrong=wrong: {"reshard_after_forward": wrong})
            for wrong in (3, 0, -1, 1.0, "all", torch.tensor(2))
        ),
        (TypeError, "`mp_policy` must be a MixedPrecisionPolicy, but is None", lambda: {"mp_policy": None}),
        (TypeError, "`mp_policy` must be", lambda: {"mp_policy": torch_fsdp.MixedPrecision()}),
        (TypeError, "`mp_policy` must be", lambda: {"mp_policy": OffloadPolicy()}),
        (TypeError, "`offload_policy` must be an? OffloadPolicy, but is True", lambda: {"offload_policy": True}),
        (TypeError, "`dp_mesh_dims` must be a DataParallelMeshDims or None", lambda: {"dp_mesh_dims": ("dp",)}),
        (ValueError, r"`dp` is not one of \(\)", lambda: {"dp_mesh_dims": DataParallelMeshDims("dp")}),
        (TypeError, "`ignored_params` must be an.*an object of type str", lambda: {"ignored_params": {"0.weight"}}),
        (TypeError, "`ignored_params` must be an iterable", lambda: {"ignored_params": 3}),
        (TypeError, "`bucket_cap_mb`", lambda: {"bucket_cap_mb": "25"}),
        (ValueError, "`order_check`", lambda: {"order_check": "sometimes"}),
        (TypeError, "`nan_check`", lambda: {"nan_check": 1}),
        (TypeError, "process_group", lambda: {"process_group": dist.group.WORLD}),
        (ValueError, r"Shard\(dim=2\) for `0.weight`, which has shape \(5, 4\)", lambda: placed(Shard(2))),
        (ValueError, "`0.weight`", lambda: placed(Shard(-3))),
        (TypeError, "returned Replicate .*`0.weight`", lambda: placed(Replicate())),
        (TypeError, r"returned int \(1\) for `0.weight`", lambda: placed(1)),
        (
            ValueError,
            r"2 ranks do not divide dimension 1 of `2.weight`, which has shape \(4, 5\)",
            lambda: {"shard_placement_fn": lambda param: Shard(param.dim() - 1)},
        ),
        (TypeError, "must be a function", lambda: {"shard_placement_fn": Shard(1)}),
    ],
}


@on_ranks(2)
@pytest.mark.parametrize("door", SHARD)
def test_arguments_that_are_refused(door):
    """Each wrong argument raises an error with its name and value; nothing is sent, and the module still trains."""
    for kind, match, given in ARGUMENTS[door]:
        module, arguments = mlp(4, 5, 4), given()
        before = list(module.named_parameters())
        with CollectiveCounter() as counter, pytest.raises(kind, match=match):
            SHARD[door](module, **arguments)
        assert not counter.calls
        after = list(module.named_parameters())
        assert all(name == other and param is same for (name, param), (other, same) in zip(before, after, strict=True))
        squares(module).backward()
        assert all(param.grad is not None for param in module.parameters())


# ---- each module that cannot be sharded: the error, words of its message, and the call


def with_integers():
    model = mlp(4, 6, 4)
    model.register_parameter("steps", nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False))
    return model


def half_narrow():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())


def of_torch(*names):
    """A model of which torch's FSDP2 has sharded some modules; "" is the whole."""
    model = mlp(4, 6, 4)
    for name in names:
        torch_fsdp.fully_shard(model.get_submodule(name))
    return model


def with_dtensors():
    model = mlp(4, 6, 4)
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh(2), [Replicate()]))
    return model


orig = partial(FSDP, use_orig_params=True)
BY_TORCH = "wrapped by torch.distributed.fsdp"
MODULES = [
    (TypeError, "list", lambda: FSDP([layer()])),
    (TypeError, "`module` must be an nn.Module.*str", lambda: fully_shard("model")),
    (TypeError, "holds an object of type int", lambda: fully_shard([layer(), 3])),
    (ValueError, "list is empty", lambda: fully_shard([])),
    (ValueError, "each module once", lambda: fully_shard([model := two(), model])),
    (ValueError, "a ParameterList has none", lambda: fully_shard(nn.ParameterList([nn.Parameter(torch.ones(3))]))),
    (ValueError, "must have a forward", lambda: fully_shard([layer(), nn.ModuleDict()])),
    (ValueError, "sharded twice", lambda: fully_shard([layer(), fully_shard(layer())])),
    (ValueError, "Inner modules.*`0.weight`", lambda: fully_shard(fully_shard(two())[0])),
    *(
        (
            ValueError,
            "Inner modules.*`0.weight`.*use one of the two",
            lambda door=door: fully_shard(door(two()).module[0]),
        )
        for door in (FSDP, orig)
    ),
    *(
        (ValueError, "not by both, but `0`", lambda door=door: fully_shard(nn.Sequential(door(two()))))
        for door in (FSDP, orig)
    ),
    (ValueError, "not by both, but `root`", lambda: FSDP(fully_shard(layer()))),
    (ValueError, "Inner modules.*`0.weight`", lambda: FSDP(fully_shard(two())[0])),
    (ValueError, "`0.weight` of a lazy module", lambda: fully_shard(nn.Sequential(nn.LazyLinear(3)))),
    (ValueError, "`0.weight` of a lazy module", lambda: FSDP(nn.Sequential(nn.LazyLinear(2)))),
    ((TypeError, ValueError), "`steps`", lambda: fully_shard(with_integers())),
    (TypeError, "steps.*int64", lambda: FSDP(with_integers())),
    (TypeError, "1.weight.*bfloat16", lambda: FSDP(half_narrow(), mixed_precision=True)),
    (ValueError, "`0.weight` is on .*`dp_mesh_dims`", lambda: fully_shard(with_dtensors())),
    (ValueError, f"`0` is {BY_TORCH}", lambda: fully_shard(of_torch("0"))),
    (ValueError, "`2?.?weight` is on|Inner", lambda: fully_shard(of_torch("0", "")[2])),
    (ValueError, BY_TORCH, lambda: fully_shard(of_torch("0", ""))),
    (ValueError, r"`0|0\.weight", lambda: FSDP(of_torch("0"))),
    # torch's own errors
    ((AssertionError, TypeError, ValueError), "", lambda: torch_fsdp.fully_shard(fully_shard(mlp(4, 6, 4))[0])),
    (AssertionError, "fully_shard has already been applied", lambda: torch_fsdp.fully_shard(fully_shard(layer()))),
]


@on_ranks(2)
def test_modules_that_are_refused():
    """Modules without a forward, sharded, wrapped, lazy or no modules at all, and what is no floating parameter."""
    for kind, match, call in MODULES:
        with pytest.raises(kind, match=match):
            call()


@needs_fsdp2_on_cpu
@on_ranks(2)
def test_a_refused_model_still_trains():
    """A model that was sharded before, by whatever door, trains after another door has refused it."""
    for model in (of_torch("0", ""), fully_shard(mlp(4, 6, 4)), FSDP(mlp(4, 6, 4)), orig(mlp(4, 6, 4))):
        with pytest.raises(ValueError, match=r"wrapped|sharded twice"):
            fully_shard(model)
        squares(model).backward()


def test_no_process_group():
    """Wrapping without a process group raises a ValueError that names ``init_process_group``."""
    with pytest.raises(ValueError, match="init_process_group"):
        FSDP(nn.Linear(2, 2))


def test_the_own_dtype_is_a_valid_compute_dtype():
    """A ``compute_dtype`` equal to the parameters' dtype changes nothing, as under autocast."""
    with fake_group(2):
        FSDP(nn.Linear(2, 2), compute_dtype=torch.float32)
        FSDP(nn.Linear(2, 2).double(), compute_dtype=torch.float64)


@on_ranks(2)
def test_a_mesh_of_other_ranks_is_refused():
    """A rank outside the mesh gets an error; the rank inside it shards."""
    mesh = DeviceMesh(rank_device().type, [1])
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match=r"holds \[1\] and not rank 0"):
            fully_shard(mlp(4, 6, 4), mesh=mesh)
    else:
        squares(fully_shard(mlp(4, 6, 4), mesh=mesh)).backward()


@on_ranks(2)
def test_sharding_communicates_nothing():
    """Sharding issues no collective, so an error in it cannot hang another rank."""
    fully_shard(mlp(4, 9, 5))  # makes the mesh
    with CollectiveCounter() as counter:
        wrap_each(mlp(4, 9, 5))
        fully_shard(mlp(4, 9, 5))
    assert counter.calls == []


# ---- ranks that differ: words of the error on all of them, and the model by whether the rank is the odd one


def linears(model, at_once):
    for part in [[model[0], model[2]]] if at_once else [model[0], model[2]]:
        fully_shard(part)
    return fully_shard(model)


def in_place(**kwargs):
    return fully_shard(mlp(12, 6, 12), **kwargs)


def cut_last(param):
    return Shard(param.dim() - 1)


DIFFERENCES = {
    "shape": (r"unit `0`.*weight.*9, 4.*10, 4", lambda odd: wrap_each(mlp(4, 9 + odd, 5))),
    "same size": ("", lambda odd: FSDP(nn.Linear(4, 6) if odd else nn.Linear(6, 4, bias=False))),
    "one layer more": ("", lambda odd: FSDP(mlp(*[4] * (3 + odd)))),
    "name": ("", lambda odd: FSDP(nn.Sequential(OrderedDict({f"layer{odd}": nn.Linear(4, 4)})))),
    "order": ("", lambda odd: FSDP(nn.Sequential(*[nn.Linear(4, 2), nn.Linear(4, 3)][:: 1 - 2 * odd]))),
    "wrapping": ("", lambda odd: (wrap_each if odd else FSDP)(mlp(4, 4))),
    "flatten": ("", lambda odd: FSDP(mlp(4, 4), flatten_parameters=bool(odd))),
    "precision": ("", lambda odd: FSDP(mlp(4, 4), mixed_precision=bool(odd))),
    "frozen": ("", lambda odd: FSDP(mlp(4, 4).requires_grad_(bool(odd)))),
    "dtype": ("", lambda odd: FSDP(mlp(4, 4).to(torch.float64 if odd else torch.float32))),
    # of the settings, only those that differ
    "bucket": (
        r"unit `root` with bucket_cap_mb=0; .* bucket_cap_mb=1\. ",
        lambda odd: FSDP(mlp(4, 4), bucket_cap_mb=odd),
    ),
    "dimension": (
        "sharded on dim 0.*sharded on dim 1",
        lambda odd: in_place(shard_placement_fn=cut_last if odd else None),
    ),
    "outputs": (
        "outputs in torch.float16",
        lambda odd: in_place(mp_policy=MixedPrecisionPolicy(output_dtype=torch.float16 if odd else None)),
    ),
    "precision in place": ("bfloat16", lambda odd: in_place(mp_policy=MixedPrecisionPolicy(BF16 if odd else None))),
    "reshard": ("reshard_after_forward=True", lambda odd: in_place(reshard_after_forward=bool(odd))),
    "bucket in place": ("bucket_cap_mb|buckets", lambda odd: in_place(bucket_cap_mb=0 if odd else 25)),
    "order_check": ("order_check", lambda odd: in_place(order_check="off" if odd else "always")),
    "lists": ("0, 2", lambda odd: linears(mlp(4, 6, 4), odd)),
}


@on_ranks(2, in_full(3))
@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_that_differ_all_raise(name):
    """When one rank builds a different model, the first use raises on every rank, naming rank and difference."""
    odd = dist.get_world_size() - 1
    match, build = DIFFERENCES[name]
    model = build(int(dist.get_rank() == odd))
    with pytest.raises(RanksDisagreeError, match=rf"(?s)^(?=.*rank {odd}).*{match}"):
        model.state_dict() if name == "shape" else model(randn(3, 4))


# ---- what is not refused


@pytest.mark.cpu_only("a group of fake ranks in this process, whose modules are on the CPU")
def test_ddp_over_the_same_ranks_is_refused():
    """DDP around a unit, or around a module that holds one, would average different shards; it may span others."""
    with fake_group(2):
        for model in (FSDP(layer()), nn.Sequential(layer(), FSDP(layer()))):
            replica = DDP(model)
            for _ in range(2):
                with pytest.raises(ValueError, match=r"is sharded over its ranks \[0, 1\].*Leave"):
                    loss_of(replica)
        loss_of(DDP(layer()))
        alone = dist.new_group([0])
        loss_of(DDP(FSDP(layer()), process_group=alone))


@on_ranks(1)
def test_a_wrapper_around_a_wrapper_warns():
    """The outer wrapper of the same module has no effect: the warning says so at the user's line."""
    model = FSDP(layer())
    with pytest.warns(UserWarning, match=r"around another one has no effect.*Wrap the module once") as caught:
        FSDP(model)
    assert {warning.filename for warning in caught} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FSDP(nn.Sequential(model))


@on_ranks(1)
@pytest.mark.parametrize("shard", [FSDP, fully_shard])
def test_a_container_may_be_given_a_forward(shard):
    """A ModuleDict with a forward of its own, set on the object, is sharded and trains."""
    parts = nn.ModuleDict({"used": layer()})
    parts.forward = lambda x: parts["used"](x)
    model = shard(parts)
    loss_of(model).backward()
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(1)
def test_autocast_names_the_policy():
    """The warning about autocast names ``mp_policy``."""
    with (
        torch.autocast(rank_device().type, BF16),
        pytest.warns(UserWarning, match=r"mp_policy=MixedPrecisionPolicy\(param_dtype=torch.bfloat16\)"),
    ):
        fully_shard(mlp(4, 5))(randn(3, 4))
