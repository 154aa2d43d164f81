"""A module that `fully_shard` has sharded is torch's FSDPModule, without any of torch's behaviour."""

import contextlib
import copy
import importlib
import io
import pickle
import pickletools

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, _get_registry
from torch.distributed._composable_state import _get_module_state
from torch.distributed.tensor import DTensor

from fairshard.nn import FSDPModule, FullyShardedDataParallel, UnshardHandle, fully_shard
from fairshard.nn.data_parallel.torch_state import TorchFSDPModule, TorchState
from tests.kit.doors import full, gathered, whole_grads
from tests.models import mlp, tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, average_grads_, randn, squares

pytestmark = pytest.mark.behaviour("a module of torch's FSDP2")

THEIRS = [name for name, value in vars(torch_fsdp.FSDPModule).items() if not name.startswith("__") or callable(value)]


@on_ranks(1)
def test_it_is_torchs_fsdp_module():
    """Sharded modules, and only they, are instances of torch's class, so code that asks for it configures them."""
    model = mlp(4, 4, 4)
    fully_shard(model[0])
    assert isinstance(model[0], torch_fsdp.FSDPModule)
    assert isinstance(model[0], nn.Linear)
    assert not isinstance(model, torch_fsdp.FSDPModule)
    fully_shard(model)
    assert isinstance(model, torch_fsdp.FSDPModule)
    assert issubclass(FSDPModule, torch_fsdp.FSDPModule)
    assert isinstance(model.unshard(async_op=True), torch_fsdp.UnshardHandle)
    assert issubclass(UnshardHandle, torch_fsdp.UnshardHandle)
    cls = type(model)
    assert cls.__mro__[cls._orig_cls_mro_index] is cls._fairshard_class
    if hasattr(torch_fsdp, "share_comm_ctx"):  # has no effect: each model keeps its own streams
        torch_fsdp.share_comm_ctx([fully_shard(nn.Linear(4, 4)) for _ in range(2)])


@on_ranks(1)
def test_no_member_of_torchs_class_is_used():
    """Every member of torch's class is one of fairshard's or of nn.Module, or is refused by name."""
    model = fully_shard(nn.Linear(4, 4))
    refused = []
    for name in THEIRS:
        owner = next(base for base in type(model).__mro__ if name in vars(base))
        assert owner is not torch_fsdp.FSDPModule, name
        if owner is TorchFSDPModule and name not in ("_get_fsdp_state", "_orig_cls_mro_index"):
            refused.append(name)
            with pytest.raises(NotImplementedError, match=f"`{name}` of torch's FSDPModule"):
                getattr(model, name)()
    assert all(name.startswith("_") for name in refused), "a public method that fairshard lacks"


@on_ranks(1)
def test_every_module_of_either_door_counts_as_managed():
    """Hugging Face's transformers keeps ranks in step (``generate``, layer drop) where it finds this attribute."""
    for model in (fully_shard(tiny()), FullyShardedDataParallel(tiny())):
        assert all(module._is_fsdp_managed_module for module in model.modules())


@on_ranks(1)
def test_a_forward_method_registered_with_torch_is_refused():
    """The error names the function to use."""
    model = fully_shard(nn.Linear(4, 4))
    model.encode = lambda x: x
    torch_fsdp.register_fsdp_forward_method(model, "encode")
    with pytest.raises(NotImplementedError, match=r"from fairshard\.nn"):
        model.encode(torch.ones(1, 4))


# ---- the state and the registry


@on_ranks(1)
def test_torch_finds_a_state():
    """Both of torch's ways to a state find one, which has what pipelining reads; everything else is named."""
    model = mlp(4, 4, 4)
    fully_shard(model[0])
    assert _get_module_state(model) is None
    assert torch_fsdp.fully_shard.state(model) is None
    fully_shard(model)
    state = torch_fsdp.fully_shard.state(model)
    assert isinstance(state, TorchState)
    assert state is _get_module_state(model) is model._get_fsdp_state()
    assert (state._is_root, state._state_ctx.all_states) == (None, [])
    model(torch.ones(1, 4))
    inner = torch_fsdp.fully_shard.state(model[0])
    assert (state._is_root, inner._is_root) == (True, False)
    assert inner._state_ctx.all_states == [state, inner]
    for owner, kind in ((state, "FSDPState"), (state._fsdp_param_group, "FSDPParamGroup")):
        with pytest.raises(AttributeError, match=f"`_device` of torch's {kind}"):
            _ = owner._device


