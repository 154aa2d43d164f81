"""Optimizer state equals the plain optimizer's, key by key, and training continues from it to the bit."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.nn import FSDP, FullOptimStateDictConfig, OptimStateKeyType, StateDictType
from fairshard.optim import CPUOptimizer
from tests.covering import all_cells, covering_array, over_cells
from tests.kit import rank_device
from tests.models import mlp, tiny, wrap_each, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, average_grads_, randn
from tests.trained import (
    FLATTEN,
    OPTIMIZERS,
    PLACEMENTS,
    PRECISIONS,
    WRAPPINGS,
    another,
    layout_of,
    odd,
    train,
    trained,
    wrap_odd,
    wrapped_tiny,
)

IDS, NAMES = OptimStateKeyType.PARAM_ID, OptimStateKeyType.PARAM_NAME
AXES = {
    "world_size": [1, 2, 3],
    "way": ["full", "scatter", "sharded", "set_full", "set_rank0", "set_sharded", "set_local", "fairscale"],
    "optimizer": ["adamw", "fused", "momentum", "adagrad"],
    "flatten": FLATTEN,
    "precision": list(PRECISIONS),
    "placement": list(PLACEMENTS),
    "wrapping": list(WRAPPINGS),
    "into": [*WRAPPINGS, "other_flatten"],
}
TYPES = {
    "set_full": (StateDictType.FULL_STATE_DICT, None, None),
    "set_rank0": (StateDictType.FULL_STATE_DICT, None, FullOptimStateDictConfig(rank0_only=True)),
    "set_sharded": (StateDictType.SHARDED_STATE_DICT, None, None),
    "set_local": (StateDictType.LOCAL_STATE_DICT, None, None),
}


def saved(way, model, optimizer):
    """The state of ``optimizer``, saved in the given way."""
    if way == "full":
        return FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    if way == "scatter":
        state = FSDP.full_optim_state_dict(model, optimizer)
        assert bool(state) == (dist.get_rank() == 0)
        return state
    if way == "sharded":
        return FSDP.sharded_optim_state_dict(model, optimizer)
    if way == "fairscale":
        return model.gather_full_optim_state_dict(optimizer, recipient_rank=None)
    with FSDP.state_dict_type(model, *TYPES[way]):
        state = FSDP.optim_state_dict(model, optimizer)
    assert bool(state) == (way != "set_rank0" or dist.get_rank() == 0)
    return state


def to_load(way, model, optimizer, state):
    """Convert what `saved` returned into the state that ``optimizer`` loads."""
    if way == "full":
        return FSDP.shard_full_optim_state_dict(state, model, optim=optimizer)
    if way == "scatter":
        return FSDP.scatter_full_optim_state_dict(state or None, model, optim=optimizer)
    if way == "sharded":
        return FSDP.flatten_sharded_optim_state_dict(state, model, optimizer)
    if way == "fairscale":
        return model.get_shard_from_optim_state_dict(state)
    with FSDP.state_dict_type(model, *TYPES[way]):
        return FSDP.optim_state_dict_to_load(model, optimizer, state)


def check(cell):
    """Another model that loads a trained optimizer's state, saved one way, trains on as the first one does."""
    way, wrapping = cell["way"], cell["wrapping"]
    if way in ("fairscale", "set_local") and wrapping == "inner":
        wrapping = "nested"  # these ways need a wrapper as the root
    make = OPTIMIZERS[cell["optimizer"]]
    model, optimizer = trained(wrapped_tiny(cell, wrapping), make)
    state = saved(way, model, optimizer)
    own = copy.deepcopy(state)
    is_cut = way in ("sharded", "set_sharded", "set_local")  # loads only into the same shards
    into, flatten = cell["into"], cell["flatten"]
    if is_cut or into == "other_flatten":
        into, flatten = wrapping, flatten if is_cut else another(flatten)
    if way == "fairscale" and into == "inner":
        into = "nested"
    other = wrapped_tiny({**cell, "flatten": flatten}, into, seed=7)
    other.load_state_dict(model.state_dict())
    resumed = make(other.parameters())
    resumed.load_state_dict(to_load(way, other, resumed, state))
    full, again = (
        FSDP.full_optim_state_dict(m, o, rank0_only=False) for m, o in ((model, optimizer), (other, resumed))
    )
    assert again["param_groups"] == full["param_groups"]
    assert list(again["state"]) == list(full["state"])
    for name, entry in full["state"].items():
        assert_same_state(again["state"][name], entry)
    for part, fitting in ((model, optimizer), (other, resumed)):
        train(part, fitting, range(2, 4))
    # torch's fused kernels compute the last elements of a shard with other instructions: 1 ulp a step in another cut
    tolerance = {"rtol": 1e-6, "atol": 1e-8} if cell["optimizer"] == "fused" and not is_cut else {}
    assert_same_state(other.state_dict(), model.state_dict(), **tolerance)
    if not is_cut:  # the load leaves the caller's state unchanged
        assert own.keys() == state.keys()
        for name, entry in own.get("state", {}).items():
            assert_same_state(state["state"][name], entry)


