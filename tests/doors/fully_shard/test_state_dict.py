"""A state dict holds DTensors under the plain model's names; whole tensors and DTensors load into the live weights."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fairshard.errors import ShardChangedError
from fairshard.nn import CPUOffloadPolicy, fully_shard
from tests.doors.fully_shard.stateful import SHARDED, by_columns, copied, shard_odd, sharded_odd, train_odd, whole_of
from tests.kit import CollectiveCounter
from tests.kit.doors import whole
from tests.models import SavedTransposed, mlp
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state, await_device, randn, sgd
from tests.trained import odd

pytestmark = pytest.mark.behaviour("state dicts of fully_shard")


@on_ranks(2, in_full(1), in_full(3))
def test_dtensors_under_the_plain_names():
    """A state dict has the plain model's names and order, with tied weights under both names, at any time."""
    plain = odd()
    model = sharded_odd()
    for how in (copied, dict):
        assert_same_state(whole_of(how(model.state_dict())), plain.state_dict())
    loss = model(randn(2, 3)).sum()  # the outermost unit stays gathered
    plain.count += 1
    with torch.no_grad():
        state = model.state_dict()
    assert_same_state(whole_of(state), plain.state_dict())
    loss.backward()
    assert all(isinstance(value, DTensor) for name, value in state.items() if name not in ("kept", "count"))
    assert state["scale"].placements == (Replicate(),)
    assert state["up.weight"].placements == (Shard(0),)
    assert state["up.weight"]._local_tensor.data_ptr() == state["down.weight"]._local_tensor.data_ptr()
    kept = model.state_dict(keep_vars=True)
    assert all(param is kept[name] for name, param in model.named_parameters())


@on_ranks(2, 3, in_full(1))
@pytest.mark.parametrize("how", SHARDED)
def test_whole_tensors_load_without_communication(how):
    """Each rank takes its part of whole tensors, in nested units and through an outer plain module as well."""
    state = odd(seed=5).state_dict()
    model = sharded_odd(how)
    outer = nn.ModuleDict({"inner": model, "other": nn.Linear(2, 2)})
    for load, strict in ((lambda: model.load_state_dict(state), True), (None, False)):
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        with CollectiveCounter() as counter:
            if load is not None:
                keys = load()
            else:
                keys = outer.load_state_dict({f"inner.{name}": value for name, value in state.items()}, strict=strict)
        assert not counter.calls
        assert keys.missing_keys == ([] if strict else ["other.weight", "other.bias"])
        assert_same_state(whole(model), state)
    x = randn(2, 3)
    expected = odd(seed=5)(x)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


@on_ranks(2, 3)
def test_dtensors_load_from_the_same_and_from_another_placement():
    """DTensors load from the same placement, and from another one, for which they are gathered."""
    state = copied(sharded_odd("columns", seed=5).state_dict())
    for how in SHARDED:
        model = sharded_odd(how)
        model.load_state_dict(state)
        assert_same_state(whole(model), odd(seed=5).state_dict())


@on_ranks(2)
@pytest.mark.parametrize("form", ["whole", "dtensors"])
@pytest.mark.parametrize("assign", [False, True])
def test_optimizers_step_what_was_loaded(form, assign):
    """Optimizers built before or after a load, gathered or not, step the loaded values as on the plain model."""
    plain, model = odd(), sharded_odd()
    before = [id(param) for param in model.parameters()]
    optimizers = [(sgd(plain, lr=1e-4), sgd(model, lr=1e-4))]
    for seed in (5, 6):
        values = odd(seed=seed).state_dict()
        plain.load_state_dict(values)
        model.load_state_dict(values if form == "whole" else sharded_odd("columns", seed).state_dict(), assign=assign)
        assert [id(param) for param in model.parameters()] == before
        optimizers.append((sgd(plain, lr=1e-4), sgd(model, lr=1e-4)))
        for of_plain, of_model in optimizers:
            train_odd(plain, of_plain, range(2))
            train_odd(model, of_model, range(2))
            assert_same_state(whole(model), plain.state_dict())
        model(randn(2, 3))  # the outermost unit is still gathered during the next load
        plain(randn(2, 3))


