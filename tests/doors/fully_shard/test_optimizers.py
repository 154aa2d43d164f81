"""PyTorch's optimizers and clipping work on the DTensors of `fully_shard` as on whole parameters."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fairshard.errors import ShardChangedError
from fairshard.nn import fully_shard
from tests.doors.fully_shard.assorted import Assorted, ByRows
from tests.doors.fully_shard.models import full_state, shard_tiny, torch_tiny
from tests.models import loss_of_tiny, mlp, tiny
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state, average_grads_, await_device, randn, rounding, sgd
from tests.torch_gaps import needs_fsdp2_on_cpu

ELEMENTWISE = {
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}),
}


def both(kind, num_backwards=1):
    """A plain model and its sharded twin, with gradients of the same backwards."""
    torch.manual_seed(1)
    plain = Assorted(kind)
    sharded = shard_tiny(copy.deepcopy(plain))
    for micro in range(num_backwards):
        backward(plain, sharded, micro)
    return plain, sharded


def backward(plain, sharded, *key):
    kept = [param.grad for param in plain.parameters()]
    for model in (plain, sharded):
        for param in plain.parameters():
            param.grad = None
        loss_of_tiny(model, key).backward()
        if model is plain:
            average_grads_(plain.parameters())
            new = [param.grad for param in plain.parameters()]
    for param, old, grad in zip(plain.parameters(), kept, new, strict=True):
        param.grad = grad if old is None or grad is None else old + grad


def full(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_same_grads(plain, sharded, **tolerance):
    for (name, one), (_, other) in zip(plain.named_parameters(), sharded.named_parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            tolerance = tolerance or dict(zip(("rtol", "atol"), rounding(), strict=True))
            torch.testing.assert_close(full(other.grad), one.grad, **tolerance, msg=lambda m, name=name: f"{name}: {m}")


@on_ranks(in_full(1), in_full(2), 3)
def test_norms_and_clipping():
    """Total norms, which count each parameter once, and gradients clipped by norm or value match the plain model."""
    for kind in ("no_dim", "few_rows", "empty"):
        # PyTorch cannot take the maximum of an empty shard, which some ranks have for the other two kinds.
        for norm_type in (1.0, 2.0, *([math.inf] if kind == "no_dim" else [])):
            plain, sharded = both(kind)
            grads = [[param.grad for param in model.parameters()] for model in (plain, sharded)]
            expected, norm = (torch.nn.utils.get_total_norm(g, norm_type, foreach=True) for g in grads)
            torch.testing.assert_close(full(norm), expected, rtol=1e-6, atol=0)
            for model in (plain, sharded):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2, norm_type, foreach=norm_type == 1.0)
            assert_same_grads(plain, sharded, rtol=1e-6, atol=1e-9)
    plain, sharded = both("no_dim")
    for model in (plain, sharded):
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    assert_same_grads(plain, sharded)


@on_ranks(in_full(2), 3)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers(name):
    """Loops, ``foreach`` and, where torch has them for DTensors, fused kernels step as on whole parameters."""
    make, options = ELEMENTWISE[name]
    ways = [{"foreach": False}, {"foreach": True}, *([{"fused": True}] if name.startswith("adam") else [])]
    for way in ways:
        plain, sharded = both("no_dim")
        of_plain = ByRows(
            [{"params": list(plain.parameters())}], dist.get_world_size(), lambda g, way=way: make(g, **options, **way)
        )
        of_sharded = make(sharded.named_parameters(), **options, **way)
        for step in range(2):
            for optimizer in (of_plain, of_sharded):
                optimizer.step()
            of_plain.zero_grad()
            of_sharded.zero_grad(set_to_none=step == 0)
            backward(plain, sharded, step)
        assert of_sharded.param_groups[0]["param_names"] == [name for name, _ in plain.named_parameters()]
        assert_same_state(full_state(sharded), plain.state_dict())


@needs_fsdp2_on_cpu
@on_ranks(2)
@pytest.mark.parametrize("name", ["Muon", "Adafactor", "LBFGS"])
def test_optimizers_that_need_shapes_behave_as_in_torch(name):
    """Optimizers that need shapes give the same weights, or the same error, as with PyTorch's `fully_shard`."""
    found = []
    for shard in (shard_tiny, torch_tiny):
        model = shard(tiny())
        params = [param for param in model.parameters() if param.dim() == 2]

        def closure(model=model):
            model.zero_grad()
            loss = loss_of_tiny(model, (0,))
            loss.backward()
            return loss.detach()

        try:
            getattr(torch.optim, name)(params, lr=0.1).step(closure)
            found.append(full_state(model))
        except Exception as error:
            found.append({"error": torch.tensor(hash(str(type(error))))})
    assert_same_state(*found)


@on_ranks(2, in_full(3))
def test_gradients_may_be_edited():
    """The optimizer steps gradients as edited: scaled, replaced, dropped, or added to by later backwards."""
    plain, sharded = both("few_rows", num_backwards=2)
    assert_same_grads(plain, sharded)
    for model in (plain, sharded):
        named = dict(model.named_parameters())
        named["first.up.weight"].grad.mul_(2)
        torch._foreach_mul_([named["second.up.weight"].grad, named["extra.rows"].grad], 3.0)
        named["embed.weight"].grad = torch.ones_like(named["embed.weight"])
        named["head.weight"].grad = named["head.weight"].grad.clone().neg_()
        named["norm.bias"].grad = None
    assert_same_grads(plain, sharded)
    backward(plain, sharded, 5)
    assert_same_grads(plain, sharded)
    for model in (plain, sharded):
        sgd(model).step()
    assert_same_state(full_state(sharded), plain.state_dict())


