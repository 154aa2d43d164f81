"""``use_orig_params``: views of the shard are registered under original names; results do not change."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import ShardingStrategy
from tests.models import tiny, tiny_batch, tiny_loss, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, average_grads_


def tiny_step(model, *key):
    tokens, extra, targets = tiny_batch(dist.get_rank(), *key)
    loss = tiny_loss(model(tokens, extra), targets)
    loss.backward()
    return loss.detach()


def two_groups(model):
    """Param groups: biases and norms have no weight decay and another learning rate."""
    named = dict(model.named_parameters())
    slow = [param for name, param in named.items() if name.endswith("bias") or "norm" in name]
    fast = [param for name, param in named.items() if not (name.endswith("bias") or "norm" in name)]
    groups = [{"params": fast, "weight_decay": 0.1}, {"params": slow, "lr": 0.03}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW], ids=lambda o: o.__name__)
def test_training_gives_the_bits_of_flat_parameters(optimizer):
    """Losses and weights are those of the flattened wrapper, bit for bit."""
    wrapped = [wrap_tiny(tiny(), use_orig_params=flag, bucket_cap_mb=0.001) for flag in (True, False)]
    options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {"foreach": False}
    optimizers = [optimizer(model.parameters(), lr=0.1, **options) for model in wrapped]
    for step in range(4):
        losses = [tiny_step(model, step) for model in wrapped]
        assert torch.equal(*losses)
        for one in optimizers:
            one.step()
            one.zero_grad(set_to_none=step % 2 == 0)
    assert_same_state(*(model.state_dict() for model in wrapped))


@on_ranks(1, 2, 3)
def test_param_groups_are_those_of_the_plain_model():
    """Learning rates and weight decay per original parameter give the weights of the plain model."""
    plain = tiny()
    wrapped = wrap_tiny(copy.deepcopy(plain), use_orig_params=True)
    assert sorted(dict(wrapped.named_parameters())) == sorted(dict(plain.named_parameters()))
    of_plain, of_wrapped = two_groups(plain), two_groups(wrapped)
    exact = {} if dist.get_world_size() < 3 else {"rtol": 1e-5, "atol": 1e-6}
    for step in range(3):
        tiny_step(plain, step)
        tiny_step(wrapped, step)
        average_grads_(plain.parameters())
        for optimizer in (of_plain, of_wrapped):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(wrapped.state_dict(), plain.state_dict(), **exact)


@on_ranks(1, 2, 3)
def test_views_are_the_runs_that_the_rank_owns():
    """One parameter for each name (tied names share one), the rank's part of the original; 1-D if that is cut."""
    plain = tiny()
    values = {name: param.detach().flatten() for name, param in plain.named_parameters()}
    wrapped = wrap_tiny(tiny(), use_orig_params=True)
    assert wrapped.head.weight is wrapped.embed.weight
    assert all(isinstance(param, nn.Parameter) for param in wrapped.parameters())
    assert dist.get_world_size() == 1 or all(param.dim() == 1 for param in wrapped.parameters())
    mine = {name: param.detach().flatten() for name, param in wrapped.named_parameters()}
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    for name, value in values.items():
        assert torch.equal(torch.cat([part[name] for part in every]), value), name
    if dist.get_world_size() == 3:
        assert any(not param.numel() for param in wrapped.parameters())
    assert FSDP is type(wrapped)


@on_ranks(1, 2)
@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
def test_other_strategies_give_the_bits_of_flat_parameters(strategy):
    """SHARD_GRAD_OP and NO_SHARD, with ``no_sync`` and assigned weights, give the bits of flat parameters."""
    settings = {"sharding_strategy": getattr(ShardingStrategy, strategy)}
    wrapped = [wrap_tiny(tiny(), use_orig_params=flag, **settings) for flag in (True, False)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in wrapped]
    for step in range(3):
        losses = []
        for model, optimizer in zip(wrapped, optimizers, strict=True):
            with model.no_sync():
                tiny_step(model, step, 0)
            losses.append(tiny_step(model, step, 1))
            optimizer.step()
            optimizer.zero_grad()
            for param in model.parameters():
                param.data = param.data * 0.5
        assert torch.equal(*losses)
    assert_same_state(*(model.state_dict() for model in wrapped))
