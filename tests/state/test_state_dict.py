"""A whole state dict has the plain model's names, values and dtypes, and belongs to the caller."""

import copy
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fairshard.engine.tree import units_below
from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.kit import rank_device
from tests.models import Tiny, mlp, tiny, tiny_batch, tiny_loss, wrap_each, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, randn, sgd

BF16 = {"mixed_precision": True, "compute_dtype": torch.bfloat16}
settings = pytest.mark.parametrize("kwargs", [{}, {"flatten_parameters": False}, BF16], ids=["flat", "apart", "bf16"])


def train_a_bit(wrapped):
    optimizer = sgd(wrapped)
    for step in range(2):
        *inputs, targets = tiny_batch(dist.get_rank(), step)
        tiny_loss(wrapped(*inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(1, 2, 3)
@settings
def test_it_loads_into_the_plain_model_and_back(kwargs):
    """What one wrapped model saves loads into the plain module and into another wrapping, bit for bit."""
    wrapped = wrap_tiny(tiny(), **kwargs)
    train_a_bit(wrapped)
    state = wrapped.state_dict()
    plain = Tiny().to(rank_device())
    assert str(plain.load_state_dict(state)) == "<All keys matched successfully>"
    assert_same_state(plain.state_dict(), state)
    again = FSDP(tiny(seed=7))
    result = again.load_state_dict(state)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert_same_state(again.state_dict(), state)
    *inputs, _ = tiny_batch(5)
    assert torch.equal(again(*inputs), plain(*inputs))


@on_ranks(1, 2)
@settings
def test_loaded_weights_are_computed_with(kwargs):
    """The forward after a load uses the loaded weights, whatever was gathered before."""
    source, target = wrap_tiny(tiny(), **kwargs), wrap_tiny(tiny(seed=2), **kwargs)
    *inputs, _ = tiny_batch(0)
    for first in (lambda: None, lambda: target(*inputs), lambda: target(*inputs).sum().backward()):
        first()
        target.load_state_dict(source.state_dict())
        with torch.no_grad():
            assert torch.equal(target(*inputs), source(*inputs))
        target.load_state_dict(wrap_tiny(tiny(seed=2), **kwargs).state_dict())


@on_ranks(1, 2)
def test_it_belongs_to_the_caller():
    """Later steps, loads and passes do not change a state dict; changing it does not change the model."""
    wrapped = wrap_tiny(tiny())
    state = wrapped.state_dict()
    before = copy.deepcopy(state)
    train_a_bit(wrapped)
    wrapped.load_state_dict(wrap_tiny(tiny(seed=3)).state_dict())
    assert_same_state(state, before)
    now = wrapped.state_dict()
    for value in wrapped.state_dict().values():
        value.fill_(7)
    assert_same_state(wrapped.state_dict(), now)


@on_ranks(1, 2)
def test_it_changes_nothing():
    """``state_dict()`` leaves nothing gathered and does not change the next pass."""
    wrapped = wrap_tiny(tiny())
    *inputs, _ = tiny_batch(0)
    with torch.no_grad():
        expected = wrapped(*inputs)
        wrapped.state_dict()
        assert not any(unit.is_gathered for _, unit in units_below(wrapped))
        assert torch.equal(wrapped(*inputs), expected)
    names = [name for name, _ in wrapped.named_parameters()]
    wrapped.state_dict()
    assert [name for name, _ in wrapped.named_parameters()] == names


@on_ranks(2)
def test_prefix_and_destination():
    """``prefix`` precedes every name; entries are added to ``destination``, which is returned."""
    plain, wrapped = mlp(4, 5, 3), wrap_each(mlp(4, 5, 3))
    destination = OrderedDict(kept=torch.ones(1))
    state = wrapped.state_dict(destination=destination, prefix="model.")
    assert state is destination
    assert list(state) == ["kept", *(f"model.{name}" for name in plain.state_dict())]
    assert list(wrapped.state_dict(OrderedDict(), "p.")) == [f"p.{name}" for name in plain.state_dict()]


@on_ranks(2)
def test_keep_vars_gives_parameters_that_require_grad():
    """``keep_vars=True`` gives Parameters that require grad, with the whole values."""
    plain, wrapped = mlp(4, 5, 3), wrap_each(mlp(4, 5, 3))
    state = wrapped.state_dict(keep_vars=True)
    for name, param in plain.named_parameters():
        assert isinstance(state[name], nn.Parameter)
        assert state[name].requires_grad
        assert torch.equal(state[name], param)


@on_ranks(2)
def test_inside_a_plain_module():
    """A plain module around wrapped ones saves plain names and loads them back."""

    def build(wrap, seed):
        torch.manual_seed(seed)
        return nn.ModuleDict(
            {"a": wrap(mlp(4, 5, 3, seed=seed)), "b": nn.Linear(3, 2), "c": wrap(mlp(2, 2, seed=seed))}
        )

    plain, wrapped = build(lambda module: module, 1), build(wrap_each, 1)
    assert_same_state(wrapped.state_dict(), plain.state_dict())
    assert_same_state(wrapped.state_dict(prefix="x."), plain.state_dict(prefix="x."))
    other = build(lambda module: module, 2)
    result = wrapped.load_state_dict(other.state_dict())
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert_same_state(wrapped.state_dict(), other.state_dict())
    with torch.no_grad():
        assert torch.equal(wrapped["a"](randn(2, 4)), other["a"](randn(2, 4)))


@on_ranks(2)
def test_inside_ddp():
    """Inside DDP (over other ranks than the shards) names get DDP's prefix only, and the dict loads back."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    plain = mlp(4, 5, 3)
    wrapped = DistributedDataParallel(wrap_each(copy.deepcopy(plain)), process_group=alone)
    state = wrapped.state_dict()
    assert_same_state(state, {f"module.{name}": value for name, value in plain.state_dict().items()})
    state = {name: value + 1 for name, value in state.items()}
    wrapped.load_state_dict(state)
    assert_same_state(wrapped.state_dict(), state)


@on_ranks(2)
def test_of_an_inner_unit():
    """The state dict of an inner unit holds its part, under the names of its own module."""
    wrapped = wrap_tiny(tiny())
    assert_same_state(wrapped.first.state_dict(), tiny().first.state_dict())
    wrapped.first.load_state_dict(tiny(seed=2).first.state_dict())
    assert_same_state(wrapped.first.state_dict(), tiny(seed=2).first.state_dict())


@on_ranks(1, 2)
@pytest.mark.parametrize("flatten", [True, False])
def test_missing_and_unexpected_keys(flatten):
    """``strict=True`` names missing and unexpected keys, as on the plain model; ``strict=False`` returns them."""
    plain = mlp(4, 5, 3)
    wrapped = wrap_each(mlp(4, 5, 3), flatten_parameters=flatten)
    state = plain.state_dict()
    del state["0.bias"]
    state["extra"] = torch.ones(1)
    before = wrapped.state_dict()
    with pytest.raises(RuntimeError) as expected:
        plain.load_state_dict(state)
    with pytest.raises(RuntimeError) as actual:
        wrapped.load_state_dict(state)
    for text in ('Missing key(s) in state_dict: "0.bias"', 'Unexpected key(s) in state_dict: "extra"'):
        assert text in str(expected.value)
        assert text in str(actual.value)
    state["2.weight"] = state["2.weight"] + 1
    result = wrapped.load_state_dict(state, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["0.bias"], ["extra"])
    after = wrapped.state_dict()
    assert torch.equal(after["2.weight"], state["2.weight"])
    assert torch.equal(after["0.bias"], before["0.bias"])


@on_ranks(2)
def test_the_given_dictionary_is_not_changed():
    """`load_state_dict` does not change the caller's dictionary."""
    wrapped = wrap_each(mlp(4, 5, 3))
    state = wrapped.state_dict()
    names = list(state)
    wrapped.load_state_dict(state)
    assert list(state) == names


@on_ranks(2)
def test_a_state_dict_of_another_dtype_is_cast():
    """bf16 weights load into fp32 masters, as into a plain fp32 model."""
    plain = mlp(4, 5, 3)
    wrapped = wrap_each(mlp(4, 5, 3))
    half = {name: value.bfloat16() for name, value in plain.state_dict().items()}
    wrapped.load_state_dict(half)
    plain.load_state_dict(half)
    assert_same_state(wrapped.state_dict(), plain.state_dict())


@on_ranks(2)
def test_with_experts_on_other_groups():
    """Units on groups of their own give their own values; the shared ones are the same on all ranks."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    expert = mlp(5, 3, seed=10 + dist.get_rank())
    expected = copy.deepcopy(expert.state_dict())
    wrapped = FSDP(nn.Sequential(mlp(4, 5), FSDP(expert, process_group=alone)))
    state = wrapped.state_dict()
    assert torch.equal(state["0.0.weight"], mlp(4, 5)[0].weight)
    for name, value in expected.items():
        assert torch.equal(state[f"1.{name}"], value)


@on_ranks(2)
def test_inside_a_pass_it_is_refused():
    """During a forward, saving or loading the state dict of the model or of an inner unit raises a ValueError."""
    wrapped = wrap_each(mlp(4, 5, 3))
    state = wrapped.state_dict()
    seen = []

    def ask(*_):
        for call in (wrapped.state_dict, wrapped[0].state_dict, lambda: wrapped.load_state_dict(state)):
            with pytest.raises(ValueError, match="IDLE"):
                call()
        seen.append(True)

    wrapped[0].module.register_forward_hook(ask)
    wrapped(randn(2, 4)).sum().backward()
    assert seen == [True]


@on_ranks(1, 2)
@pytest.mark.parametrize("flatten", [True, False])
def test_local_state_dict_restores_the_shards(flatten):
    """A local state dict is a copy of this rank's shards; loading it restores them without communication."""
    wrapped = wrap_tiny(tiny(), flatten_parameters=flatten)
    train_a_bit(wrapped)
    local, whole = wrapped.local_state_dict(), wrapped.state_dict()
    assert sum(value.numel() for value in local.values()) == sum(param.numel() for param in wrapped.parameters())
    before = {name: value.clone() for name, value in local.items()}
    train_a_bit(wrapped)
    assert all(torch.equal(local[name], value) for name, value in before.items())
    result = wrapped.load_local_state_dict(local)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert_same_state(wrapped.state_dict(), whole)
    other = wrap_tiny(tiny(seed=2), flatten_parameters=flatten)
    other.load_local_state_dict(local)
    assert_same_state(other.state_dict(), whole)


@on_ranks(2)
def test_local_state_dict_can_be_looped_over(tmp_path):
    """Every entry is a shard or a buffer; what describes the shards survives files and copies, but not new dicts."""
    wrapped = wrap_each(mlp(4, 5, 3))
    local = wrapped.local_state_dict()
    assert {name: value.shape for name, value in local.items()} == {
        name: param.shape for name, param in wrapped.named_parameters()
    }
    halves = copy.deepcopy(local)
    for value in halves.values():
        value.mul_(0.5)
    path = tmp_path / f"{dist.get_rank()}.pt"
    torch.save(halves, path)
    every = [None, None]
    dist.all_gather_object(every, torch.load(path, weights_only=True))
    before = wrapped.state_dict()
    with pytest.raises(RuntimeError, match=r"its rank is \d while this model's is \d"):
        wrapped.load_local_state_dict(every[1 - dist.get_rank()])
    wrapped.load_local_state_dict(every[dist.get_rank()])
    assert_same_state(wrapped.state_dict(), {name: value / 2 for name, value in before.items()})
    wrapped.load_local_state_dict(dict(local))
    assert_same_state(wrapped.state_dict(), before)


@on_ranks(2)
def test_local_state_dicts_of_earlier_versions_are_read():
    """Up to 0.5 the description was an entry, bytes of JSON: it is not unexpected, and a mismatch still raises."""
    wrapped = wrap_each(mlp(4, 5, 3))
    local = wrapped.local_state_dict()
    layout = torch.tensor(list(local._metadata[""]["_fairshard_layout"].encode()), dtype=torch.uint8)
    earlier = {**local, "_fairshard_layout": layout}
    result = wrapped.load_local_state_dict(earlier)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    every = [None, None]
    dist.all_gather_object(every, earlier)
    with pytest.raises(RuntimeError, match=r"its rank is \d"):
        wrapped.load_local_state_dict(every[1 - dist.get_rank()])
    metadata = [None, None]
    dist.all_gather_object(metadata, wrapped.local_metadata_dict())
    assert_same_state(FSDP.consolidate_shard_weights(every[::-1], metadata[::-1]), mlp(4, 5, 3).state_dict())


@on_ranks(2)
def test_local_state_dict_holds_buffers():
    """Buffers are part of the local state."""
    wrapped = FSDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    local = wrapped.local_state_dict()
    wrapped(randn(8, 4))
    assert wrapped.state_dict()["1.num_batches_tracked"] == 1
    wrapped.load_local_state_dict(local)
    assert wrapped.state_dict()["1.num_batches_tracked"] == 0


@on_ranks(2)
def test_a_local_state_dict_of_another_wrapping_is_refused():
    """Missing or unexpected shards, or shards of another size, raise a RuntimeError, and nothing is loaded."""
    wrapped = wrap_each(mlp(4, 5, 3))
    before = wrapped.state_dict()
    for other in (wrap_each(mlp(4, 6, 3)), FSDP(mlp(4, 5, 3))):
        with pytest.raises(RuntimeError):
            wrapped.load_local_state_dict(other.local_state_dict())
        assert_same_state(wrapped.state_dict(), before)
    local = wrapped.local_state_dict()
    name = "0.flat_param_0"
    del local[name]
    result = wrapped.load_local_state_dict(local, strict=False)
    assert result.missing_keys == [name]
