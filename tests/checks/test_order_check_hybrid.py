"""In a hybrid model, which has shard and replica groups, all ranks raise, whichever rank disagrees."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.errors import RanksDisagreeError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.state.full_params import gather_line
from tests.checks.test_order_check import OTHER_PATHS, Branches, Path, native_collectives, train_step, wrapped_path
from tests.kit import rank_device
from tests.on_ranks import on_ranks
from tests.reference import sgd
from tests.settings.test_hybrid import HYBRID, ZERO2, pairs

# Ranks 0 and 1 are one shard group, 2 and 3 the other; 0 and 2 hold the same shard, as do 1 and 3.
DISSENTERS = {"one rank": [1], "the other shards": [2, 3], "the other replicas": [1, 3], "one of each": [1, 2]}


@on_ranks(4)
@pytest.mark.parametrize("who", DISSENTERS)
def test_whoever_takes_another_path_all_ranks_are_told(who):
    """Every rank raises an error with the step and both names; no weight has changed, and the groups still work."""
    ranks, groups = DISSENTERS[who], pairs(2)
    cases = [(HYBRID, "other modules", 1), (ZERO2, "other order", 2)]
    if who == "the other shards":  # each shard group agrees on its gathers: only the replica groups notice
        cases += [(HYBRID, "one more", 1), (ZERO2, "one more", 3)]
    for strategy, kind, last in cases:
        path, ours, theirs = OTHER_PATHS[kind]
        model = wrapped_path(process_group=groups, sharding_strategy=strategy)
        optimizer = sgd(model)
        with contextlib.nullcontext() if who == "the other shards" else native_collectives():
            for step in range(1, last):
                train_step(model, step)
                optimizer.step()
                optimizer.zero_grad()
            before = [param.detach().clone() for param in model.parameters()]
            model.module.path = path if dist.get_rank() in ranks else Path.usual
            with pytest.raises(RanksDisagreeError) as raised:
                train_step(model, last)
        told = f"In step {last} rank 0 is at `{ours}` (forward), rank {ranks[0]} at `{theirs}` (forward)"
        assert told in str(raised.value), (strategy, kind)
        assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@on_ranks(4)
@pytest.mark.parametrize("who", DISSENTERS)
def test_backwards_may_reach_other_units_on_some_ranks(who):
    """Forwards agree; units that some ranks do not reach count as zeros there, in the mean over all four ranks."""
    how = {"process_group": pairs(2), "sharding_strategy": ZERO2}
    branches = [FSDP(nn.Linear(4, 4, device=rank_device()), **how) for _ in range(2)]
    model = FSDP(Branches(nn.ModuleList(branches)), **how)
    outputs = model(torch.ones(3, 4, device=rank_device()))
    sum(output.sum() for output in outputs[dist.get_rank() in DISSENTERS[who] :]).backward()
    for branch, share in zip(branches, (1 - len(DISSENTERS[who]) / 4, 1.0), strict=True):
        flat_param = branch._fairshard_unit.flat_params[0]
        _, bias = flat_param.line.params_of(gather_line(flat_param, flat_param.shard.grad))
        assert torch.equal(bias, torch.full_like(bias, 3 * share))