@over_cells(covering_array(AXES))
@on_ranks()
def test_every_pair_of_settings_goes_on_to_the_bit(cell):
    """Training continues to the bit for every pair of ways, optimizers, layouts, precisions and placements."""
    check(cell)


@pytest.mark.full
@over_cells(all_cells({**AXES, "world_size": [2], "precision": ["fp32"], "wrapping": ["nested"]}))
@on_ranks()
def test_every_combination_of_settings_goes_on_to_the_bit(cell):
    """Training continues to the bit for every combination of settings, in fp32 with nested units, on two ranks."""
    check(cell)


@over_cells(covering_array({"world_size": [1, 2, 3], "optimizer": list(OPTIMIZERS), "flatten": FLATTEN}))
@on_ranks()
def test_it_is_the_plain_optimizers_own_and_back(cell):
    """The state equals the plain optimizer's ``state_dict()`` key by key, and each loads into the other."""
    make, flatten = OPTIMIZERS[cell["optimizer"]], cell["flatten"]
    plain, of_plain = trained(tiny(), make)
    model, of_model = trained(wrap_tiny(tiny(), **layout_of(flatten)), make)
    full = FSDP.full_optim_state_dict(model, of_model, rank0_only=False)
    numbered = FSDP.rekey_optim_state_dict(full, IDS, plain, optim=of_plain)
    expected = of_plain.state_dict()
    assert numbered["param_groups"] == expected["param_groups"]
    assert list(numbered["state"]) == list(expected["state"])
    for number, entry in expected["state"].items():
        assert list(numbered["state"][number]) == list(entry)
        for key, value in entry.items():
            # torch may compute the last elements of a tensor with other instructions: 1 ulp a step
            torch.testing.assert_close(numbered["state"][number][key], value, rtol=1e-6, atol=1e-9, check_device=False)
    fresh = tiny(seed=9)
    fresh.load_state_dict(model.state_dict())
    of_fresh = make(fresh.parameters())
    of_fresh.load_state_dict(copy.deepcopy(numbered))
    assert_same_state(dict(enumerate(_moments(of_fresh))), dict(enumerate(_moments_of_state(numbered))))
    train(fresh, of_fresh, range(2, 4))
    back = wrap_tiny(tiny(seed=8), **layout_of(another(flatten)))
    back.load_state_dict(fresh.state_dict())
    of_back = make(back.parameters())
    named = FSDP.rekey_optim_state_dict(of_fresh.state_dict(), NAMES, fresh)
    of_back.load_state_dict(FSDP.shard_full_optim_state_dict(named, back, optim=of_back))
    again = FSDP.full_optim_state_dict(back, of_back, rank0_only=False)
    for name, entry in named["state"].items():
        assert_same_state(again["state"][name], entry)
    train(model, of_model, range(2, 4))
    assert_same_state(model.state_dict(), fresh.state_dict(), rtol=1e-5, atol=1e-7)


def _moments(optimizer):
    return _moments_of_state(optimizer.state_dict())


