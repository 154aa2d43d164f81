"""Through every door, with every pair of settings, a model trains to the bit as a replica of plain torch.

The reference sums in rank order, within the shards first if there are replicas, and divides afterwards. Only the total
norm has a tolerance, because its sum runs over shards instead of parameters; both sides then clip by the engine's norm.
NCCL adds in its own order, so on GPUs a few roundings of the reduce dtype are allowed.
"""

import contextlib
import copy
import functools
import itertools
import math
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fairshard.nn import (
    BackwardPrefetch,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Owned,
    RowBlocks,
    ShardingStrategy,
    StateDictType,
    checkpoint_wrapper,
)
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn.wrap import lambda_auto_wrap_policy
from fairshard.optim import ShardedGradScaler
from fairshard.utils.collectives import counters, reset_counters
from fairshard.views import received_in_place
from tests.covering import covering_array, over_cells, random_cells
from tests.doors.fully_shard.assorted import KINDS, Assorted, Boom, ByRows, Extra
from tests.doors.fully_shard.models import shard_tiny, torch_tiny
from tests.kit import rank_device
from tests.kit.doors import full, no_sync, shard, whole
from tests.models import DIM, loss_of_tiny, tiny, tiny_batch, tiny_loss, wrap_tiny
from tests.on_ranks import in_full, on_ranks
from tests.reference import Reference, assert_same_state, mean_over_ranks, run_steps, sgd
from tests.settings.test_hybrid import pairs
from tests.torch_gaps import needs_fsdp2_on_cpu

pytestmark = pytest.mark.behaviour("training")

NUM_MICRO, MAX_NORM, SCALE = 2, 0.05, 2.0**6
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

OF_BOTH = {
    "checkpointing": [None, "reentrant", "not_reentrant"],
    "kind": [*KINDS, "spare"],
    "raises": [None, "forward", "backward"],
}

# ---- the wrapper

NUM_SHARDS = {1: 1, 2: 1, 3: 3, 4: 2}  # of hybrid strategies, by world size
NUM_KEPT = {1: True, 2: 2, 3: 3, 4: 2}  # ranks that parameters stay sharded over after the forward

WRAPPER = {
    **OF_BOTH,
    "sharding": [  # world size and strategy
        (1, "FULL_SHARD"),
        (2, "SHARD_GRAD_OP"),
        (3, "FULL_SHARD"),
        (3, "NO_SHARD"),
        (4, "HYBRID_SHARD"),
        (4, "_HYBRID_SHARD_ZERO2"),
        (4, "few"),
    ],
    "layout": ["flat", "apart", "orig", "blocks", "owned"],
    "built": ["memory", "meta", "policy_sync", "policy_meta_sync"],
    "precision": ["fp32", "bf16_wide", "bf16_reduce", "fp16"],
    "placement": ["device", "offload", "master_on_cpu"],
    "prefetch": ["ahead", "late", "never"],
    "hook": [None, "mean"],
    "ignored": [None, "modules", "states"],
    "order_check": ["sampled", "always", "off"],
    "accumulate": ["once", "no_sync", "sharded"],
    "clip": [None, 2.0, math.inf],
    "groups": ["one", "by_name"],
    "saved": [None, *StateDictType.__members__],
    "bucket": [25, 0.001, 0],
}
MORE_OF_WRAPPER = {
    **WRAPPER,
    "sharding": [*itertools.product((1, 2, 3, 4), (*ShardingStrategy.__members__, "few"))],
    "layout": [*WRAPPER["layout"], "orig_apart"],
    "built": [*WRAPPER["built"], "sync", "policy"],
    "precision": [*WRAPPER["precision"], "bf16"],
    "checkpointing": [*WRAPPER["checkpointing"], "wrapper"],
}
ORIG = {"use_orig_params": True}
LAYOUTS = {
    "flat": {},
    "apart": {"flatten_parameters": False},
    "orig": ORIG,
    "orig_apart": {**ORIG, "flatten_parameters": False},
    "blocks": {**ORIG, "placement_fn": lambda param: RowBlocks(2)},
    # Not chosen by what ranks own of other models: local state dicts load into the same owners only.
    "owned": {**ORIG, "placement_fn": lambda param: Owned(param.numel() % 2)},
}
PRECISIONS = {  # settings of the wrapper, compute dtype, reduce dtype
    "fp32": ({}, FP32, FP32),
    "bf16": ({"mixed_precision": MixedPrecision(BF16)}, BF16, BF16),
    "bf16_wide": ({"mixed_precision": MixedPrecision(BF16, FP32, BF16)}, BF16, FP32),
    "bf16_reduce": ({"mixed_precision": MixedPrecision(reduce_dtype=BF16)}, FP32, BF16),
    "fp16": ({"mixed_precision": True}, FP16, FP16),
}
PLACEMENTS = {"device": {}, "offload": {"cpu_offload": True}, "master_on_cpu": {"move_grads_to_cpu": True}}
PREFETCH = {
    "ahead": {"forward_prefetch": True},
    "late": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST, "limit_all_gathers": False},
    "never": {"forward_prefetch": False, "backward_prefetch": None},
}


