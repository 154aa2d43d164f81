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

from fairshard.errors import RanksDisagreeError, TrainingStateError
from fairshard.nn import FSDPModule, UnshardHandle, fully_shard
from fairshard.utils.collectives import RowGather
from fairshard.utils.transfers import Transfer
from tests.kit import rank_device
from tests.kit.doors import full, gathered, num_gathers, shard, whole
from tests.models import DIM, Block, mlp
from tests.on_ranks import in_full, on_ranks
from tests.reference import (
    assert_same_state,
    average_grads_,
    await_device,
    backward_that_raises_on,
    randn,
    run_steps,
    squares,
    train_both,
)

pytestmark = pytest.mark.behaviour("unshard")

NUM_TOWERS = 3


def two_layers(**how):
    """A plain model of two Linears, and its twin, where each Linear is a unit and the root has no parameters."""
    return mlp(4, 6, 4), shard(mlp(4, 6, 4), "fully_shard", "0", "2", **how)


@on_ranks(2, in_full(1), in_full(3))
def test_unshard_and_reshard():
    """Before or between forwards ``unshard`` gathers once; parameters are whole until ``reshard``, and no others.

    Afterwards the DTensors are the same objects.
    """
    plain, model = two_layers(order_check="off")
    before = dict(model.named_parameters())
    for has_run in (False, True):
        num_gathers()
        handle = model[0].unshard(async_op=True)
        assert isinstance(handle, UnshardHandle)
        for _ in range(2):
            handle.wait()
            assert torch.equal(model[0].weight, plain[0].weight)
        assert isinstance(model[2].weight, DTensor)
        assert model[2].unshard() is None
        model[2].unshard(async_op=True)
        assert gathered(model) == ["0", "2"]
        assert all(type(param) is nn.Parameter for param in model.parameters())
        assert_same_state(dict(model.named_parameters()), dict(plain.named_parameters()))
        if has_run:
            assert torch.equal(model(randn(2, 4)), plain(randn(2, 4)))
        for part in (model[2], model[2], model[0]):
            part.reshard()
        assert gathered(model) == []
        handle.wait()  # nothing left to wait for
        assert num_gathers() == (2 if dist.get_world_size() > 1 else 0)
        assert all(param is before[name] for name, param in model.named_parameters())
        model(randn(2, 4)).sum().backward()
        model.zero_grad()
    train_both(plain, model, squares)


@on_ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_gathers_of_all_before_a_forward(reshard):
    """All units may be gathered before the forward, in any order; it gathers none, and training is the same."""
    plain, model = two_layers(reshard_after_forward=reshard)

    def ahead(model):
        for layer in (model[2], model[0]):
            layer.unshard(async_op=True)
        num_gathers()

    with torch.no_grad():
        model(randn(2, 4))
        ahead(model)
        model(randn(2, 4))
    assert num_gathers() == 0
    train_both(plain, model, squares, before=ahead)
    assert gathered(model) == []


@on_ranks(2)
def test_a_gather_without_a_wait():
    """A gather may be freed immediately, started twice, or never waited for; the forward is still correct."""
    plain, model = two_layers()
    for _ in range(2):
        model[0].unshard(async_op=True)
        model[0].reshard()
        for layer in (model[0], model[0], model[2]):
            layer.unshard(async_op=True)
        assert torch.equal(model(randn(3, 4)), plain(randn(3, 4)))


@on_ranks(2)
@pytest.mark.parametrize("way", ["step", "write"])
def test_weights_that_change_after_a_gather_are_computed_with(way):
    """After a step or a write between ``unshard`` and forward, the first gather is waited for before it is repeated.

    Mixed messages would hang the next collective.
    """
    plain, model = two_layers()
    weights = plain[0].weight, model[0].weight
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, foreach=True) for each in (plain, model)]
    for each in (plain, model):
        each(randn(3, 4)).sum().backward()
    average_grads_(plain.parameters())
    start, wait = RowGather.start, Transfer.wait
    started, waited = [], []

    def noted_start(gather, tag):
        started.append(start(gather, tag))
        return started[-1]

    def noted_wait(transfer):
        waited.append(transfer)
        return wait(transfer)

    with (
        mock.patch.object(RowGather, "start", noted_start),
        mock.patch.object(Transfer, "wait", noted_wait),
        torch.no_grad(),
    ):
        model[0].unshard()
        model[2].unshard(async_op=True)
        await_device()  # the gather, whose result is refused, does not wait for the step
        for weight, optimizer in zip(weights, optimizers, strict=True):
            optimizer.step() if way == "step" else weight.mul_(2)
        assert torch.equal(model(randn(3, 4)), plain(randn(3, 4)))
    assert len(started) == (4 if way == "step" else 3)
    assert all(any(each is transfer for each in waited) for transfer in started)


