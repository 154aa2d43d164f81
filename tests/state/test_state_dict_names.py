"""State has the names of the unwrapped module, whatever else wraps its parts; hooks are called and see these names."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fairshard.errors import FairshardError
from fairshard.nn import FSDP, FullStateDictConfig, StateDictType
from fairshard.utils.names import clean_tensor_name
from fairshard.utils.span_tensor import SpanTensor
from tests.models import mlp, wrap_each
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state
from tests.trained import full_of, shard


def test_clean_tensor_name():
    """Every wrapper's part of a name is removed, at any position; parts that only look similar stay."""
    for name, clean in {
        "a._orig_mod.b.weight": "a.b.weight",
        "_orig_mod.weight": "weight",
        "_fsdp_wrapped_module.a._checkpoint_wrapped_module._orig_mod.b": "a.b",
        "my_orig_mod.weight": "my_orig_mod.weight",
        "a._orig_mode.b": "a._orig_mode.b",
        "module.a": "module.a",
        "": "",
    }.items():
        assert clean_tensor_name(name) == clean


def build(around, seed=1):
    """A block of two layers, plain or with each part also wrapped by torch, inside and outside our wrapper."""
    block = nn.Sequential(mlp(4, 5, seed=seed), nn.BatchNorm1d(5), mlp(5, 3, seed=seed + 5))
    if around == "plain":
        return block
    if around == "compiled":
        block[0] = torch.compile(FSDP(block[0]))
        block[2] = FSDP(torch.compile(block[2]))
        return FSDP(torch.compile(block))
    if around == "checkpointed":
        block[0] = checkpoint_wrapper(FSDP(checkpoint_wrapper(block[0])))
        block[2] = checkpoint_wrapper(block[2])
        return FSDP(checkpoint_wrapper(block))
    block[0] = FSDP(checkpoint_wrapper(torch.compile(block[0])))
    block[2] = torch.compile(checkpoint_wrapper(block[2]))
    return FSDP(block)


@on_ranks(2)
@pytest.mark.parametrize("around", ["compiled", "checkpointed", "both"])
@pytest.mark.parametrize("form", ["full", "rank0", "sharded", "local"])
def test_torchs_wrappers_leave_no_trace(around, form):
    """No form has the names of torch.compile or the checkpoint wrapper, and a dict with clean names loads."""
    kinds = {
        "full": (StateDictType.FULL_STATE_DICT, None),
        "rank0": (StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)),
        "sharded": (StateDictType.SHARDED_STATE_DICT, None),
        "local": (StateDictType.LOCAL_STATE_DICT, None),
    }
    plain = build("plain").state_dict()
    model, target = build(around), build(around, seed=2)
    for part in (model, target):
        FSDP.set_state_dict_type(part, *kinds[form])
    state = model.state_dict()
    assert not any("_orig_mod" in name or "_checkpoint" in name for name in state)
    if form == "full":
        assert_same_state(state, plain)
        assert "0.0" in state._metadata
        assert not any("_orig_mod" in name for name in state._metadata)
    if form == "sharded":
        assert list(state) == list(plain)
    result = target.load_state_dict(state)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    for part in (model, target):
        FSDP.set_state_dict_type(part, *kinds["full"])
        assert_same_state(part.state_dict(), plain)
    assert_same_state(model.state_dict(prefix="x."), {f"x.{name}": value for name, value in plain.items()})


@on_ranks(2)
def test_dicts_with_wrappers_names_load():
    """Dicts with the names of torch.compile, of the checkpoint wrapper or of another FSDP load."""
    model, state = build("compiled"), build("plain", seed=3).state_dict()
    for infix in ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"):
        other = {f"{infix}.{name.replace('0.0.', f'0.{infix}.0.')}": value + 1 for name, value in state.items()}
        model.load_state_dict(other)
        assert_same_state(model.state_dict(), {name: value + 1 for name, value in state.items()})


@on_ranks(2)
def test_errors_and_lists_have_clean_names():
    """Errors about missing, unexpected and wrongly shaped entries use the plain module's names."""
    model = build("compiled")
    state = model.state_dict()
    wrong = {**state, "0.0.weight": torch.ones(2, 2), "more": torch.ones(1)}
    del wrong["2.0.bias"]
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(wrong)
    for text in ('Missing key(s) in state_dict: "2.0.bias"', '"more"', "size mismatch for 0.0.weight"):
        assert text in str(caught.value)
    wrong["0.0.weight"] = state["0.0.weight"]
    result = model.load_state_dict(wrong, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["2.0.bias"], ["more"])


