"""User hooks on modules, tensors and outputs run as on the plain model."""

import copy

import pytest
import torch
from torch import nn

from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.kit import rank_device
from tests.models import mlp, wrap_each
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, randn, sgd


def linears(model):
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def log_hooks(model, log):
    """Register every kind of module hook on the Linears; each logs what it sees."""
    for index, layer in enumerate(linears(model)):
        layer.register_forward_pre_hook(lambda m, x, i=index: log.append(("forward_pre", i, x[0].detach().clone())))
        layer.register_forward_hook(lambda m, x, y, i=index: log.append(("forward", i, y.detach().clone())))
        layer.register_full_backward_pre_hook(lambda m, g, i=index: log.append(("backward_pre", i, g[0].clone())))
        layer.register_full_backward_hook(lambda m, gi, go, i=index: log.append(("backward", i, gi[0].clone())))


def same_log(a, b):
    assert [entry[:2] for entry in a] == [entry[:2] for entry in b]
    for (name, index, x), (_, _, y) in zip(a, b, strict=True):
        assert torch.equal(x, y), (name, index)


@on_ranks(1, 2)
@pytest.mark.parametrize("wrap", [FSDP, wrap_each], ids=["one", "each"])
@pytest.mark.parametrize("reshard", [True, False])
def test_module_hooks_see_what_they_see_on_the_plain_model(wrap, reshard):
    """Forward and backward hooks on submodules run in the same order with the same tensors."""
    plain = mlp(4, 9, 7, 5)
    wrapped = wrap(copy.deepcopy(plain), reshard_after_forward=reshard)
    logs = []
    for model in (plain, wrapped):
        log = []
        log_hooks(model, log)
        for step in range(2):
            model(randn(3, 4, key=step).requires_grad_()).sum().backward()
        logs.append(log)
    same_log(*logs)


@on_ranks(1, 2)
def test_hooks_on_outputs():
    """A hook on the output of the model, or of a unit in it, runs once with the plain gradient and may change it."""
    plain = mlp(4, 9, 5)
    wrapped = wrap_each(copy.deepcopy(plain))
    results = []
    for model in (plain, wrapped):
        seen = []
        model[0].register_forward_hook(
            lambda m, x, y, seen=seen: y.register_hook(lambda grad: seen.append(grad.clone()) or grad * 2) and None
        )
        x = randn(3, 4).requires_grad_()
        out = model(x)
        out.register_hook(lambda grad, seen=seen: seen.append(grad.clone()))
        out.square().sum().backward()
        results.append([*seen, x.grad])
    assert len(results[0]) == len(results[1]) == 3
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(actual, expected)


@on_ranks(1, 2)
def test_hooks_may_read_parameters():
    """Inside a forward or backward hook of a submodule, its parameters are whole."""
    plain = mlp(4, 9, 5)
    wrapped = wrap_each(copy.deepcopy(plain))
    seen = []

    def read(module, *_):
        seen.append(module.weight.detach().clone())

    layer = wrapped[0].module
    layer.register_forward_pre_hook(read)
    layer.register_forward_hook(read)
    layer.register_full_backward_pre_hook(read)
    wrapped(randn(3, 4)).sum().backward()
    assert len(seen) == 3
    for weight in seen:
        assert torch.equal(weight, plain[0].weight)


@on_ranks(2)
def test_hooks_on_the_wrapper():
    """Hooks on the wrapper itself run around the whole unit."""
    wrapped = FSDP(nn.Linear(4, 5).to(rank_device()))
    log = []
    wrapped.register_forward_pre_hook(lambda *_: log.append("pre"))
    wrapped.register_forward_hook(lambda *_: log.append("post"))
    wrapped.register_full_backward_hook(lambda *_: log.append("backward"))
    wrapped(randn(3, 4).requires_grad_()).sum().backward()
    assert log == ["pre", "post", "backward"]
    assert wrapped.params[0].grad is not None


@on_ranks(2)
def test_a_hook_may_replace_the_output():
    """An output returned by a forward hook, on a unit or inside it, replaces the original output."""
    plain = mlp(4, 9, 5)
    wrapped = wrap_each(copy.deepcopy(plain))
    grads = []
    for model in (plain, wrapped):
        linears(model)[0].register_forward_hook(lambda m, x, y: y * 2)
        model.register_forward_hook(lambda m, x, y: {"out": y + 1})
        x = randn(3, 4).requires_grad_()
        model(x)["out"].sum().backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1])


@on_ranks(2)
def test_an_optimizer_in_a_hook_on_a_shard_steps_the_reduced_gradient():
    """Stepping and dropping each gradient in its hook, torch's way to fuse optimizer and backward, changes nothing."""
    plain = mlp(4, 5, 3)
    hooked, stepped = wrap_each(copy.deepcopy(plain)), wrap_each(plain)
    optimizers = {param: torch.optim.SGD([param], lr=0.1, momentum=0.9) for param in hooked.parameters()}

    def step(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in optimizers:
        param.register_post_accumulate_grad_hook(step)
    optimizer = sgd(stepped)
    for key in range(3):
        hooked(randn(3, 4, key=key)).square().sum().backward()
        assert not hooked.params_with_grad
        stepped(randn(3, 4, key=key)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_state(hooked.state_dict(), stepped.state_dict())


@on_ranks(2)
@pytest.mark.parametrize("kind", ["list", "tuple", "dict", "nested"])
def test_outputs_of_any_nesting(kind):
    """Outputs in containers keep their type, and gradients flow from each tensor in them."""

    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            y = self.layer(x)
            return {
                "list": [y, 2 * y],
                "tuple": (y, 2 * y),
                "dict": {"a": y, "b": 2 * y},
                "nested": {"a": [y, ({"b": 2 * y},)], "c": 5},
            }[kind]

    def total(out):
        if isinstance(out, torch.Tensor):
            return out.sum()
        values = out.values() if isinstance(out, dict) else out
        return sum(total(value) for value in values if not isinstance(value, int))

    plain = Nested().to(rank_device())
    wrapped = FSDP(nn.Sequential(FSDP(copy.deepcopy(plain))))
    x, y = randn(3, 4).requires_grad_(), randn(3, 4).requires_grad_()
    total(plain(x)).backward()
    out = wrapped(y)
    assert type(out) is type(plain(x))
    total(out).backward()
    assert torch.equal(x.grad, y.grad)
    assert wrapped[0].params[0].grad is not None
