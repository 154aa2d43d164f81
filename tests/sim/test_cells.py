"""Every way to use the engine gives the same bits in every order of a device's work, without a race."""

import pytest
import torch

from tests import sim
from tests.on_ranks import in_full
from tests.sim.cells import BY_NAME
from tests.sim.ranks import on_sim
from tests.sim.training import digest, train

NUM_SEEDS = (1, in_full(200))
WALKED_BY_OTHERS = {
    *("wrapper-fp32-device", "wrapper-bf16-offload", "orig-fp32-offload", "orig-bf16-device"),
    *("fully_shard-fp32-device", "fully_shard-bf16-device", "fully_shard-small-buckets", "small-buckets-offload"),
    *("blocks-scaler", "cpu-optimizer", "overlap-orig", "no-shard-offload", "fully_shard-few", "hook-no-shard"),
    *("join-offload", "no-sync-offload", "clip-offload", "explicit-fp32", "raises-accumulate", "subclass-bf16"),
    *("raises-in-hook-stream", "clip-ignored", "clip-inf-ignored"),
    *("state-rank0", "few-kept-offload", "own-stream-raises"),
    *("orig-fp32-device", "orig-bf16-offload", "wrapper-bf16-device", "fully_shard-bf16-offload", "explicit-changed"),
    *("own-stream-orig", "accumulate", "state"),
    *("blocks-clip-inf", "blocks-bf16-offload", "muon", "muon-rows", "fully_shard-overlap", "fully_shard-hybrid"),
    *("own-comms-few", "fully_shard-medium-buckets", "reduce-hook", "save", "raises", "no-sync", "summon-grads"),
    *("held", "cpu-optimizer-clip", "raises-in-hook", "explicit-freed", "clip-inf", "write-offload"),
}
"""Cells whose ways other cells go, alone or together; `make test-all` runs them."""
assert BY_NAME.keys() >= WALKED_BY_OTHERS


def digest_in_order(cell, seed, folder):
    """Digest of a run of ``cell`` in the order of ``seed``; raises at a race."""
    sim.reset()
    sim.order_by_seed(seed)
    result = digest(train(cell, f"{folder}/{seed}"))
    torch.accelerator.synchronize()
    found = sim.races()
    assert not found, "\n".join([f"seed {seed}:", *found])
    return result


@pytest.mark.parametrize("num_seeds", NUM_SEEDS)
@pytest.mark.parametrize("name", [in_full(name) if name in WALKED_BY_OTHERS else name for name in BY_NAME])
@on_sim(in_full(1), 2, timeout=600.0)
def test_every_order_gives_the_bits_of_the_serial_one(name, num_seeds, shared_folder):
    """Work on several streams may run late and in any order that the waits allow; results do not change."""
    cell = BY_NAME[name]
    expected = digest_in_order(cell, None, shared_folder)
    for seed in range(num_seeds):
        assert digest_in_order(cell, seed, shared_folder) == expected, f"seed {seed}"


@pytest.mark.parametrize("name", ["hybrid", "fully_shard-hybrid", "few", "fully_shard-few", "replicas-later"])
@on_sim(in_full(4), timeout=600.0)
def test_replicas_of_shards_too(name, shared_folder):
    """On four ranks, two replicas of two shards, or kept sharded over two."""
    cell = BY_NAME[name]
    expected = digest_in_order(cell, None, shared_folder)
    for seed in range(3):
        assert digest_in_order(cell, seed, shared_folder) == expected, f"seed {seed}"
