"""The form of state dicts is set for all units at once, with FSDP1's names, defaults and objects."""

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from fairshard import nn as fairshard_nn
from fairshard.errors import FairshardError, StateDictTypesDifferError
from fairshard.nn import (
    FSDP,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fairshard.utils.span_tensor import SpanTensor
from tests.models import mlp, tiny, wrap_each, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, randn

FULL, SHARDED, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT
DEFAULT = StateDictSettings(FULL, FullStateDictConfig(), FullOptimStateDictConfig())


def test_configs_have_the_names_and_defaults_of_fsdp1():
    """Fields, their order and their defaults, of every config class; `StateDictSettings` takes all three."""
    model, optim = {"offload_to_cpu": False, "use_dtensor": False}, {"offload_to_cpu": True, "use_dtensor": False}
    expected = {
        StateDictConfig: model,
        FullStateDictConfig: {**model, "rank0_only": False},
        ShardedStateDictConfig: model,
        LocalStateDictConfig: model,
        OptimStateDictConfig: optim,
        FullOptimStateDictConfig: {**optim, "rank0_only": False},
        ShardedOptimStateDictConfig: optim,
        LocalOptimStateDictConfig: {**optim, "offload_to_cpu": False},
    }
    for cls, defaults in expected.items():
        assert list(dataclasses.asdict(cls()).items()) == list(defaults.items()), cls
        assert issubclass(cls, StateDictConfig if "Optim" not in cls.__name__ else OptimStateDictConfig)
        assert getattr(fairshard_nn, cls.__name__) is cls
    names = [field.name for field in dataclasses.fields(StateDictSettings)]
    assert names == ["state_dict_type", "state_dict_config", "optim_state_dict_config"]
    assert {kind.name for kind in StateDictType} == {kind.name for kind in torch_fsdp.StateDictType}


@on_ranks(1, 2)
def test_set_returns_what_was_and_get_what_is():
    """``set_state_dict_type`` returns the previous settings, and sets those of all units below."""
    model = wrap_tiny(tiny())
    assert FSDP.get_state_dict_type(model) == DEFAULT
    assert FSDP.set_state_dict_type(model, SHARDED, ShardedStateDictConfig(offload_to_cpu=True)) == DEFAULT
    now = StateDictSettings(SHARDED, ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig())
    assert FSDP.get_state_dict_type(model) == FSDP.get_state_dict_type(model.first.up) == now
    assert FSDP.set_state_dict_type(model, LOCAL) == now
    assert FSDP.get_state_dict_type(copy.deepcopy(model)).state_dict_type is LOCAL


@on_ranks(2)
def test_any_module_will_do():
    """Any module can be passed: all wrappers in it are set, and a module without wrappers has the defaults."""
    outer = nn.ModuleDict({"a": wrap_each(mlp(4, 5, 3)), "b": nn.Linear(2, 2), "c": wrap_each(mlp(2, 2))})
    with FSDP.state_dict_type(outer, SHARDED):
        state = outer.state_dict()
        kinds = {name: isinstance(value, SpanTensor) for name, value in state.items()}
        assert kinds == {name: not name.startswith("b") for name in state}
        assert FSDP.get_state_dict_type(outer["c"]).state_dict_type is SHARDED
    assert FSDP.get_state_dict_type(outer) == DEFAULT
    assert FSDP.get_state_dict_type(nn.Linear(2, 2)) == DEFAULT
    assert FSDP.set_state_dict_type(nn.Linear(2, 2), LOCAL) == DEFAULT


@on_ranks(2)
def test_the_context_restores_also_after_an_exception():
    """A ``with`` block restores the previous settings, also when nested and after an exception."""
    model = wrap_tiny(tiny())
    FSDP.set_state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True))
    before = FSDP.get_state_dict_type(model)

    def fail():
        with FSDP.state_dict_type(model, SHARDED):
            with FSDP.state_dict_type(model, LOCAL):
                assert FSDP.get_state_dict_type(model).state_dict_type is LOCAL
            assert FSDP.get_state_dict_type(model).state_dict_type is SHARDED
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert FSDP.get_state_dict_type(model) == before


