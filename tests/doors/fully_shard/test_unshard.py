"""Gathers by ``unshard``, early, several at a time, or beside other communication, do not change results."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.parallel import DistributedDataParallel

from fairshard.errors import RanksDisagreeError
from fairshard.nn import FSDPModule, fully_shard
from fairshard.utils.collectives import RowGather, counters, reset_counters
from fairshard.utils.testing import rank_device
from fairshard.utils.transfers import Transfer
from tests.models import DIM, Block, mlp
from tests.on_ranks import in_full, on_ranks
from tests.reference import average_grads_, await_device, backward_that_raises_on, randn

NUM_TOWERS = 3


class Mean(torch.autograd.Function):
    """The mean over ranks; its gradient is also averaged over ranks."""

    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    @staticmethod
    def backward(ctx, grad):
        return Mean.forward(ctx, grad)


class MeanOverRanks(nn.Module):
    """A layer that communicates in its forward, and again in its backward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x):
        return torch.tanh(Mean.apply(self.linear(x)))


class Towers(nn.Module):
    """Blocks side by side."""

    def __init__(self):
        super().__init__()
        self.each = nn.ModuleList(Block() for _ in range(NUM_TOWERS))

    def forward(self, x):
        return sum(tower(x) for tower in self.each)


class TowersAfterMean(nn.Module):
    """Starts to gather all towers, runs another module that communicates, and then calls the towers.

    Waits for the first ``waits_for`` gathers itself, and leaves the others to the towers' forwards.
    """

    def __init__(self, waits_for=0):
        super().__init__()
        self.waits_for = waits_for
        self.mean = MeanOverRanks()
        self.towers = Towers()

    def forward(self, x):
        handles = [tower.unshard(async_op=True) for tower in self.towers.each if isinstance(tower, FSDPModule)]
        x = self.mean(x)
        for handle in handles[: self.waits_for]:
            handle.wait()
        return self.towers(x)


@on_ranks(2, in_full(1))
@pytest.mark.parametrize("reshard", [False, pytest.param(True, marks=pytest.mark.full)])
def test_several_gathers_under_way_beside_other_communication(reshard):
    """Towers that are gathered while another module reduces train as the plain model does, bit for bit.

    The other module is replicated, by DDP or by torch's ``replicate``, or sharded with the rest.
    """
    for beside, waits_for in (("ddp", 0), ("replicate", NUM_TOWERS), ("sharded", 1)):
        torch.manual_seed(1)
        plain = TowersAfterMean(waits_for).to(rank_device())
        model = copy.deepcopy(plain)
        for tower in model.towers.each:
            fully_shard(tower, reshard_after_forward=reshard)
        fully_shard(model.towers, reshard_after_forward=reshard)
        if beside == "ddp":
            model.mean = DistributedDataParallel(model.mean)
        elif beside == "replicate":
            replicate(model.mean)
        else:
            fully_shard(model, reshard_after_forward=reshard)
        optimizers = [torch.optim.Adam(each.parameters(), lr=0.1, foreach=True) for each in (plain, model)]
        for step in range(3):
            losses = [each(randn(4, DIM, key=step)).square().sum() for each in (plain, model)]
            assert torch.equal(*losses), (beside, step)
            for loss in losses:
                loss.backward()
            average_grads_(plain.parameters())
            with implicit_replication():  # parameters of both kinds in one call
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            whole = param.full_tensor() if isinstance(param, DTensor) else param
            torch.testing.assert_close(whole, expected, rtol=0, atol=0, msg=beside)


def num_gathers():
    return counters().get("all_gather", (0,))[0]


def two_layers(**how):
    """A plain model of two Linears, and its twin, where each Linear is a unit and the root has no parameters."""
    plain = mlp(6, 5, 4)
    model = copy.deepcopy(plain)
    fully_shard(model[0], **how)
    fully_shard(model[2], **how)
    return plain, fully_shard(model, **how)


