"""Steps and clipping raise while gradients of the optimizer's parameters are pending, and lose none."""

import contextlib
import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fairshard.errors import PartialGradientError, PendingGradientError
from fairshard.nn import CPUOffloadPolicy, fully_shard
from fairshard.optim import CPUOptimizer, ShardedGradScaler
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
def test_pending_gradients_are_neither_stepped_nor_lost(shard, make):
    """A step raises by name and changes nothing, also with gradients from before; a later pass reduces all of them."""
    plain = mlp(4, 5, 3)
    model = DOORS[shard](copy.deepcopy(plain))
    of_plain, of_model = (OPTIMIZERS[make](net.parameters()) for net in (plain, model))

    def step():
        for optimizer in (of_plain, of_model):
            optimizer.step()
            optimizer.zero_grad()
        assert_alike(model, plain)

    def keep(key):
        with no_sync(model):
            loss_of(model, key).backward()
        before = values_of(model)
        with pytest.raises(PendingGradientError, match=r"that of `.*(0\.|flat).*` .* outside of no_sync"):
            of_model.step()
        after = values_of(model)
        assert all(torch.equal(after[name], before[name]) for name in before)

    loss_of(model, 0).backward()
    add_mean_grads_(plain, 0)
    step()
    for _ in range(2):
        keep(1)
    loss_of(model, 2).backward()
    keep(3)
    loss_of(model, 4).backward()
    add_mean_grads_(plain, 1, 1, 2, 3, 4)
    step()
    keep(5)
    of_model.zero_grad()  # drops them
    loss_of(model, 6).backward()
    add_mean_grads_(plain, 6)
    step()
    counts = {float(state["step"]) for state in of_model.state.values() if "step" in state}
    assert counts <= {3.0}


@on_ranks(2)
@pytest.mark.parametrize("of_what", ["gradients", "sums over replicas"])
def test_only_optimizers_with_pending_gradients_raise(of_what):
    """An optimizer of units that reduce steps as always while another unit keeps its gradients or its sums."""
    plain = mlp(4, 5, 3)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    model = in_place(mesh=mesh)(copy.deepcopy(plain))
    keep = model[0].set_requires_gradient_sync if of_what == "gradients" else model[0].set_requires_all_reduce
    cure = "no_sync" if of_what == "gradients" else r"set_requires_all_reduce\(True\)"
    of_plain, of_model = ([sgd(net[index].parameters()) for index in (0, 2)] for net in (plain, model))
    for number in range(6):
        keep(number % 3 == 2)
        loss_of(model, number).backward()
        add_mean_grads_(plain, number)
        if number % 3 < 2:
            with pytest.raises(PendingGradientError, match=rf"`0\.\w+` .*{cure}"):
                of_model[0].step()
        for one in (of_plain, of_model):
            for optimizer in one[number % 3 < 2 :]:
                optimizer.step()
                optimizer.zero_grad()
        assert_alike(model, plain)


@on_ranks(2)
def test_closures():
    """Gradients are checked after a closure, which may drop what was pending before it."""
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

    with pytest.raises(PendingGradientError):
        of_model.step(keep)
    with pytest.raises(PendingGradientError):
        of_model.step(closure=keep)
    assert all(torch.equal(value, before[name]) for name, value in values_of(model).items())
    of_model.step(renew)
    add_mean_grads_(plain, 1)
    of_plain.step()
    assert_alike(model, plain)


@on_ranks(2)
@pytest.mark.parametrize("settings", [{}, {"cpu_offload": True}, {"cpu_offload": True, "move_grads_to_cpu": False}])
@pytest.mark.parametrize("shown", [False, True])
def test_the_cpu_optimizer_refuses(settings, shown):
    """It raises, and the pending gradients stay; ``zero_grad`` drops them, wherever gradients are kept."""
    plain = mlp(4, 5, 3)
    model = wrapper(use_orig_params=shown, **settings)(copy.deepcopy(plain))
    optimizer = CPUOptimizer(model, torch.optim.SGD, lr=0.1)
    for number, drop in enumerate((None, optimizer.zero_grad, model.zero_grad)):
        for to_none in (True, False) if drop else ():
            with model.no_sync():
                loss_of(model, "dropped").backward()
            drop(to_none)
        with model.no_sync():
            loss_of(model, (number, 0)).backward()
        with pytest.raises(PendingGradientError):
            optimizer.step()
        loss_of(model, (number, 1)).backward()
        add_mean_grads_(plain, (number, 0), (number, 1))
        optimizer.step()
        optimizer.zero_grad()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        plain.zero_grad()
        assert_alike(model, plain)


@on_ranks(2)
@pytest.mark.parametrize("settings", [{}, {"cpu_offload": True, "move_grads_to_cpu": False}])
def test_clipping_and_unscaling_are_refused(settings):
    """`clip_grad_norm_` and the scaler raise on all ranks while gradients are pending, instead of missing them."""
    model = wrapper(**settings)(mlp(4, 5, 3))
    optimizer = CPUOptimizer(model, torch.optim.SGD, lr=0.1)
    scaler = ShardedGradScaler("cpu")
    loss_of(model, 0).backward()
    with model.no_sync():
        scaler.scale(loss_of(model, 1)).backward()
    for _ in range(2):
        with pytest.raises(PendingGradientError):
            model.clip_grad_norm_(1.0)
        with pytest.raises(PendingGradientError):
            scaler.unscale_(optimizer)
        scaler.update(1.0)
    scaler.scale(loss_of(model, 2)).backward()
    assert model.clip_grad_norm_(1.0) > 0


@on_ranks(2)
@pytest.mark.parametrize("door", ["in place", "original"])
def test_only_what_is_reached_has_a_placeholder(door):
    """Under ``no_sync`` a parameter that no rank has reached keeps None; others have zeros, on all ranks."""

    class Parts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.used(x)

    model = DOORS[door](torch.nn.Sequential(Parts()))
    with no_sync(model):
        loss_of(model, 0).backward()
    found = {name: param.grad for name, param in model.named_parameters()}
    assert {name for name, grad in found.items() if grad is None} == {name for name in found if "unused" in name}
    own = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in found.values() if grad is not None]
    assert not any(grad.any() for grad in own)


@on_ranks(2)
@pytest.mark.parametrize("door", ["in place", "wrapper", "original"])
@pytest.mark.parametrize("to_none", [True, False])
def test_an_interrupted_pass_spoils_the_sums_that_it_has_added_to(door, to_none):
    """A ``no_sync`` backward that raises has added to some units only: steps raise until gradients are zeroed."""
    plain = mlp(4, 5, 4, 3)
    model = copy.deepcopy(plain)
    if door == "in place":
        for index in (2, 4):
            fully_shard(model[index])
    model = DOORS[door](model)
    optimizer = sgd(model.parameters())
    with no_sync(model):
        loss_of(model, 0).backward()
        handle = model[1].register_forward_hook(lambda module, args, out: out.register_hook(_fail) and None)
        with pytest.raises(KeyError):
            loss_of(model, 1).backward()  # the last Linear has kept its gradient when the one before it is reached
        handle.remove()
        loss_of(model, 2).backward()
    loss_of(model, 3).backward()
    with pytest.raises(PartialGradientError, match="Call zero_grad"):
        optimizer.step()
    optimizer.zero_grad(set_to_none=to_none)
    loss_of(model, 4).backward()
    add_mean_grads_(plain, 4)
    optimizer.step()
    sgd(plain.parameters()).step()
    assert_alike(model, plain)


def _fail(grad):
    raise KeyError("on purpose")


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
