"""A model of any sharding strategy loads what a model of any other saved, on any number of ranks."""

import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from fairshard.checkpoint import Checkpointer, load
from fairshard.nn import FSDP, FullStateDictConfig, ShardingStrategy, StateDictType
from tests.checkpoint.compared import assert_same, whole
from tests.kit import rank_device, run_ranks
from tests.models import tiny, wrap_tiny
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state
from tests.trained import OPTIMIZERS, trained

STRATEGIES = list(ShardingStrategy)
DISTINCT = (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD, ShardingStrategy.HYBRID_SHARD)
"""Those that lay states out in different ways."""


def _wrapped(strategy, seed):
    kwargs = {"sharding_strategy": strategy}
    if strategy.is_hybrid:
        kwargs["device_mesh"] = init_device_mesh(rank_device().type, (2, 2))
    return wrap_tiny(tiny(seed=seed), **kwargs)


def _save(strategy, root):
    model, optimizer = trained(_wrapped(strategy, 1), OPTIMIZERS["adamw"])
    with Checkpointer(root, every=1) as checkpointer:
        checkpointer.save(1, model, optimizer)
    return whole(model, optimizer)


def _load(strategy, root):
    model = _wrapped(strategy, 7)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warns that random numbers are not restored
        load(f"{root}/step-00000001", model, optimizer)
    return whole(model, optimizer)


@pytest.mark.parametrize(
    "strategy", [s if s in DISTINCT else in_full(s) for s in STRATEGIES], ids=lambda strategy: strategy.name
)
def test_every_strategy_reads_and_is_read(strategy, tmp_path):
    """What each strategy saves on four ranks FULL_SHARD loads on three, and the other way round."""
    for number, (before, after, ranks) in enumerate(
        [(strategy, ShardingStrategy.FULL_SHARD, (4, 3)), (ShardingStrategy.FULL_SHARD, strategy, (3, 4))]
    ):
        root = str(tmp_path / str(number))
        saved = run_ranks(ranks[0], _save, before, root)[0]
        for loaded in run_ranks(ranks[1], _load, after, root):
            assert_same(loaded, saved)


@on_ranks(4)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_a_dict_of_rank_0_loads_with_every_strategy(strategy):
    """If one rank of each set of shards keeps the state dict, that rank loads it, and all ranks get the values."""
    config = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    model, other = _wrapped(strategy, 1), _wrapped(strategy, 7)
    expected = model.state_dict()
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        state = model.state_dict()
    with FSDP.state_dict_type(other, StateDictType.FULL_STATE_DICT, config):
        other.load_state_dict(state)
    assert_same_state(other.state_dict(), expected)
    assert all(value.device == torch.device("cpu") for value in state.values())
