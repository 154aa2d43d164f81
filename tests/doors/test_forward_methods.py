"""Registered methods run with gathered parameters, as ``forward`` does; others raise an error that names the fix."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fairshard.errors import ParameterShardedError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import MixedPrecisionPolicy, fully_shard, register_forward_method, register_fsdp_forward_method
from tests.kit import rank_device
from tests.kit.doors import DOORS, both_apis, gathered, inside, main_doors, shard
from tests.on_ranks import on_ranks
from tests.reference import randn, train_both

pytestmark = pytest.mark.behaviour("forward methods")


class Coder(nn.Module):
    """An encoder and a decoder, run together by ``forward`` or each on its own; both use the module's parameters."""

    around = ()

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.down = nn.Parameter(torch.randn(4, 6))
        self.middle = nn.Linear(4, 4)
        self.up = nn.Linear(4, 6)

    def encode(self, x, *, scale=1.0):
        return {"code": self.middle(torch.tanh(F.linear(x, self.down))) * scale}

    def decode(self, code):
        return self.up(code)

    def both(self, x):
        return self.decode(self.encode(x)["code"])

    def stream(self, x):
        yield self.encode(x)

    async def later(self, x):
        return self.encode(x)

    @property
    def norm(self):
        return self.down.norm()

    @property
    def first_shape(self):
        return next(self.parameters()).shape

    def forward(self, x):
        caller = self.around[0] if self.around else self
        return self.decode(caller.encode(x)["code"])


def coder():
    return Coder().to(rank_device())


def sharded(door, *names, inner=True, **kwargs):
    """A `Coder`, with a unit inside if ``inner``, and its methods ``names`` registered."""
    model = shard(coder(), door, *(["middle"] if inner else []), **kwargs)
    for name in names:
        register_forward_method(model, name)
    return model


def by_methods(model, key):
    code = model.encode(randn(3, 6, key=key), scale=2.0)["code"]
    return model.decode(torch.tanh(code)).square().sum()


@pytest.mark.pairs
@on_ranks(1, 2)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("setting", ["plain", "offload", "kept"])
@pytest.mark.parametrize("inner", [True, False])
def test_training_through_methods(door, setting, inner):
    """Training through methods gives the losses and weights of the plain module, and frees all units."""
    model = sharded(door, "encode", "decode", inner=inner, setting=setting)
    train_both(coder(), model, by_methods)
    assert gathered(model) == []


@on_ranks(2)
def test_methods_of_two_wrappers():
    """A method that is registered with the outer one of two wrappers of a module is found through both."""
    model = FSDP(sharded("flat"))
    for name in ("encode", "decode"):
        register_forward_method(model, name)
    train_both(coder(), model, by_methods)


@on_ranks(2)
@both_apis
@pytest.mark.parametrize("inner", [True, False])
def test_methods_and_forward_in_turns(door, inner):
    """A registered method called under ``no_grad`` between passes of the whole model changes nothing."""

    def loss_of(model, key):
        with torch.no_grad():
            model.encode(randn(2, 6))
            model(randn(2, 6))
        return model(randn(3, 6, key=key)).square().sum()

    model = sharded(door, "encode", inner=inner)
    train_both(coder(), model, loss_of)
    with torch.no_grad():
        assert not model.encode(randn(2, 6))["code"].requires_grad
    assert gathered(model) == []


