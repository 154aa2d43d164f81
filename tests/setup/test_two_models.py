"""A unit belongs to the model that was called first since it was built: the model that lost it raises by name."""

import copy
import gc
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fairshard.engine.tree import units_below
from fairshard.errors import ShardChangedError, TrainingStateError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import fully_shard
from tests.kit import CollectiveCounter, rank_device
from tests.models import mlp
from tests.on_ranks import on_ranks
from tests.reference import randn, train_alike

DOORS = {
    "flat": FSDP,
    "apart": partial(FSDP, flatten_parameters=False),
    "orig": partial(FSDP, use_orig_params=True),
    "rows": fully_shard,
    "offload": partial(FSDP, cpu_offload=True),
}
every_door = pytest.mark.parametrize("door", DOORS)


class Head(nn.Module):
    """A body, which other heads may share, and a layer of its own."""

    def __init__(self, body, out, seed):
        super().__init__()
        self.body = body
        self.layer = mlp(5, out, seed=seed)[0]

    def forward(self, x):
        return self.layer(torch.tanh(self.body(x)))


class Both(nn.Module):
    """Calls two heads in one graph."""

    def __init__(self, actor, critic):
        super().__init__()
        self.actor, self.critic = actor, critic

    def forward(self, x):
        return self.actor(x).sum() + self.critic(x).square().sum()


def body():
    return mlp(4, 5, seed=1)[0]


def actor_and_critic(shard):
    backbone = shard(body())
    return shard(Head(backbone, 3, seed=2)), shard(Head(backbone, 1, seed=3))


LOST = r"unit `body` of this model has joined another one.*module around both"


@on_ranks(1, 2)
@every_door
def test_the_model_that_lost_a_unit_is_refused(door):
    """A second model takes the unit and computes; the first raises from then on, and the cure works."""
    actor, critic = actor_and_critic(DOORS[door])
    x = randn(2, 4)
    expected = actor(x)
    expected.sum().backward()
    backbone = body()
    for _ in range(2):
        assert torch.equal(critic(x), Head(backbone, 1, seed=3)(x))
        critic(x).sum().backward()
        with pytest.raises(ValueError, match=LOST):
            actor(x)
        assert all(unit.root is root_of(critic) for _, unit in units_below(critic))
    both = DOORS[door](Both(actor, critic))
    plain = Both(Head(backbone, 3, seed=2), Head(backbone, 1, seed=3))
    for _ in range(2):
        loss = both(x)
        assert torch.equal(loss, plain(x))
        loss.backward()


def root_of(model):
    return units_below(model)[0][1].root


@on_ranks(1, 2)
@pytest.mark.parametrize("door", [name for name in DOORS if name != "offload"])
@pytest.mark.parametrize("order", ["first", "second", "together"])
def test_graphs_of_the_model_that_lost_a_unit_are_still_right(door, order):
    """Both models were called before a backward: gradients are those of the plain modules, in any order."""
    actor, critic = actor_and_critic(DOORS[door])
    backbone = body()
    plain = Head(backbone, 3, seed=2), Head(backbone, 1, seed=3)
    x = randn(2, 4, key=dist.get_rank())
    for heads in ((actor, critic), plain):
        losses = [head(x).square().sum() for head in heads]
        for loss in {"first": losses, "second": losses[::-1], "together": [sum(losses)]}[order]:
            loss.backward()
    params = dict.fromkeys(param for head in (actor, critic) for param in head.parameters())
    ours = sum(whole_square(param.grad) for param in params)
    theirs = torch.zeros((), device=rank_device())
    for param in dict.fromkeys(param for head in plain for param in head.parameters()):
        dist.all_reduce(param.grad)
        theirs += (param.grad / dist.get_world_size()).square().sum()
    torch.testing.assert_close(ours, theirs)


@on_ranks(2)
def test_an_offloaded_unit_that_moved_has_no_graphs():
    """Its shard is laid out again in host memory: the backward of an earlier forward raises by name."""
    actor, critic = actor_and_critic(DOORS["offload"])
    loss = actor(randn(2, 4)).sum()
    critic(randn(2, 4)).sum().backward()
    with pytest.raises(ShardChangedError, match=r"body\.flat_param_0"):
        loss.backward()


def whole_square(grad):
    """The sum of squares of a gradient, from its shards on all ranks."""
    square = (grad.to_local() if isinstance(grad, DTensor) else grad).square().sum().to(rank_device())
    dist.all_reduce(square)
    return square


@on_ranks(2)
@every_door
def test_the_cure_trains(door):
    """Both heads inside one outer unit train as the plain module, even after each was called alone."""
    shard = DOORS[door]

    def wrap(model):
        model.actor.body = model.critic.body = shard(model.actor.body)
        model.actor, model.critic = shard(model.actor), shard(model.critic)
        with torch.no_grad():
            model.actor(randn(2, 4))
            model.critic(randn(2, 4))
        return shard(model)

    backbone = body()
    plain = Both(Head(backbone, 3, seed=2), Head(backbone, 1, seed=3))
    if door == "rows":
        train_rows(plain, wrap)
    else:
        train_alike(plain, wrap, lambda model, key: model(randn(3, 4, key=key)))


