"""Parameters placed by `RowBlocks` or `Owned`: cuts fall between blocks, or one rank has all; torch's tools work.

That they train as by default, to the bit and with every setting, is shown in ``test_matrix.py``.
"""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fairshard.errors import ParameterShardedError, RanksDisagreeError
from fairshard.nn import Owned, RowBlocks, fully_shard
from fairshard.utils.collectives import counters, reset_counters
from fairshard.utils.ragged_tensor import RaggedShard, RaggedTensor
from fairshard.views.copied_out import CopiedOut
from tests.kit import rank_device
from tests.kit.doors import shard as shard_units
from tests.kit.doors import whole, whole_grads
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state, randn

pytestmark = pytest.mark.behaviour("placements of fully_shard")

both_kinds = pytest.mark.parametrize("place", [RowBlocks(1), Owned()], ids=["blocks", "owned"])
BOTH = [RowBlocks(1), Owned()]


def plain_model(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 11), nn.Linear(11, 3)).to(rank_device())


def shard(model, place, **kwargs):
    """Shard as a unit inside a unit, with one placement; None is the default one."""
    placement_fn = None if place is None else lambda param: place
    return shard_units(model, "fully_shard", "0", shard_placement_fn=placement_fn, **kwargs)


def backward(model, key=0):
    model(randn(3, 7, key=(dist.get_rank(), key))).square().sum().backward()


@on_ranks(in_full(1), 2, in_full(3), in_full(5))
@pytest.mark.parametrize("place", [RowBlocks(1), RowBlocks(2), Owned()], ids=str)
def test_each_rank_has_whole_blocks(place):
    """Rows begin with a block, or one rank has all; gradients and moments are placed like parameters.

    Ranks own about as much.
    """
    plain = plain_model()
    model = shard(copy.deepcopy(plain), place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    backward(model)
    optimizer.step()
    loads = [0] * dist.get_world_size()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(param, nn.Parameter)
        assert type(param) is RaggedTensor
        (placement,) = param.placements
        spans = [placement.rows_on(rank, len(expected)) for rank in range(dist.get_world_size())]
        if isinstance(place, Owned):
            assert placement == RaggedShard(placement.first, len(expected), 0)
            loads[placement.first] += expected.nbytes
        else:
            assert all(span.start % place.rows == 0 for span in spans if span.numel)
        own = slice(*spans[dist.get_rank()])
        torch.testing.assert_close(param.to_local().detach(), expected[own].detach(), rtol=1e-6, atol=0)
        assert param.grad.placements == param.placements
        assert torch.equal(param.grad.to_local(), param.grad.full_tensor()[own])
        assert optimizer.state[param]["exp_avg"].to_local().shape == expected[own].shape
    assert max(loads) - min(loads) <= max(param.nbytes for param in plain.parameters())


@on_ranks(2, in_full(3))
@both_kinds
def test_the_gathered_line_computes(place):
    """Parameters are views of the memory into which ranks gather, and gradients are contiguous in their bucket.

    Owned parameters are sent without padding.
    """
    model = shard(plain_model(), place)
    for _ in range(2):
        reset_counters()
        backward(model)
    if place == Owned():
        nbytes = sum(param.nbytes for param in plain_model().parameters())
        owned = sum(param.to_local().nbytes for param in model.parameters())
        again = sum(param.nbytes - param.to_local().nbytes for param in model[0].parameters())  # in the backward
        assert counters()["all_gather"] == (3, nbytes - owned + again)
        assert counters()["reduce_scatter"] == (1, nbytes - owned)
    for unit_module in (model[0], model):
        unit_module.unshard()
        for flat_param in unit_module._fairshard_unit.flat_params:
            assert not isinstance(flat_param.gathered, CopiedOut)
            buffer = flat_param.gathered.buffer
            assert place != Owned() or buffer.numel() - flat_param.line.numel < dist.get_world_size()
            storages = {slot.leaf.untyped_storage().data_ptr() for slot in flat_param.slots}
            assert storages == {buffer.untyped_storage().data_ptr()}
            if place != Owned():
                *runs, _ = flat_param.line.bucket_views(torch.empty_like(buffer))
                assert all(len(own) == 1 and own[0].is_contiguous() for own in runs)


@on_ranks(2)
def test_units_are_balanced_together():
    """Owners are chosen by what ranks own of all units that were sharded since the last model began to run."""
    layers = [fully_shard(nn.Linear(4, 4, bias=False), shard_placement_fn=lambda param: Owned()) for _ in range(5)]
    owners = [layer.weight.placements[0].first for layer in layers]
    assert owners == [0, 1, 0, 1, 0]  # the next would be on rank 1
    layers[0](torch.ones(1, 4))
    assert fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda param: Owned()).weight.placements[0].first == 0