@on_ranks(2)
def test_optimizer_state_has_clean_names():
    """Optimizer state of wrapped, compiled and checkpointed parts is saved under plain names, and loads from others."""
    model = build("both")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        param.grad = torch.full_like(param, 2.0)
    optimizer.step()
    full = full_of(model, optimizer)
    assert list(full["state"]) == [name for name, _ in build("plain").named_parameters()]
    other = {**full, "state": {f"_orig_mod.{name}": own for name, own in full["state"].items()}}
    for state in (full, other):
        made = shard(state, model, optimizer)
        assert made["state"].keys() == optimizer.state_dict()["state"].keys()


@on_ranks(2)
def test_versions_of_modules_are_seen():
    """A module that loads old formats receives the version that its part was saved with, as in the plain module."""
    seen = []

    class Versioned(nn.Linear):
        _version = 3

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
            seen.append(local_metadata.get("version"))
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    plain = nn.Sequential(nn.Sequential(Versioned(3, 3)), Versioned(3, 3))
    state = plain.state_dict()
    model = copy.deepcopy(plain)
    model[0][0] = FSDP(model[0][0])
    model[0] = FSDP(model[0])
    model = FSDP(model)
    plain.load_state_dict(state)
    model.load_state_dict(state)
    model.load_state_dict(model.state_dict())
    assert seen == [3] * 6
    del state._metadata
    model.load_state_dict(state)
    assert seen[6:] == [None, None]


@on_ranks(2)
def test_hooks_on_wrappers_are_called():
    """Hooks before and after saving and loading, on an outer and an inner wrapper, see unwrapped names."""
    model = wrap_each(mlp(4, 5, 3))
    calls = []
    for part in (model, model[0]):
        part.register_state_dict_pre_hook(lambda module, prefix, keep_vars: calls.append(("pre", prefix)))
        part.register_state_dict_post_hook(
            lambda module, state, prefix, metadata: calls.append(("post", prefix, f"{prefix}bias" in state))
        )
        part.register_load_state_dict_pre_hook(
            lambda module, state, prefix, *_: calls.append(("load", f"{prefix}bias" in state))
        )
        part.register_load_state_dict_post_hook(lambda module, keys: calls.append(("loaded", len(keys))))
    state = model.state_dict()
    assert calls == [("pre", ""), ("pre", "0."), ("post", "0.", True), ("post", "", False)]
    calls.clear()
    model.load_state_dict(state)
    assert [call[0] for call in calls] == ["load", "load", "loaded", "loaded"]
    calls.clear()
    model[0].load_state_dict(model[0].state_dict())
    assert ("load", True) in calls


@on_ranks(2)
@pytest.mark.parametrize("kind", [StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT])
def test_the_order_of_flat_parameters_stays(kind):
    """A unit with several flat parameters yields them in the same order after a state dict, a load or a summon."""
    model = FSDP(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).double(), nn.Linear(2, 2).requires_grad_(False)))
    names = [name for name, _ in model.named_parameters()]
    assert len(names) == 3
    FSDP.set_state_dict_type(model, kind)
    state = model.state_dict()
    assert [name for name, _ in model.named_parameters()] == names
    model.load_state_dict(state)
    with model.summon_full_params():
        pass
    assert [name for name, _ in model.named_parameters()] == names


@on_ranks(2)
def test_views_of_buffers_belong_to_the_caller():
    """Later writes to a buffer do not change a view of it that a module has saved."""

    class Turned(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_buffer("table", torch.arange(6.0).view(2, 3))

        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "turned"] = destination[prefix + "table"][1:].t()

    model = FSDP(Turned())
    state = model.state_dict()
    model.module.table.zero_()
    assert state["turned"].tolist() == [[3], [4], [5]]


@on_ranks(2)
def test_modules_that_compute_with_what_they_save():
    """A module that computes with a sharded value while saving raises on all ranks, and the model still works."""

    class Doubled(nn.Linear):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "weight"] = destination[prefix + "weight"] * 2

    model = FSDP(Doubled(3, 2))
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        with pytest.raises(FairshardError, match=r"not used in computation \(`mul`\)"):
            model.state_dict()
    assert model.state_dict()["weight"].shape == (2, 3)
    assert not any(isinstance(value, SpanTensor) for value in model.state_dict().values())
    assert dist.get_world_size() == 2
