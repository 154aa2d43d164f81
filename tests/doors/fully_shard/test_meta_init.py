"""Modules sharded on the meta device get memory and values later; casts and freezing take effect."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fairshard.engine.tree import units_below
from fairshard.errors import FairshardError
from fairshard.nn import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from tests.kit import rank_device
from tests.models import Tiny, mlp, tiny, tiny_batch, tiny_loss
from tests.on_ranks import in_full, on_ranks
from tests.reference import average_grads_, randn, sgd


def shard(model, **kwargs):
    """Shard into nested units, with one for the rest."""
    for part in (model.first.up, model.first, model.second, model.shared):
        fully_shard(part, **kwargs)
    return fully_shard(model, **kwargs)


def on_meta():
    with torch.device("meta"):
        return Tiny()


def whole(model):
    return {name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in model.named_parameters()}  # fmt: skip


def trains_as(sharded, plain, num_steps=2):
    """Check that both have the same values, now and after each step."""
    of_plain, of_sharded = sgd(plain), sgd(sharded)
    for step in range(num_steps + 1):
        for name, value in whole(sharded).items():
            assert torch.equal(value, plain.get_parameter(name)), (step, name)
        for model in (plain, sharded):
            inputs = tiny_batch(torch.distributed.get_rank(), step)
            dtype = next(plain.parameters()).dtype
            model(inputs[0], inputs[1].to(dtype)).float().square().mean().backward()
        average_grads_(plain.parameters())
        for optimizer in (of_plain, of_sharded):
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2, in_full(1), in_full(3))
@pytest.mark.parametrize("offload", [False, True])
def test_to_empty_and_initialise(offload):
    """All ranks train from the values that ``reset_parameters`` and ``nn.init`` wrote to DTensors."""
    kwargs = {"offload_policy": CPUOffloadPolicy()} if offload else {}
    model = shard(on_meta(), **kwargs)
    assert all(param.is_meta for param in model.parameters())
    model.to_empty(device="cpu" if offload else rank_device())
    torch.manual_seed(7)
    with torch.no_grad():
        for part in model.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
        nn.init.constant_(model.head.bias, 0.5)
        nn.init.normal_(model.embed.weight, std=0.1)
    plain = tiny()
    with torch.no_grad():
        for name, value in whole(model).items():
            plain.get_parameter(name).copy_(value)
    assert plain.head.bias.eq(0.5).all()
    assert plain.first.norm.weight.eq(1).all()
    trains_as(model, plain)


@on_ranks(2)
@pytest.mark.parametrize("way", ["root", "without to_empty", "plain submodule", "after to_empty"])
def test_assigned_dtensors(way):
    """``load_state_dict(assign=True)`` of another sharded model's DTensors provides both memory and values."""
    source = shard(tiny(seed=3))
    model = shard(on_meta())
    params = list(model.parameters())
    state = source.state_dict()
    if way == "after to_empty":
        model.to_empty(device=rank_device())
    if way == "plain submodule":
        model.norm.load_state_dict({name: state[f"norm.{name}"] for name in ("weight", "bias")}, assign=True)
    model.load_state_dict(state, assign=True)
    assert all(mine is param for mine, param in zip(model.parameters(), params, strict=True))
    before = whole(source)
    trains_as(model, tiny(seed=3))
    assert all(torch.equal(value, before[name]) for name, value in whole(source).items())  # no memory is shared


@on_ranks(2)
def test_still_on_meta():
    """The first forward names parameters without memory, and works once they have it."""
    model = shard(on_meta())
    *inputs, targets = tiny_batch(0)
    for _ in range(2):
        with pytest.raises(FairshardError, match=r"values before the first.*`embed.weight`.* more are still on the m"):
            model(*inputs)
    model.first.to_empty(device=rank_device())
    with pytest.raises(FairshardError, match=r"`second.norm.weight`|`embed.weight`"):
        model(*inputs)
    model.to_empty(device=rank_device())
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert tiny_loss(model(*inputs), targets).isfinite()


@on_ranks(2)
@pytest.mark.parametrize("when", ["root", "inner", "submodule", "each"])
def test_casts_before_the_first_forward(when):
    """The root, an inner unit or a plain submodule may be cast before the first forward."""
    plain, model = tiny(), shard(tiny())
    for net in (plain, model):
        if when == "root":
            net.double()
        elif when == "inner":
            net.first.double().float()
            net.shared.half().float()
        elif when == "submodule":
            net.double()
            net.norm.float().double()
        else:
            for part in net.modules():
                part.to(torch.float64)
    trains_as(model, plain)


