"""``load_state_dict(..., assign=True)`` copies the values; sharded parameters stay the objects that optimizers hold.

Covers the wrapper and ``fully_shard``, and the parameters and buffers that stay whole.
"""

import pytest
import torch
from torch import nn

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn.data_parallel import FullStateDictConfig, StateDictType
from tests.kit import rank_device
from tests.models import SavedTransposed
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, randn
from tests.state.doors import DOORS, every_door, sharded, whole_state
from tests.trained import odd


@pytest.mark.pairs
@on_ranks(1, 2)
@every_door
@pytest.mark.parametrize("has_run", [False, True])
def test_values_are_taken_and_parameters_stay(door, has_run):
    """Loading twice, before or after the first forward, gives the new values and keeps the parameter objects."""
    model = sharded(door, 1)
    if has_run:
        model(randn(2, 3)).sum().backward()
    before = [(name, id(param), param.requires_grad) for name, param in model.named_parameters()]
    for seed in (2, 3):
        wanted = {name: value.detach().clone() for name, value in odd(seed).state_dict().items()}
        given = {name: value.clone() for name, value in wanted.items()}
        assert str(model.load_state_dict(given, assign=True)) == "<All keys matched successfully>"
        assert [(name, id(param), param.requires_grad) for name, param in model.named_parameters()] == before
        for name, value in given.items():
            if "rows" not in door or name not in ("kept", "count"):  # with ``fully_shard`` torch assigns buffers
                value.zero_()
        assert_same_state(whole_state(model), wanted)


@on_ranks(2)
@every_door
def test_an_optimizer_goes_on(door):
    """An optimizer built before the load steps the loaded values, with the state that it has."""
    model, twin = sharded(door, 1), sharded(door, 1)
    state = {name: value.detach().clone() for name, value in odd(2).state_dict().items()}
    for net, assign in ((model, True), (twin, False)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            if step:
                net.load_state_dict({name: value.clone() for name, value in state.items()}, assign=assign)
            net(randn(2, 3, key=step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(whole_state(model), whole_state(twin))


@on_ranks(2)
@every_door
def test_a_load_that_fails(door):
    """Missing, unexpected and wrongly shaped entries raise as without ``assign``, and the next load works."""
    model = sharded(door, 1)
    before = [id(param) for param in model.parameters()]
    state = {name: value.detach().clone() for name, value in odd(2).state_dict().items()}
    for wrong in (
        {name: value for name, value in state.items() if name != "up.weight"},
        {**state, "more": torch.zeros(1)},
        {**state, "one": torch.zeros(3)},
    ):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"up\.weight|more|one"):
                model.load_state_dict(wrong, assign=True)
            assert [id(param) for param in model.parameters()] == before
    assert model.load_state_dict({**state, "more": torch.zeros(1)}, strict=False, assign=True)[1] == ["more"]
    model.load_state_dict(state, assign=True)
    assert_same_state(whole_state(model), odd(2).state_dict())
    model(randn(2, 3)).sum().backward()


@on_ranks(2)
@every_door
def test_inside_a_plain_module(door):
    """A plain module around sharded ones loads them in the same way, and its own parameters as torch does."""
    outer = nn.Sequential(sharded(door, 1), nn.Linear(3, 2))
    before = [id(param) for param in outer[0].parameters()]
    for seed in (2, 3):
        torch.manual_seed(seed)
        other = nn.Sequential(odd(seed), nn.Linear(3, 2))
        state = {name: value.detach().clone() for name, value in other.state_dict().items()}
        outer.load_state_dict(dict(state), assign=True)
        assert [id(param) for param in outer[0].parameters()] == before
        assert outer[1].weight.data_ptr() == state["1.weight"].data_ptr()
        assert_same_state(whole_state(outer), other.state_dict())


@on_ranks(1, 2)
@pytest.mark.parametrize("door", ["flat", "orig", "rows"])
def test_dtypes_stay(door):
    """Values of another dtype are cast to the dtype of the shards, which is that of the optimizer's state."""
    model = sharded(door, 1)
    state = {n: v.double() if v.is_floating_point() else v for n, v in odd(2).state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    expected = {n: v for n, v in odd(2).state_dict().items() if n != "kept"}
    assert_same_state({n: v for n, v in whole_state(model).items() if n != "kept"}, expected)
    assert model.kept.dtype == (torch.float64 if door == "rows" else torch.float32)


@on_ranks(2)
@every_door
def test_what_is_ignored(door):
    """An ignored parameter keeps its identity, because optimizers hold it."""
    model = odd(1)
    ignored = model.up.bias
    name = "ignored_params" if "rows" in door else "ignored_parameters"
    if "bf16" in door:
        return
    model = DOORS[door](model, **{name: {ignored}})
    for seed in (2, 3):
        wanted = odd(seed).state_dict()
        model.load_state_dict({n: v.clone() for n, v in wanted.items()}, assign=True)
        inside = model.module if isinstance(model, FSDP) else model
        assert inside.up.bias is ignored
        assert_same_state(whole_state(model), wanted)
        model(randn(2, 3)).sum().backward()


class Transposing(SavedTransposed, nn.Linear):
    """Saves and loads its weight transposed."""


@on_ranks(2)
@pytest.mark.parametrize("door", ["flat", "apart", "orig", "rows"])
def test_modules_with_their_own_way_to_load(door):
    """A module's own ``_load_from_state_dict`` works as it does unsharded."""
    torch.manual_seed(1)
    plain = nn.Sequential(Transposing(3, 5), nn.Linear(5, 2)).to(rank_device())
    state = {n: v.detach().clone() for n, v in plain.state_dict().items()}
    torch.manual_seed(2)
    model = DOORS[door](nn.Sequential(Transposing(3, 5), nn.Linear(5, 2)).to(rank_device()))
    for _ in range(2):
        model.load_state_dict(dict(state), assign=True)
        assert torch.equal(model(randn(2, 3)), plain(randn(2, 3)))


@on_ranks(2)
@pytest.mark.parametrize("door", ["flat", "apart", "orig"])
@pytest.mark.parametrize("form", ["rank0", "sharded", "local"])
def test_all_forms_of_state_dicts(door, form):
    """State dicts of rank 0 alone, sharded ones and local ones load as without ``assign``."""
    model, other = sharded(door, 1), sharded(door, 2)
    before = [id(param) for param in model.parameters()]
    kind, config = {
        "rank0": (StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)),
        "sharded": (StateDictType.SHARDED_STATE_DICT, None),
        "local": (StateDictType.LOCAL_STATE_DICT, None),
    }[form]
    for _ in range(2):
        with FSDP.state_dict_type(other, kind, config), FSDP.state_dict_type(model, kind, config):
            model.load_state_dict(other.state_dict(), assign=True)
        assert [id(param) for param in model.parameters()] == before
        assert_same_state(model.state_dict(), other.state_dict())
        with torch.no_grad():
            for net in (model, other):
                net(randn(2, 3))
