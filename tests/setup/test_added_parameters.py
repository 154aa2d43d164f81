"""Parameters added to a wrapped model, or put in the place of sharded ones, are refused by name at the next forward."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from fairshard.errors import FairshardError, RanksDisagreeError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import fully_shard
from tests.models import mlp, wrap_each
from tests.on_ranks import in_full, on_ranks
from tests.reference import randn
from tests.waiting import told_about

LAYOUTS = pytest.mark.parametrize(
    "layout", [{}, {"flatten_parameters": False}, {"use_orig_params": True}], ids=["flat", "unflattened", "orig_params"]
)
WHEN = pytest.mark.parametrize("has_run", [False, True])


class LowRank(nn.Module):
    """A Linear and a low-rank addition to it, as adapters are injected: the Linear becomes a submodule."""

    def __init__(self, base):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(4, 1, bias=False), nn.Linear(1, 6, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Net(nn.Module):
    """Two Linears, one in a container that has no parameters of its own."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 6), nn.ReLU()), nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.body(x))


def add_adapter(net):
    net.body[0] = LowRank(net.body[0])


def add_frozen_adapter(net):
    net.body[0] = LowRank(net.body[0]).requires_grad_(False)


def replace_head(net):
    net.head = nn.Linear(6, 9)


def replace_weight(net):
    net.head.weight = nn.Parameter(torch.zeros(4, 6))


def add_parameter(net):
    net.body[1].register_parameter("slope", nn.Parameter(torch.ones(1)))


CHANGES = {
    add_adapter: r"body\.0\.(up|down)\.weight",
    add_frozen_adapter: r"body\.0\.(up|down)\.weight",
    replace_head: r"head\.weight",
    add_parameter: r"body\.1\.slope",
}


@on_ranks(in_full(1), 2)
@LAYOUTS
@WHEN
def test_what_is_added_raises_at_the_next_forward(layout, has_run):
    """Each kind of change, before the first forward and after a step, deep in the outer unit: every rank raises."""
    for change, fqn in CHANGES.items():
        model = FSDP(Net(), **layout)
        if has_run:
            model(randn(3, 4)).sum().backward()
        change(model.module)
        for _ in range(2):
            with pytest.raises(FairshardError, match=f"`{fqn}` was added later.*before wrapping"):
                model(randn(3, 4))


@on_ranks(2)
@LAYOUTS
@WHEN
def test_a_replaced_weight_raises_before_it_is_trained(layout, has_run):
    """A forward cannot know whether ``functional_call`` has put it there; the backward that would train it does."""
    model = FSDP(Net(), **layout)
    if has_run:
        model(randn(3, 4)).sum().backward()
    replace_weight(model.module)
    for _ in range(2):
        with pytest.raises(FairshardError, match=r"`head\.weight` was added later.*before wrapping"):
            model(randn(3, 4)).sum().backward()


@on_ranks(2)
@WHEN
def test_an_inner_unit_and_the_wrapper_itself(has_run):
    """A parameter added to an inner unit, or set on a wrapper, is named by its place in the whole model."""
    for holder, fqn in ((lambda model: model.module[2].module, "2.scale"), (lambda model: model, "scale")):
        model = wrap_each(mlp(4, 6, 4))
        if has_run:
            model(randn(3, 4))
        holder(model).scale = nn.Parameter(torch.ones(4))
        with pytest.raises(FairshardError, match=f"`{fqn}` was added later"):
            model(randn(3, 4))
        del holder(model).scale
        model(randn(3, 4)).sum().backward()


@on_ranks(2)
@LAYOUTS
def test_what_may_change(layout):
    """Other models, modules without parameters, ignored modules and their parameters, wrapped modules, functional_call.

    None of these raises, before the first forward or after it.
    """
    net = Net()
    net.extra = nn.Linear(4, 4)
    model = FSDP(net, ignored_modules=[net.extra], **layout)
    replaced = {name: value.detach() for name, value in Net().named_parameters()}
    for _ in range(2):
        nn.Linear(2, 2)
        model.module.body.append(nn.Identity())
        model.module.extra.scale = nn.Parameter(torch.ones(4))
        model.module.extra.weight = nn.Parameter(torch.ones(4, 4))
        given = {f"module.{name}": nn.Parameter(value) for name, value in replaced.items()}
        functional_call(model, given, (randn(3, 4),))
        model(randn(3, 4)).sum().backward()
        functional_call(model, given, (randn(3, 4),))
        copy.deepcopy(model)(randn(3, 4))
        with model.summon_full_params(), torch.no_grad():
            model.module.head.weight.mul_(2)
        model.load_state_dict(model.state_dict(), assign=True)