def _moments_of_state(state):
    return [value for entry in state["state"].values() for value in entry.values() if isinstance(value, torch.Tensor)]


def grouped(model):
    """Param groups: weight decay for matrices only, and a group without settings of its own."""
    named = dict(model.named_parameters())
    plain = [name for name in named if name.endswith("bias") or "norm" in name]
    return [
        {"params": [param for name, param in named.items() if name not in plain], "weight_decay": 0.1},
        {"params": [named[name] for name in plain], "lr": 0.02, "betas": (0.5, 0.9)},
    ]


@on_ranks(1, 2)
def test_several_param_groups():
    """Groups, their settings and their order of parameters match the plain optimizer's, before and after a load."""

    def make(groups):
        return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)

    plain, model = tiny(), wrap_tiny(tiny(), flatten_parameters=False)
    of_plain, of_model = make(grouped(plain)), make(grouped(model))
    for part, optimizer in ((plain, of_plain), (model, of_model)):
        train(part, optimizer, range(2))
    full = FSDP.full_optim_state_dict(model, of_model, rank0_only=False)
    numbered = FSDP.rekey_optim_state_dict(full, IDS, plain, optim=of_plain)
    assert numbered["param_groups"] == of_plain.state_dict()["param_groups"]
    of_fairscale = model.gather_full_optim_state_dict(of_model, recipient_rank=None)
    assert of_fairscale["param_groups"] == numbered["param_groups"]
    assert of_fairscale["state"].keys() == numbered["state"].keys()
    other = wrap_tiny(tiny(seed=2), flatten_parameters=False)
    other.load_state_dict(model.state_dict())
    resumed = make([{**group, "weight_decay": 7.0} for group in grouped(other)])
    for state in (
        FSDP.shard_full_optim_state_dict(full, other, optim=resumed),
        other.get_shard_from_optim_state_dict(of_fairscale, resumed),
    ):
        resumed.load_state_dict(state)
        settings = [{key: value for key, value in group.items() if key != "params"} for group in resumed.param_groups]
        assert settings == [
            {key: value for key, value in group.items() if key != "params"} for group in of_model.param_groups
        ]
    for part, optimizer in ((model, of_model), (other, resumed)):
        train(part, optimizer, range(2, 4))
    assert_same_state(other.state_dict(), model.state_dict())


@on_ranks(2, timeout=20.0)
def test_one_rank_alone_can_convert_fairscales_state():
    """``get_shard_from_optim_state_dict`` does not communicate, before the first forward and after; errors included."""
    model = wrap_tiny(tiny())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    state = model.gather_full_optim_state_dict(optimizer, recipient_rank=1)
    assert (state is None) == (dist.get_rank() == 0)
    fresh = wrap_tiny(tiny(seed=2))
    if dist.get_rank() == 1:
        for wrapped in (fresh, model):
            made = wrapped.get_shard_from_optim_state_dict(state)
            for number, entry in optimizer.state_dict()["state"].items():
                assert_same_state(made["state"][number], entry)
        del state["state"][0]["exp_avg"]
        with pytest.raises(ValueError, match="must have the same state"):
            fresh.get_shard_from_optim_state_dict(state)
    else:
        with pytest.raises(TypeError, match=r"must be, on every rank, the dict .*, but is None"):
            fresh.get_shard_from_optim_state_dict(state)
    dist.barrier()
    train(fresh, torch.optim.Adam(fresh.parameters()), range(1))


@on_ranks(2)
def test_settings_that_differ_within_a_unit_are_refused():
    """A flat parameter has one learning rate: groups that cut through a unit raise an error that names the group."""
    plain = tiny()
    of_plain = torch.optim.AdamW(grouped(plain), lr=0.01)
    state = FSDP.rekey_optim_state_dict(of_plain.state_dict(), NAMES, plain, optim=of_plain)
    model = wrap_tiny(tiny())
    with pytest.raises(ValueError, match="group 0 they differ between its parameters"):
        FSDP.shard_full_optim_state_dict(state, model, optim=torch.optim.AdamW(model.parameters()))


