"""``local_metadata_dict`` and ``consolidate_shard_weights``: fairscale's way from shards to a whole state dict."""

from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.checkpoint.consolidate import consolidate_torch
from fairshard.checkpoint.import_fairscale import import_fairscale
from fairshard.errors import CheckpointError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import ShardingStrategy, checkpoint_wrapper
from tests.checkpoint.test_import_fairscale import MODELS, check_equal, write_shards
from tests.models import mlp, tiny, wrap_each, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import randn


def of_all_ranks(wrapped):
    """Weights and metadata of all ranks, gathered on every rank."""
    own = (wrapped.local_state_dict(), wrapped.local_metadata_dict())
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return [list(part) for part in zip(*found, strict=True)]


@on_ranks(1, 2, 3)
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"flatten_parameters": False}, {"cpu_offload": True}, {"sharding_strategy": ShardingStrategy.NO_SHARD}],
    ids=["flat", "not flat", "offload", "not cut"],
)
def test_the_shards_of_all_ranks_are_the_state_dict(kwargs):
    """Consolidated shards equal `state_dict`, with nested units, tied weights under both names, and padding."""
    wrapped = wrap_tiny(tiny(), **kwargs)
    consolidated = FSDP.consolidate_shard_weights(*of_all_ranks(wrapped))
    check_equal(consolidated, {name: value.cpu() for name, value in tiny().state_dict().items()})
    assert all(value.device.type == "cpu" for value in consolidated.values())


@on_ranks(2, 3)
def test_names_are_those_of_the_unwrapped_model():
    """Frozen parameters, modules with two names and wrapped modules have plain names, relative to the module asked."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(5, 3)
            self.other = self.one
            self.kernel = nn.Parameter(torch.ones(4, 1))
            self.weight = self.kernel
            self.tied = nn.Linear(1, 4)
            self.tied.weight = self.kernel

    torch.manual_seed(0)
    frozen = nn.Linear(3, 2).requires_grad_(False)
    plain = nn.Sequential(Twice(), nn.BatchNorm1d(3), frozen, nn.Sequential(nn.Linear(2, 2)))
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    checkpoint_wrapper(plain[3])
    plain[0] = FSDP(plain[0])
    wrapped = FSDP(torch.compile(plain, backend="eager"))
    check_equal(FSDP.consolidate_shard_weights(*of_all_ranks(wrapped)), expected)
    inner = {name.removeprefix("0."): value for name, value in expected.items() if name.startswith("0.")}
    check_equal(FSDP.consolidate_shard_weights(*of_all_ranks(plain[0])), inner)


@on_ranks(3)
def test_the_format_is_fairscales():
    """A flat parameter of 5 x 4 + 5 elements on 3 ranks has 9 per rank, 2 of them padding on the last."""
    model = nn.Sequential(FSDP(nn.Linear(4, 5)), nn.BatchNorm1d(5, affine=False))
    metadata = FSDP(model).local_metadata_dict()
    assert metadata == {
        "param_metadata": [
            {"fsdp_path": "", "params": {}, "no_broadcast_optim_state": False, "shared_param_info": []},
            {
                "fsdp_path": "0",
                "params": {
                    "flat_param_0": {
                        "names": ["weight", "bias"],
                        "shapes": [(5, 4), (5,)],
                        "numels": [20, 5],
                        "padding": 2 if dist.get_rank() == 2 else 0,
                    }
                },
                "no_broadcast_optim_state": False,
                "shared_param_info": [],
            },
        ],
        "buffer_names": ["1.running_mean", "1.running_var", "1.num_batches_tracked"],
    }


@on_ranks(2)
def test_buffers_may_be_left_out():
    """Consolidated buffers are rank 0's; ``with_module_buffers=False`` leaves them out."""
    wrapped = FSDP(nn.BatchNorm1d(3))
    wrapped(randn(4, 3))
    found = of_all_ranks(wrapped)
    buffers = {name: value for name, value in found[0][0].items() if "running" in name or "num" in name}
    both = FSDP.consolidate_shard_weights(*found)
    check_equal({name: both[name] for name in buffers}, buffers)
    assert list(FSDP.consolidate_shard_weights(*found, with_module_buffers=False)) == ["weight", "bias"]


