"""Optimizer steps while gradients of ``no_sync`` passes wait to be reduced: parameters without other gradients rest."""

import contextlib
import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fairshard.errors import FairshardError
from fairshard.nn import CPUOffloadPolicy, fully_shard
from fairshard.optim import CPUOptimizer
from fairshard.params.shard_grad import marked
from tests.models import mlp, wrap_each
from tests.on_ranks import in_full, on_ranks
from tests.reference import mean_over_ranks, randn


def loss_of(model, key):
    return model(randn(3, 4, key=key)).square().mean()


def in_place(**kwargs):
    def shard(model):
        fully_shard(model[0], **kwargs)
        return fully_shard(model, **kwargs)

    return shard


def wrapper(**kwargs):
    return lambda model: wrap_each(model, **kwargs)


def no_sync(model):
    """The passes inside keep their gradients, whichever door has sharded ``model``."""
    if hasattr(model, "no_sync"):
        return model.no_sync()
    model.set_requires_gradient_sync(False)
    stack = contextlib.ExitStack()
    stack.callback(model.set_requires_gradient_sync, True)
    return stack


def mean_grads(plain, key):
    """The means over ranks of the gradients of the pass ``key``."""
    return [mean_over_ranks(grad) for grad in torch.autograd.grad(loss_of(plain, key), plain.parameters())]


def add_mean_grads_(plain, *keys):
    """Add `mean_grads` of the passes ``keys`` to the gradients of ``plain``."""
    for key in keys:
        add_(plain.parameters(), mean_grads(plain, key))


def add_(params, grads):
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad if param.grad is None else param.grad + grad


def values_of(model):
    state = model.state_dict()
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def assert_alike(model, plain):
    torch.testing.assert_close(values_of(model), dict(plain.state_dict()), check_device=False)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)


def adamw(**kwargs):
    return lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, **kwargs)


OPTIMIZERS = {"sgd": sgd, "fused": adamw(fused=True), "foreach": adamw(foreach=True), "loop": adamw(foreach=False)}
DOORS = {
    "in place": in_place(),
    "in place, offloaded": in_place(offload_policy=CPUOffloadPolicy()),
    "wrapper": wrapper(),
    "original": wrapper(use_orig_params=True),
    "wrapper, offloaded": wrapper(cpu_offload=True),
}


@on_ranks(2, in_full(1), in_full(3))
@pytest.mark.parametrize(
    ("shard", "make"),
    [
        ("in place", "sgd"),
        ("in place, offloaded", "fused"),
        ("wrapper", "loop"),
        ("original", "foreach"),
        ("wrapper, offloaded", "sgd"),
    ],
)
def test_kept_gradients_are_neither_stepped_nor_lost(shard, make):
    """A step with kept gradients alone changes no weights and no state; a later pass reduces them.

    A gradient from before the kept ones is stepped.
    """
    plain = mlp(4, 5, 3)
    model = DOORS[shard](copy.deepcopy(plain))
    of_plain, of_model = (OPTIMIZERS[make](net.parameters()) for net in (plain, model))

    def step(*, clears):
        for optimizer in (of_plain, of_model):
            optimizer.step()
            if clears:
                optimizer.zero_grad()
        assert_alike(model, plain)

    loss_of(model, 0).backward()
    add_mean_grads_(plain, 0)
    step(clears=True)
    for _ in range(2):
        with no_sync(model):
            loss_of(model, 1).backward()
        before = values_of(model)
        of_model.step()
        after = values_of(model)
        assert all(torch.equal(after[name], before[name]) for name in before)
    loss_of(model, 2).backward()
    add_mean_grads_(plain, 1, 1, 2)
    step(clears=False)
    with no_sync(model):
        loss_of(model, 3).backward()
    kept = mean_grads(plain, 3)
    step(clears=False)
    loss_of(model, 4).backward()
    add_(plain.parameters(), kept)
    add_mean_grads_(plain, 4)
    step(clears=True)
    with no_sync(model):
        loss_of(model, 5).backward()
    of_model.step()
    of_model.zero_grad()  # drops the kept gradients
    loss_of(model, 6).backward()
    add_mean_grads_(plain, 6)
    step(clears=True)
    counts = {float(state["step"]) for state in of_model.state.values() if "step" in state}
    assert counts <= {5.0}
    assert not any(grad.has_zeros for grad in marked)


