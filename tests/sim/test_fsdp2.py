"""torch's own fully_shard trains on the simulator: in every order as in the serial one, without a race."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import init_device_mesh

from tests import sim
from tests.on_ranks import in_full
from tests.sim.ranks import on_sim

POLICIES = {
    "fp32": {},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "offload": {"offload_policy": CPUOffloadPolicy()},
}


def trained(world_size, policy):
    """The losses and the own shards after four steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)) for _ in range(3)])
    mesh = init_device_mesh("sim", (world_size,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh, **POLICIES[policy])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = [torch.randn(4, 16) for _ in range(4)]
    losses = []
    for batch in batches:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses], [p.detach().to_local().tolist() for p in model.parameters()]


@pytest.mark.parametrize("policy", POLICIES)
@on_sim(in_full(1), 2)
def test_every_order_gives_the_serial_orders_bits(policy):
    """Losses and shards are those of the serial order, bit for bit."""
    world_size = torch.distributed.get_world_size()
    sim.order_by_seed(None)
    expected = trained(world_size, policy)
    for seed in range(4):
        sim.order_by_seed(seed)
        assert trained(world_size, policy) == expected
