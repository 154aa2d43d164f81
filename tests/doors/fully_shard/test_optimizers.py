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
from tests.doors.fully_shard.models import shard_tiny, torch_tiny
from tests.kit.doors import full, no_sync, whole
from tests.models import loss_of_tiny, mlp, tiny
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state, average_grads_, await_device, randn, rounding, sgd, squares
from tests.torch_gaps import needs_fsdp2_on_cpu

pytestmark = pytest.mark.behaviour("optimizers of fully_shard")

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
    """Add the gradients of one backward to both."""
    kept = [param.grad for param in plain.parameters()]
    plain.zero_grad()
    for model in (plain, sharded):
        loss_of_tiny(model, key).backward()
    average_grads_(plain.parameters())
    for param, old in zip(plain.parameters(), kept, strict=True):
        if old is not None and param.grad is not None:
            param.grad += old


def assert_same_grads(plain, sharded, **tolerance):
    tolerance = tolerance or dict(zip(("rtol", "atol"), rounding(), strict=True))
    for (name, one), (_, other) in zip(plain.named_parameters(), sharded.named_parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            torch.testing.assert_close(full(other.grad), one.grad, **tolerance, msg=lambda m, name=name: f"{name}: {m}")


@on_ranks(in_full(1), in_full(2), 3)
@pytest.mark.parametrize("kind", ["no_dim", "few_rows", "empty"])
def test_norms_and_clipping(kind):
    """Total norms, which count each parameter once, and gradients clipped by norm or value match the plain model."""
    # PyTorch cannot take the maximum of an empty shard, which some ranks have for the other two kinds.
    for norm_type in (1.0, 2.0, *([math.inf] if kind == "no_dim" else [])):
        plain, sharded = both(kind)
        grads = [[param.grad for param in model.parameters()] for model in (plain, sharded)]
        expected, norm = (torch.nn.utils.get_total_norm(g, norm_type, foreach=True) for g in grads)
        torch.testing.assert_close(full(norm), expected, rtol=1e-6, atol=0)
        for model in (plain, sharded):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2, norm_type, foreach=norm_type == 1.0)
        assert_same_grads(plain, sharded, rtol=1e-6, atol=1e-9)
    plain, sharded = both(kind)
    for model in (plain, sharded):
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    assert_same_grads(plain, sharded)


@on_ranks(in_full(2), 3)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers(name):
    """Loops, ``foreach`` and, where torch has them for DTensors, fused kernels step as on whole parameters."""
    make, options = ELEMENTWISE[name]
    for way in ({"foreach": False}, {"foreach": True}, *([{"fused": True}] if name.startswith("adam") else [])):
        plain, sharded = both("no_dim")
        groups = [{"params": list(plain.parameters())}]
        of_plain = ByRows(groups, dist.get_world_size(), lambda params, way=way: make(params, **options, **way))
        of_sharded = make(sharded.named_parameters(), **options, **way)
        for step in range(2):
            of_plain.step()
            of_sharded.step()
            of_plain.zero_grad()
            of_sharded.zero_grad(set_to_none=step == 0)
            backward(plain, sharded, step)
        assert of_sharded.param_groups[0]["param_names"] == [name for name, _ in plain.named_parameters()]
        assert_same_state(whole(sharded), plain.state_dict())


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
            found.append(whole(model))
        except Exception as error:
            found.append({str(type(error)): torch.zeros(())})
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
    assert_same_state(whole(sharded), plain.state_dict())


@on_ranks(2)
def test_a_penalty_on_weights_adds_to_their_gradients():
    """The gradients of a penalty on DTensors add to those that the engine reduces, in either order."""
    plain, sharded = both("plain")
    for step in range(2):
        for zeroes in (False, True):
            for model in (plain, sharded):
                if zeroes:
                    model.zero_grad()
                full(sum(param.square().sum() for param in model.parameters())).backward()
            if not zeroes:
                assert_same_grads(plain, sharded)
        backward(plain, sharded, step)
        assert_same_grads(plain, sharded)


@on_ranks(2, 3)
@pytest.mark.parametrize("way", ["none", "foreach", "loop"])
def test_zeroing_drops_what_was_accumulated(way):
    """`zero_grad` of any optimizer also discards gradients not yet reduced, even on ranks without rows.

    Clipping while they wait raises, with every kernel.
    """
    plain, sharded = both("few_rows")
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1, foreach=way == "foreach")
    with no_sync(sharded):
        loss_of_tiny(sharded, (7,)).backward()
    for foreach in (True, False):
        with pytest.raises(RuntimeError, match="single memory location"):
            torch.nn.utils.clip_grad_norm_(sharded.parameters(), 1e-3, foreach=foreach)
    optimizer.zero_grad(set_to_none=way == "none")
    for param in plain.parameters():
        param.grad = None if way == "none" else torch.zeros_like(param)
    backward(plain, sharded, 1)
    assert_same_grads(plain, sharded)


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
def test_hooks_on_parameters_see_reduced_gradients():
    """`register_post_accumulate_grad_hook` on a DTensor runs once per backward, and may step and drop the gradient."""
    plain, sharded, seen = mlp(4, 5, 3), fully_shard(mlp(4, 5, 3)), []

    def step(param):
        seen.append(param)
        with torch.no_grad():
            param.sub_(param.grad, alpha=0.1)
        param.grad = None

    for param in sharded.parameters():
        param.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        for model in (plain, sharded):
            squares(model).backward()
        average_grads_(plain.parameters())
        sgd(plain, momentum=0.0).step()
        plain.zero_grad()
    assert len(seen) == 8
    assert all(param.grad is None for param in sharded.parameters())
    assert_same_state(whole(sharded), plain.state_dict())


@on_ranks(2)
def test_fused_kernels_step_other_dimensions_in_one_order():
    """On parameters sharded by the last dimension, fused steps do not depend on the memory order of their inputs."""

    def other_order(value):
        return distribute_tensor(value.full_tensor(), value.device_mesh, value.placements)

    found = []
    for moves in (False, True):
        model = fully_shard(mlp(6, 6), shard_placement_fn=lambda param: Shard(param.dim() - 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for step in range(3):
            model(randn(2, 6, key=step)).square().sum().backward()
            for param in model.parameters() if moves else ():
                param.grad, state = other_order(param.grad), optimizer.state[param]
                state.update({name: other_order(value) for name, value in state.items() if isinstance(value, DTensor)})
            optimizer.step()
            optimizer.zero_grad()
        found.append(whole(model))
    assert_same_state(*found)