class Gated(Assorted):
    """An `Assorted` with a buffer, a gate that may be ignored, and for kind ``"spare"`` a module that is not called."""

    def __init__(self, cell):
        super().__init__(cell["kind"], cell["checkpointing"] if cell["checkpointing"] != "wrapper" else None)
        self.gate = nn.Linear(DIM, DIM)
        self.register_buffer("level", torch.linspace(0.5, 1.5, DIM))
        if cell["kind"] == "spare":
            self.spare = nn.Linear(DIM, DIM)

    def forward(self, tokens, extra):
        gate = torch.sigmoid(self.gate(extra.to(self.gate.weight.dtype)))
        return super().forward(tokens, extra * gate.to(extra.dtype) * self.level.to(extra.dtype))


def gated(cell, seed=1):
    torch.manual_seed(seed)
    return Gated(cell).to(rank_device())


def unit_names(cell):
    """The names of the wrapped submodules, innermost first."""
    return ["first.up", "first", "second", "shared", *(["spare"] if cell["kind"] == "spare" else [])]


def alone(cell):
    """The modules whose gradients are not reduced: ignored or unused ones."""
    return [*(["gate"] if cell["ignored"] else []), *(["spare"] if cell["kind"] == "spare" else [])]


def is_hybrid(cell):
    return "HYBRID" in cell["strategy"]


def has_hook(cell):
    """Hybrid strategies and placements refuse hooks."""
    return bool(cell["hook"]) and not is_hybrid(cell) and cell["layout"] not in ("blocks", "owned")


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
    if world_size == 1 or cell["strategy"] == "NO_SHARD" or (is_hybrid(cell) and NUM_SHARDS[world_size] == 1):
        settings.pop("placement_fn", None)  # nothing is cut
    return settings


def to_be_wrapped(cell, plain):
    """A model to wrap, and the arguments with which it gets the values of ``plain``."""
    built, has_values = cell["built"], "sync" not in cell["built"] or dist.get_rank() == 0
    how = {"sync_module_states": True} if "sync" in built else {}
    if "meta" in built:
        with torch.device("meta"):
            model = Gated(cell)
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


def in_groups(model):
    """Param groups: matrices, and biases with norms, which have another rate."""
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    others = [name for name in named if name.endswith("bias") or "norm" in name]
    return [
        {"params": [named[name] for name in named if name not in others], "weight_decay": 0.1},
        {"params": [named[name] for name in others], "lr": 0.03},
    ]


def optimizer_of(cell, model):
    """SGD with momentum; in groups, if not flattened."""
    if cell["groups"] == "one" or cell["layout"] == "flat":
        return sgd(model)
    return torch.optim.SGD(in_groups(model), lr=0.1, momentum=0.9)


def resumed(cell, model, optimizer):
    """A new model and optimizer that have loaded the state of the given ones."""
    other = wrapped(cell, gated(cell, seed=7))
    of_other = optimizer_of(cell, other)
    for one in (model, other):
        FSDP.set_state_dict_type(one, StateDictType[cell["saved"]])
    other.load_state_dict(model.state_dict())
    state = FSDP.optim_state_dict(model, optimizer)
    of_other.load_state_dict(FSDP.optim_state_dict_to_load(other, of_other, state))
    FSDP.set_state_dict_type(other, StateDictType.FULL_STATE_DICT)
    return other, of_other