@on_ranks(2)
@pytest.mark.parametrize("of_what", ["gradients", "sums over replicas"])
def test_only_the_units_that_keep_gradients_rest(of_what):
    """Units that reduce are stepped as always, while another keeps its gradients or its sums."""
    plain = mlp(4, 5, 3)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    model = in_place(mesh=mesh)(copy.deepcopy(plain))
    keep = model[0].set_requires_gradient_sync if of_what == "gradients" else model[0].set_requires_all_reduce
    of_plain, of_model = sgd(plain.parameters()), sgd(model.parameters())
    kept = None
    for number in range(6):
        keep(number % 3 == 2)
        loss_of(model, number).backward()
        add_mean_grads_(plain, number)
        inner = list(plain[0].parameters())
        if number % 3 < 2:
            new = [param.grad for param in inner]
            kept = new if kept is None else [sum(pair) for pair in zip(kept, new, strict=True)]
            for param in inner:
                param.grad = None
        elif kept is not None:
            for param, grad in zip(inner, kept, strict=True):
                param.grad += grad
            kept = None
        of_plain.step()
        of_model.step()
        of_plain.zero_grad()
        model[2].zero_grad() if kept is not None else of_model.zero_grad()
        assert_alike(model, plain)


class Fails(torch.optim.SGD):
    """Raises in its step."""

    def step(self, closure=None):
        raise KeyError("on purpose")


@on_ranks(2)
def test_closures_and_steps_that_raise():
    """A closure sees kept gradients, so that its ``zero_grad`` drops them; a step that raises does not."""
    plain = mlp(4, 5, 3)
    model = in_place()(copy.deepcopy(plain))
    of_plain, of_model = sgd(plain.parameters()), sgd(model.parameters())
    before = values_of(model)

    def keep():
        with no_sync(model):
            loss_of(model, 0).backward()

    def renew():
        of_model.zero_grad()
        loss = loss_of(model, 1)
        loss.backward()
        return loss

    of_model.step(keep)
    of_model.step(closure=keep)
    assert all(torch.equal(value, before[name]) for name, value in values_of(model).items())
    of_model.step(renew)
    add_mean_grads_(plain, 1)
    of_plain.step()
    assert_alike(model, plain)
    of_model.zero_grad()
    of_plain.zero_grad()
    keep()
    with pytest.raises(KeyError):
        Fails(model.parameters(), lr=0.1).step()
    loss_of(model, 2).backward()
    add_mean_grads_(plain, 0, 2)
    of_model.step()
    of_plain.step()
    assert_alike(model, plain)


@on_ranks(2)
def test_the_cpu_optimizer_refuses():
    """It raises, as before, and the kept gradients stay."""
    plain = mlp(4, 5, 3)
    model = wrapper(cpu_offload=True, move_grads_to_cpu=False)(copy.deepcopy(plain))
    optimizer = CPUOptimizer(model, torch.optim.SGD, lr=0.1)
    with model.no_sync():
        loss_of(model, 0).backward()
    with pytest.raises(FairshardError, match="must be reduced before a step"):
        optimizer.step()
    loss_of(model, 1).backward()
    add_mean_grads_(plain, 0, 1)
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_alike(model, plain)


@on_ranks(2)
@pytest.mark.parametrize("shard", ["in place", "wrapper", "original"])
def test_zero_grad_reaches_gradients_that_a_step_has_hidden(shard):
    """It drops them, in a hook after the step or after a step that raised, on the optimizer or the model."""
    plain = mlp(4, 5, 3)
    model = DOORS[shard](copy.deepcopy(plain))
    of_plain, of_model = sgd(plain.parameters()), sgd(model.parameters())
    failing = Fails(model.parameters(), lr=0.1)
    in_hook = of_model.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
    for number, clear in enumerate((None, model.zero_grad, failing.zero_grad)):
        with no_sync(model):
            loss_of(model, 0).backward()
        if clear is not None:
            with pytest.raises(KeyError):
                failing.step()
            clear()
        else:
            of_model.step()
            in_hook.remove()
        loss_of(model, number).backward()
        add_mean_grads_(plain, number)
        for optimizer in (of_plain, of_model):
            optimizer.step()
            optimizer.zero_grad()
        assert_alike(model, plain)


@on_ranks(2)
@pytest.mark.parametrize("shard", ["in place", "wrapper", "original"])
def test_gradients_that_the_user_has_zeroed_are_stepped(shard):
    """After ``zero_grad(set_to_none=False)`` the zeros are the user's, and decay weights as in any model."""
    plain = mlp(4, 5, 3)
    model = DOORS[shard](copy.deepcopy(plain))
    add_mean_grads_(plain, 0)
    with no_sync(model):
        loss_of(model, 0).backward()
    for net in (plain, model):
        optimizer = sgd(net.parameters())
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
    assert_alike(model, plain)