@over_cells(covering_array({"world_size": [1, 2, 3], "flatten": FLATTEN, "given": ["all", "trainable"]}))
@on_ranks()
def test_odd_parameters(cell):
    """0-d, one-element, tied and frozen parameters (held by the optimizer or not) match the plain optimizer."""
    flatten, given = cell["flatten"], cell["given"]

    def make(model):
        params = list(model.parameters())
        return torch.optim.AdamW(params if given == "all" else [p for p in params if p.requires_grad], lr=0.1)

    def run(model, optimizer, steps):
        for step in steps:
            model(randn(2, 3, key=step)).square().mean().backward()
            if not isinstance(model, FSDP):
                average_grads_(model.parameters())
            optimizer.step()
            optimizer.zero_grad()

    plain, model = odd(), wrap_odd(odd(), **layout_of(flatten))
    of_plain, of_model = make(plain), make(model)
    run(plain, of_plain, range(2))
    run(model, of_model, range(2))
    full = FSDP.full_optim_state_dict(model, of_model, rank0_only=False)
    expected = FSDP.rekey_optim_state_dict(of_plain.state_dict(), NAMES, plain, optim=of_plain)
    assert sorted(full["param_groups"][0]["params"]) == expected["param_groups"][0]["params"]
    assert set(expected["state"]) - set(full["state"]) <= {"none"}  # it has no elements, so no rank steps it
    for name, entry in full["state"].items():
        assert "frozen" not in name
        assert {key: value.shape for key, value in entry.items()} == {
            key: value.shape for key, value in expected["state"][name].items()
        }
        for key, value in expected["state"][name].items():
            torch.testing.assert_close(entry[key], value, rtol=1e-6, atol=1e-9, check_device=False)
    other = wrap_odd(odd(2), **layout_of(another(flatten)))
    other.load_state_dict(model.state_dict())
    resumed = make(other)
    for state in (full, FSDP.full_optim_state_dict(model, of_model)):
        resumed.load_state_dict(
            FSDP.shard_full_optim_state_dict(state, other, optim=resumed)
            if state is full
            else FSDP.scatter_full_optim_state_dict(state, other, optim=resumed)
        )
        again = FSDP.full_optim_state_dict(other, resumed, rank0_only=False)
        for name, entry in full["state"].items():
            assert_same_state(again["state"][name], entry)
    run(model, of_model, range(2, 4))
    run(other, resumed, range(2, 4))
    assert_same_state(other.state_dict(), model.state_dict())