@on_ranks(2)
def test_before_any_forward():
    """After ``unshard`` a module has whole parameters and its forward gathers nothing; ``reshard`` undoes this."""
    plain, model = two_layers(order_check="off")
    assert model[0].unshard() is None
    assert not isinstance(model[0].weight, DTensor)
    assert torch.equal(model[0].weight, plain[0].weight)
    assert isinstance(model[2].weight, DTensor)
    model[0].reshard()
    assert isinstance(model[0].weight, DTensor)
    model(randn(3, 6))  # sets up the model, with the unit that was gathered alone
    handles = [model[0].unshard(async_op=True), model[2].unshard(async_op=True)]
    for handle in (*handles, *handles):
        handle.wait()
    assert torch.equal(model[2].weight, plain[2].weight)
    reset_counters()
    assert torch.equal(model(randn(3, 6)), plain(randn(3, 6)))
    assert num_gathers() == 0


@on_ranks(2)
def test_a_gather_without_a_wait():
    """A gather may be freed immediately, started twice, or never waited for; the forward is still correct."""
    plain, model = two_layers()
    for _ in range(2):
        model[0].unshard(async_op=True)
        model[0].reshard()
        model[0].unshard(async_op=True)
        model[0].unshard(async_op=True)
        model[2].unshard(async_op=True)
        assert torch.equal(model(randn(3, 6)), plain(randn(3, 6)))


@on_ranks(2)
def test_weights_that_change_after_a_gather_are_computed_with():
    """After a step between ``unshard`` and forward, the forward waits for the first gather and gathers again."""
    plain, model = two_layers()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for each in (plain, model):
        each(randn(3, 6)).sum().backward()
    average_grads_(plain.parameters())
    start, wait = RowGather.start, Transfer.wait
    started, waited = [], []

    def noted_start(gather, tag):
        started.append(start(gather, tag))
        return started[-1]

    def noted_wait(transfer):
        waited.append(transfer)
        return wait(transfer)

    with mock.patch.object(RowGather, "start", noted_start), mock.patch.object(Transfer, "wait", noted_wait):
        model[0].unshard()
        model[2].unshard(async_op=True)
        await_device()  # the gather, whose result is refused, does not wait for the step
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            assert torch.equal(model(randn(3, 6)), plain(randn(3, 6)))
    assert len(started) == 4
    assert all(any(each is transfer for each in waited) for transfer in started)


@on_ranks(2)
def test_a_module_without_parameters():
    """On a module without parameters ``unshard`` and ``reshard`` do nothing."""
    _, model = two_layers()
    reset_counters()
    assert model.unshard() is None
    model.unshard(async_op=True).wait()
    model.reshard()
    assert num_gathers() == 0
    alone = fully_shard(nn.ReLU())
    alone.unshard(async_op=True).wait()
    assert torch.equal(alone(torch.ones(2, device=rank_device())), torch.ones(2, device=rank_device()))


@on_ranks(2)
@pytest.mark.parametrize("wrong", ["the next", "itself", "unused"])
def test_a_wrong_prefetch_changes_nothing_but_memory(wrong):
    """Backward prefetch of modules that the backward has finished, or never reaches, changes no bit."""

    class Path(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x):
            for block in self.blocks[:3]:
                x = block(x)
            return x

    def trained(named):
        torch.manual_seed(1)
        model = Path().to(rank_device())
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        for index, block in enumerate(model.blocks[:3]):
            if named is not None:
                block.set_modules_to_backward_prefetch([model.blocks[named(index)]])
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for step in range(3):
            model(randn(4, DIM, key=step)).square().sum().backward()
            assert all(isinstance(param, DTensor) for param in model.parameters()), "what was not used is freed too"
            optimizer.step()
            optimizer.zero_grad()
        return [param.full_tensor() for param in model.parameters()]

    named = {"the next": lambda index: (index + 1) % 3, "itself": lambda index: index, "unused": lambda index: 3}
    for with_it, without in zip(trained(named[wrong]), trained(None), strict=True):
        assert torch.equal(with_it, without)


@on_ranks(2)
def test_unshard_after_a_backward_that_raised_on_one_rank():
    """The rank first serves the rest of its failed backward, so no rank waits for it; the next backward raises."""
    model = mlp(4, 4, 4)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    backward_that_raises_on(1, model(randn(3, 4)).sum())
    model[0].unshard()
    model[0].reshard()
    with pytest.raises(RanksDisagreeError, match=r"raised differ: .*1 on rank 1.*restart all ranks"):
        model(randn(3, 4)).sum().backward()