@on_ranks(2)
def test_a_penalty_on_weights_adds_to_their_gradients():
    """The gradients of a penalty on DTensors add to those that the engine reduces, in either order."""
    plain, sharded = both("plain")
    for step in range(2):
        for model in (plain, sharded):
            full(sum(param.square().sum() for param in model.parameters())).backward()
        assert_same_grads(plain, sharded)
        for model in (plain, sharded):
            model.zero_grad()
            full(sum(param.square().sum() for param in model.parameters())).backward()
        backward(plain, sharded, step)
        assert_same_grads(plain, sharded)


def unsynced(model, *key):
    model.set_requires_gradient_sync(False)
    loss_of_tiny(model, key).backward()
    model.set_requires_gradient_sync(True)


@on_ranks(2, 3)
@pytest.mark.parametrize("way", ["none", "foreach", "loop"])
def test_zeroing_drops_what_was_accumulated(way):
    """`zero_grad` of any optimizer also discards gradients not yet reduced, even on ranks without rows."""
    plain, sharded = both("few_rows")
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1, foreach=way == "foreach")
    unsynced(sharded, 7)
    optimizer.zero_grad(set_to_none=way == "none")
    for param in plain.parameters():
        param.grad = None if way == "none" else torch.zeros_like(param)
    backward(plain, sharded, 1)
    assert_same_grads(plain, sharded)


@on_ranks(2)
def test_a_change_under_accumulation_is_refused():
    """Clipping a gradient while unreduced ones wait raises, with every kernel."""
    _, sharded = both("plain")
    unsynced(sharded, 1)
    for foreach in (True, False):
        with pytest.raises(RuntimeError, match="single memory location"):
            torch.nn.utils.clip_grad_norm_(sharded.parameters(), 1e-3, foreach=foreach)


@on_ranks(2)
@pytest.mark.parametrize("way", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_a_step_between_forward_and_backward_is_refused(way):
    """After a step with any kernel the backward raises, because the weights of the forward are gone."""
    _, sharded = both("plain")
    optimizer = torch.optim.AdamW(sharded.parameters(), **way)
    loss = loss_of_tiny(sharded, (0,))
    optimizer.step()
    await_device()  # the backward's gather, whose result is refused, does not wait for the step
    with pytest.raises(ShardChangedError):
        loss.backward()


@on_ranks(2)
def test_a_step_is_seen_by_what_stays_gathered():
    """Units gathered by hand, or kept after a backward, are gathered again after a step."""
    plain, sharded = both("plain")
    of_plain, of_sharded = (torch.optim.SGD(model.parameters(), lr=0.1, foreach=True) for model in (plain, sharded))
    sharded.set_reshard_after_backward(False)
    for step in range(3):
        for optimizer in (of_plain, of_sharded):
            optimizer.zero_grad()
        backward(plain, sharded, step)
        sharded.first.unshard()
        for optimizer in (of_plain, of_sharded):
            optimizer.step()
    assert_same_state(full_state(sharded), plain.state_dict())


@on_ranks(2)
def test_hooks_on_parameters_see_reduced_gradients():
    """`register_post_accumulate_grad_hook` on a DTensor runs once per backward, and may step and drop the gradient."""
    plain = mlp(4, 5, 3)
    sharded = fully_shard(copy.deepcopy(plain))
    seen = []

    def step(param):
        seen.append(param)
        with torch.no_grad():
            param.sub_(param.grad, alpha=0.1)
        param.grad = None

    for param in sharded.parameters():
        param.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        for model in (plain, sharded):
            model(randn(2, 4)).square().sum().backward()
        average_grads_(plain.parameters())
        with torch.no_grad():
            for param in plain.parameters():
                param.sub_(param.grad, alpha=0.1)
                param.grad = None
    assert len(seen) == 8
    assert all(param.grad is None for param in sharded.parameters())
    assert_same_state(full_state(sharded), plain.state_dict())


@on_ranks(2)
def test_fused_kernels_step_other_dimensions_in_one_order():
    """On parameters sharded by the last dimension, fused steps do not depend on the memory order of their inputs."""

    def build():
        return fully_shard(mlp(6, 6), shard_placement_fn=lambda param: Shard(param.dim() - 1))

    def other_order(value):
        whole = value.full_tensor()
        return distribute_tensor(whole, value.device_mesh, value.placements)

    found = []
    for moves in (False, True):
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for step in range(3):
            model(randn(2, 6, key=step)).square().sum().backward()
            if moves:
                for param in model.parameters():
                    param.grad = other_order(param.grad)
                    for name, value in optimizer.state[param].items():
                        optimizer.state[param][name] = other_order(value) if isinstance(value, DTensor) else value
            optimizer.step()
            optimizer.zero_grad()
        found.append(full_state(model))
    assert_same_state(*found)
