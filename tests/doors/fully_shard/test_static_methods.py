"""Static methods of `FullyShardedDataParallel` work on a model that `fully_shard` has sharded, or are refused."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fairshard.errors import FairshardError
from fairshard.nn import CPUOffloadPolicy, FullStateDictConfig, OptimStateKeyType, StateDictType
from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.checkpoint.compared import assert_same
from tests.doors.fully_shard.stateful import SHARDED, shard_odd, sharded_odd, train_odd
from tests.kit.doors import whole
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state, average_grads_, randn, sgd
from tests.trained import OPTIMIZERS, odd

pytestmark = pytest.mark.behaviour("static methods of fully_shard")

EVERY = [*SHARDED, "offloaded"]


def _sharded(how, seed=1):
    if how == "offloaded":
        return shard_odd(odd(seed=seed), offload_policy=CPUOffloadPolicy(pin_memory=False))
    return sharded_odd(how, seed)


def _fail_while_shown(model):
    with FSDP.summon_full_params(model):
        torch.nn.init.zeros_(model.up.weight)
        raise ZeroDivisionError


@on_ranks(2, in_full(1), in_full(3))
@pytest.mark.parametrize("how", EVERY)
def test_whole_parameters_are_shown_and_kept(how):
    """``summon_full_params`` shows the plain model's parameters and gradients; writes are kept for the next step."""
    plain, model = odd(), _sharded(how)
    optimizers = sgd(plain, lr=1e-4), sgd(model, lr=1e-4)
    for turn in range(2):
        x = randn(2, 3, key=turn)
        for each in (plain, model):
            each(x).square().sum().backward()
        average_grads_(plain.parameters())
        before = [id(param) for param in model.parameters()]
        with FSDP.summon_full_params(model, with_grads=True):
            shown, expected = dict(model.named_parameters()), dict(plain.named_parameters())
            assert list(shown) == list(expected)
            for name, param in expected.items():
                assert type(shown[name]) is nn.Parameter
                torch.testing.assert_close(shown[name], param, rtol=0, atol=0, msg=name)
                if param.grad is not None:
                    torch.testing.assert_close(shown[name].grad, param.grad, rtol=0, atol=0, msg=name)
            assert model.down.weight is model.up.weight
            with torch.no_grad():
                for each in (plain, model):
                    for param in each.parameters():
                        param.mul_(0.5).add_(0.125)
                        if param.grad is not None:
                            param.grad.mul_(2)
            with pytest.raises(FairshardError):
                model(x)
        assert [id(param) for param in model.parameters()] == before
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_state(whole(model), plain.state_dict())


@on_ranks(2)
@pytest.mark.parametrize("how", EVERY)
def test_whole_parameters_on_one_rank_of_one_unit_and_thrown_away(how):
    """``rank0_only``, ``recurse=False`` and ``writeback=False`` work; after an exception, writes are discarded."""
    model, plain = _sharded(how), odd()
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True):
        is_shown = not isinstance(model.up.weight, DTensor)
        assert is_shown == (dist.get_rank() == 0)
        if is_shown:
            assert_same_state(dict(model.named_parameters()), dict(plain.named_parameters()))
    if how != "whole":
        with FSDP.summon_full_params(model.frozen, writeback=False):
            assert torch.equal(model.frozen.weight, plain.frozen.weight)
            assert isinstance(model.up.weight, DTensor)
        with FSDP.summon_full_params(model, recurse=False, writeback=False):
            assert isinstance(model.frozen.weight, DTensor)
            torch.nn.init.zeros_(model.up.weight)
    with pytest.raises(ZeroDivisionError):
        _fail_while_shown(model)
    assert_same_state(whole(model), plain.state_dict())


@on_ranks(2, in_full(3))
@pytest.mark.parametrize("how", EVERY)
def test_optimizer_state_by_name(how):
    """Optimizer state loads whole, sharded or from rank 0, and whole state loads into the plain model's optimizer."""

    def both(model, optimizer):
        return whole(model), FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)

    def fresh():
        other = _sharded(how, seed=5)
        other.load_state_dict(model.state_dict())
        return other, OPTIMIZERS["adamw"]([param for param in other.parameters() if param.requires_grad])

    model = _sharded(how)
    optimizer = OPTIMIZERS["adamw"]([param for param in model.parameters() if param.requires_grad])
    train_odd(model, optimizer, range(2))
    expected = both(model, optimizer)
    assert not any(isinstance(value, DTensor) for own in expected[1]["state"].values() for value in own.values())
    plain = odd()
    plain.load_state_dict(expected[0])
    of_plain = OPTIMIZERS["adamw"]([param for param in plain.parameters() if param.requires_grad])
    of_plain.load_state_dict(
        FSDP.rekey_optim_state_dict(copy.deepcopy(expected[1]), OptimStateKeyType.PARAM_ID, plain, optim=of_plain)
    )
    assert_same(both(plain, of_plain), expected)

    other, of_other = fresh()
    of_other.load_state_dict(FSDP.shard_full_optim_state_dict(expected[1], other, optim=of_other))
    assert_same(both(other, of_other), expected)
    other, of_other = fresh()
    first = expected[1] if dist.get_rank() == 0 else None
    of_other.load_state_dict(FSDP.scatter_full_optim_state_dict(first, other, optim=of_other))
    assert_same(both(other, of_other), expected)
    train_odd(other, of_other, range(2, 4))

    own = FSDP.optim_state_dict(model, optimizer)
    assert isinstance(own["state"]["up.weight"]["exp_avg"], DTensor)
    again, of_again = fresh()
    of_again.load_state_dict(FSDP.optim_state_dict_to_load(again, of_again, own))
    train_odd(again, of_again, range(2, 4))
    train_odd(model, optimizer, range(2, 4))
    assert_same(both(again, of_again), both(model, optimizer))
    assert_same(both(other, of_other), both(model, optimizer))


@on_ranks(2)
def test_other_forms_of_state_dicts_are_refused():
    """No setting changes a state dict of DTensors; the error names the call that returns full values."""
    model = sharded_odd()
    assert FSDP.get_state_dict_type(model).state_dict_type is StateDictType.SHARDED_STATE_DICT
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        assert isinstance(model.state_dict()["one"], DTensor)
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.LOCAL_STATE_DICT):
        with pytest.raises(FairshardError, match="get_model_state_dict"):
            FSDP.set_state_dict_type(nn.Sequential(model), kind)
    with pytest.raises(FairshardError, match="full_state_dict=True"):
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
            pass
