"""The functions for optimizer state accept older argument orders, `optim_input`, named optimizers and other keys."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch.distributed._shard.sharded_tensor import ShardedTensor

from fairshard.nn import FSDP, OptimStateKeyType, StateDictType
from tests.kit import rank_device
from tests.models import mlp, wrap_each
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, randn
from tests.trained import full_of, shard, stepped

IDS, NAMES = OptimStateKeyType.PARAM_ID, OptimStateKeyType.PARAM_NAME


@on_ranks(1, 2)
def test_optim_input():
    """`optim_input` warns and accepts parameters or groups; other types, empty input and a missing "params" raise."""
    model, optimizer = stepped()
    full = full_of(model, optimizer)
    expected = shard(full, model, optimizer)
    params = list(model.parameters())
    for given in (params, [{"params": params}], [{"params": params[0]}, {"params": params[1:]}], iter(params)):
        with pytest.warns(FutureWarning, match="deprecated"):
            made = FSDP.shard_full_optim_state_dict(full, model, given)
        assert made["state"].keys() == expected["state"].keys()
        for number, entry in expected["state"].items():
            assert_same_state(made["state"][number], entry)
    wrong = [
        (TypeError, "iterable of parameters", 3),
        (TypeError, "iterable of parameters", params[0]),
        (TypeError, "parameters only or param groups only", [params[0], {"params": params[1:]}]),
        (TypeError, "parameters only or param groups only", [1]),
        (ValueError, "is empty", []),
        (KeyError, 'must have the key "params"', [{"lr": 1.0}]),
    ]
    for kind, text, given in wrong:
        for call in (
            lambda given=given: FSDP.shard_full_optim_state_dict(full, model, given),
            lambda given=given: FSDP.scatter_full_optim_state_dict(full, model, given),
            lambda given=given: FSDP.full_optim_state_dict(model, optimizer, given),
            lambda given=given: FSDP.rekey_optim_state_dict(full, IDS, mlp(4, 5, 3), given),
        ):
            with pytest.warns(FutureWarning), pytest.raises(kind, match=text):
                call()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        full_of(model, optimizer)


@on_ranks(2)
def test_older_orders_of_arguments():
    """Seed 000's third argument ``optim_input`` and the order (state, model, optimizer) of 003's examples work."""
    model, optimizer = stepped()
    full, sharded = full_of(model, optimizer), FSDP.sharded_optim_state_dict(model, optimizer)
    expected = shard(full, model, optimizer)
    params = list(model.parameters())
    with pytest.warns(FutureWarning):
        also = FSDP.sharded_optim_state_dict(model, optimizer, params)
    assert also["state"].keys() == sharded["state"].keys()
    results = [
        FSDP.optim_state_dict_to_load(full, model, optimizer),
        FSDP.optim_state_dict_to_load(model, optimizer, full),
        FSDP.optim_state_dict_to_load(optim_state_dict=full, model=model, optim=optimizer),
        FSDP.flatten_sharded_optim_state_dict(sharded, model, optimizer),
        FSDP.flatten_sharded_optim_state_dict(sharded, model, optim=optimizer),
        FSDP.flatten_sharded_optim_state_dict(sharded, model, None, optimizer),
        FSDP.shard_full_optim_state_dict(full, model, None, optimizer),
        FSDP.shard_full_optim_state_dict(full, model),
    ]
    with pytest.warns(FutureWarning):
        results.append(FSDP.flatten_sharded_optim_state_dict(sharded, model, params, optimizer))
    for made in results:
        assert made["param_groups"] == expected["param_groups"]
        for number, entry in expected["state"].items():
            assert_same_state(made["state"][number], entry)


@on_ranks(2)
def test_the_group_must_be_the_models():
    """``group`` exists for compatibility with FSDP1: the model's own group is accepted, any other is refused."""
    model, optimizer = stepped()
    other = dist.new_group([0, 1])
    full = FSDP.full_optim_state_dict(model, optimizer, group=dist.group.WORLD)
    FSDP.scatter_full_optim_state_dict(full, model, optim=optimizer, group=dist.group.WORLD)
    for call in (
        lambda: FSDP.full_optim_state_dict(model, optimizer, group=other),
        lambda: FSDP.sharded_optim_state_dict(model, optimizer, other),
        lambda: FSDP.optim_state_dict(model, optimizer, group=other),
        lambda: FSDP.optim_state_dict_to_load(model, optimizer, full, group=other),
    ):
        with pytest.raises(ValueError, match="`group` must be the process group"):
            call()


@on_ranks(2)
def test_load_directly():
    """``load_directly=True`` loads what it returns."""
    model, optimizer = stepped()
    other, fresh = stepped()
    full = full_of(model, optimizer)
    full["param_groups"][0]["lr"] = 0.125
    made = FSDP.optim_state_dict_to_load(other, fresh, full, load_directly=True)
    assert fresh.param_groups[0]["lr"] == made["param_groups"][0]["lr"] == 0.125