@on_ranks(2)
def test_shards_that_lack_parameters():
    """A missing parameter raises by name; with ``strict=False`` the result omits it."""
    weights, metadata = of_all_ranks(wrap_each(mlp(4, 9, 5)))
    for one in weights:
        del one["2.flat_param_0"]
    with pytest.raises(CheckpointError, match=r"shard_weights\[0\] .* `2\.flat_param_0`, which is missing"):
        FSDP.consolidate_shard_weights(weights, metadata)
    assert list(FSDP.consolidate_shard_weights(weights, metadata, strict=False)) == ["0.weight", "0.bias"]
    weights, metadata = of_all_ranks(FSDP(tiny(), flatten_parameters=False))
    for one in weights:
        del one["embed.weight"]
    found = FSDP.consolidate_shard_weights(weights, metadata, strict=False)
    assert tiny().state_dict().keys() - found.keys() == {"embed.weight", "head.weight"}


@on_ranks(1, 2)
def test_what_was_ignored_is_there():
    """Ignored parameters are consolidated whole under every name; values that differ between ranks raise."""
    plain = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 5))
    plain[2].weight = plain[1].weight
    expected = {name: value.to("cpu", copy=True) for name, value in plain.state_dict().items()}
    wrapped = FSDP(plain, ignored_modules=[plain[1]], sync_module_states=True)
    dist.broadcast(plain[1].weight.data, 0)
    dist.broadcast(plain[1].bias.data, 0)
    weights, metadata = of_all_ranks(wrapped)
    if dist.get_rank() == 0:
        check_equal(FSDP.consolidate_shard_weights(weights, metadata), expected)
    if dist.get_world_size() > 1:
        weights[1]["1.bias"] += 1
        with pytest.raises(CheckpointError, match=r"`1\.bias` is whole in every shard"):
            FSDP.consolidate_shard_weights(weights, metadata)


class Expert(nn.Linear):
    """A layer and a buffer with values of ``number``; two ranks do not cut its 12 + 3 elements evenly."""

    def __init__(self, number):
        super().__init__(4, 3)
        nn.init.constant_(self.weight, number)
        nn.init.constant_(self.bias, number + 0.5)
        self.register_buffer("scale", torch.tensor(float(number)))


def with_experts(groups, name):
    """A model of which each of ``groups`` has its own expert, ``name(number)``; and the expected whole state."""
    trunk = mlp(4, 9)
    expected = {f"trunk.{key}": value.clone() for key, value in trunk.state_dict().items()}
    parts = {"trunk": FSDP(trunk)}
    for number, ranks in enumerate(groups):
        group = dist.new_group(ranks)
        expected.update({f"{name(number)}.{key}": value for key, value in Expert(number).state_dict().items()})
        if dist.get_rank() in ranks:
            parts[name(number)] = FSDP(Expert(number), process_group=group)
    return FSDP(nn.Sequential(OrderedDict(parts))), expected


@on_ranks(3)
@pytest.mark.parametrize("groups", [[[0], [1], [2]], [[0, 1], [2]], [[0], [1, 2]]], ids=str)
def test_experts_under_their_own_names(groups):
    """Each expert is put together from the ranks that hold it, whole or cut; buffers are those of its first rank."""
    wrapped, expected = with_experts(groups, "expert{}".format)
    weights, metadata = of_all_ranks(wrapped)
    check_equal(FSDP.consolidate_shard_weights(weights, metadata), expected)
    is_expert = [unit["fsdp_path"].startswith("expert") for unit in metadata[0]["param_metadata"]]
    assert is_expert == [False, False, True], "rank 0 describes the root, the trunk and its own expert"


