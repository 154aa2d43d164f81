"""Options of fairscale's wrapper after the first ten."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.engine.unit import Unit
from fairshard.nn import FullStateDictConfig, ShardingStrategy, StateDictType
from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.kit import rank_device
from tests.models import mlp, tiny, tiny_batch, tiny_loss, wrap_each, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, randn, sgd, train_alike


def gathers_of_a_step(model, x):
    """How many units a forward and its backward gather, in the second step, when everything is set up."""
    model(x).sum().backward()
    gathered = []

    def unshard(unit, in_backward):
        gathered.append(not unit.is_gathered)
        original(unit, in_backward)

    original = Unit.unshard
    with mock.patch.object(Unit, "unshard", unshard):
        model(x).sum().backward()
    return sum(gathered)


@on_ranks(1, 2)
@pytest.mark.parametrize("kwargs", [{}, {"flatten_parameters": False}, {"cpu_offload": True}], ids=str)
def test_the_outermost_wrapper_may_reshard_too(kwargs):
    """``disable_reshard_on_root=False`` frees the outermost wrapper after its forward, and changes no numbers."""
    wrapped = train_alike(
        mlp(4, 9, 5),
        lambda model: FSDP(model, disable_reshard_on_root=False, **kwargs),
        lambda model, key: model(randn(3, 4, key=key)).square().mean(),
    )
    loss = wrapped(randn(3, 4)).sum()
    assert not wrapped._unit.is_gathered
    loss.backward()
    kept = FSDP(mlp(4, 9, 5))
    kept(randn(3, 4)).sum()
    assert kept._unit.is_gathered


@on_ranks(2)
@pytest.mark.parametrize(("reshard", "disable", "num"), [(True, True, 1), (True, False, 2), (False, False, 1)])
def test_the_outermost_wrapper_is_gathered_twice_then(reshard, disable, num):
    """The root is gathered in forward and backward; ``reshard_after_forward=False`` keeps it, like inner wrappers."""
    model = FSDP(mlp(4, 9, 5), reshard_after_forward=reshard, disable_reshard_on_root=disable)
    assert gathers_of_a_step(model, randn(3, 4)) == num


@on_ranks(2)
def test_state_dicts_on_rank_0_alone():
    """Other ranks get an empty state dict; rank 0's loads back. Inner wrappers follow the outermost."""
    wrapped = FSDP(wrap_each(mlp(4, 9, 5)), state_dict_on_rank_0_only=True)
    state = wrapped.state_dict()
    if dist.get_rank():
        assert not state
    else:
        assert_same_state(state, mlp(4, 9, 5).state_dict())
        state = {name: value + 1 for name, value in state.items()}
    wrapped.load_state_dict(state)
    with FSDP.state_dict_type(wrapped, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
        again = wrapped.state_dict()
    expected = {name: value + 1 for name, value in mlp(4, 9, 5).state_dict().items()}
    assert_same_state(again, expected)
    assert FSDP.get_state_dict_type(wrapped).state_dict_config.rank0_only


@on_ranks(2)
def test_state_dicts_in_host_memory():
    """``state_dict_device="cpu"`` equals ``offload_to_cpu=True``, for all inner wrappers, and in copies."""
    wrapped = FSDP(wrap_each(mlp(4, 9, 5)), state_dict_device=torch.device("cpu"))
    for model in (wrapped, copy.deepcopy(wrapped)):
        assert FSDP.get_state_dict_type(model).state_dict_config == FullStateDictConfig(offload_to_cpu=True)
        state = model.state_dict()
        assert {value.device.type for value in state.values()} == {"cpu"}
        assert_same_state(state, mlp(4, 9, 5).state_dict())
    assert wrapped.state_dict_device == torch.device("cpu")
    before = FSDP.get_state_dict_type(FSDP(wrap_each(mlp(4, 9, 5))))
    assert before.state_dict_config == FullStateDictConfig()


@on_ranks(2)
def test_autocast_keeps_nothing():
    """``clear_autocast_cache`` drops the casts of parameters that stay gathered after the wrapper's forward."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for clear in (False, True):
            model = FSDP(nn.Linear(4, 4), reshard_after_forward=False, clear_autocast_cache=clear)
            with mock.patch.object(torch, "clear_autocast_cache") as dropped:
                model(randn(2, 4))
            assert dropped.called is clear


@on_ranks(2)
def test_repr_may_show_everything():
    """Without ``verbose`` the repr shows the first ten settings; with it every setting, each once."""
    short, long = FSDP(nn.Linear(4, 4)), FSDP(nn.Linear(4, 4), verbose=True)
    assert "state_dict_on_rank_0_only" not in short.extra_repr()
    names = [field.partition("=")[0] for field in long.extra_repr().split(", ") if "=" in field]
    assert names[:10] == [field.partition("=")[0] for field in short.extra_repr().split(", ")]
    assert {"sharding_strategy", "disable_reshard_on_root", "state_dict_device", "verbose"} <= set(names)
    assert "late" not in names


@on_ranks(2)
def test_the_later_name_of_offload():
    """``move_params_to_cpu=True`` trains as ``cpu_offload=True`` does."""

    def losses(**kwargs):
        wrapped = wrap_tiny(tiny(), **kwargs)
        optimizer, found = sgd(wrapped), []
        for step in range(3):
            *inputs, targets = tiny_batch(dist.get_rank(), step)
            loss = tiny_loss(wrapped(*inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        assert wrapped.cpu_offload is wrapped.move_params_to_cpu is wrapped.move_grads_to_cpu is bool(kwargs)
        return found

    assert losses(move_params_to_cpu=True) == losses(cpu_offload=True) == losses()


@on_ranks(2)
def test_optimizer_state_that_stays_is_noted():
    """``no_broadcast_optim_state`` of each wrapper appears in its metadata."""
    wrapped = FSDP(nn.Sequential(FSDP(nn.Linear(4, 4), no_broadcast_optim_state=True), nn.Linear(4, 4)))
    described = wrapped.local_metadata_dict()["param_metadata"]
    assert [unit["no_broadcast_optim_state"] for unit in described] == [False, True]
    assert wrapped[0].no_broadcast_optim_state is True


@on_ranks(1, 2)
def test_optimizer_state_of_an_expert_on_each_rank_stays():
    """An inner wrapper on a group of one rank gets ``no_broadcast_optim_state``, if the outer one is on more ranks."""
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    expert, whole = FSDP(nn.Linear(4, 4), process_group=alone), FSDP(nn.Linear(4, 4))
    assert expert.no_broadcast_optim_state is False, "an outermost wrapper shares its state with no one"
    not_cut = FSDP(nn.Linear(4, 4), sharding_strategy=ShardingStrategy.NO_SHARD)
    wrapped = FSDP(nn.Sequential(expert, whole, not_cut))
    differs = dist.get_world_size() > 1
    assert [one.no_broadcast_optim_state for one in (wrapped, *wrapped.module)] == [False, differs, False, False]
    described = wrapped.local_metadata_dict()["param_metadata"]
    assert [unit["no_broadcast_optim_state"] for unit in described] == [False, differs, False, False]
    optimizer = sgd(wrapped)
    wrapped(torch.full((1, 4), 1.0 + dist.get_rank(), device=rank_device())).sum().backward()
    optimizer.step()
    own = optimizer.state[expert.flat_param_0]["momentum_buffer"]
    weight, bias = own[:16].view(4, 4), own[16:]
    assert torch.equal(weight[:, 0], bias * (1.0 + dist.get_rank())), "the gradient of this rank's inputs alone"
    state = wrapped.gather_full_optim_state_dict(optimizer, recipient_rank=None)
    of_bias = state["state"][list(wrapped.state_dict()).index("0.bias")]
    assert torch.equal(of_bias["momentum_buffer"], own[16:].cpu())
    restored = wrapped.get_shard_from_optim_state_dict(state)
    number = list(wrapped.parameters()).index(expert.flat_param_0)
    assert torch.equal(restored["state"][number]["momentum_buffer"], own)