def train_rows(plain, wrap):
    model = wrap(copy.deepcopy(plain))
    for step in range(3):
        for net in (plain, model):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            net(randn(3, 4, key=(step, 0))).backward()
            if net is plain:
                for param in net.parameters():
                    dist.all_reduce(param.grad)
                    param.grad /= dist.get_world_size()
            optimizer.step()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.full_tensor(), one.detach())


@on_ranks(2)
def test_the_refused_model_gathers_nothing():
    """The model that lost a unit raises before anything is sent."""
    actor, critic = actor_and_critic(FSDP)
    actor(randn(2, 4)).sum().backward()
    critic(randn(2, 4)).sum().backward()
    with CollectiveCounter() as counter, pytest.raises(ValueError, match=LOST):
        actor(randn(2, 4))
    assert not counter.calls
    assert not any(unit.is_gathered for _, unit in units_below(actor))


@on_ranks(2)
@every_door
def test_a_first_model_that_one_rank_has_deleted(door):
    """The second model runs, whether a rank still has the first or not."""
    actor, critic = actor_and_critic(DOORS[door])
    actor(randn(2, 4)).sum().backward()
    if dist.get_rank() == 1:
        del actor
    critic(randn(2, 4)).sum().backward()


@on_ranks(2)
def test_a_unit_does_not_move_during_a_pass():
    """A model that is first called in the forward of another one raises if it holds a unit of that."""
    backbone = FSDP(body())
    other = FSDP(Head(backbone, 1, seed=3))

    class CallsOther(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = backbone

        def forward(self, x):
            return self.body(x).sum() + other(x).sum()

    with pytest.raises(TrainingStateError, match="forward of an outer unit` must be called between passes"):
        FSDP(CallsOther())(randn(2, 4))


@on_ranks(1, 2)
@every_door
def test_a_unit_that_was_called_alone(door):
    """An inner unit, the model around it, and a model around that train in turns."""
    shard = DOORS[door]
    plain = nn.Sequential(Head(body(), 3, seed=2), nn.Tanh())
    inner = shard(copy.deepcopy(plain[0].body))
    x = randn(2, 4)
    assert torch.equal(inner(x), plain[0].body(x))
    inner(x).sum().backward()
    model = shard(Head(inner, 3, seed=2))
    for _ in range(2):
        assert torch.equal(model(x), plain[0](x))
        model(x).sum().backward()
        inner(x).sum().backward()
    outer = shard(nn.Sequential(model, nn.Tanh()))
    for _ in range(2):
        assert torch.equal(outer(x), plain(x))
        outer(x).sum().backward()
        model(x).sum().backward()
        inner(x).sum().backward()


@pytest.mark.pairs
@on_ranks(1, 2)
@every_door
@pytest.mark.parametrize("collects", [True, False])
def test_a_new_model_after_the_old_one(door, collects):
    """Once the old outer model is deleted, garbage-collected or not, a new one may have its units."""
    shard = DOORS[door]
    backbone = shard(body())
    old = shard(Head(backbone, 3, seed=2))
    x = randn(2, 4)
    old(x).sum().backward()
    gc.disable()
    try:
        for seed in (3, 4):
            del old
            if collects:
                gc.collect()
            old = shard(Head(backbone, 2, seed=seed))
            plain = Head(body(), 2, seed=seed)
            for _ in range(2):
                assert torch.equal(old(x), plain(x))
                old(x).sum().backward()
    finally:
        gc.enable()


@on_ranks(2)
def test_a_model_that_lost_the_unit():
    """A unit that was removed from a model that still exists may go into another model."""
    backbone = FSDP(body())
    old = FSDP(Head(backbone, 3, seed=2))
    old(randn(2, 4)).sum().backward()
    old.module.body = nn.Linear(4, 5, device=rank_device())
    new = FSDP(Head(backbone, 3, seed=2))
    assert torch.equal(new(randn(2, 4)), Head(body(), 3, seed=2)(randn(2, 4)))
    new(randn(2, 4)).sum().backward()


@on_ranks(2)
def test_a_rank_that_has_run_a_model_alone():
    """Ranks agree on the models that they run together, whatever each rank has run alone before."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    for _ in range(2 - dist.get_rank()):
        FSDP(mlp(2, 2), process_group=alone)(randn(2, 2)).sum().backward()
    actor, critic = actor_and_critic(FSDP)
    kept = actor(randn(2, 4))  # a backward could still reach the actor as a model of its own
    both = FSDP(Both(actor, critic))
    for _ in range(2):
        both(randn(2, 4)).backward()
    assert kept.requires_grad


@on_ranks(2)
def test_plain_models_may_share_a_unit():
    """Plain modules may share a unit, which is then a model of its own that is called twice."""
    backbone = FSDP(body())
    actor, critic = Head(backbone, 3, seed=2), Head(backbone, 1, seed=3)
    shared = body()
    plain = Both(Head(shared, 3, seed=2), Head(shared, 1, seed=3))
    for _ in range(2):
        loss = Both(actor, critic)(randn(2, 4))
        assert torch.equal(loss, plain(randn(2, 4)))
        loss.backward()