@on_ranks(3)
@pytest.mark.parametrize("groups", [[[0], [1], [2]], [[0, 1], [2]]], ids=str)
def test_experts_under_one_name_are_refused(groups):
    """Experts that differ, under one name, raise: one of them would be lost. Equal ones are one parameter."""
    wrapped, _ = with_experts(groups, lambda number: "expert")
    weights, metadata = of_all_ranks(wrapped)
    problem = "has other values than" if len(groups) == 3 else "there are 2 copies on groups of different sizes"
    with pytest.raises(CheckpointError, match=rf"`expert\.flat_param_0` is .*{problem}.*under different names"):
        FSDP.consolidate_shard_weights(weights, metadata)
    if len(groups) == 3:
        for one in weights:
            one["expert.flat_param_0"] = weights[2]["expert.flat_param_0"]
        found = FSDP.consolidate_shard_weights(weights, metadata)
        check_equal({"weight": found["expert.weight"]}, {"weight": Expert(2).weight.detach()})


@on_ranks(4)
def test_copies_on_groups_of_ranks():
    """Two groups of two ranks each: equal copies of a unit are combined, and copies that differ raise."""
    wrapped, _ = with_experts([[0, 1], [2, 3]], lambda number: "expert")
    weights, metadata = of_all_ranks(wrapped)
    with pytest.raises(CheckpointError, match=r"held more than once, .*shard_weights\[2\] has other values"):
        FSDP.consolidate_shard_weights(weights, metadata)
    for rank in (2, 3):
        weights[rank]["expert.flat_param_0"] = weights[rank - 2]["expert.flat_param_0"]
    found = FSDP.consolidate_shard_weights(weights, metadata)
    check_equal({"bias": found["expert.bias"]}, {"bias": Expert(0).bias.detach()})


@on_ranks(2)
def test_what_is_not_of_all_ranks_is_refused():
    """A missing rank, a rank given twice, and weights without metadata raise."""
    weights, metadata = of_all_ranks(FSDP(nn.Linear(4, 5)))
    with pytest.raises(CheckpointError, match="hold 13 elements of `flat_param_0`, which has 25: at least one"):
        FSDP.consolidate_shard_weights(weights[:1], metadata[:1])
    for pairs in [(weights[:1] * 2, metadata[:1] * 2), (weights[:1] * 2, metadata)]:
        with pytest.raises(CheckpointError, match=r"once, but the given shards are of ranks \[0, 0\]"):
            FSDP.consolidate_shard_weights(*pairs)
    with pytest.raises(CheckpointError, match="in the place of rank 0"):
        FSDP.consolidate_shard_weights(weights[::-1], metadata)
    with pytest.raises(ValueError, match="weights of 2 and metadata of 1 ranks"):
        FSDP.consolidate_shard_weights(weights, metadata[:1])
    with pytest.raises(ValueError, match="weights of 0 and metadata of 0 ranks"):
        FSDP.consolidate_shard_weights([], [])


@on_ranks(2)
def test_it_survives_files_and_becomes_a_checkpoint(tmp_path):
    """One file of plain data per rank, as fairscale's users write it, consolidates and loads by `import_fairscale`."""
    wrapped = wrap_tiny(tiny())
    found = {"shard_weights": wrapped.local_state_dict(), "shard_metadata": wrapped.local_metadata_dict()}
    torch.save(found, tmp_path / f"shard_{dist.get_rank()}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        import_fairscale([tmp_path / "shard_0.pt", tmp_path / "shard_1.pt"], tmp_path / "out")
        consolidate_torch(tmp_path / "out", tmp_path / "out.pt")
        check_equal(torch.load(tmp_path / "out.pt", weights_only=True), dict(tiny().state_dict()))
    dist.barrier()


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_fairscales_own_are_read(tmp_path, model, world_size):
    """fairscale's own shards are read without a process group, for any units and any padding."""
    found = [torch.load(path, weights_only=True) for path in write_shards(tmp_path, model, world_size, wrappers=True)]
    weights, metadata = ([one[key] for one in found] for key in ("shard_weights", "shard_metadata"))
    check_equal(FSDP.consolidate_shard_weights(weights, metadata), model.weights())
