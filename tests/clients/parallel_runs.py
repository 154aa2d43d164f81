"""torch's pipelining over sharded stages, and torchao's float8 layers gathered in fp8."""

import torch
import torch.distributed as dist
from torch import nn

from tests.clients.case import Case, Curve, engine_of, fully_shard_of, grad_norm
from tests.clients.loops import Net, next_token_loss, shard_each, tokens


class Stage(nn.Module):
    """Half of a `Net`."""

    def __init__(self, whole, is_first):
        super().__init__()
        self.embed = whole.embed if is_first else None
        self.blocks = nn.ModuleList([whole.blocks[0 if is_first else 1]])
        self.head = None if is_first else whole.head

    def forward(self, x):
        x = x if self.embed is None else self.embed(x)
        x = self.blocks[0](x)
        return x if self.head is None else self.head(x)


def run_pipeline(engine):
    """Four steps of four micro-batches by 1F1B, over two stages of two ranks each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    number = mesh["pp"].get_local_rank()
    torch.manual_seed(1)
    stage = shard_each(fully_shard_of(engine), Stage(Net(), number == 0), mesh=mesh["dp"])
    curve = Curve(seen=engine_of(stage))
    pipeline = PipelineStage(stage, number, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(pipeline, n_microbatches=4, loss_fn=next_token_loss)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    for step in range(4):
        given = tokens(step, mesh["dp"].get_local_rank(), rows=4)
        losses = []
        if number == 0:
            schedule.step(given)
        else:
            schedule.step(target=given, losses=losses)
        loss = torch.stack(losses).mean() if losses else torch.zeros(())
        curve.add(loss * 2, grad_norm(stage.parameters()))  # only half of the ranks have a loss
        optimizer.step()
        optimizer.zero_grad()
    return curve


def run_float8(engine):
    """Four steps with weights that are gathered in fp8 and scaled over all ranks; the arithmetic is emulated."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

    torch.manual_seed(1)
    model = Net()
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, fqn: "blocks" in fqn)
    shard_each(fully_shard_of(engine), model)
    curve = Curve(seen=engine_of(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        given = tokens(step, dist.get_rank())
        loss = next_token_loss(model(given), given)
        loss.backward()
        curve.add(loss, nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
        precompute_float8_dynamic_scale_for_fsdp(model)
    return curve


CASES = [
    Case("pipelining 1F1B, two stages of two ranks", run_pipeline, (), 4),
    Case("torchao float8, gathered in fp8", run_float8, ("torchao",)),
]