@on_ranks(2)
def test_zero_dim_state_of_zero_dim_parameters():
    """In a unit of one 0-dim parameter NAdam's product and ASGD's rate are scalars; moments have the shard's shape."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0, device=rank_device()))

        def forward(self, x):
            return self.scale * x

    for make in (torch.optim.NAdam, torch.optim.ASGD, torch.optim.RAdam, torch.optim.Rprop):
        plain, model = Scale(), FSDP(Scale())
        of_plain, of_model = make(plain.parameters()), make(model.parameters())
        for part, optimizer in ((plain, of_plain), (model, of_model)):
            for _ in range(2):
                part(torch.ones(3, device=rank_device())).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        shards = {key: value.clone() for key, value in of_model.state[model.params[0]].items()}
        named = FSDP.rekey_optim_state_dict(of_plain.state_dict(), NAMES, plain)
        of_model.load_state_dict(FSDP.shard_full_optim_state_dict(named, model, optim=of_model))
        loaded = dict(of_model.state[model.params[0]])
        assert {key: value.shape for key, value in loaded.items()} == {k: value.shape for k, value in shards.items()}
        if dist.get_rank() == 0:  # the other rank has padding
            assert_same_state(loaded, shards)


@on_ranks(2, 3)
def test_units_and_parameters_without_a_gradient():
    """A unit that never ran has no state and gets none from a load; the other units get theirs."""

    def build():
        model = wrap_tiny(tiny())
        model.module.spare = FSDP(nn.Linear(3, 3, device=rank_device()))
        return model

    model, optimizer = trained(build(), OPTIMIZERS["adam"])
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    assert {name for name in full["param_groups"][0]["params"] if name not in full["state"]} == {
        "spare.weight",
        "spare.bias",
    }
    other = build()
    resumed = OPTIMIZERS["adam"](other.parameters())
    resumed.load_state_dict(FSDP.shard_full_optim_state_dict(full, other, optim=resumed))
    assert len(resumed.state) == len(optimizer.state)


@on_ranks(2)
def test_before_the_first_step_there_is_no_state():
    """Before the first step every form holds param groups only, and loads."""
    for form in TYPES.values():
        model = wrap_each(mlp(4, 5, 3))
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        with FSDP.state_dict_type(model, *form):
            state = FSDP.optim_state_dict(model, optimizer)
            made = FSDP.optim_state_dict_to_load(model, optimizer, state)
        assert made["state"] == {}
        optimizer.load_state_dict(made)


@on_ranks(1, 2)
@pytest.mark.parametrize("kwargs", [{"state_dtype": torch.bfloat16}, {}, {"offload_fraction": 0.5}], ids=str)
def test_cpu_optimizer(kwargs):
    """Moments of `CPUOptimizer`, in fp32 or bf16, are saved under names and loaded back to the bit."""

    def make(model):
        return CPUOptimizer(model, torch.optim.AdamW, lr=0.01, **kwargs)

    model = wrap_tiny(tiny(), cpu_offload=True)
    optimizer = make(model)
    train(model, optimizer, range(2))
    full = FSDP.full_optim_state_dict(model, optimizer)
    other = wrap_tiny(tiny(seed=2), cpu_offload=True, flatten_parameters=True)
    resumed = make(other)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(FSDP.scatter_full_optim_state_dict(full, other, optim=resumed))
    for param, same in zip(model.parameters(), other.parameters(), strict=True):
        assert_same_state(resumed.state[same], optimizer.state[param])
    for part, fitting in ((model, optimizer), (other, resumed)):
        train(part, fitting, range(2, 4))
    assert_same_state(other.state_dict(), model.state_dict())


@on_ranks(2)
def test_plain_module_with_several_roots():
    """A plain module with units and with unsharded parameters of its own saves all state under its plain names."""

    def build(wrap, seed=1):
        torch.manual_seed(seed)
        layers = [wrap(mlp(4, 5, seed=seed)), nn.Linear(5, 5), wrap(mlp(5, 3, seed=seed))]
        return nn.Sequential(*layers).to(rank_device())

    def run(model, optimizer):
        shards = {shard for part in model.modules() if isinstance(part, FSDP) for shard in part.params}
        for step in range(2):
            model(randn(2, 4, key=step)).square().mean().backward()
            average_grads_(param for param in model.parameters() if param not in shards)
            optimizer.step()
            optimizer.zero_grad()

    plain, model = build(lambda module: module), build(wrap_each)
    of_plain, of_model = OPTIMIZERS["momentum"](plain.parameters()), OPTIMIZERS["momentum"](model.parameters())
    run(plain, of_plain)
    run(model, of_model)
    expected = FSDP.rekey_optim_state_dict(of_plain.state_dict(), NAMES, plain)
    full = FSDP.full_optim_state_dict(model, of_model, rank0_only=False)
    assert sorted(full["param_groups"][0]["params"]) == expected["param_groups"][0]["params"]
    assert list(full["state"]) == list(expected["state"])
    for name, entry in expected["state"].items():
        assert_same_state(full["state"][name], entry)
    other = build(wrap_each, seed=2)
    resumed = OPTIMIZERS["momentum"](other.parameters())
    first = FSDP.full_optim_state_dict(model, of_model)
    assert bool(first) == (dist.get_rank() == 0)
    resumed.load_state_dict(FSDP.scatter_full_optim_state_dict(first, other, optim=resumed))
    for param, same in zip(model.parameters(), other.parameters(), strict=True):
        assert_same_state(dict(resumed.state[same]), dict(of_model.state[param]))
