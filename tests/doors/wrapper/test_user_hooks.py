"""User hooks on modules, tensors and outputs run as on the plain model."""

import copy

import pytest
import torch
from torch import nn

from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.kit import rank_device
from tests.kit.doors import whole
from tests.models import mlp, wrap_each
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, randn, run_steps, sgd, squares

pytestmark = pytest.mark.behaviour("user hooks")


def linears(model):
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def log_hooks(model, log):
    """Register every kind of module hook on the Linears; each logs what it sees, and the weight there."""
    for index, layer in enumerate(linears(model)):

        def note(kind, tensor, module, index=index):
            log.append((f"{kind} {index}", tensor.detach().clone(), module.weight.detach().clone()))

        layer.register_forward_pre_hook(lambda m, x, note=note: note("forward_pre", x[0], m))
        layer.register_forward_hook(lambda m, x, y, note=note: note("forward", y, m))
        layer.register_full_backward_pre_hook(lambda m, g, note=note: note("backward_pre", g[0], m))
        layer.register_full_backward_hook(lambda m, gi, go, note=note: note("backward", gi[0], m))


@pytest.mark.pairs
@on_ranks(1, 2)
@pytest.mark.parametrize("wrap", [FSDP, wrap_each], ids=["one", "each"])
@pytest.mark.parametrize("reshard", [True, False])
def test_module_hooks_see_what_they_see_on_the_plain_model(wrap, reshard):
    """Forward and backward hooks on submodules run in the same order with the same tensors, and whole parameters."""
    logs = []
    for model in (mlp(4, 9, 7, 5), wrap(mlp(4, 9, 7, 5), reshard_after_forward=reshard)):
        log = []
        log_hooks(model, log)
        for step in range(2):
            model(randn(3, 4, key=step).requires_grad_()).sum().backward()
        logs.append(log)
    assert [name for name, *_ in logs[0]] == [name for name, *_ in logs[1]]
    for (name, *expected), (_, *actual) in zip(*logs, strict=True):
        assert torch.equal(actual[0], expected[0]), name
        if not name.startswith("backward "):  # by then the unit may be freed
            assert torch.equal(actual[1], expected[1]), name


@on_ranks(1, 2)
def test_hooks_on_outputs():
    """A hook on the output of the model, or of a unit in it, runs once with the plain gradient and may change it."""
    results = []
    for model in (mlp(4, 9, 5), wrap_each(mlp(4, 9, 5))):
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


@on_ranks(2)
def test_hooks_on_the_wrapper():
    """Hooks on the wrapper itself run around the whole unit."""
    wrapped, log = FSDP(mlp(4, 5)), []
    wrapped.register_forward_pre_hook(lambda *_: log.append("pre"))
    wrapped.register_forward_hook(lambda *_: log.append("post"))
    wrapped.register_full_backward_hook(lambda *_: log.append("backward"))
    squares(wrapped).backward()
    assert log == ["pre", "post", "backward"]
    assert wrapped.params[0].grad is not None


@on_ranks(2)
def test_a_hook_may_replace_the_output():
    """An output returned by a forward hook, on a unit or inside it, replaces the original output."""
    grads = []
    for model in (mlp(4, 9, 5), wrap_each(mlp(4, 9, 5))):
        linears(model)[0].register_forward_hook(lambda m, x, y: y * 2)
        model.register_forward_hook(lambda m, x, y: {"out": y + 1})
        x = randn(3, 4).requires_grad_()
        model(x)["out"].sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


@on_ranks(2)
def test_an_optimizer_in_a_hook_on_a_shard_steps_the_reduced_gradient():
    """Stepping and dropping each gradient in its hook, torch's way to fuse optimizer and backward, changes nothing."""
    hooked, stepped = wrap_each(mlp(4, 5, 3)), wrap_each(mlp(4, 5, 3))
    optimizers = {param: torch.optim.SGD([param], lr=0.1, momentum=0.9) for param in hooked.parameters()}

    def step(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in optimizers:
        param.register_post_accumulate_grad_hook(step)
    for key in range(3):
        squares(hooked, (key, 0)).backward()
        assert not hooked.params_with_grad
    run_steps(stepped, squares, 3, optimizer=sgd(stepped))
    assert_same_state(whole(hooked), whole(stepped))


class Nested(nn.Module):
    """Returns what ``nest`` makes of two tensors."""

    def __init__(self, nest):
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.nest = nn.Linear(4, 4), nest

    def forward(self, x):
        y = self.layer(x)
        return self.nest(y, 2 * y)


def total(out):
    """The sum of all tensors in ``out``."""
    if isinstance(out, torch.Tensor):
        return out.sum()
    values = out.values() if isinstance(out, dict) else out
    return sum(total(value) for value in values if not isinstance(value, int))


NESTS = {
    "list": lambda y, z: [y, z],
    "tuple": lambda y, z: (y, z),
    "dict": lambda y, z: {"a": y, "b": z},
    "nested": lambda y, z: {"a": [y, ({"b": z},)], "c": 5},
}


@on_ranks(2)
@pytest.mark.parametrize("kind", NESTS)
def test_outputs_of_any_nesting(kind):
    """Outputs in containers keep their type, and gradients flow from each tensor in them."""
    plain = Nested(NESTS[kind]).to(rank_device())
    wrapped = FSDP(nn.Sequential(FSDP(copy.deepcopy(plain))))
    x, y = randn(3, 4).requires_grad_(), randn(3, 4).requires_grad_()
    total(plain(x)).backward()
    out = wrapped(y)
    assert type(out) is type(plain(x))
    total(out).backward()
    assert torch.equal(x.grad, y.grad)
    assert wrapped[0].params[0].grad is not None