@on_ranks(2)
def test_settings_are_not_shared():
    """Changing a config object that was passed or returned does not change the settings."""
    model, config = wrap_tiny(tiny()), FullStateDictConfig()
    FSDP.set_state_dict_type(model, FULL, config)
    config.rank0_only = True
    FSDP.get_state_dict_type(model).state_dict_config = LocalStateDictConfig()
    assert FSDP.get_state_dict_type(model) == DEFAULT


@on_ranks(2)
def test_torchs_own_enum_and_configs_are_accepted():
    """A script that imports them from torch works unchanged."""
    model = wrap_each(mlp(4, 5, 3))
    FSDP.set_state_dict_type(
        model,
        torch_fsdp.StateDictType.FULL_STATE_DICT,
        torch_fsdp.FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        torch_fsdp.FullOptimStateDictConfig(rank0_only=True),
    )
    assert FSDP.get_state_dict_type(model) == StateDictSettings(
        FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
    )
    assert bool(model.state_dict()) == (dist.get_rank() == 0)
    with FSDP.state_dict_type(
        model,
        torch_fsdp.StateDictType.SHARDED_STATE_DICT,
        torch_fsdp.ShardedStateDictConfig(),
        torch_fsdp.ShardedOptimStateDictConfig(),
    ):
        assert FSDP.get_state_dict_type(model).state_dict_type is SHARDED
    FSDP.set_state_dict_type(model, LOCAL, torch_fsdp.LocalStateDictConfig(), torch_fsdp.LocalOptimStateDictConfig())
    assert FSDP.get_state_dict_type(model).state_dict_type is LOCAL


@on_ranks(1)
def test_a_config_of_another_form_is_refused():
    """A config of another form raises a RuntimeError and changes nothing; the base class fits every form."""
    model = wrap_each(mlp(4, 5, 3))
    wrong = [
        ((FULL, ShardedStateDictConfig()), "FullStateDictConfig"),
        ((SHARDED, FullStateDictConfig()), "ShardedStateDictConfig"),
        ((LOCAL, torch_fsdp.FullStateDictConfig()), "LocalStateDictConfig"),
        ((FULL, None, ShardedOptimStateDictConfig()), "FullOptimStateDictConfig"),
        ((SHARDED, FullOptimStateDictConfig()), "ShardedStateDictConfig"),
        ((FULL, {"rank0_only": True}), "FullStateDictConfig"),
    ]
    for arguments, name in wrong:
        with pytest.raises(RuntimeError, match=f"must be a {name}"):
            FSDP.set_state_dict_type(model, *arguments)
        with pytest.raises(RuntimeError, match=f"must be a {name}"), FSDP.state_dict_type(model, *arguments):
            pass
        assert FSDP.get_state_dict_type(model) == DEFAULT
    with pytest.raises(TypeError, match=r"StateDictType\.FULL_STATE_DICT"):
        FSDP.set_state_dict_type(model, "full")
    FSDP.set_state_dict_type(model, SHARDED, StateDictConfig(offload_to_cpu=True), OptimStateDictConfig())
    assert FSDP.get_state_dict_type(model).state_dict_config == ShardedStateDictConfig(offload_to_cpu=True)


@on_ranks(1)
@pytest.mark.parametrize("ours", [True, False])
def test_dtensors_are_refused_by_name(ours):
    """``use_dtensor=True`` raises for flat parameters, with our config class and with torch's."""
    model = wrap_each(mlp(4, 5, 3))
    config = ShardedStateDictConfig(use_dtensor=True) if ours else torch_fsdp.ShardedStateDictConfig(_use_dtensor=True)
    with pytest.raises(RuntimeError, match="use_dtensor=False"):
        FSDP.set_state_dict_type(model, SHARDED, config)