@on_ranks(2)
@LAYOUTS
def test_tied_weights(layout):
    """Names that share a parameter are known."""
    net = Net()
    net.tied = nn.Linear(4, 6)
    net.tied.weight = net.body[0].weight
    model = FSDP(nn.Sequential(nn.Linear(4, 4), FSDP(net, **layout)))
    for _ in range(2):
        nn.Linear(2, 2)
        model(randn(3, 4)).sum().backward()


@on_ranks(2)
def test_what_is_inside_an_ignored_module_may_change():
    """A module put into an ignored one has parameters that no unit shards: the next forwards run."""
    kept = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    model = FSDP(nn.Sequential(nn.Linear(4, 6), kept), ignored_modules=[kept])
    model(randn(2, 4)).sum().backward()
    kept[0] = nn.Sequential(kept[0], nn.Linear(6, 6))
    model(randn(2, 4)).sum().backward()
    assert all(param.grad is not None for param in kept.parameters())


@on_ranks(2)
@pytest.mark.parametrize("door", [FSDP, fully_shard])
@WHEN
def test_an_ignored_module_may_be_replaced(door, has_run):
    """Another module, or another parameter, in the place of an ignored one is ignored too, also in an inner unit."""
    net = nn.Sequential(Net(), nn.Linear(4, 4))
    for part in net:
        part.extra = nn.Linear(4, 4)
    ignored = [param for part in net for param in part.extra.parameters()] + [net[1].bias]
    if door is FSDP:
        net[0] = FSDP(net[0], ignored_states=[net[0].extra])
        model = FSDP(net, ignored_states=[net[1].extra, net[1].bias])
    else:
        fully_shard(net[0], ignored_params=set(ignored))
        model = fully_shard(net, ignored_params=set(ignored))
    if has_run:
        model(randn(3, 4)).sum().backward()
    parts = (net[0].module if door is FSDP else net[0], net[1])
    for _ in range(2):
        for part in parts:
            part.extra = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        net[1].bias = nn.Parameter(torch.zeros(4))
        model(randn(3, 4)).sum().backward()
    net[1].other = nn.Linear(4, 4)
    with pytest.raises(FairshardError, match=r"`1\.other\.(weight|bias)` was added later"):
        model(randn(3, 4))


@on_ranks(2)
@LAYOUTS
def test_what_one_rank_adds_before_the_first_forward_raises_on_all(layout):
    """The ranks compare their models then: the rank without the parameter raises too, and names it."""
    model = FSDP(Net(), **layout)
    if dist.get_rank():
        add_parameter(model.module)
    for _ in range(2):
        with pytest.raises(RanksDisagreeError, match=r"rank 1 has a model that raises: .*`body\.1\.slope` was added"):
            model(randn(3, 4))
    if dist.get_rank():
        del model.module.body[1].slope
    model(randn(3, 4)).sum().backward()


@on_ranks(2)
def test_what_one_rank_adds_later_is_named_to_ranks_that_wait():
    """That rank raises alone, as later forwards compare nothing; if a collective of the other fails, it is told."""
    model = FSDP(Net())
    model(randn(3, 4)).sum().backward()

    def add():
        add_parameter(model.module)
        with pytest.raises(FairshardError, match=r"`body\.1\.slope` was added later"):
            model(randn(3, 4))
        del model.module.body[1].slope

    place = r"rank 1: after the backward of step 1.* has raised FairshardError: .*`body\.1\.slope` was added later"
    assert re.search(place, told_about(add))
    model(randn(3, 4)).sum().backward()