def train_wrapped(cell, num_steps=2):
    """Train a wrapped model beside its reference; after the first step a new one loads its state, if ``saved``."""
    _, compute_dtype, reduce_dtype = PRECISIONS[cell["precision"]]
    plain = gated(cell)
    mean = functools.partial(mean_over_ranks, num_shards=NUM_SHARDS[dist.get_world_size()] if is_hybrid(cell) else None)
    own = (lambda grad: mean(grad).to(reduce_dtype)) if has_hook(cell) else mean
    reference = Reference(plain, compute_dtype, reduce_dtype, own, alone(cell), cell["layout"] != "flat")
    model = wrapped(cell, plain)
    run = Run(cell, reference, optimizer_of(cell, reference.master), tolerances(reduce_dtype))
    optimizer = optimizer_of(cell, model)
    for step in range(num_steps):
        run.step(model, optimizer, step)
        if step == 0 and cell["saved"]:
            model, optimizer = resumed(cell, model, optimizer)
    assert_same_state(whole(model), reference.master.state_dict(), *run.tolerances)


# ---- fully_shard

IN_PLACE = {
    **OF_BOTH,
    "world_size": [1, 2, 3],
    "precision": ["fp32", "bf16", "bf16_wide", "fp16"],
    "offload": [False, True],
    "accumulate": ["once", "no_sync", "sharded", "kept"],
    "clip": [None, 2.0],
    "reshard": [None, True, False, "number"],
    "bucket": [25, 0],
    "optimizer": ["sgd", "foreach", "fused", "groups"],
    "in_place": ["none", "all", "large"],
    "placement": ["rows", "blocks", "some_blocks", "owned", "each_kind"],
}
MIN_NBYTES = {"none": 1 << 17, "all": 1, "large": 32}  # a rank, of parameters that are received in place
DTYPES = {"fp32": (None, None), "bf16": (BF16, None), "bf16_wide": (BF16, FP32), "fp16": (FP16, None)}
OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "foreach": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, foreach=True),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, fused=True),
    "groups": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, foreach=True),
}
PLACED = {
    "rows": None,
    "blocks": lambda param: RowBlocks(),
    "some_blocks": lambda param: RowBlocks(3) if param.dim() > 1 else None,
    "owned": lambda param: Owned(),
    "each_kind": lambda param: Owned() if param.dim() > 1 else [None, RowBlocks(), Owned(0)][param.numel() % 3],
}


def groups_of(cell, model):
    if cell["optimizer"] == "groups":
        return in_groups(model)
    return [{"params": [param for param in model.parameters() if param.requires_grad]}]


def sharded_in_place(cell, model, dtypes):
    # 4 ranks keep parameters sharded over pairs; with fewer ranks, the number is the world size.
    number = 2 if dist.get_world_size() == 4 else dist.get_world_size()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that a number of 1 means False
        return shard(
            model,
            "fully_shard",
            *unit_names(cell),
            reshard_after_forward=number if cell["reshard"] == "number" else cell["reshard"],
            mp_policy=MixedPrecisionPolicy(*dtypes),
            offload_policy=CPUOffloadPolicy() if cell["offload"] else OffloadPolicy(),
            bucket_cap_mb=cell["bucket"],
            shard_placement_fn=PLACED[cell["placement"]],
        )