@on_ranks(2)
def test_units_that_disagree_are_refused_until_they_agree():
    """Every method raises an AssertionError that names both units, until the inner unit is set back."""
    model = wrap_each(mlp(4, 5, 3))
    FSDP.set_state_dict_type(model[2], SHARDED)
    calls = [
        model.state_dict,
        lambda: model.load_state_dict({}),
        lambda: FSDP.get_state_dict_type(model),
        lambda: FSDP.set_state_dict_type(model, FULL),
        lambda: FSDP.optim_state_dict(model, torch.optim.SGD(model.parameters())),
    ]
    for call in calls:
        with pytest.raises(AssertionError, match=r"`root` has .*FULL_STATE_DICT.*`2` has .*SHARDED_STATE_DICT"):
            call()
    with pytest.raises(StateDictTypesDifferError):
        model.state_dict()
    FSDP.set_state_dict_type(model[2], FULL)
    assert_same_state(model.state_dict(), mlp(4, 5, 3).state_dict())


@on_ranks(2)
@pytest.mark.parametrize("flatten", [True, False])
def test_local_form_is_the_shards(flatten):
    """Both ways of saving give the same local dict, and both ways of loading accept it."""
    source, target = (wrap_tiny(tiny(seed=seed), flatten_parameters=flatten) for seed in (1, 2))
    expected = source.state_dict()
    for model in (source, target):
        FSDP.set_state_dict_type(model, LOCAL, LocalStateDictConfig(offload_to_cpu=True))
    state = source.state_dict()
    assert_same_state(state, source.local_state_dict())
    assert sum(value.numel() for value in state.values()) == sum(param.numel() for param in source.parameters())
    target.load_state_dict(state)
    FSDP.set_state_dict_type(target, FULL)
    assert_same_state(target.state_dict(), expected)


@on_ranks(2)
def test_a_local_mismatch_names_the_first_difference():
    """A local dict of another rank, cut, shape or order raises, names the first difference, and changes nothing."""
    model = wrap_each(mlp(4, 5, 3))
    before = model.state_dict()
    own = model.local_state_dict()
    layouts = [None, None]
    dist.all_gather_object(layouts, own)
    without_bias = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 3))
    others = [
        (r"its rank is \d while this model's is \d", layouts[1 - dist.get_rank()]),
        (
            r"its `0.flat_param_0` is `0.weight` \(6, 4\) while this model's is `0.weight` \(5, 4\)",
            wrap_each(mlp(4, 6, 3)).local_state_dict(),
        ),
        (r"its `0.flat_param_0` is absent while this model's is", FSDP(mlp(4, 5, 3)).local_state_dict()),
        (r"its `2.flat_param_0` is absent while this model's", wrap_each(mlp(4, 5)).local_state_dict()),
        (
            r"its `0.flat_param_0` is nothing more while this model's is `0.bias`",
            wrap_each(without_bias).local_state_dict(),
        ),
        ("cannot be read", {**own, "_fairshard_layout": torch.tensor([123, 1], dtype=torch.uint8)}),
    ]
    for text, state in others:
        with pytest.raises(RuntimeError, match=text):
            model.load_local_state_dict(state, strict=False)
        assert_same_state(model.state_dict(), before)


@on_ranks(2)
def test_a_local_dict_is_loaded_by_the_wrapper():
    """Loading a local dict into a plain module around the wrapper raises, and the model still works."""
    outer = nn.Sequential(wrap_each(mlp(4, 5, 3)))
    before = outer.state_dict()
    FSDP.set_state_dict_type(outer, LOCAL)
    state = outer.state_dict()
    with pytest.raises(FairshardError, match="Call load_state_dict on the wrapper"):
        outer.load_state_dict(state)
    FSDP.set_state_dict_type(outer, FULL)
    assert_same_state(outer.state_dict(), before)
    assert outer(randn(2, 4)).shape == (2, 3)
