"""Optimizers of other packages on `fully_shard`, and PEFT on both doors."""

import functools

import torch
import torch.distributed as dist
from torch import nn

from tests.clients.accelerate_runs import NORM, _torchs_on_cpu
from tests.clients.case import Case, Curve, engine_of, fully_shard_of
from tests.clients.loops import Block, net, next_token_loss, shard_each, tokens


def _muon(model):
    matrices = [param for name, param in model.named_parameters() if param.ndim == 2 and "blocks" in name]
    return torch.optim.Muon(matrices, lr=1e-2)


def _schedule_free(model):
    from schedulefree import AdamWScheduleFree

    optimizer = AdamWScheduleFree(model.parameters(), lr=1e-2)
    optimizer.train()
    return optimizer


def _eight_bit(model):
    from torchao.optim import AdamW8bit

    return AdamW8bit(model.parameters(), lr=1e-2, block_size=32)


def run(engine, make):
    """Four steps, clipped."""
    model = shard_each(fully_shard_of(engine), net())
    return _train(Curve(seen=engine_of(model)), model, make(model))


def _train(curve, model, optimizer, clip=nn.utils.clip_grad_norm_):
    for step in range(4):
        given = tokens(step, dist.get_rank())
        loss = next_token_loss(model(given), given)
        loss.backward()
        curve.add(loss, clip(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return curve


def run_peft(engine, door):
    """Four steps of LoRA; only its own matrices are trained."""
    from peft import LoraConfig, inject_adapter_in_model

    model = net()
    torch.manual_seed(4)
    model = inject_adapter_in_model(LoraConfig(r=2, target_modules=["up", "down"]), model)
    curve = Curve()
    if door == "fully_shard":
        shard_each(fully_shard_of(engine), model)
        clip = nn.utils.clip_grad_norm_
    else:
        model = _wrapped(engine, model)

        def clip(params, max_norm):
            return model.clip_grad_norm_(max_norm)

    curve.seen = engine_of(model)
    trained = [param for param in model.parameters() if param.requires_grad]
    return _train(curve, model, torch.optim.AdamW(trained, lr=1e-2), clip)


def _wrapped(engine, model):
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    from fairshard.nn import FullyShardedDataParallel

    wrapper = FullyShardedDataParallel if engine == "fairshard" else _torchs_on_cpu()
    return wrapper(model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)


def _case(name, make, *packages):
    return Case(f"{name} on fully_shard", functools.partial(run, make=make), packages)


CASES = [
    _case("Muon", _muon),
    _case("ScheduleFree AdamW", _schedule_free, "schedulefree"),
    _case("torchao AdamW8bit", _eight_bit, "torchao"),
    Case("PEFT, fully_shard", functools.partial(run_peft, door="fully_shard"), ("peft",)),
    Case(
        "PEFT, wrapper",
        functools.partial(run_peft, door="wrapper"),
        ("peft",),
        **NORM,
    ),
]
