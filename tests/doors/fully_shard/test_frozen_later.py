"""``requires_grad_()`` at any time between forwards and backwards gives the gradients that plain autograd gives."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairshard.nn import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from tests.kit import rank_device
from tests.kit.doors import gathered, shard, whole_grads
from tests.models import mlp
from tests.on_ranks import in_full, on_ranks
from tests.reference import average_grads_, randn

pytestmark = pytest.mark.behaviour("freezing")

SCRIPTS = {
    "frozen after the forward": "forward freeze backward",
    "frozen for one backward": "forward freeze backward unfreeze forward backward",
    "unfrozen after the forward": "freeze forward unfreeze backward",
    "unfrozen and trained": "freeze forward unfreeze backward forward backward",
    "a frozen forward in between": "forward freeze forward unfreeze together",
    "a frozen forward first": "freeze forward unfreeze forward together",
    "the frozen one goes back first": "forward freeze forward unfreeze newest backward",
    "the frozen one goes back last": "forward freeze forward unfreeze backward backward",
    "no backward": "forward freeze forward newest",
    "resharded in between": "forward freeze reshard unfreeze forward newest",
    "gathered by hand": "forward backward freeze unshard reshard unfreeze freeze unshard forward backward",
    "gradients stay": "forward backward freeze forward backward",
    "kept gradients": "keep forward backward freeze forward backward unfreeze send forward backward",
    "kept and still frozen": "keep forward backward freeze send forward backward",
    "frozen while gradients are kept": "keep forward backward forward freeze backward unfreeze send forward backward",
    "frozen in the first kept pass": "keep forward freeze backward unfreeze send forward backward",
}


class Net(nn.Module):
    """Layers with a tied weight, rows that ranks share unevenly, an unused parameter and an empty one."""

    def __init__(self, checkpoints=False):
        super().__init__()
        self.up, self.down, self.tied = nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 5)
        self.tied.weight = self.up.weight
        self.row = nn.Parameter(torch.ones(1, 4))
        self.unused = nn.Parameter(torch.ones(3))
        self.empty = nn.Parameter(torch.ones(0, 4))
        self.checkpoints = checkpoints

    def forward(self, x):
        x = checkpoint(self.up, x, use_reentrant=True) if self.checkpoints else self.up(x)
        return (self.down(torch.tanh(x)) * self.row.sum(0) + self.empty.sum(0)) @ self.tied.weight.t()


def run(script, model, which):
    """Apply the words of ``script`` to ``model``; parameters with ``which`` in their names are frozen and unfrozen."""
    losses = []
    for step, word in enumerate(script.split()):
        if word in ("freeze", "unfreeze"):
            for name, param in model.named_parameters():
                if which in name:
                    param.requires_grad_(word == "unfreeze")
        elif word == "forward":
            losses.append(model(randn(3, 4, key=step).requires_grad_()).float().square().sum())
        elif word == "together":
            torch.stack(losses).sum().backward()
        elif word in ("backward", "newest"):
            losses.pop(0 if word == "backward" else -1).backward()
        elif isinstance(model, FSDPModule):
            if word in ("keep", "send"):
                model.set_requires_gradient_sync(word == "send")
            else:
                getattr(model, word)()


def assert_as_plain(model, plain, rtol=0.0):
    """The same parameters are trained, the same have a gradient, and the gradients are the mean over ranks."""
    average_grads_(plain.parameters(), keeps_none=True)
    grads = whole_grads(model)
    for (name, param), (_, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert param.requires_grad == expected.requires_grad, name
        assert (grads[name] is None) == (expected.grad is None), name
        if expected.grad is not None:
            torch.testing.assert_close(grads[name].cpu(), expected.grad.cpu(), rtol=rtol, atol=rtol)


@on_ranks(in_full(1), 2, in_full(3))
@pytest.mark.parametrize(
    ("setting", "which"),
    [
        ("plain", ""),
        ("checkpoints", "row"),
        ("offload", "weight"),
        ("bf16", ""),
        *(pytest.param(setting, "row", marks=pytest.mark.full) for setting in ("plain", "offload", "bf16")),
        *(pytest.param(setting, "weight", marks=pytest.mark.full) for setting in ("plain", "checkpoints", "bf16")),
    ],
)
def test_frozen_and_unfrozen_at_any_time(setting, which):
    """Every script gives the gradients, the Nones and the ``requires_grad`` of the plain model."""
    options = {
        "offload": {"offload_policy": CPUOffloadPolicy()},
        "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    }.get(setting, {})
    for title, script in SCRIPTS.items():
        torch.manual_seed(1)
        plain = Net(checkpoints=setting == "checkpoints").to(rank_device())
        model = shard(copy.deepcopy(plain), "fully_shard", "down", **options)
        for _ in range(2):  # the second time from whatever state the first has left
            run(script, plain, which)
            run(script, model, which)
        try:
            # bf16 has 8 bits; gradients add up to about 30 times the largest of them
            assert_as_plain(model, plain, rtol=0.5 if setting == "bf16" else 1e-5)
        except AssertionError as error:
            raise AssertionError(title) from error


@on_ranks(2)
def test_frozen_between_an_exception_and_the_next_pass():
    """After a backward that raised, parameters frozen before and unfrozen after it train as on the plain model."""

    def boom(_grad):
        raise RuntimeError("on purpose")

    torch.manual_seed(1)
    plain = Net().to(rank_device())
    model = shard(copy.deepcopy(plain), "fully_shard")
    for net in (plain, model):
        output = net(randn(3, 4, key=0).requires_grad_())
        output.register_hook(boom)
        run("freeze", net, "")
        with pytest.raises(RuntimeError, match="on purpose"):
            output.sum().backward()
        run("unfreeze forward freeze backward unfreeze forward backward", net, "")
    assert_as_plain(model, plain)


@on_ranks(2)
@pytest.mark.parametrize("door", ["flat", "orig"])
def test_an_earlier_graph_of_the_wrapper_keeps_its_gradients(door):
    """A forward with frozen parameters between a trained one and its backward loses no gradient of the trained one."""
    plain, model = mlp(4, 9, 5), shard(mlp(4, 9, 5), door)
    for net in (plain, model):
        run("forward freeze forward unfreeze together", net, "")
    average_grads_(plain.parameters())
    for name, grad in whole_grads(model).items():
        torch.testing.assert_close(grad, plain.get_parameter(name).grad, rtol=1e-6, atol=1e-6, msg=name)


@on_ranks(2)
def test_nothing_stays_gathered_after_a_frozen_backward():
    """A backward that gives no parameter a gradient frees all units."""
    model = shard(Net().to(rank_device()), "fully_shard", "down")
    run("forward freeze backward", model, "")
    assert gathered(model) == []