@on_ranks(1, 3)
@pytest.mark.parametrize("kwargs", [{}, {"flatten_parameters": False}, {"cpu_offload": True}], ids=str)
def test_sharded_state_of_fsdp1(kwargs):
    """The ``ShardedTensor`` values of FSDP1's sharded optimizer state give what its whole state gives."""
    theirs = torch_fsdp.FullyShardedDataParallel(mlp(4, 5, 3), device_id=rank_device())
    of_theirs = torch.optim.Adam(theirs.parameters(), lr=0.01)
    theirs(randn(2, 4)).square().sum().backward()
    of_theirs.step()
    full = torch_fsdp.FullyShardedDataParallel.full_optim_state_dict(theirs, of_theirs, rank0_only=False)
    sharded = torch_fsdp.FullyShardedDataParallel.sharded_optim_state_dict(theirs, of_theirs)
    assert isinstance(sharded["state"]["0.weight"]["exp_avg"], ShardedTensor)
    model = wrap_each(mlp(4, 5, 3), **kwargs)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    expected = shard(full, model, optimizer)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        also = FSDP.optim_state_dict_to_load(model, optimizer, sharded)
    for made in (also, FSDP.flatten_sharded_optim_state_dict(sharded, model, optimizer)):
        assert made["param_groups"] == expected["param_groups"]
        assert made["state"].keys() == expected["state"].keys()
        for number, entry in expected["state"].items():
            assert_same_state(made["state"][number], entry)
    if dist.get_world_size() > 1:
        with pytest.raises(ValueError, match="State on rank 0 alone must be whole"):
            FSDP.scatter_full_optim_state_dict(sharded, model, optim=optimizer)


class Named(torch.optim.AdamW):
    """Keys its state dict by the given names, as torchrec's optimizers do."""

    def __init__(self, named, **kwargs):
        self.names = {param: name for name, param in named}
        super().__init__(self.names, **kwargs)

    def state_dict(self):
        state = super().state_dict()
        names = list(self.names.values())
        groups = [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]]
        return {"state": {names[i]: own for i, own in state["state"].items()}, "param_groups": groups}


@on_ranks(2)
@pytest.mark.parametrize("flatten", [True, False])
def test_named_optimizers(flatten):
    """Saving recognises string keys; loading creates them with ``is_named_optimizer``."""

    def wrap(model):
        return wrap_each(model, flatten_parameters=flatten)

    model, plain = stepped(wrap=wrap)
    named = Named(list(model.named_parameters())[1:], lr=0.01)
    model(randn(2, 4)).square().sum().backward()
    named.step()
    state = FSDP.optim_state_dict(model, named)
    assert set(state["state"]) == {"0.weight", "0.bias", "2.weight", "2.bias"} - set(
        ["0.weight", "0.bias"] if flatten else ["0.weight"]
    )
    made = FSDP.optim_state_dict_to_load(model, named, state, is_named_optimizer=True)
    own = named.state_dict()
    assert made["state"].keys() == own["state"].keys()
    for name, entry in own["state"].items():
        assert_same_state(made["state"][name], entry)
    assert made["param_groups"] == own["param_groups"]
    wrong = {**own, "param_groups": [{"params": ["nobody"]}]}
    with pytest.raises(ValueError, match="'nobody' is not"):
        FSDP.optim_state_dict(model, named, wrong)
    assert plain is not named


@on_ranks(1)
def test_rekeying():
    """Rekeying refuses mixed keys, returns correct ones unchanged, numbers ids by group, and sorts params."""
    plain = mlp(4, 5, 3)
    named = dict(plain.named_parameters())
    optimizer = torch.optim.SGD(
        [{"params": [named["2.weight"], named["2.bias"]]}, {"params": [named["0.weight"], named["0.bias"]]}],
        lr=0.1,
        momentum=0.9,
    )
    plain(randn(2, 4)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    assert FSDP.rekey_optim_state_dict(state, IDS, plain, optim=optimizer) is state
    by_name = FSDP.rekey_optim_state_dict(state, NAMES, plain, optim=optimizer)
    assert FSDP.rekey_optim_state_dict(by_name, NAMES, plain, optim=optimizer) is by_name
    assert [group["params"] for group in by_name["param_groups"]] == [["2.bias", "2.weight"], ["0.bias", "0.weight"]]
    for number, name in enumerate(("2.weight", "2.bias", "0.weight", "0.bias")):
        assert by_name["state"][name] is state["state"][number]
    back = FSDP.rekey_optim_state_dict(by_name, torch_fsdp.OptimStateKeyType.PARAM_ID, plain, optim=optimizer)
    assert back["state"].keys() == state["state"].keys()
    assert back["param_groups"] == state["param_groups"]
    assert list(FSDP.rekey_optim_state_dict(by_name, IDS, plain)["state"]) == [2, 3, 0, 1], "model.parameters()"
    mixed = {"state": {0: {}, "2.bias": {}}, "param_groups": []}
    for key_type in (IDS, NAMES):
        with pytest.raises(ValueError, match="all numbers or all names, but are int, str"):
            FSDP.rekey_optim_state_dict(mixed, key_type, plain)
    with pytest.raises(ValueError, match=r"'3\.weight' is not"):
        FSDP.rekey_optim_state_dict({"state": {"3.weight": {}}}, IDS, plain)
    with pytest.raises(ValueError, match="7 is not"):
        FSDP.rekey_optim_state_dict({"state": {7: {}}}, NAMES, plain)
    with pytest.raises(TypeError, match=r"OptimStateKeyType\.PARAM_NAME"):
        FSDP.rekey_optim_state_dict(state, "names", plain)
    with pytest.raises(ValueError, match="must be the unwrapped module"):
        FSDP.rekey_optim_state_dict(state, NAMES, FSDP(mlp(4, 5, 3)))
