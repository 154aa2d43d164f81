"""With features combined, a model trains to the bit as a replica that spells out the arithmetic.

Each feature on its own is tested in another file; here any two of them meet. The reference sums in rank order, within
the shards first if there are replicas, and divides afterwards. On GPUs NCCL sums in its own order, so a few roundings
of the reduce dtype are allowed.
"""

import contextlib
import copy
import functools
import itertools
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.nn import BackwardPrefetch, MixedPrecision, ShardingStrategy, StateDictType, checkpoint_wrapper
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn.wrap import lambda_auto_wrap_policy
from tests.covering import covering_array, over_cells, random_cells
from tests.kit import rank_device
from tests.models import DIM, Tiny, tiny_batch, tiny_loss
from tests.on_ranks import on_ranks
from tests.reference import Reference, assert_same_state, mean_over_ranks, sgd
from tests.settings.test_hybrid import pairs

NUM_MICRO, MAX_NORM = 2, 0.05
NUM_SHARDS = {1: 1, 2: 1, 3: 3, 4: 2}  # of hybrid strategies, by world size
NUM_KEPT = {1: True, 2: 2, 3: 3, 4: 2}  # ranks that parameters stay sharded over after the forward

AXES = {
    "sharding": [  # world size and strategy
        (1, "FULL_SHARD"),
        (2, "SHARD_GRAD_OP"),
        (3, "FULL_SHARD"),
        (3, "NO_SHARD"),
        (4, "HYBRID_SHARD"),
        (4, "_HYBRID_SHARD_ZERO2"),
        (4, "few"),
    ],
    "layout": ["flat", "apart", "orig"],
    "built": ["memory", "meta", "policy_sync", "policy_meta_sync"],
    "precision": ["fp32", "bf16_wide", "bf16_reduce"],
    "placement": ["device", "offload", "master_on_cpu"],
    "prefetch": ["ahead", "late", "never"],
    "hook": [None, "mean"],
    "ignored": [None, "modules", "states"],
    "checkpointing": [None, "reentrant", "not_reentrant"],
    "order_check": ["sampled", "always", "off"],
    "accumulate": ["once", "no_sync", "sharded"],
    "clip": [None, 2.0, math.inf],
    "frozen": [None, "parameters", "unit"],
    "unused": [None, "parameters", "unit"],
    "groups": ["one", "by_name"],
    "saved": [None, *StateDictType.__members__],
    "bucket": [25, 0.001],
}
ALL_AXES = {
    **AXES,
    "sharding": [*itertools.product((1, 2, 3, 4), (*ShardingStrategy.__members__, "few"))],
    "layout": ["flat", "apart", "orig", "orig_apart"],
    "built": ["memory", "meta", "sync", "policy", "policy_sync", "policy_meta_sync"],
    "precision": ["fp32", "bf16", "bf16_wide", "bf16_reduce"],
    "checkpointing": [None, "reentrant", "not_reentrant", "wrapper"],
}
LAYOUTS = {
    "flat": {},
    "apart": {"flatten_parameters": False},
    "orig": {"use_orig_params": True},
    "orig_apart": {"use_orig_params": True, "flatten_parameters": False},
}
PRECISIONS = {  # settings, compute dtype, reduce dtype
    "fp32": ({}, torch.float32, torch.float32),
    "bf16": ({"mixed_precision": MixedPrecision(torch.bfloat16)}, torch.bfloat16, torch.bfloat16),
    "bf16_wide": (
        {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)},
        torch.bfloat16,
        torch.float32,
    ),
    "bf16_reduce": ({"mixed_precision": MixedPrecision(reduce_dtype=torch.bfloat16)}, torch.float32, torch.bfloat16),
}
PLACEMENTS = {"device": {}, "offload": {"cpu_offload": True}, "master_on_cpu": {"move_grads_to_cpu": True}}
PREFETCH = {
    "ahead": {"forward_prefetch": True},
    "late": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST, "limit_all_gathers": False},
    "never": {"forward_prefetch": False, "backward_prefetch": None},
}


