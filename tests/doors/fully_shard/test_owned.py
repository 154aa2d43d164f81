"""Parameters placed by `Owned`: whole on one rank, sent without padding, stepped as by default."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.errors import RanksDisagreeError
from fairshard.nn import CPUOffloadPolicy, MixedPrecisionPolicy, Owned, RowBlocks, fully_shard
from fairshard.utils.collectives import counters, reset_counters
from fairshard.utils.ragged_tensor import RaggedShard, RaggedTensor
from tests.doors.fully_shard.test_row_blocks import assert_same, backward, plain_model, shard, whole
from tests.on_ranks import in_full, on_ranks


@on_ranks(in_full(1), 2, in_full(3), in_full(5))
def test_each_parameter_is_whole_on_its_owner():
    """One rank has a parameter, its gradient and its state, the others nothing of it; ranks own about as much."""
    plain = plain_model()
    model = shard(copy.deepcopy(plain), Owned())
    optimizer = torch.optim.AdamW(model.parameters())
    backward(model)
    optimizer.step()
    loads = [0] * dist.get_world_size()
    for param, like in zip(model.parameters(), plain.parameters(), strict=True):
        assert type(param) is RaggedTensor
        (placement,) = param.placements
        assert placement == RaggedShard(placement.first, len(like), 0)
        own = like.shape if placement.first == dist.get_rank() else (0, *like.shape[1:])
        assert param.to_local().shape == param.grad.to_local().shape == own
        assert optimizer.state[param]["exp_avg"].to_local().shape == own
        loads[placement.first] += like.nbytes
    assert max(loads) - min(loads) <= max(param.nbytes for param in plain.parameters())


@on_ranks(2, in_full(3))
def test_the_gathered_line_computes_without_padding():
    """Parameters are views of the memory into which ranks gather; gradients are contiguous; nothing else is sent."""
    model = shard(plain_model(), Owned())
    backward(model)
    reset_counters()
    backward(model)
    nbytes = sum(param.nbytes for param in plain_model().parameters())
    owned = sum(param.to_local().nbytes for param in model.parameters())
    again = sum(param.nbytes - param.to_local().nbytes for param in model[0].parameters())  # gathered in the backward
    assert counters()["all_gather"] == (3, nbytes - owned + again)
    assert counters()["reduce_scatter"] == (1, nbytes - owned)
    for unit_module in (model[0], model):
        unit_module.unshard()
        for flat_param in unit_module._fairshard_unit.flat_params:
            assert flat_param.gathered.buffer.numel() - flat_param.line.numel < dist.get_world_size()
            buffer = flat_param.gathered.buffer.untyped_storage().data_ptr()
            assert {slot.leaf.untyped_storage().data_ptr() for slot in flat_param.slots} == {buffer}


def all_owned(param):
    """One placement for all."""
    return Owned()


def place_by_size(param):
    """A placement of each kind."""
    if param.dim() < 2:
        return None if len(param) > 5 else RowBlocks()
    return Owned(1) if param.shape == (5, 7) else Owned()


SETTINGS = {
    "plain": {},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "bf16, fp32 sums": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "fp16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16)},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "kept": {"reshard_after_forward": False},
    "parts": {},
    "a bucket each": {"bucket_cap_mb": 0},
}


def train(place, num_passes=1, **kwargs):
    """Train with accumulation, a frozen and an unused parameter; returns the whole parameters."""
    model = plain_model()
    model[2].bias.requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(3, 2)))
    model.register_parameter("tied", model[3].bias)
    for part in (model[0], model):
        fully_shard(part, shard_placement_fn=place, **kwargs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    for key in range(2):
        for number in range(num_passes):
            model.set_requires_gradient_sync(number == num_passes - 1)
            backward(model, (key, number))
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


@on_ranks(2, in_full(4), in_full(5), timeout=120)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("place", [all_owned, place_by_size])
def test_settings_give_the_bits_of_the_default(settings, place):
    """Precisions, offload and how long parameters are kept change no bit, with and without accumulated passes."""
    chosen = dict(SETTINGS[settings])
    if settings == "parts" and dist.get_world_size() == 4:
        chosen["reshard_after_forward"] = 2
    for num_passes in (1, 2):
        assert_same(train(place, num_passes, **chosen), train(None, num_passes, **chosen))


@on_ranks(2)
def test_owners_that_differ_across_ranks_raise_on_all():
    """The first forward compares owners before anything is gathered."""
    model = shard(plain_model(), Owned(dist.get_rank()))
    owned_by_each = r"by RaggedShard\(first=0, head=11, each=0\); rank 1 .* RaggedShard\(first=1, head=11, each=0\)"
    with pytest.raises(RanksDisagreeError, match=owned_by_each):
        backward(model)


class OwnComm:
    """Custom communication."""

    def allocate(self, size, *, dtype, device):
        raise AssertionError

    __call__ = allocate


@on_ranks(2)
def test_communication_of_equal_rows_is_refused():
    """What the user communicates has equally many elements of all ranks; owned parameters are named."""
    model = shard(plain_model(), Owned())
    for method in (model[0].set_custom_all_gather, model[0].set_custom_reduce_scatter):
        with pytest.raises(ValueError, match=r"equally many elements of all ranks, but `0.weight` is placed by Owned"):
            method(OwnComm())
    with pytest.raises(ValueError, match=r"`set_allocate_memory_from_process_group_for_comm` must communicate"):
        model[0].set_allocate_memory_from_process_group_for_comm(True)


@on_ranks(2)
def test_units_are_balanced_together():
    """Owners are chosen by what ranks own of all units that were sharded since the last model began to run."""
    layers = [fully_shard(nn.Linear(4, 4, bias=False), shard_placement_fn=lambda param: Owned()) for _ in range(5)]
    owners = [layer.weight.placements[0].first for layer in layers]
    assert owners == [0, 1, 0, 1, 0]  # the next would be on rank 1
    layers[0](torch.ones(1, 4))
    assert fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda param: Owned()).weight.placements[0].first == 0