def train_in_place(cell, num_steps=3):
    """Train a model of `fully_shard` beside its reference; on one rank nothing is sent."""
    param_dtype, reduce_dtype = DTYPES[cell["precision"]]
    if param_dtype is not None and rank_device().type != "cpu":
        reduce_dtype = FP32  # collectives of devices add 16 bits in 16 bits
    plain = gated(cell)
    reference = Reference(plain, param_dtype or FP32, reduce_dtype, keeps_none=True)
    model = sharded_in_place(cell, plain, (param_dtype, reduce_dtype))
    make, placed = OPTIMIZERS[cell["optimizer"]], dict(model.named_parameters())
    placed = {param: placed[name] for name, param in reference.master.named_parameters()}
    of_reference = ByRows(groups_of(cell, reference.master), dist.get_world_size(), make, placed)
    run = Run(cell, reference, of_reference, tolerances(FP32), scales=cell["precision"] == "fp16")
    optimizer = make(groups_of(cell, model))
    reset_counters()
    with mock.patch.object(received_in_place, "_MIN_NBYTES", MIN_NBYTES[cell["in_place"]]):
        for step in range(num_steps):
            run.step(model, optimizer, step)
    assert dist.get_world_size() > 1 or counters() == {}
    assert_same_state(whole(model), reference.master.state_dict(), *run.tolerances)


# ---- both


def tolerances(dtype):
    """``(rtol, atol)`` of values after a few sums over ranks in ``dtype``, of gradients near 1 and a rate of 0.1."""
    eps = torch.finfo(dtype).eps
    return (0.0, 0.0) if rank_device().type == "cpu" else (max(1e-5, 4 * eps), max(1e-6, eps / 4))


class Run:
    """The steps of a sharded model and its reference, side by side."""

    def __init__(self, cell, reference, of_reference, tolerances, scales=False):
        self.cell, self.reference, self.of_reference, self.tolerances = cell, reference, of_reference, tolerances
        kind = "cpu" if cell.get("offload") else rank_device().type
        self.scaler = ShardedGradScaler(kind, init_scale=SCALE, enabled=scales)

    def step(self, model, optimizer, step):
        """Compare the losses of one step's backwards, and their norm; step both."""
        scale, accumulate = self.scaler.get_scale(), self.cell["accumulate"]
        if step == 1 and self.cell["raises"]:
            self.interrupt(model, optimizer)
        num_micro = 1 if accumulate == "once" else NUM_MICRO
        for micro in range(num_micro):
            *inputs, targets = tiny_batch(dist.get_rank(), step, micro)
            is_last = micro == num_micro - 1
            syncs = accumulate == "sharded" or is_last
            expected = tiny_loss(self.reference(*inputs), targets)
            (expected * scale).backward()
            self.reference.reduce_grads() if syncs else self.reference.keep_grads()
            if not isinstance(model, FSDP):
                model.set_is_last_backward(is_last)
                model.set_reshard_after_backward(accumulate != "kept" or is_last)
            with contextlib.nullcontext() if syncs else no_sync(model):
                actual = tiny_loss(model(*inputs), targets)
                self.scaler.scale(actual).backward()
            torch.testing.assert_close(actual, expected, rtol=self.tolerances[0], atol=self.tolerances[1])
        self.scaler.unscale_(optimizer)
        self.reference.scale_grads(torch.tensor(1 / scale))
        if self.cell["clip"] is not None:
            self.clip(model)
        self.of_reference.step()
        self.scaler.step(optimizer)
        self.scaler.update()
        self.of_reference.zero_grad()
        optimizer.zero_grad()

    def interrupt(self, model, optimizer):
        """A pass that raises in its forward or its backward."""
        second = [module for name, module in model.named_modules() if "second" in name and isinstance(module, Extra)]
        second[0].raises = self.cell["raises"]
        with pytest.raises(Boom):
            loss_of_tiny(model, ()).backward()
        second[0].raises = None
        optimizer.zero_grad()

    def clip(self, model):
        """Clip both by the model's norm, which must be the reference's up to a few roundings."""
        kind = self.cell["clip"]
        if isinstance(model, FSDP):
            norm = model.clip_grad_norm_(MAX_NORM, kind)
        else:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, kind)
        factor = full(MAX_NORM / (norm + 1e-6))  # torch 2.6 adds 1e-6 to the norm of every rank's part
        rtol = max(1e-6, self.tolerances[0])
        expected = self.reference.grad_norm(kind)
        torch.testing.assert_close(full(norm).double(), expected, rtol=rtol, atol=0, check_device=False)
        assert full(norm) > MAX_NORM, "the test must clip"
        self.reference.scale_grads(factor)