class Joined(Tiny):
    """A `Tiny` with a buffer and a gate that may be ignored; optionally with frozen and with unused parts."""

    def __init__(self, cell):
        super().__init__(cell["checkpointing"] if cell["checkpointing"] != "wrapper" else None)
        self.gate = nn.Linear(DIM, DIM)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, DIM))
        if cell["unused"] == "unit":
            self.spare = nn.Linear(DIM, DIM)
        elif cell["unused"] == "parameters":
            self.second.spare = nn.Linear(DIM, DIM)
        if cell["frozen"] == "unit":
            self.second.requires_grad_(False)
        elif cell["frozen"] == "parameters":
            for param in (self.first.down.weight, self.second.norm.bias, self.shared.bias, self.norm.weight):
                param.requires_grad_(False)

    def forward(self, tokens, extra):
        x = self._run(self.first, self.embed(tokens) + extra)
        x = torch.tanh(self.shared(x)) * self.scale.to(x.dtype)
        x = x * torch.sigmoid(self.gate(x.to(self.gate.weight.dtype))).to(x.dtype)
        return self.head(self.norm(self.shared(self._run(self.second, x))))


def joined(cell, seed=1):
    torch.manual_seed(seed)
    return Joined(cell).to(rank_device())


def unit_names(cell):
    """The names of the wrapped submodules, innermost first."""
    return ["first.up", "first", "second", "shared", *(["spare"] if cell["unused"] == "unit" else [])]


def alone(cell):
    """The modules whose gradients are not reduced: ignored or unused ones."""
    return [*(["gate"] if cell["ignored"] else []), *(["spare"] if cell["unused"] == "unit" else [])]


def is_hybrid(cell):
    return "HYBRID" in cell["strategy"]


def has_hook(cell):
    return bool(cell["hook"]) and not is_hybrid(cell)  # hybrid strategies refuse hooks


def mean_by_hook(state, grad, shard=None):
    """A communication hook that takes the mean in rank order."""
    mean = mean_over_ranks(grad)
    if shard is None:
        grad.copy_(mean)
    else:
        shard.copy_(mean.view(dist.get_world_size(), -1)[dist.get_rank()])


def settings_of(cell):
    world_size = dist.get_world_size()
    settings = {
        **LAYOUTS[cell["layout"]],
        **PRECISIONS[cell["precision"]][0],
        **PLACEMENTS[cell["placement"]],
        **PREFETCH[cell["prefetch"]],
        "order_check": cell["order_check"],
        "nan_check": cell["order_check"] == "always",
        "bucket_cap_mb": cell["bucket"],
    }
    if cell["strategy"] == "few":
        settings["reshard_after_forward"] = NUM_KEPT[world_size]
    else:
        settings["sharding_strategy"] = ShardingStrategy[cell["strategy"]]
    if is_hybrid(cell):
        settings["process_group"] = pairs(NUM_SHARDS[world_size])
    return settings


def to_be_wrapped(cell, plain):
    """A model to wrap, and the arguments with which it gets the values of ``plain``."""
    built, has_values = cell["built"], "sync" not in cell["built"] or dist.get_rank() == 0
    how = {"sync_module_states": True} if "sync" in built else {}
    if "meta" in built:
        with torch.device("meta"):
            model = Joined(cell)
        if cell["ignored"]:
            model.gate = copy.deepcopy(plain.gate)
        twins = dict(zip(model.modules(), plain.modules(), strict=True))
        how["param_init_fn"] = functools.partial(init_as, twins if has_values else None)
        return model, how
    model = copy.deepcopy(plain)
    if not has_values:
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.add_(0 if cell["ignored"] and name.startswith("gate") else 1)
    return model, how


def init_as(twins, module):
    """A ``param_init_fn`` that allocates memory and, given ``twins``, copies the values of the module's twin."""
    module.to_empty(device=rank_device(), recurse=False)
    for kind in ("_parameters", "_buffers") if twins else ():
        for name, own in getattr(module, kind).items():
            own.copy_(getattr(twins[module], kind)[name])


def wrapped(cell, plain):
    """``plain`` wrapped with the settings of the cell."""
    model, how = to_be_wrapped(cell, plain)
    if cell["checkpointing"] == "wrapper":
        checkpoint_wrapper(model.first)
        checkpoint_wrapper(model.second)
    settings = {**settings_of(cell), **how}
    ignored = {
        None: {},
        "modules": {"ignored_modules": [model.gate]},
        "states": {"ignored_states": list(model.gate.parameters())},
    }[cell["ignored"]]
    if "policy" in cell["built"]:
        units = [model.get_submodule(name) for name in unit_names(cell)]
        policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: module in units)
        settings.update(auto_wrap_policy=policy, device_id=rank_device())
    else:
        for name in unit_names(cell):
            model.set_submodule(name, FSDP(model.get_submodule(name), **settings))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that a policy leaves much in the outermost unit
        model = FSDP(model, **ignored, **settings)
    if has_hook(cell):
        model.register_comm_hook(None, mean_by_hook)
    return model