class Outer(nn.Module):
    """Calls a method of a coder, and the coder, in its forward."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        torch.manual_seed(3)
        self.head = nn.Linear(4, 2).to(rank_device())

    def forward(self, x):
        return self.head(self.inner.encode(x)["code"]) + self.inner(x).sum()


@on_ranks(2)
@both_apis
def test_a_method_called_from_within(door):
    """A registered method called in the forward of its module, or of an outer one, leaves the module gathered."""
    model, plain = sharded(door, "encode", inner=False), coder()
    inside(model).around = (model,)
    assert torch.equal(model(randn(3, 6)), plain(randn(3, 6)))
    outer = shard(Outer(sharded(door, "encode")), door)
    train_both(Outer(coder()), outer, lambda net, key: net(randn(3, 6, key=key)).square().sum())


@on_ranks(2)
@both_apis
def test_casts(door):
    """Inputs and outputs of a registered method are cast like those of ``forward``."""
    of_fully_shard = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64)}
    settings, dtype = ({"setting": "bf16"}, torch.bfloat16) if door == "flat" else (of_fully_shard, torch.float64)
    model = sharded(door, "decode", inner=False, **settings)
    seen = []
    inside(model).up.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    assert model.decode(randn(2, 4)).dtype == dtype
    assert seen == [torch.bfloat16]


@on_ranks(2)
@both_apis
def test_an_exception_leaves_everything_sharded(door):
    """A method that raises leaves all units sharded, as a forward that raises does."""
    model = sharded(door, "decode")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes"):
            model.decode(randn(2, 5))
        assert gathered(model) == []
    assert model.decode(randn(2, 4)).shape == (2, 6)


UP = r"`up\.(weight|bias)`.*`up`.*register_f"
CURE = r'register_fsdp_forward_method\(module, "encode"\)'
UNREGISTERED = {  # by door: ways in, and what they raise
    "flat": [
        (lambda model: model.encode(randn(2, 6)), "`down` must be gathered.*register_forward_method"),
        (lambda model: model.decode(randn(2, 4)), UP),
        (lambda model: model.up(randn(2, 4)), UP),
        (lambda model: model.module(randn(2, 6)), "`down`"),
        (lambda model: model.first_shape, r'`first_shape` of the wrapped Coder.*wrapper, "first_shape"'),
    ],
    "fully_shard": [
        (lambda model: model.encode(randn(2, 6)), rf"`encode` of the sharded Coder `root`.*{CURE}"),
        (lambda model: model.both(randn(2, 6)), rf"`encode` of the sharded Coder.*{CURE}"),
        (lambda model: model.decode(randn(2, 4)), r"`up\.(weight|bias)`"),
        (lambda model: model.up(randn(2, 4)), UP),
        (lambda model: model.forward(randn(2, 6)), "`encode` of|`forward` of"),
    ],
}


@on_ranks(2)
@pytest.mark.parametrize("door", UNREGISTERED)
def test_unregistered_ways_in_raise(door):
    """Unregistered methods, ``forward`` and submodules raise and name the fix, before and after a pass."""
    model = sharded(door, inner=False)
    for repeat in range(2):
        for way, match in UNREGISTERED[door]:
            with pytest.raises(ParameterShardedError, match=match):
                way(model)
        if not repeat:
            model(randn(2, 6)).sum().backward()


class Peeking(nn.Module):
    """Uses the weight of a unit in its own forward."""

    def __init__(self):
        super().__init__()
        self.inner = fully_shard(nn.Linear(4, 4).to(rank_device()))

    def forward(self, x):
        return F.linear(x, self.inner.weight)


@on_ranks(2)
def test_what_works_on_dtensors_needs_no_registration():
    """A method that computes with DTensors runs; a forward that computes with those of another unit is named."""
    model = sharded("fully_shard")
    assert model.norm.full_tensor() > 0
    with pytest.raises(ParameterShardedError, match=r"`forward` of the sharded Peeking.*parameters of `inner`"):
        fully_shard(Peeking())(randn(2, 4))


@on_ranks(2)
@main_doors
def test_copies_keep_their_methods(door):
    """deepcopy and pickle keep registered methods; a copy's later ones are its own."""
    model = sharded(door, "encode")
    with torch.no_grad():
        expected = model.encode(randn(2, 6))["code"]
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other.encode(randn(2, 6))["code"], expected)
            with pytest.raises(ParameterShardedError):
                other.decode(randn(2, 4))
            register_forward_method(other, "decode")
            assert other.decode(randn(2, 4)).shape == (2, 6)
        with pytest.raises(ParameterShardedError):
            model.decode(randn(2, 4))


@on_ranks(2)
def test_methods_of_the_instance():
    """A method set on the instance, before or after it is registered, runs with gathered parameters."""
    model = sharded("fully_shard", inner=False)
    expected = F.linear(randn(2, 4), coder().up.weight)
    for factor in (2, 4):
        model.more = lambda code, factor=factor: F.linear(code, model.up.weight) * factor
        if factor == 2:
            register_forward_method(model, "more")
        assert torch.equal(model.more(randn(2, 4)), expected * factor)


GENERATOR = r"`{}` of Coder is a generator or coroutine"
REFUSED = [  # door, or None: a module that is not sharded; name; error
    (None, "encode", TypeError, "Coder"),
    ("flat", "generate", AttributeError, "Coder.*generate"),
    ("flat", "training", AttributeError, "training"),
    *(("flat", name, ValueError, name) for name in ("forward", "state_dict", "no_sync")),
    *((door, name, TypeError, GENERATOR.format(name)) for name in ("stream", "later") for door in DOORS),
    ("fully_shard", "no_such", AttributeError, "`no_such`"),
    ("fully_shard", "down", AttributeError, "`down`"),
]
REFUSED_AS_IN_TORCH = [
    *(("fully_shard", name, ValueError, f"Coder must have a method `{name}`") for name in ("no_such", "down")),
    *(("fully_shard", name, TypeError, GENERATOR.format(name)) for name in ("stream", "later")),
    ("fully_shard", "unshard", ValueError, "`unshard` must not be a method of FSDPModule"),
    ("flat", "no_such", ValueError, "`no_such`"),
]


@on_ranks(1)
def test_what_cannot_be_registered():
    """Modules that are not sharded, names that are no methods, generators, and the door's own methods are refused."""
    for register, cases in ((register_forward_method, REFUSED), (register_fsdp_forward_method, REFUSED_AS_IN_TORCH)):
        for door, name, error, match in cases:
            with pytest.raises(error, match=match):
                register(coder() if door is None else sharded(door), name)
    plain = coder()
    assert register_fsdp_forward_method(plain, "no such") is None  # as in torch: it does nothing
    assert "encode" not in vars(plain)
    for door in ("flat", "fully_shard"):
        model = sharded(door)
        register_fsdp_forward_method(model, "encode")
        model.encode(randn(2, 6))


@on_ranks(1)
def test_methods_that_are_replaced_on_the_class():
    """Sharded instances, old and new, run the methods that their class has now."""

    class Other(Coder):
        pass

    plain, old = Other(), fully_shard(Other())
    assert type(old) is type(copy.deepcopy(old))
    x = randn(3, 6)
    assert torch.equal(old(x), plain(x))
    Other.forward = lambda self, x: self.decode(self.encode(x)["code"]) + 1
    Other.both = lambda self, x: self(x) * 2
    for model in (old, fully_shard(Other())):
        assert torch.equal(model(x), plain(x))
        assert torch.equal(model.both(x), plain.both(x))
