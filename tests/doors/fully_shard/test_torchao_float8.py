"""torchao's float8 training, with and without gathering weights in float8, beside torch's ``fully_shard``."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fairshard.nn import fully_shard
from tests.on_ranks import on_ranks
from tests.reference import randn, sgd
from tests.torch_gaps import needs_fsdp2_on_cpu, needs_torchao

pytestmark = pytest.mark.behaviour("float8 of torchao")


def float8_net(gathers_float8):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)])
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers_float8, emulate=True)
    return convert_to_float8_training(net, config=config)


def train(net, door, precomputes):
    for layer in net:
        door(layer)
    door(net)
    optimizer = sgd(net)
    losses = []
    for step in range(4):
        loss = net(randn(16, 16, key=step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if precomputes:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(net)
        losses.append(loss.detach())
    weights = [param.to_local().detach() for param in net.parameters()]
    return [*losses, *(getattr(weight, "_tensor", weight) for weight in weights)]


@needs_fsdp2_on_cpu
@needs_torchao
@pytest.mark.parametrize(("gathers_float8", "precomputes"), [(True, False), (True, True), (False, False)])
@on_ranks(2)
def test_float8_training_equals_torch(gathers_float8, precomputes):
    """Losses and weights of each step are those of torch's ``fully_shard`` on the same program, bit for bit."""
    ours, theirs = (train(float8_net(gathers_float8), door, precomputes) for door in (fully_shard, torch_fully_shard))
    for own, other in zip(ours, theirs, strict=True):
        assert torch.equal(own, other)
