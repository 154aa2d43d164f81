"""Mistakes in arguments and in what is sharded: each error says what is wrong, where, and what to do."""

import warnings
from functools import partial

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW

from fairshard import Checkpointer, fully_shard
from fairshard import FullyShardedDataParallel as FSDP
from fairshard.nn import CPUOffload, CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy
from fairshard.nn.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from fairshard.optim import CPUOptimizer, Muon
from tests.doors.mistakes import BATCH, check, layer, loss_of, two
from tests.kit import fake_group, run_ranks
from tests.on_ranks import on_ranks

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


def convert_after_a_forward():
    model = FSDP(layer())
    model(BATCH)
    model.half()


def shard_each(model):
    for part in model:
        fully_shard(part)
    return fully_shard(model)


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
        lambda: FSDP(layer(), mixed_precision=torch.distributed.fsdp.MixedPrecisionPolicy(BF16)),
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
        lambda: FSDP(layer(), process_group=torch.distributed.GroupMember.NON_GROUP_MEMBER),
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
        convert_after_a_forward,
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
        lambda: shard_each(tied()),
    ),
}


@on_ranks(1)
@pytest.mark.parametrize("name", MISTAKES)
def test_the_message_says_what_to_do(name):
    """The error of each mistake says what is wrong, where, and what to do."""
    check(MISTAKES[name])


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
        alone = torch.distributed.new_group([0])
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
