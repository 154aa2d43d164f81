"""`FairshardStrategy` beside Lightning's ``ModelParallelStrategy``: the same module in several runs, and clipping."""

import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fairshard.errors import FairshardError
from fairshard.nn import FullyShardedDataParallel, fully_shard
from tests.clients.case import be_torchrun
from tests.clients.lightning_runs import QUIET, Rows, _strategy
from tests.clients.loops import net, next_token_loss, shard_each, tokens
from tests.kit import run_ranks

pytest.importorskip("lightning")
pytestmark = pytest.mark.cpu_only("the Trainer is told to use the CPU")


def module(shards):
    """A LightningModule that records its losses; it ``shards`` itself, or leaves that to the strategy."""
    from lightning.pytorch import LightningModule

    class Lit(LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses = net(), []

        def configure_model(self):
            if shards and not hasattr(self.net, "unshard"):
                shard_each(fully_shard, self.net)

        def training_step(self, given, index):
            loss = next_token_loss(self.net(given), given)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, given, index):
            self.training_step(given, index)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Lit()


def trainer(strategy):
    from lightning.pytorch import Trainer

    limits = {"limit_train_batches": 2, "limit_val_batches": 1, "max_epochs": 1}
    made = _strategy(strategy, "fairshard", "full")
    return Trainer(accelerator="cpu", devices=2, strategy=made, **limits, **QUIET)


def fit_again(strategy):
    """Losses of a fit, a validation and a second fit with one Trainer, and of a third fit with another."""
    loader = torch.utils.data.DataLoader(Rows(), batch_size=2)
    given = module(shards=strategy == "model parallel")
    first = trainer(strategy)
    first.fit(given, loader)
    first.validate(given, loader, verbose=False)
    first.fit_loop.max_epochs += 1
    first.fit(given, loader)
    trainer(strategy).fit(given, loader)
    return given.losses


def compare():
    with mock.patch.dict(os.environ), mock.patch.object(dist, "destroy_process_group"):
        be_torchrun(dist.get_rank(), dist.get_world_size(), 29500)
        losses = fit_again("ours")
        assert len(losses) == 7
        assert losses == fit_again("model parallel")


def clip_a_part():
    from lightning.pytorch.plugins.precision import FSDPPrecision

    from fairshard.integrations.lightning import FairshardPrecision

    model = FullyShardedDataParallel(net(), use_orig_params=True)
    precision = FairshardPrecision(FSDPPrecision("32-true"), SimpleNamespace(model=model))
    own = torch.optim.SGD(model.module.head.parameters(), lr=0.1)
    given = tokens("clip")
    next_token_loss(model(given), given).backward()
    with pytest.raises(ValueError, match=r"`gradient_clip_val` must clip all .*`embed\.weight` .*not in this SGD"):
        precision.clip_grad_by_norm(own, 0.01)
    for name, param in model.named_parameters():
        if not name.startswith("head"):
            param.requires_grad_(False)
            param.grad = None
    precision.clip_grad_by_norm(own, 0.01)
    squares = sum(param.grad.square().sum() for param in model.module.head.parameters())
    dist.all_reduce(squares)
    torch.testing.assert_close(squares.sqrt().item(), 0.01, rtol=1e-3, atol=0)


def networks(how):
    """A LightningModule that calls a net again after a backward in the same step; it may ``wrap`` or shard the net."""
    from torch.distributed.fsdp.wrap import wrap

    class Lit(type(module(shards=how == "shard"))):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def configure_model(self):
            super().configure_model()
            if how == "wrap":
                self.net = wrap(self.net)

        def training_step(self, given, index):
            for _ in range(2):
                loss = next_token_loss(self.net(given), given)
                self.losses.append(loss.item())
                self.manual_backward(loss)
                self.optimizers().step()
                self.optimizers().zero_grad()

    return Lit()


def step_twice():
    loader = torch.utils.data.DataLoader(Rows(), batch_size=2)
    with mock.patch.dict(os.environ), mock.patch.object(dist, "destroy_process_group"):
        be_torchrun(dist.get_rank(), dist.get_world_size(), 29500)
        with pytest.raises(FairshardError, match=r"inside the forward of unit `root`.*as a unit of its own"):
            trainer("ours").fit(networks(""), loader)
        wrapped, sharded = networks("wrap"), networks("shard")
        trainer("ours").fit(wrapped, loader)
        assert isinstance(wrapped.net, FullyShardedDataParallel)
        trainer("model parallel").fit(sharded, loader)
        assert len(wrapped.losses) == 4
        assert wrapped.losses == sharded.losses


def test_a_module_is_trained_and_validated_again():
    """Fit, validate, fit, and a fit by another Trainer give the losses of ``ModelParallelStrategy``, to the bit."""
    run_ranks(2, compare, timeout=240.0)


def test_an_optimizer_of_some_parameters_is_not_clipped():
    """Clipping by a norm over more parameters than the optimizer has raises; freezing the others is the cure."""
    run_ranks(2, clip_a_part, timeout=240.0)


def test_networks_wrapped_apart_are_called_after_a_backward():
    """With manual optimization, ``wrap`` in ``configure_model`` allows it; without, the error names this cure."""
    run_ranks(2, step_twice, timeout=240.0)


def test_averaging_callbacks_are_refused():
    """Lightning's averages have whole shapes, which shards do not."""
    from lightning.pytorch import callbacks

    from fairshard.integrations.lightning import FairshardStrategy

    if not hasattr(callbacks, "EMAWeightAveraging"):
        pytest.skip("needs a Lightning that has EMAWeightAveraging")
    with pytest.raises(ValueError, match=r"must not average weights.*EMAWeightAveraging"):
        FairshardStrategy().setup(SimpleNamespace(callbacks=[callbacks.EMAWeightAveraging()]))
