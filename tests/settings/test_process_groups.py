"""Units of one model on different process groups: experts that only some ranks share."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.kit import rank_device
from tests.models import mlp
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, average_grads_, randn, sgd


class Experts(nn.Module):
    """A shared layer, then an expert that differs between groups of ranks."""

    def __init__(self, seed):
        super().__init__()
        self.shared = mlp(4, 6, seed=1)
        self.expert = mlp(6, 5, seed=seed)

    def forward(self, x):
        return self.expert(torch.tanh(self.shared(x)))


def train_experts(groups):
    """Train with an expert on each group of ranks in ``groups``; compare with plain replicas, to the bit."""
    mine = None
    for index, ranks in enumerate(groups):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine, number = group, index
    plain = Experts(seed=10 + number).to(rank_device())
    wrapped = copy.deepcopy(plain)
    wrapped.expert = FSDP(wrapped.expert, process_group=mine)
    wrapped = FSDP(wrapped)
    assert wrapped.world_size == dist.get_world_size()
    assert wrapped.expert.world_size == dist.get_world_size(mine)
    of_plain, of_wrapped = sgd(plain), sgd(wrapped)
    for step in range(3):
        expected = plain(randn(3, 4, key=step)).square().sum()
        actual = wrapped(randn(3, 4, key=step)).square().sum()
        assert torch.equal(actual, expected)
        expected.backward()
        actual.backward()
        average_grads_(plain.shared.parameters())
        average_grads_(plain.expert.parameters(), mine)
        for optimizer in (of_plain, of_wrapped):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(wrapped.state_dict(), plain.state_dict())


@on_ranks(2)
def test_an_expert_for_each_rank():
    """Every rank has an expert of its own, in a group of one; the shared layer is sharded over all."""
    train_experts([[0], [1]])


@on_ranks(3)
def test_experts_on_groups_of_different_sizes():
    """Two ranks share one expert, the third has another."""
    train_experts([[0, 1], [2]])


@on_ranks(4)
def test_two_experts_on_two_ranks_each():
    """Four ranks, two experts, each sharded over two ranks."""
    train_experts([[0, 2], [1, 3]])


@on_ranks(2)
def test_clip_refuses_mixed_groups_by_name():
    """The total norm of units on several groups is not one number: clipping raises and names the unit."""
    group = dist.new_group()
    model = Experts(1)
    model.expert = FSDP(model.expert, process_group=group)
    model = FSDP(model)
    assert not model.children_share_process_group
    model(randn(3, 4)).sum().backward()
    with pytest.raises(NotImplementedError, match="expert"):
        model.clip_grad_norm_(1.0)


@on_ranks(2)
def test_the_default_group_is_one_object():
    """Without ``process_group`` every unit uses the default group itself, so that clipping works."""
    model = Experts(1)
    model.expert = FSDP(model.expert)
    model = FSDP(model)
    assert model.process_group is model.expert.process_group is dist.group.WORLD
    assert model.children_share_process_group
    model(randn(3, 4)).sum().backward()
    assert model.clip_grad_norm_(1.0) > 0


@on_ranks(3)
def test_a_model_on_some_of_the_ranks():
    """In a group without rank 1 the other ranks train, and rank 1 takes no part."""
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return
    plain = mlp(4, 5)
    wrapped = FSDP(copy.deepcopy(plain), process_group=group)
    assert (wrapped.rank, wrapped.world_size) == (dist.get_rank() // 2, 2)
    for _ in range(2):
        for one in (plain, wrapped):
            one.zero_grad()
            one(randn(3, 4)).square().sum().backward()
        average_grads_(plain.parameters(), group)
        sgd(plain).step()
        sgd(wrapped).step()
    assert_same_state(wrapped.state_dict(), plain.state_dict())
