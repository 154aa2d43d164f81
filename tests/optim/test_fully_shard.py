"""`CPUOptimizer` over the DTensors of `fully_shard`: the numbers and the state of the plain optimizer."""

import contextlib
import copy
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from fairshard.errors import FairshardError, ShardOptimizerError
from fairshard.nn import CPUOffloadPolicy, OffloadPolicy
from fairshard.optim import CPUOptimizer
from tests.doors.fully_shard.assorted import Assorted
from tests.doors.fully_shard.models import full_state, shard_tiny
from tests.models import loss_of_tiny
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state

OFFLOAD = {"offload_policy": CPUOffloadPolicy()}
ADAMW = {"lr": 0.01, "weight_decay": 0.1, "fused": True}


def build(kind="no_dim", **kwargs):
    torch.manual_seed(1)
    return shard_tiny(Assorted(kind), bucket_cap_mb=0, **{**OFFLOAD, **kwargs})


def groups_of(model):
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    return [
        {"params": [named[name] for name in named if name.endswith("weight")], "weight_decay": 0.0},
        {"params": [named[name] for name in named if not name.endswith("weight")], "lr": 0.02},
    ]


def train(model, optimizer, steps=range(3), clip=None, early=False):
    for step in steps:
        with optimizer.last_backward() if early else contextlib.nullcontext():
            loss_of_tiny(model, (step,)).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 1)


def full_optimizer_state(optimizer):
    """The whole state, keyed by position."""
    return {
        f"{index}.{name}": value.full_tensor() if isinstance(value, DTensor) else value
        for index, state in sorted(optimizer.state_dict()["state"].items())
        for name, value in state.items()
    }


@on_ranks(in_full(1), in_full(2), 3)
@pytest.mark.parametrize("kind", ["frozen", *map(in_full, ["no_dim", "few_rows", "empty"])])
def test_the_plain_optimizers_bits(kind):
    """With param groups, in host memory or not, stepped early or late, parameters and state equal the plain ones."""
    plain = build(kind)
    of_plain = torch.optim.AdamW(groups_of(plain), **ADAMW)
    train(plain, of_plain)
    for policy in (CPUOffloadPolicy(), OffloadPolicy()):
        for overlap in (False, True):
            model = build(kind, offload_policy=policy)
            options = {k: v for k, v in ADAMW.items() if k != "fused"}
            optimizer = CPUOptimizer(model, torch.optim.AdamW, params=groups_of(model), overlap=overlap, **options)
            train(model, optimizer, early=overlap)
            assert_same_state(full_state(model), full_state(plain))
            assert_same_state(full_optimizer_state(optimizer), full_optimizer_state(of_plain))
            for param, state in optimizer.state.items():
                assert isinstance(state["exp_avg"], DTensor)
                assert state["exp_avg"].placements == param.placements


@on_ranks(2)
def test_gradients_are_freed():
    """A step keeps no gradient alive and increments the weights' version, even if the optimizer has no state."""
    model = build("plain", offload_policy=OffloadPolicy())
    optimizer = CPUOptimizer(model, torch.optim.SGD, lr=0.1)
    loss_of_tiny(model, (0,)).backward()
    grad = weakref.ref(model.head.weight.grad.to_local().untyped_storage())
    version = model.head.weight._version
    optimizer.step()
    optimizer.zero_grad()
    assert model.head.weight._version > version
    loss_of_tiny(model, (1,))  # the next forward notices that they were dropped
    assert grad() is None
    assert not optimizer.state


@on_ranks(2, in_full(3))
@pytest.mark.parametrize("kind", ["no_dim", "few_rows"])
def test_its_clipping_is_torchs(kind):
    """``clip_grad_norm`` is torch's: each parameter counts once, even a replicated one."""
    plain = build(kind)
    options = {"lr": 0.1, "momentum": 0.9, "foreach": False}
    train(plain, torch.optim.SGD(plain.parameters(), **options), clip=0.05)
    model = build(kind)
    optimizer = CPUOptimizer(model, torch.optim.SGD, clip_grad_norm=0.05, **options)
    train(model, optimizer)
    assert_same_state(full_state(model), full_state(plain), rtol=1e-6, atol=1e-7)
    assert len(optimizer.state) == len(list(model.parameters()))


