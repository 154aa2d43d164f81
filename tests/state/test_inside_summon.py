"""Inside ``summon_full_params`` state dicts hold the shown values, and initialising parameters takes effect.

Covers the wrapper and ``fully_shard``: ``state_dict()`` of both modules and ``reset_parameters()``.
"""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.errors import FairshardError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn.data_parallel import StateDictType
from tests.kit import rank_device
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, randn
from tests.state.doors import DOORS, every_door, sharded, whole_state
from tests.trained import odd


class Boom(Exception):
    pass


def inside(model):
    return model.module if isinstance(model, FSDP) else model


def double_(model):
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)


def copied(state):
    return {name: value.clone() for name, value in state.items()}


@pytest.mark.pairs
@on_ranks(1, 2)
@every_door
@pytest.mark.parametrize("writeback", [True, False])
@pytest.mark.parametrize("has_run", [True, False])
def test_state_dicts(door, writeback, has_run):
    """The wrapper's and the inner module's state dicts have the plain module's names and the values last written."""
    plain, model = odd(2), sharded(door, 2)
    if has_run:
        with torch.no_grad():
            plain(randn(2, 3)), model(randn(2, 3))
    before = copied(plain.state_dict())
    for _ in range(2):
        with FSDP.summon_full_params(model, writeback=writeback):
            for changed in (False, True):
                if changed:
                    double_(plain), double_(model)
                for state in (model.state_dict(), inside(model).state_dict()):
                    assert list(state) == list(plain.state_dict())
                    assert not any(isinstance(value, nn.Parameter) for value in state.values())
                    assert_same_state(state, plain.state_dict())
        if not writeback and dist.get_world_size() > 1:  # a single rank always keeps the writes
            plain.load_state_dict(before)
        assert_same_state(whole_state(model), plain.state_dict())
    model(randn(2, 3)).sum().backward()


@on_ranks(2)
@pytest.mark.parametrize("door", [door for door in DOORS if "rows" not in door])
def test_a_wrappers_state_is_the_callers_own(door):
    """Later writes, inside or outside, do not change what the wrapper's ``state_dict()`` has returned."""
    model = sharded(door, 2)
    with model.summon_full_params():
        state = model.state_dict()
        double_(model)
    double_(model)
    assert_same_state(state, odd(2).state_dict())


class Reset(nn.Module):
    """Initialises its layers and its own parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 3)
        self.own = nn.Parameter(torch.zeros(7))

    def reset_parameters(self):
        self.up.reset_parameters()
        self.down.reset_parameters()
        nn.init.normal_(self.own)

    def forward(self, x):
        return self.down(self.up(x)) * self.own.sum()


@pytest.mark.pairs
@on_ranks(1, 2)
@every_door
@pytest.mark.parametrize("allow", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_reset_parameters(door, allow, nested):
    """Resetting the model, its inner module or a part works as unsharded, with and without the argument for it."""
    if "rows" in door and allow:
        return
    more = {"allow_reset_parameters": allow} if "rows" not in door else {}
    plain = Reset().to(rank_device())
    model = copy.deepcopy(plain)
    if nested:
        model.up = DOORS[door](model.up, **more)
    model = DOORS[door](model, **more)
    for call in (
        lambda net: net.reset_parameters(),
        lambda net: inside(net).reset_parameters(),
        lambda net: net.up.reset_parameters(),
        lambda net: (
            net.apply(lambda part: part.reset_parameters() if type(part) is nn.Linear else None)
            if "rows" not in door
            else net.down.reset_parameters()
        ),
    ):
        for seed in (3, 4):
            for net in (plain, model):
                torch.manual_seed(seed)
                with FSDP.summon_full_params(model) if net is model else nullcontext():
                    call(net)
            assert_same_state(whole_state(model), plain.state_dict())
    model(randn(2, 3)).sum().backward()


@on_ranks(2)
@every_door
def test_after_an_exception(door):
    """An exception inside discards the writes; state dicts then work again, outside and inside."""
    model = sharded(door, 1)

    def fail():
        with FSDP.summon_full_params(model):
            double_(model)
            model.state_dict()
            raise Boom

    for _ in range(2):
        with pytest.raises(Boom):
            fail()
        assert_same_state(whole_state(model), odd(1).state_dict())
        with FSDP.summon_full_params(model):
            assert_same_state(model.state_dict(), odd(1).state_dict())


@on_ranks(2)
@pytest.mark.parametrize("door", ["flat", "apart", "orig"])
def test_the_outermost_unit_alone(door):
    """With ``recurse=False`` the state dict gathers the inner units, as it does outside."""
    model = sharded(door, 1)
    with model.summon_full_params(recurse=False):
        nn.init.zeros_(model.up.weight)
        state = model.state_dict()
    expected = odd(1)
    nn.init.zeros_(expected.up.weight)
    assert_same_state(state, expected.state_dict())
    assert_same_state(model.state_dict(), expected.state_dict())


@on_ranks(2)
@pytest.mark.parametrize("door", ["flat", "apart", "orig"])
def test_on_rank_0_alone(door):
    """With ``rank0_only`` the other ranks get an empty state dict, and loading raises on every rank."""
    model = sharded(door, 1)
    for _ in range(2):
        with model.summon_full_params(rank0_only=True, writeback=False):
            state = model.state_dict()
        if dist.get_rank() == 0:
            assert_same_state(state, odd(1).state_dict())
        else:
            assert state == {}
        with model.summon_full_params(rank0_only=True, writeback=False):
            with pytest.raises(FairshardError, match="must be on every rank"):
                model.load_state_dict(odd(2).state_dict())
        assert_same_state(model.state_dict(), odd(1).state_dict())


@on_ranks(2)
@pytest.mark.parametrize("kind", [StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT])
def test_other_forms_are_refused(kind):
    """Sharded and local state dicts raise inside, because the shards do not hold the shown values yet."""
    model = sharded("orig", 1)
    with FSDP.state_dict_type(model, kind), model.summon_full_params():
        with pytest.raises(FairshardError, match=rf"summon_full_params.*{kind.name}"):
            model.state_dict()
    assert len(model.state_dict()) == len(odd(1).state_dict())


@on_ranks(2)
@every_door
def test_loading_inside(door):
    """``load_state_dict`` of the model or of its inner module writes the shown parameters, and so the shards."""
    model = sharded(door, 1)
    for seed, load in ((2, lambda state: model.load_state_dict(state)), (3, inside(model).load_state_dict)):
        with FSDP.summon_full_params(model):
            load(odd(seed).state_dict())
            assert_same_state(model.state_dict(), odd(seed).state_dict())
        assert_same_state(whole_state(model), odd(seed).state_dict())
    model(randn(2, 3)).sum().backward()