@on_ranks(2)
def test_torchs_callback_after_a_backward_reduces_what_was_kept():
    """It reduces gradients that waited, and frees parameters that waited for it, once.

    Gradients of a module that does not reduce yet wait for the callback after it does.
    """
    plain, model = mlp(4, 4, 4), mlp(4, 4, 4)
    squares(plain).backward()
    average_grads_(plain.parameters())
    expected = {name: param.grad for name, param in plain.named_parameters()}
    for module in (model[0], model[2], model):
        fully_shard(module)
    callback = torch_fsdp.fully_shard.state(model)._root_post_backward_final_callback
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    squares(model).backward()
    assert gathered(model)
    model.set_reshard_after_backward(True)
    for module in (model[2], model[0]):
        assert not model[0].weight.grad.full_tensor().any()
        module.set_requires_gradient_sync(True)
        callback()
    for _ in range(2):
        assert gathered(model) == []
        assert_same_state(whole_grads(model), expected)
        callback()


@on_ranks(1)
def test_copies_are_registered_and_pickles_hold_no_key_of_torch():
    """torch's keys differ in each process: a copy gets those of its own, with a state of its own."""
    model = fully_shard(nn.Linear(4, 4))
    pickled = io.BytesIO()
    pickle.dump(model, pickled)
    words = {argument for _, argument, _ in pickletools.genops(pickled.getvalue())}
    assert not {STATE_KEY, REGISTRY_KEY} & words
    for copied in (copy.deepcopy(model), pickle.loads(pickled.getvalue())):
        state = torch_fsdp.fully_shard.state(copied)
        assert state is _get_module_state(copied)
        assert state is not torch_fsdp.fully_shard.state(model)
        assert "fully_shard" in _get_registry(copied)


# ---- torch's replicate, and shared memory


def replicates():
    """torch's functions ``replicate``; torch 2.6 has only the first."""
    for place in ("torch.distributed._composable.replicate", "torch.distributed._composable.replicate_with_fsdp"):
        with contextlib.suppress(ImportError):
            yield importlib.import_module(place).replicate


@on_ranks(2)
def test_replicas_around_sharded_blocks():
    """``replicate`` leaves sharded blocks alone: weights after some steps are those of a whole replica.

    It refuses a sharded module.
    """
    for replicate in replicates():
        plain, model = mlp(4, 4, 4, 4), mlp(4, 4, 4, 4)
        fully_shard(model[2])
        model = replicate(model)
        # torch's foreach functions take no tensors beside DTensors
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False) for net in (plain, model)]
        for step in range(3):
            for net in (plain, model):
                net(randn(2, 4, key=step)).square().mean().backward()
            average_grads_(plain.parameters())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert isinstance(model[2].weight, DTensor)
        for param, value in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(full(param), value)
        with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
            replicate(fully_shard(nn.Linear(4, 4)))


@on_ranks(2)
@pytest.mark.parametrize("is_inside", [True, False])
def test_sharing_memory_is_refused(is_inside):
    """``share_memory()``, where torch's kills the process, raises by name, also of a module around."""
    model = fully_shard(nn.Sequential(nn.Linear(4, 4)))
    around = nn.Sequential(model) if is_inside else model
    with pytest.raises(TypeError, match=r"`share_memory\(\)`.*DTensors.*to_local"):
        around.share_memory()
    around.to(torch.float32)
    model(torch.ones(2, 4)).sum().backward()
    shared = [param.to_local().detach().clone().share_memory_() for param in model.parameters()]
    assert all(rows.is_shared() for rows in shared)
