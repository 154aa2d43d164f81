"""``use_orig_params`` with replicas and with offload: changes to single parameters, and copies."""

import contextlib

import pytest
import torch

from fairshard.nn import ShardingStrategy
from tests.models import mlp, wrap_each
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state, randn, sgd
from tests.settings.test_hybrid import HYBRID, ZERO2, pairs

OTHERS = [
    pytest.param(name, marks=pytest.mark.full) for name in ("_HYBRID_SHARD_ZERO2", "NO_SHARD", "SHARD_GRAD_OP", "few")
]
strategies = pytest.mark.parametrize("strategy", ["HYBRID_SHARD", *OTHERS])
APART = {"flatten_parameters": False}  # the twin has original names too, and shards of their own
PLACEMENTS = [{}, {"cpu_offload": True}, {"move_grads_to_cpu": True}, {"cpu_offload": True, "move_grads_to_cpu": False}]


def settings(strategy):
    if strategy == "few":
        return {"reshard_after_forward": 2}
    chosen = ShardingStrategy[strategy]
    return {"sharding_strategy": chosen, **({"process_group": pairs(2)} if chosen in (HYBRID, ZERO2) else {})}


def build(**kwargs):
    return wrap_each(mlp(4, 9, 7, 5), bucket_cap_mb=0, **kwargs)


def backward(model, key, accumulates=False):
    with model.no_sync() if accumulates else contextlib.nullcontext():
        loss = model(randn(3, 4, key=key)).square().sum()
        loss.backward()
    return loss.detach()


@on_ranks(4)
@strategies
@pytest.mark.parametrize("placement", [in_full(PLACEMENTS[0]), PLACEMENTS[1]], ids=["device", "offload"])
def test_what_is_done_to_single_parameters(strategy, placement):
    """Freezing parameters, and dropping, zeroing, editing or assigning gradients work as with separate shards."""
    how = {**settings(strategy), **placement}
    states = []
    for layout in ({"use_orig_params": True}, APART):
        model = build(**layout, **how)
        optimizer, named = sgd(model), dict(model.named_parameters())
        for step in range(4):
            named["0.weight"].requires_grad_(step in (0, 3))
            backward(model, (step, 0), accumulates=True)
            if step == 1:
                named["2.weight"].grad = None
            elif step == 2:
                named["0.bias"].grad.zero_()
            backward(model, (step, 1))
            named["4.weight"].grad.mul_(2)
            named["4.bias"].grad = torch.full_like(named["4.bias"], 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 0)
        states.append(model.state_dict())
    assert_same_state(*states)