@on_ranks(2, in_full(3))
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, torch.inf])
@both_kinds
def test_norms_are_those_of_whole_gradients(order, place):
    """The norm of gradients, some of which a rank has nothing of, beside evenly sharded ones."""
    model = plain_model()
    fully_shard(model[0])
    fully_shard(model, shard_placement_fn=lambda param: place)
    backward(model)
    grads = [param.grad.full_tensor() for param in model.parameters()]
    expected = torch.nn.utils.get_total_norm(grads, order)
    for foreach in (True, False):
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6, order, foreach=foreach).full_tensor()
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)


@on_ranks(2)
@both_kinds
def test_an_infinite_norm_is_nan_if_an_element_is_on_any_rank(place):
    """Backends give a number as the largest of it and NaN, by which NaN on one rank would be lost."""
    for bad in range(dist.get_world_size()):
        weight = shard(plain_model(), place)[0].weight.detach().clone()
        rows = weight.to_local()
        if dist.get_rank() == bad:
            rows[:1] = torch.nan
        has_rows = bool(weight.placements[0].rows_on(bad, weight.shape[0]).numel)
        assert torch.linalg.vector_norm(weight, torch.inf).full_tensor().isnan() == has_rows


@on_ranks(2)
@both_kinds
def test_equal_answers_for_the_whole(place):
    """`torch.equal` gives all ranks one answer, also where only one rank has the rows that differ."""
    for weight in (param.detach() for param in shard(plain_model(), place).parameters()):
        for rank in range(dist.get_world_size()):
            other = weight.clone()
            assert torch.equal(other, weight)
            if dist.get_rank() == rank:
                other.to_local().add_(1)
            rows = weight.placements[0].rows_on(rank, weight.shape[0])
            assert torch.equal(other, weight) == (not rows.numel)


@on_ranks(2)
def test_values_load_from_any_placement():
    """Whole values, even rows, other blocks and owned tensors load, from and into each other, and without memory."""
    expected, changed = plain_model(5).state_dict(), plain_model(6).state_dict()
    with torch.device("meta"):
        empty = [nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 11), nn.Linear(11, 3)) for _ in BOTH]
    models = [shard(plain_model(), place) for place in (*BOTH, RowBlocks(2), None)]
    for model, place in zip(empty, BOTH, strict=True):
        models.append(shard(model, place).to_empty(device=rank_device()))
    for model in models:
        model.load_state_dict(expected)
        assert_same_state(whole(model), expected)
        model.load_state_dict(changed)
        for other in models:
            other.load_state_dict(model.state_dict())
            assert_same_state(whole(other), changed)
        backward(model)