@on_ranks(2)
def test_a_module_without_parameters():
    """On a module without parameters ``unshard`` and ``reshard`` do nothing."""
    _, model = two_layers()
    num_gathers()
    for part in (model, fully_shard(nn.ReLU())):
        assert part.unshard() is None
        part.unshard(async_op=True).wait()
        part.reshard()
        part(torch.ones(2, 4, device=rank_device()))
    model.reshard()


@on_ranks(2)
def test_reshard_in_its_own_forward_is_refused():
    """``reshard`` inside the module's forward raises an error that names it, and the model keeps working."""
    _, model = two_layers()
    handle = model[0].register_forward_hook(lambda *_: model[0].reshard())
    for _ in range(2):
        with pytest.raises(TrainingStateError, match=r"`reshard` must not be called inside the forward.*`0`"):
            model(randn(2, 4))
        assert gathered(model) == []
    handle.remove()
    model(randn(2, 4)).sum().backward()


@on_ranks(2)
def test_unshard_after_a_backward_that_raised_on_one_rank():
    """The rank first serves the rest of its failed backward, so no rank waits for it; the next backward raises."""
    _, model = two_layers()
    backward_that_raises_on(1, model(randn(3, 4)).sum())
    model[0].unshard()
    model[0].reshard()
    with pytest.raises(RanksDisagreeError, match=r"raised differ: .*1 on rank 1.*restart all ranks"):
        model(randn(3, 4)).sum().backward()


# ---- beside other communication


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
@pytest.mark.parametrize("reshard", [False, in_full(True)])
def test_several_gathers_under_way_beside_other_communication(reshard):
    """Towers that are gathered while another module reduces train as the plain model does, bit for bit.

    The other module is replicated, by DDP or by torch's ``replicate``, or sharded with the rest; each unit is gathered
    once in a forward.
    """
    for beside, waits_for in (("ddp", 0), ("replicate", NUM_TOWERS), ("sharded", 1)):
        torch.manual_seed(1)
        plain = TowersAfterMean(waits_for).to(rank_device())
        model = copy.deepcopy(plain)
        for tower in (*model.towers.each, model.towers):
            fully_shard(tower, reshard_after_forward=reshard)
        if beside == "ddp":
            model.mean = DistributedDataParallel(model.mean)
        elif beside == "replicate":
            replicate(model.mean)
        else:
            fully_shard(model, reshard_after_forward=reshard)
        optimizers = [torch.optim.Adam(each.parameters(), lr=0.1, foreach=True) for each in (plain, model)]
        for step in range(3):
            num_gathers()
            losses = [each(randn(4, DIM, key=step)).square().sum() for each in (plain, model)]
            count = num_gathers()
            assert torch.equal(*losses), (beside, step)
            if step and dist.get_world_size() > 1:
                assert count == NUM_TOWERS + (beside == "sharded")
            for loss in losses:
                loss.backward()
            average_grads_(plain.parameters())
            with implicit_replication():  # parameters of both kinds in one call
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(param), expected, rtol=0, atol=0, msg=beside)


class Path(nn.Module):
    """Uses three of four blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks[:3]:
            x = block(x)
        return x


@on_ranks(2)
@pytest.mark.parametrize("wrong", ["the next", "itself", "unused"])
def test_a_wrong_prefetch_changes_nothing_but_memory(wrong):
    """Backward prefetch of modules that the backward has finished, or never reaches, changes no bit."""

    def trained(named):
        torch.manual_seed(1)
        model = shard(Path().to(rank_device()), "fully_shard", *(f"blocks.{index}" for index in range(4)))
        for index, block in enumerate(model.blocks[:3]):
            if named is not None:
                block.set_modules_to_backward_prefetch([model.blocks[named(index)]])
        adam = torch.optim.Adam(model.parameters(), lr=0.1)
        run_steps(model, lambda net, key: net(randn(4, DIM, key=key)).square().sum(), optimizer=adam)
        assert gathered(model) == [], "what was not used is freed too"
        return whole(model)

    named = {"the next": lambda index: (index + 1) % 3, "itself": lambda index: index, "unused": lambda index: 3}
    assert_same_state(trained(named[wrong]), trained(None))