@on_ranks(2, in_full(3))
def test_state_travels():
    """State loads through ``state_dict``, PyTorch's functions and from or into a plain optimizer; training goes on."""
    model = build()
    optimizer = CPUOptimizer(model, torch.optim.AdamW, params=groups_of(model), lr=0.01)
    train(model, optimizer, range(2))
    own, named = copy.deepcopy((optimizer.state_dict(), get_optimizer_state_dict(model, optimizer)))
    assert named["state"]["first.up.weight"]["exp_avg"].shape == model.first.up.weight.shape
    weights = {name: value.clone() for name, value in full_state(model).items()}
    found = []
    for way in ("own", "named", "plain"):
        other = build()
        if way == "plain":
            another = torch.optim.AdamW(groups_of(other), lr=0.01, fused=True)
            another.load_state_dict(copy.deepcopy(own))
        else:
            another = CPUOptimizer(other, torch.optim.AdamW, params=groups_of(other), lr=0.01)
            if way == "own":
                another.load_state_dict(copy.deepcopy(own))
            else:
                set_optimizer_state_dict(other, another, copy.deepcopy(named))
        with torch.no_grad():
            for name, param in other.named_parameters():
                rows = weights[name].chunk(dist.get_world_size()) if param.dim() else [weights[name]]
                mine = rows[dist.get_rank() if param.dim() else 0]
                param.to_local().copy_(mine)
        assert_same_state(full_optimizer_state(another), full_optimizer_state(optimizer))
        train(other, another, range(2, 4))
        found.append(full_state(other))
    train(model, optimizer, range(2, 4))
    for state in found:
        assert_same_state(state, full_state(model))


@on_ranks(2)
def test_half_moments_and_a_part_on_the_device():
    """With ``state_dtype`` and ``offload_fraction`` moments are bf16 DTensors; replicated ones agree on all ranks."""
    model = build()
    optimizer = CPUOptimizer(model, torch.optim.AdamW, lr=0.01, state_dtype=torch.bfloat16, offload_fraction=0.5)
    train(model, optimizer)
    for param, state in optimizer.state.items():
        assert state["exp_avg"].dtype == (torch.bfloat16 if param.device.type == "cpu" else torch.float32)
        assert state["exp_avg"].to_local().device == param.to_local().device
        assert state["exp_avg"].shape == param.shape
    moment = optimizer.state[model.extra.scale]["exp_avg"].to_local().clone()
    moments = [torch.empty_like(moment) for _ in range(dist.get_world_size())]
    dist.all_gather(moments, moment)
    assert all(torch.equal(other, moment) for other in moments)
    again = CPUOptimizer(model, torch.optim.AdamW, lr=0.01, state_dtype=torch.bfloat16)
    again.load_state_dict(optimizer.state_dict())
    dtypes = {state["exp_avg"].dtype for param, state in again.state.items() if param.device.type == "cpu"}
    assert dtypes == {torch.bfloat16}
    assert again.state[model.extra.scale]["step"].dtype == torch.float32, "bf16 cannot count beyond 256"
    train(model, again, range(3, 4))


@on_ranks(2)
@pytest.mark.parametrize("edit", ["clip", "scale", "zero"])
def test_an_edit_after_an_early_step_is_refused(edit):
    """A gradient edited after an early step raises by name, even by ``foreach``, whose writes torch does not count."""
    model = build()
    optimizer = CPUOptimizer(model, torch.optim.SGD, lr=0.1, overlap=True)
    with optimizer.last_backward():
        loss_of_tiny(model, (0,)).backward()
    if edit == "clip":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3, foreach=True)
    elif edit == "scale":
        model.first.up.weight.grad.mul_(2)
    else:
        torch._foreach_zero_([param.grad for param in model.parameters()])
    with pytest.raises(FairshardError, match=r"gradient of `[a-z.]+` must not change"):
        optimizer.step()


@on_ranks(2)
def test_what_needs_shapes_is_refused():
    """CPUOptimizer refuses classes that need shapes; PyTorch's own Muon and LBFGS step the DTensors directly."""
    for name in {"Muon", "Adafactor", "LBFGS"} & set(dir(torch.optim)):  # torch 2.6 has no Muon
        with pytest.raises(ShardOptimizerError, match=r"`embed\.weight`"):
            CPUOptimizer(build(), getattr(torch.optim, name), lr=0.1)