@on_ranks(2)
@both_kinds
def test_copies_have_the_same_placements(place):
    """A deepcopy and a pickle of a trained model have its values and placements, and train like it."""
    model = shard(plain_model(), place)
    backward(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [param.placements for param in copied.parameters()] == [param.placements for param in model.parameters()]
        assert_same_state(whole(copied), whole(model))
        copied.zero_grad()
        backward(copied)
        assert_same_state(whole_grads(copied), whole_grads(model))


@on_ranks(2)
@both_kinds
def test_converted_layers_keep_their_rows(place):
    """A layer that is converted before the first forward keeps its rows, in its new dtype, and trains."""
    model = shard(plain_model(), place)
    before = whole(model)
    model[2].to(torch.float64)
    model[3].to(torch.float64)
    assert_same_state(whole(model), {name: value.to(model.get_parameter(name).dtype) for name, value in before.items()})
    inputs = randn(3, 7)
    hidden = model[1](model[0](inputs)).double()
    model.forward = lambda hidden: model[3](model[2](hidden))
    model(hidden).sum().backward()
    assert model[2].weight.grad.dtype == torch.float64


@on_ranks(2)
def test_random_initialisation_raises_on_all_ranks():
    """Ranks would draw numbers for their own rows: refused on ranks without rows too; constants are allowed."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(7, 5), nn.Embedding(4, 3), nn.LayerNorm(6))
    model = fully_shard(model, shard_placement_fn=lambda param: RowBlocks(5))
    model.to_empty(device=rank_device())
    for layer in model[:2]:
        with pytest.raises(ParameterShardedError, match="before sharding"):
            layer.reset_parameters()
    for initialise in (nn.init.normal_, nn.init.xavier_uniform_, nn.init.trunc_normal_, nn.init.orthogonal_):
        with pytest.raises(ParameterShardedError, match="before sharding"):
            initialise(model[0].weight)
    model[2].reset_parameters()
    nn.init.constant_(model[0].bias, 0.5)
    assert torch.equal(model[2].weight.full_tensor(), torch.ones(6, device=rank_device()))
    assert model[0].bias.full_tensor().eq(0.5).all()


@on_ranks(2)
@both_kinds
def test_gradients_through_values(place):
    """Gradients of `full_tensor()`, of `to_local()` of each rank and of norms reach the parameter, as with DTensors.

    With ``grad_placements=[Partial()]`` each rank's gradient is a term of the sum.
    """
    weight = shard(plain_model(), place)[0].weight
    value, rank = weight.full_tensor().detach(), dist.get_rank()
    for loss, expected in (
        (lambda: weight.full_tensor().square().sum(), 2 * value),
        (lambda: weight.to_local().square().sum(), 2 * value),
        (lambda: (weight.full_tensor(grad_placements=[Partial()]) * (rank + 1)).sum(), torch.full_like(value, 1 + 2)),
        (lambda: weight.norm().full_tensor(), value / value.norm()),
    ):
        weight.grad = None
        loss().backward()
        torch.testing.assert_close(weight.grad.full_tensor(), expected)  # the norm adds in another order


@on_ranks(2)
@pytest.mark.parametrize("is_finite", [True, False])
@both_kinds
def test_a_scaler_of_torch(is_finite, place):
    """torch's scaler divides gradients, and all ranks see an overflow that one rank has."""
    model = shard(plain_model(), place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(rank_device().type, init_scale=8.0)
    backward(model)
    expected = {name: param.grad.full_tensor() / 8 for name, param in model.named_parameters()}
    bias = model[2].bias.grad.to_local()
    has_first = bias.numel() and dist.get_rank() == model[2].bias.placements[0].first
    if has_first and not is_finite:
        bias[0] = torch.inf
    scaler._scale = scaler.scale(torch.ones((), device=rank_device()))
    scaler.unscale_(optimizer)
    (found,) = scaler._found_inf_per_device(optimizer).values()
    assert bool(found) != is_finite
    if is_finite:
        assert_same_state(whole_grads(model), expected)


REFUSED = {
    "sum": lambda param, even: param.sum(),
    "matrix product": lambda param, even: param @ torch.ones(7, 2, device=rank_device()),
    "transpose": lambda param, even: param.t(),
    "random": lambda param, even: param.normal_(),
    "random signs": lambda param, even: param.bernoulli_(),
    "random copies": lambda param, even: torch.rand_like(param),
    "into a plain one": lambda param, even: torch.zeros((), device=rank_device()).copy_(param),
    "another shape": lambda param, even: param.view(-1),
    "another dtype": lambda param, even: param.view(torch.int32),
    "one row": lambda param, even: param[0],
    "whole operand": lambda param, even: param + torch.ones(5, 7, device=rank_device()),
    "even operand": lambda param, even: param + even,
    "into even": lambda param, even: even.copy_(param),
    "lists": lambda param, even: torch._foreach_add_([param], [even]),
    "to even rows": lambda param, even: param.redistribute(placements=[Shard(0)]),
    "to another mesh": lambda param, even: param.redistribute(init_device_mesh("cpu", (1, 2)), [Replicate()] * 2),
    "into a result": lambda param, even: nn.init.eye_(param.clone()),
    "zero norm": lambda param, even: torch.nn.utils.get_total_norm([param], 0.0),
    "negative norm": lambda param, even: torch.linalg.vector_norm(param, -1.0),
    "norms of rows": lambda param, even: torch.linalg.vector_norm(param, 2, dim=1),
}


@on_ranks(2)
@both_kinds
def test_what_needs_other_rows_raises_by_name(place):
    """Operators that need other elements or another layout raise, and name the placement and the remedy."""
    param, even = (shard(plain_model(), each)[0].weight.detach() for each in (place, None))
    for name, operator in REFUSED.items():
        with pytest.raises(ParameterShardedError, match=r"RaggedShard\(first=0, head=\d, each=\d\)") as raised:
            operator(param, even)
        assert "ather" in str(raised.value), name


@on_ranks(2, 3)
@pytest.mark.parametrize("kind", ["owners", "blocks"])
def test_ranks_that_place_otherwise_raise_when_they_gather(kind):
    """Also before the first forward, which compares placements: no rank waits for rows that nobody sends."""
    rank = dist.get_rank()
    place = Owned(rank) if kind == "owners" else RowBlocks(4 if rank else 1)
    param = shard(plain_model(), place)[0].weight
    with pytest.raises(RanksDisagreeError, match=rf"must place a tensor alike to gather it, .* \(rank {rank}\)"):
        param.full_tensor()
    model = shard(plain_model(), place)
    with pytest.raises(RanksDisagreeError, match=r"sharded by RaggedShard\(.*; rank \d has .* RaggedShard\("):
        backward(model)


@on_ranks(2)
def test_even_chunks_are_never_assumed():
    """Functions of torch that know even chunks only either ask the placement, which raises, or get no chunk at all."""
    param, even = (shard(plain_model(), rows)[0].weight.detach() for rows in (RowBlocks(1), None))
    mesh, placements = param.device_mesh, param.placements
    own = placements[0].rows_on(dist.get_rank(), 5)
    (chunk,) = param.__create_chunk_list__()
    assert (chunk.offsets, chunk.sizes) == (torch.Size((own.start, 0)), torch.Size((own.numel, 7)))
    (item,) = param.__create_write_items__("weight", param)
    assert item.tensor_data.chunk == chunk
    assert torch.equal(param.redistribute(placements=[Replicate()]).to_local(), param.full_tensor())
    assert param.redistribute(placements=placements) is param
    for wanted in ([Replicate()], placements):
        narrow = param.redistribute(placements=wanted, forward_dtype=torch.bfloat16)
        assert (narrow.dtype, narrow.placements) == (torch.bfloat16, tuple(wanted))
        assert torch.equal(narrow.full_tensor(), param.full_tensor().bfloat16())
    # torch takes a placement that it does not know for a whole tensor: never for an even part
    assert compute_local_shape_and_global_offset(param.shape, mesh, placements) == ((5, 7), (0, 0))
    with pytest.raises(RuntimeError, match="unsupported placements RaggedShard"):
        distribute_tensor(torch.ones(5, 7, device=rank_device()), mesh, placements)
    plain = DTensor.from_local(param.to_local(), mesh, placements, shape=param.shape, stride=param.stride())
    for refused in (
        plain.full_tensor,
        lambda: plain + 1,
        lambda: plain.redistribute(placements=[Shard(0)]),
        lambda: even.redistribute(placements=placements),
        lambda: DTensor.from_local(torch.ones(5, 7), mesh, [Replicate()]).redistribute(placements=placements),
    ):
        with pytest.raises(AttributeError, match=r"RaggedShard\(.*\) has no `"):
            refused()
    model = shard(plain_model(), RowBlocks(1))
    with pytest.raises(RuntimeError, match=r"`0.weight`: A DTensor placed by RaggedShard.* must come from a sharded"):
        model.load_state_dict({**model.state_dict(), "0.weight": plain})


class OwnComm:
    """Custom communication."""

    def allocate(self, size, *, dtype, device):
        raise AssertionError

    __call__ = allocate


@on_ranks(2)
def test_what_cannot_be_placed_is_refused():
    """A parameter that is a DTensor already, and an owner that does not exist, raise by name."""
    mesh = init_device_mesh(rank_device().type, (1, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(4, 4, device=rank_device())
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tp"], [Shard(0)]))
    with pytest.raises(ValueError, match="must be a plain tensor, but `weight`, a DTensor, is a DTensor already"):
        fully_shard(model, mesh=mesh["dp"], shard_placement_fn=lambda param: RowBlocks())
    with pytest.raises(ValueError, match=r"must be one of the 2 ranks .*, from 0 to 1, but is 2 for `weight`"):
        fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda param: Owned(2))
    model = shard(plain_model(), Owned())
    for method in (model[0].set_custom_all_gather, model[0].set_custom_reduce_scatter):
        with pytest.raises(ValueError, match=r"equally many elements of all ranks, but `0.weight` is placed by Owned"):
            method(OwnComm())
    with pytest.raises(ValueError, match=r"`set_allocate_memory_from_process_group_for_comm` must communicate"):
        model[0].set_allocate_memory_from_process_group_for_comm(True)