@on_ranks(2)
def test_offloaded_weights_load():
    """Weights kept in host memory are loaded there, and the next forward uses them."""
    model = shard_odd(odd(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    for seed in (5, 6):
        model.load_state_dict(odd(seed=seed).state_dict())
        x = randn(2, 3)
        torch.testing.assert_close(model(x), odd(seed=seed)(x), rtol=0, atol=0)


@on_ranks(2)
def test_a_model_built_on_the_meta_device_takes_whole_tensors():
    """Whole tensors load with ``assign=True``, as torch requires, and an optimizer built before steps them."""
    plain = mlp(4, 6, 2, seed=3)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    fully_shard(model[0])
    fully_shard(model)
    optimizers = sgd(plain), sgd(model)
    model.load_state_dict(plain.state_dict(), assign=True)
    x = torch.ones(2, 4)
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        each(x).square().sum().backward()
        optimizer.step()
    assert_same_state(whole(model), plain.state_dict())


@on_ranks(2)
def test_what_does_not_fit_is_named():
    """Wrong shapes, missing and unexpected names, and meta tensors raise an error that names them on every rank."""
    model = sharded_odd()
    state = odd(seed=5).state_dict()
    state["frozen.weight"] = torch.zeros(2, 3)
    state["up.bias"] = torch.zeros(4, device="meta")
    state["other"] = state.pop("one")
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(state)
    message = str(caught.value)
    assert "size mismatch for frozen.weight" in message
    assert "`up.bias` must have values" in message
    assert 'Missing key(s) in state_dict: "one"' in message
    assert 'Unexpected key(s) in state_dict: "other"' in message


@on_ranks(2)
def test_not_between_forward_and_backward():
    """A load between forward and backward raises, because the backward would use different weights."""
    model = sharded_odd()
    loss = model(randn(2, 3)).sum()
    model.load_state_dict(odd(seed=5).state_dict())
    await_device()  # the backward's gather, whose result is refused, does not wait for the load
    with pytest.raises(ShardChangedError, match="load_state_dict"):
        loss.backward()


class Transposed(SavedTransposed, nn.Linear):
    """A Linear that saves its weight transposed."""


def _rename(module, state, prefix, *rest):
    if prefix + "old" in state:
        state[prefix + "weight"] = state.pop(prefix + "old")


@on_ranks(2)
def test_modules_with_custom_load_hooks():
    """A module's own load hooks see the state dict that the user passed, and their result is loaded."""
    model = nn.Sequential(Transposed(3, 4), nn.Linear(4, 2))
    model[1].register_load_state_dict_pre_hook(_rename)
    plain = copy.deepcopy(model)
    fully_shard(model)
    state = {name: randn(*value.shape) for name, value in plain.state_dict().items()}
    for value in state.values():
        dist.broadcast(value, 0)
    state["1.old"] = state.pop("1.weight")
    plain.load_state_dict(state)
    model.load_state_dict(state)
    own, expected = whole(model), plain.state_dict()
    assert_same_state(own, expected)
    model.load_state_dict(plain.state_dict())
    assert_same_state(whole_of(dict(model.named_parameters())), dict(plain.named_parameters()))


@on_ranks(2)
def test_a_dtensor_on_another_mesh_dimension_is_cut_right():
    """DTensors that a user has replicated by hand load as well."""
    model = fully_shard(mlp(4, 6, 2), shard_placement_fn=by_columns)
    mesh = model[0].weight.device_mesh
    values = {name: torch.ones_like(value) for name, value in mlp(4, 6, 2, seed=3).state_dict().items()}
    model.load_state_dict({name: distribute_tensor(value, mesh, [Replicate()]) for name, value in values.items()})
    assert_same_state(whole(model), values)