def optimizer_of(cell, model):
    """SGD with momentum; in groups, if not flattened: weight decay for matrices, another rate for the rest."""
    if cell["groups"] == "one" or cell["layout"] == "flat":
        return sgd(model)
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    others = [name for name in named if name.endswith("bias") or "norm" in name]
    groups = [
        {"params": [named[name] for name in named if name not in others], "weight_decay": 0.1},
        {"params": [named[name] for name in others], "lr": 0.03},
    ]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def resumed(cell, model, optimizer):
    """A new model and optimizer that have loaded the state of the given ones."""
    other = wrapped(cell, joined(cell, seed=7))
    of_other = optimizer_of(cell, other)
    for one in (model, other):
        FSDP.set_state_dict_type(one, StateDictType[cell["saved"]])
    other.load_state_dict(model.state_dict())
    state = FSDP.optim_state_dict(model, optimizer)
    of_other.load_state_dict(FSDP.optim_state_dict_to_load(other, of_other, state))
    FSDP.set_state_dict_type(other, StateDictType.FULL_STATE_DICT)
    return other, of_other


def train(cell, num_steps=2):
    _, compute_dtype, reduce_dtype = PRECISIONS[cell["precision"]]
    plain = joined(cell)
    mean = functools.partial(mean_over_ranks, num_shards=NUM_SHARDS[dist.get_world_size()] if is_hybrid(cell) else None)
    own = (lambda grad: mean(grad).to(reduce_dtype)) if has_hook(cell) else mean
    keeps_none = cell["layout"] != "flat"
    reference = Reference(plain, compute_dtype, reduce_dtype, own, alone(cell), keeps_none)
    model = wrapped(cell, plain)
    of_reference, optimizer = optimizer_of(cell, reference.master), optimizer_of(cell, model)
    eps = torch.finfo(reduce_dtype).eps  # of each sum over ranks, on gradients near 1 and a rate of 0.1
    rtol, atol = (0.0, 0.0) if rank_device().type == "cpu" else (4 * eps, max(1e-5, eps / 4))
    num_micro = 1 if cell["accumulate"] == "once" else NUM_MICRO
    for step in range(num_steps):
        for micro in range(num_micro):
            *inputs, targets = tiny_batch(dist.get_rank(), step, micro)
            sync = cell["accumulate"] != "no_sync" or micro == num_micro - 1
            expected = tiny_loss(reference(*inputs), targets)
            expected.backward()
            reference.reduce_grads() if sync else reference.keep_grads()
            with contextlib.nullcontext() if sync else model.no_sync():
                actual = tiny_loss(model(*inputs), targets)
                actual.backward()
            torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
        if cell["clip"] is not None:
            norm = model.clip_grad_norm_(MAX_NORM, cell["clip"])
            # The norm is summed in fp32 and in another order than the reference's: a few roundings.
            torch.testing.assert_close(norm.double(), reference.grad_norm(cell["clip"]), rtol=max(1e-6, rtol), atol=0)
            assert norm > MAX_NORM, "the test must clip"
            reference.scale_grads(MAX_NORM / (norm + 1e-6))
        of_reference.step()
        optimizer.step()
        of_reference.zero_grad()
        optimizer.zero_grad()
        if step == 0 and cell["saved"]:
            model, optimizer = resumed(cell, model, optimizer)
    assert_same_state(model.state_dict(), reference.master.state_dict(), rtol, atol)


def spread(cells):
    """The cells, with ``sharding`` split into ``world_size`` and ``strategy``."""
    return [{**dict(zip(("world_size", "strategy"), cell.pop("sharding"), strict=True)), **cell} for cell in cells]


CELLS = spread(covering_array(AXES, seed=45))  # this seed loses no pair where a hook or groups are left out


@over_cells(CELLS)
@on_ranks()
def test_every_pair_of_features_trains_as_a_replica(cell):
    """Losses and weights equal the replica's, in cells that cover every pair of features."""
    train(cell)


@pytest.mark.full
@over_cells([{**cell, "layout": "orig"} for cell in CELLS])
@on_ranks()
def test_every_pair_of_features_meets_original_parameters(cell):
    """The same holds with ``use_orig_params`` in every cell."""
    train(cell)


@pytest.mark.full
@over_cells(spread(random_cells(ALL_AXES, 300)))
@on_ranks()
def test_features_at_random_train_as_a_replica(cell):
    """The same holds over more steps, in random cells that cover nearly every triple of features."""
    train(cell, num_steps=4)
