"""Modules sharded on the meta device get memory and values later; casts and freezing take effect."""

import copy

import pytest
import torch
from torch import nn

from fairshard.errors import FairshardError
from fairshard.nn import MixedPrecisionPolicy, fully_shard
from tests.kit import rank_device
from tests.kit.doors import gathered, whole
from tests.kit.doors import shard as shard_units
from tests.models import Tiny, loss_of_tiny, mlp, tiny, tiny_batch
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state, randn, sgd, squares, train_both

pytestmark = pytest.mark.behaviour("late values of fully_shard")


def shard(model, setting="plain"):
    """Shard into nested units, with one for the rest."""
    return shard_units(model, "fully_shard", "first.up", "first", "second", "shared", setting=setting)


def on_meta():
    with torch.device("meta"):
        return Tiny()


def loss_of(model, key):
    """A loss of a `Tiny` of any dtype."""
    tokens, extra, _ = tiny_batch(torch.distributed.get_rank(), *key)
    return model(tokens, extra.to(model.head.weight.dtype)).float().square().mean()


@on_ranks(2, in_full(1), in_full(3))
@pytest.mark.parametrize("setting", ["plain", "offload"])
def test_to_empty_and_initialise(setting):
    """All ranks train from the values that ``reset_parameters`` and ``nn.init`` wrote to DTensors."""
    model = shard(on_meta(), setting)
    assert all(param.is_meta for param in model.parameters())
    model.to_empty(device="cpu" if setting == "offload" else rank_device())
    torch.manual_seed(7)
    with torch.no_grad():
        for part in model.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
        nn.init.constant_(model.head.bias, 0.5)
        nn.init.normal_(model.embed.weight, std=0.1)
    plain = tiny()
    plain.load_state_dict(whole(model))
    assert plain.head.bias.eq(0.5).all()
    assert plain.first.norm.weight.eq(1).all()
    train_both(plain, model, loss_of)


@on_ranks(2)
@pytest.mark.parametrize("way", ["root", "plain submodule", "after to_empty"])
def test_assigned_dtensors(way):
    """``load_state_dict(assign=True)`` of another sharded model's DTensors provides both memory and values."""
    source, model = shard(tiny(seed=3)), shard(on_meta())
    params, before, state = list(model.parameters()), whole(source), source.state_dict()
    if way == "after to_empty":
        model.to_empty(device=rank_device())
    if way == "plain submodule":
        model.norm.load_state_dict({name: state[f"norm.{name}"] for name in ("weight", "bias")}, assign=True)
    model.load_state_dict(state, assign=True)
    assert all(mine is param for mine, param in zip(model.parameters(), params, strict=True))
    train_both(tiny(seed=3), model, loss_of)
    assert_same_state(whole(source), before)  # no memory is shared


@on_ranks(2)
def test_still_on_meta():
    """The first forward names parameters without memory, and works once they have it."""
    model = shard(on_meta())
    for _ in range(2):
        with pytest.raises(FairshardError, match=r"values before the first.*`embed.weight`.* more are still on the m"):
            loss_of_tiny(model, ())
    model.first.to_empty(device=rank_device())
    with pytest.raises(FairshardError, match=r"`second.norm.weight`|`embed.weight`"):
        loss_of_tiny(model, ())
    model.to_empty(device=rank_device())
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert loss_of_tiny(model, ()).isfinite()


CASTS = {
    "root": lambda model: model.double(),
    "inner": lambda model: (model.first.double().float(), model.shared.half().float()),
    "submodule": lambda model: (model.double(), model.norm.float().double()),
    "each": lambda model: [part.to(torch.float64) for part in model.modules()],
}


@on_ranks(2)
@pytest.mark.parametrize("when", CASTS)
def test_casts_before_the_first_forward(when):
    """The root, an inner unit or a plain submodule may be cast before the first forward."""
    plain, model = tiny(), shard(tiny())
    for net in (plain, model):
        CASTS[when](net)
    train_both(plain, model, loss_of)


class Mixed(nn.Module):
    """Three layers, of which the second may have another dtype."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.one, self.two, self.three = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return self.three(self.two(self.one(x).to(self.two.weight.dtype)).float())


@on_ranks(2)
def test_a_unit_of_several_dtypes():
    """A unit may have several dtypes: a submodule cast on its own computes in its dtype, the others in theirs."""
    plain, model = Mixed().to(rank_device()), fully_shard(Mixed().to(rank_device()))
    optimizer = sgd(model)
    for net in (plain, model):
        net.two.double()
    assert all(param is own for param, own in zip(model.parameters(), optimizer.param_groups[0]["params"], strict=True))
    train_both(plain, model, squares)


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
    assert model.to(rank_device()).float() is model
    assert_same_state(whole(model), before)
    assert all(param.grad is not None for param in model.parameters())
    optimizer.step()
    model(x).sum().backward()
    handle = model[0].register_forward_hook(lambda *_: model.to(rank_device()) and None)
    model(x).sum().backward()  # the same call changes nothing inside a forward
    handle.remove()
    model[1].half()
    with pytest.raises(TypeError, match="must keep one dtype"):
        model(x)
    model[1].float()
    model(x)


class Scaled(nn.Module):
    """A Linear and a scale without dimensions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) * self.scale


@on_ranks(2, in_full(3))
def test_parameters_without_dimensions():
    """Parameters without dimensions are whole on each rank, get the mean gradient, and may start on the meta device."""
    plain = Scaled().to(rank_device())
    with torch.device("meta"):
        model = fully_shard(Scaled())
    assert model.scale.shape == ()
    model.to_empty(device=rank_device())
    model.load_state_dict(plain.state_dict())
    train_both(plain, model, squares)


@pytest.mark.cpu_only("torch has kernels of LSTMs for its own devices only")
@on_ranks(2)
@pytest.mark.parametrize("start", ["cpu", "double", "meta"])
def test_recurrent_modules(start):
    """An RNN, which keeps a list of its weights, computes with whole ones, also after a cast or from meta."""
    torch.manual_seed(1)
    plain = nn.LSTM(3, 4, num_layers=2).to(rank_device())
    model = fully_shard(copy.deepcopy(plain).to("meta") if start == "meta" else copy.deepcopy(plain))
    if start == "double":
        model.double().float()
    if start == "meta":
        model.to_empty(device=rank_device())
        model.load_state_dict(plain.state_dict())
    for _ in range(2):
        assert torch.equal(model(randn(5, 2, 3))[0], plain(randn(5, 2, 3))[0])
    narrow = fully_shard(copy.deepcopy(plain), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    assert narrow(randn(5, 2, 3))[0].dtype is torch.bfloat16
    assert gathered(narrow) in ([], [""])