@on_ranks(2)
def test_a_unit_of_several_dtypes():
    """A unit may have several dtypes: a submodule cast on its own computes in its dtype, the others in theirs."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.one, self.two, self.three = (nn.Linear(5, 5) for _ in range(3))

        def forward(self, x):
            return self.three(self.two(self.one(x).to(self.two.weight.dtype)).float())

    plain = Mixed().to(rank_device())
    model = fully_shard(copy.deepcopy(plain))
    optimizers = [sgd(model), sgd(plain)]  # parameters stay registered through a cast
    for net in (plain, model):
        net.two.double()
    assert {param.dtype for param in model.parameters()} == {torch.float32, torch.float64}
    for _ in range(2):
        for net in (model, plain):
            net(randn(3, 5)).square().sum().backward()
        average_grads_(plain.parameters())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in whole(model).items():
        assert value.dtype == plain.get_parameter(name).dtype
        assert torch.equal(value, plain.get_parameter(name)), name


@on_ranks(2)
def test_casts_after_the_first_forward_are_refused():
    """A later cast or move raises and changes nothing; one that keeps dtype and device is allowed."""
    model, x = fully_shard(nn.Sequential(fully_shard(mlp(4, 6, 4)), nn.Linear(4, 4))).to(rank_device()), randn(2, 4)
    before = whole(model)
    model(x).sum().backward()
    for convert in (model.half, model[0].double, lambda: model.to("meta"), lambda: model.to_empty(device="meta")):
        with pytest.raises(TypeError, match="before the first forward"):
            convert()
    optimizer = sgd(model)
    for step in range(2):
        assert model.to(rank_device()).float() is model
        assert {param.dtype for param in model.parameters()} == {torch.float32}
        if not step:
            assert all(torch.equal(value, before[name]) for name, value in whole(model).items())
        assert all(param.grad is not None for param in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        model(x).sum().backward()
    handle = model[0].register_forward_hook(lambda *_: model.to(rank_device()) and None)
    model(x).sum().backward()  # the same call changes nothing inside a forward
    handle.remove()
    model[1].half()
    with pytest.raises(TypeError, match="must keep one dtype"):
        model(x)
    model[1].float()
    model(x)


@on_ranks(2)
def test_requires_grad_between_steps():
    """DTensors may be frozen and unfrozen between steps, as for LoRA; frozen ones get no gradient and do not change."""
    plain, model = tiny(), shard(tiny())
    *inputs, targets = tiny_batch(torch.distributed.get_rank())
    frozen = [("embed.weight", "first.up.bias"), ("second.up.weight", "second.norm.bias"), (), ("head.bias",)]
    for names in frozen:
        for net in (plain, model):
            for name, param in net.named_parameters():
                param.requires_grad_(name not in names)
            tiny_loss(net(*inputs), targets).backward()
        average_grads_(plain.parameters())
        for name, param in model.named_parameters():
            assert (param.grad is None) == (name in names), name
        for net in (plain, model):
            sgd(net).step()
            net.zero_grad()
        for name, value in whole(model).items():
            assert torch.equal(value, plain.get_parameter(name)), name


@on_ranks(2, in_full(3))
def test_parameters_without_dimensions():
    """Parameters without dimensions are whole on each rank, get the mean gradient, and may start on the meta device."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return self.linear(x) * self.scale

    with torch.device("meta"):
        model = fully_shard(Scaled())
    assert model.scale.shape == ()
    model.to_empty(device=rank_device())
    with torch.no_grad():
        model.scale.fill_(3.0)
        model.linear.weight.fill_(0.5)
        model.linear.bias.fill_(0.25)
    plain = Scaled().to(rank_device())
    with torch.no_grad():
        for name, value in whole(model).items():
            plain.get_parameter(name).copy_(value)
    for net in (model, plain):
        net(randn(2, 3)).square().sum().backward()
    average_grads_(plain.parameters())
    assert torch.equal(model.scale.grad.full_tensor(), plain.scale.grad)
    assert torch.equal(model.linear.weight.grad.full_tensor(), plain.linear.weight.grad)


@pytest.mark.cpu_only("torch has kernels of LSTMs for its own devices only")
@on_ranks(2)
def test_recurrent_modules():
    """An RNN, which keeps a list of its weights, computes with whole ones, also after a cast or from meta."""
    torch.manual_seed(1)
    plain = nn.LSTM(3, 4, num_layers=2).to(rank_device())
    for start in ("cpu", "double", "meta"):
        model = fully_shard(copy.deepcopy(plain).to("meta") if start == "meta" else copy.deepcopy(plain))
        if start == "double":
            model.double().float()
        if start == "meta":
            model.to_empty(device=rank_device())
            source = fully_shard(copy.deepcopy(plain))
            with torch.no_grad():
                for param, value in zip(model.parameters(), source.parameters(), strict=True):
                    param.copy_(value)
        for _ in range(2):
            assert torch.equal(model(randn(5, 2, 3))[0], plain(randn(5, 2, 3))[0])
    model = fully_shard(copy.deepcopy(plain), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    assert model(randn(5, 2, 3))[0].dtype is torch.bfloat16
    assert not any(unit.is_gathered for _, unit in units_below(model)[1:])