def spread(cells):
    """The cells, with ``sharding`` split into ``world_size`` and ``strategy``."""
    return [{**dict(zip(("world_size", "strategy"), cell.pop("sharding"), strict=True)), **cell} for cell in cells]


CELLS = spread(covering_array(WRAPPER, seed=45))


@over_cells(CELLS)
@on_ranks()
def test_every_pair_of_settings_of_the_wrapper(cell):
    """Losses and weights equal the replica's, in cells that cover every pair of settings."""
    train_wrapped(cell)


@pytest.mark.full
@over_cells([{**cell, "layout": "orig"} for cell in CELLS])
@on_ranks()
def test_every_pair_of_settings_meets_original_parameters(cell):
    """The same holds with ``use_orig_params`` in every cell."""
    train_wrapped(cell)


@pytest.mark.full
@over_cells(spread(random_cells(MORE_OF_WRAPPER, 400)))
@on_ranks()
def test_random_settings_of_the_wrapper(cell):
    """The same holds over more steps, in random cells that cover nearly every triple of settings."""
    train_wrapped(cell, num_steps=4)


@over_cells(covering_array(IN_PLACE))
@on_ranks()
def test_every_pair_of_settings_of_fully_shard(cell):
    """Losses and weights equal the replica's, in cells that cover every pair of settings."""
    train_in_place(cell)


@pytest.mark.full
@over_cells([{**cell, "world_size": cell["world_size"] % 4 + 1} for cell in random_cells(IN_PLACE, 200)])
@on_ranks()
def test_random_settings_of_fully_shard(cell):
    """The same holds in 200 random cells, also on 4 ranks that keep parameters sharded over pairs."""
    train_in_place(cell)


# ---- beside torch's own


@on_ranks(in_full(1), 2, 3)
@pytest.mark.parametrize("norm_type", [None, 2.0, in_full(math.inf)])
def test_the_wrapper_beside_ddp(norm_type):
    """20 steps give DDP's losses and weights: to the bit at 1 and 2 ranks, closely at 3, and closely when clipped.

    DDP divides every rank's gradient before it adds; we divide the sum. At 1 and 2 ranks both are exact halvings. At 3
    ranks DDP rounds a third three times and we round it once: in each step the last bit of a gradient may differ. A
    norm is summed over other parts.
    """
    ddp, model = DistributedDataParallel(tiny()), wrap_tiny(tiny())
    clips = [lambda _: None] * 2
    if norm_type is not None:
        clips = [
            lambda model: model.clip_grad_norm_(0.3, norm_type),
            lambda ddp: torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.3, norm_type),
        ]
    losses = [run_steps(net, loss_of_tiny, 20, clip=clip) for net, clip in zip((model, ddp), clips, strict=True)]
    is_exact = dist.get_world_size() < 3 and norm_type is None and rank_device().type == "cpu"
    rtol = 0.0 if is_exact else 2e-6
    torch.testing.assert_close(*losses, rtol=rtol, atol=0)
    assert_same_state(whole(model), ddp.module.state_dict(), rtol, rtol)
    assert losses[0][-1] < losses[0][0], "the model must learn something"


@needs_fsdp2_on_cpu
@on_ranks(in_full(1), in_full(2), 3)
@pytest.mark.parametrize("name", [in_full("sgd"), "foreach", "fused"])
def test_fully_shard_beside_fsdp2(name):
    """20 steps give the losses and weights of PyTorch's `fully_shard`: exactly at 1 and 2 ranks, closely at 3.

    There gloo's reduce-scatter adds in ring order. AdamW divides by the root of squares, which amplifies last bits of
    tiny gradients.
    """
    ours, theirs = shard_tiny(tiny()), torch_tiny(tiny())
    losses = [
        run_steps(model, loss_of_tiny, 20, optimizer=OPTIMIZERS[name]([{"params": list(model.parameters())}]))
        for model in (ours, theirs)
    ]
    rtol = 0.0 if dist.get_world_size() < 3 else 1e-6 if name == "sgd" else 1e-4
    torch.testing.assert_close(*losses, rtol=rtol, atol=0)
    assert_same_state(whole(ours), whole(theirs), rtol, rtol)
