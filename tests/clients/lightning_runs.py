"""Lightning: `FairshardStrategy`, `ModelParallelStrategy` with `fully_shard`, and Fabric with `no_backward_sync`."""

import contextlib
import functools
import os

import torch
import torch.distributed as dist

from tests.clients.accelerate_runs import _torchs_on_cpu, shared_folder
from tests.clients.case import Case, Curve, engine_of, fully_shard_of, grad_norm
from tests.clients.loops import Block, net, next_token_loss, shard_each, tokens

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}


class Rows(torch.utils.data.Dataset):
    """Sixteen sequences that depend on their index only."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return tokens("rows", index, rows=1)[0]


def _module(curve, engine, shards):
    from lightning.pytorch import LightningModule

    class Lit(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def configure_model(self):
            if shards and not hasattr(self.net, "unshard"):
                shard_each(fully_shard_of(engine), self.net)

        def training_step(self, given, index):
            loss = next_token_loss(self.net(given), given)
            curve.add(loss)
            return loss

        def on_before_optimizer_step(self, optimizer):
            curve.norms.append(grad_norm(self.trainer.model.parameters()).item())

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Lit()


def _strategy(name, engine, state):
    if engine == "torch":
        state = "sharded"  # FSDP1 cannot save a full state on CPU ranks
    from lightning.pytorch.strategies import ModelParallelStrategy

    from fairshard.integrations.lightning import FairshardStrategy

    if name == "model parallel":
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return FairshardStrategy(auto_wrap_policy={Block}, state_dict_type=state)


@contextlib.contextmanager
def _engine_of_strategy(engine):
    """Let `FairshardStrategy` make FSDP1's wrapper when the engine is torch's: Lightning's own refuses CPU ranks."""
    from unittest import mock

    from fairshard.integrations import lightning as integration

    on_torch = mock.patch.object(integration, "FullyShardedDataParallel", _torchs_on_cpu())
    with on_torch if engine == "torch" else contextlib.nullcontext():
        yield


def run(engine, strategy, state="full", clip=None):
    """Two steps, a checkpoint, and two more steps by a second Trainer that loads it."""
    from lightning.pytorch import Trainer

    curve = Curve()
    path = os.path.join(shared_folder(), "checkpoint")
    with _engine_of_strategy(engine):
        for steps, resumes in [(2, None), (4, path)]:
            given = _module(curve, engine, shards=strategy == "model parallel")
            trainer = Trainer(
                accelerator="cpu",
                devices=2,
                max_steps=steps,
                strategy=_strategy(strategy, engine, state),
                gradient_clip_val=clip,
                **QUIET,
            )
            loader = torch.utils.data.DataLoader(Rows(), batch_size=2)
            trainer.fit(given, loader, ckpt_path=resumes)
            curve.seen = engine_of(trainer.model)
            trainer.save_checkpoint(path)
            dist.barrier()
    return curve


def run_fabric(engine):
    """Four steps of two micro-batches; the first of each has no reduction."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    curve = Curve()
    strategy = ModelParallelStrategy(
        parallelize_fn=lambda model, mesh: shard_each(fully_shard_of(engine), model, mesh=mesh["data_parallel"]),
        data_parallel_size=2,
        tensor_parallel_size=1,
    )
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(net())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    curve.seen = engine_of(model)
    for step in range(4):
        for micro in range(2):
            given = tokens(step, micro, dist.get_rank())
            with fabric.no_backward_sync(model, enabled=micro == 0):
                loss = next_token_loss(model(given), given) / 2
                fabric.backward(loss)
        curve.add(loss, fabric.clip_gradients(model, optimizer, max_norm=0.5))
        optimizer.step()
        optimizer.zero_grad()
    return curve


CASES = [
    *(
        Case(
            f"Lightning FSDP strategy, {state} state",
            functools.partial(run, strategy="ours", state=state),
            ("lightning",),
            rtol=1e-12,
            why="the program adds its norm in another order",
        )
        for state in ("full", "sharded")
    ),
    Case(
        "Lightning ModelParallelStrategy",
        functools.partial(run, strategy="model parallel"),
        ("lightning",),
    ),
    Case("Fabric no_backward_sync", run_fabric, ("lightning",)),
]
