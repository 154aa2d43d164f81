"""Registered methods run with gathered parameters, as ``forward`` does; others raise an error that names the fix."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fairshard.engine.tree import units_below
from fairshard.errors import ParameterShardedError
from fairshard.nn import FSDPModule, MixedPrecisionPolicy, fully_shard, register_forward_method
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import register_fsdp_forward_method as register
from tests.doors.fully_shard.beside import train_beside
from tests.kit import rank_device
from tests.on_ranks import in_full, on_ranks
from tests.reference import randn


class Coder(nn.Module):
    """An encoder and a decoder, run together by ``forward`` or each on its own; both use the module's parameters."""

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

    def forward(self, x):
        return self.decode(self.encode(x)["code"])


def coder():
    return Coder().to(rank_device())


def shard(model, *names, inner=True, **kwargs):
    if inner:
        fully_shard(model.middle, **kwargs)
    fully_shard(model, **kwargs)
    for name in names:
        register(model, name)
    return model


def by_methods(model, key):
    code = model.encode(randn(3, 6, key=key), scale=2.0)["code"]
    return model.decode(torch.tanh(code)).square().sum()


def steps_alike(wrap, loss_of):
    """Train the sharded model and its plain twin, and compare losses and values."""
    plain, model = coder(), wrap(coder())
    train_beside(model, plain, loss_of)
    return model


@on_ranks(2, in_full(1))
def test_training_through_methods():
    """Training through methods gives the losses and weights of the plain module, and frees all units."""
    for kwargs in ({}, {"inner": False}, {"reshard_after_forward": False}):
        model = steps_alike(lambda net, kwargs=kwargs: shard(net, "encode", "decode", **kwargs), by_methods)
        assert not any(unit.is_gathered for _, unit in units_below(model))


@on_ranks(2)
def test_methods_and_forward_in_turns():
    """A registered method called under ``no_grad`` between passes of the whole model changes nothing."""

    def loss_of(model, key):
        with torch.no_grad():
            model.encode(randn(2, 6))
            model(randn(2, 6))
        return model(randn(3, 6, key=key)).square().sum()

    model = steps_alike(lambda net: shard(net, "encode"), loss_of)
    with torch.no_grad():
        assert not model.encode(randn(2, 6))["code"].requires_grad
    assert not any(unit.is_gathered for _, unit in units_below(model))


@on_ranks(2)
def test_a_method_called_from_within():
    """A registered method called in the forward of its module, or of an outer one, leaves the module gathered."""
    model, plain = shard(coder(), "encode", "forward"), coder()
    assert torch.equal(model(randn(3, 6)), plain(randn(3, 6)))
    assert torch.equal(model.forward(randn(3, 6)), plain(randn(3, 6)))

    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            torch.manual_seed(3)
            self.head = nn.Linear(4, 2).to(rank_device())

        def forward(self, x):
            return self.head(self.inner.encode(x)["code"]) + self.inner(x).sum()

    outer, expected = fully_shard(Outer(shard(coder(), "encode"))), Outer(coder())
    for net in (outer, expected):
        net(randn(3, 6, key=1)).sum().backward()
    torch.distributed.all_reduce(expected.inner.down.grad)
    assert torch.equal(outer.inner.down.grad.full_tensor(), expected.inner.down.grad / 2)


@on_ranks(2)
def test_casts():
    """Inputs and outputs of a registered method are cast like those of ``forward``."""
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64)
    model = shard(coder(), "decode", inner=False, mp_policy=policy)
    seen = []
    model.up.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    assert model.decode(randn(2, 4)).dtype == torch.float64
    assert seen == [torch.bfloat16]


@on_ranks(2)
def test_an_exception_leaves_everything_sharded():
    """A method that raises leaves all units sharded, as a forward that raises does."""
    model = shard(coder(), "decode")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes"):
            model.decode(randn(2, 5))
        assert not any(unit.is_gathered for _, unit in units_below(model))
    assert model.decode(randn(2, 4)).shape == (2, 6)


@on_ranks(2)
def test_unregistered_ways_in_raise():
    """Unregistered methods, ``forward`` and submodules raise and name the fix; code that works on DTensors runs."""
    model = shard(coder(), inner=False)
    cure = r'register_fsdp_forward_method\(module, "{}"\)'
    ways = [
        (lambda: model.encode(randn(2, 6)), rf"`encode` of the sharded Coder `root`.*{cure.format('encode')}"),
        (lambda: model.both(randn(2, 6)), rf"`encode` of the sharded Coder.*{cure.format('encode')}"),
        (lambda: model.forward(randn(2, 6)), "`encode` of|`forward` of"),
        (lambda: model.up(randn(2, 4)), r"`up\.(weight|bias)`.*`up`.*register_fsdp_forward_method"),
        (lambda: model.decode(randn(2, 4)), r"`up\.(weight|bias)`"),
    ]
    for repeat in range(2):
        for way, match in ways:
            with pytest.raises(ParameterShardedError, match=match):
                way()
        if not repeat:
            model(randn(2, 6)).sum().backward()
    assert model.norm.full_tensor() > 0

    class Peeking(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = fully_shard(nn.Linear(4, 4).to(rank_device()))

        def forward(self, x):
            return F.linear(x, self.inner.weight)

    with pytest.raises(ParameterShardedError, match=r"`forward` of the sharded Peeking.*parameters of `inner`"):
        fully_shard(Peeking())(randn(2, 4))


@on_ranks(2)
def test_copies_keep_their_methods():
    """deepcopy and pickle keep registered methods."""
    model = shard(coder(), "encode")
    with torch.no_grad():
        expected = model.encode(randn(2, 6))["code"]
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other.encode(randn(2, 6))["code"], expected)
            with pytest.raises(ParameterShardedError):
                other.decode(randn(2, 4))
            register(other, "decode")
            assert other.decode(randn(2, 4)).shape == (2, 6)
        with pytest.raises(ParameterShardedError):
            model.decode(randn(2, 4))


@on_ranks(2)
def test_methods_of_the_instance():
    """A method set on the instance, before or after it is registered, runs with gathered parameters."""
    model = shard(coder(), inner=False)
    model.double_up = lambda code: F.linear(code, model.up.weight) * 2
    register(model, "double_up")
    expected = F.linear(randn(2, 4), coder().up.weight) * 2
    assert torch.equal(model.double_up(randn(2, 4)), expected)
    model.double_up = lambda code: F.linear(code, model.up.weight) * 4
    assert torch.equal(model.double_up(randn(2, 4)), expected * 2)


@on_ranks(1)
def test_arguments():
    """Registering an unsuitable method raises an error; on a module that is not sharded it does nothing."""
    plain, model = coder(), shard(coder())
    assert register(plain, "no such") is None
    assert "encode" not in vars(plain)
    for name in ("no_such", "down"):
        with pytest.raises(ValueError, match=f"Coder must have a method `{name}`"):
            register(model, name)
    with pytest.raises(AttributeError, match="`no_such`"):
        register_forward_method(model, "no_such")
    for name in ("stream", "later"):
        for way in (register, register_forward_method):
            with pytest.raises(TypeError, match=f"`{name}` of Coder is a generator or coroutine"):
                way(model, name)
    with pytest.raises(ValueError, match="`unshard` must not be a method of FSDPModule"):
        register(model, "unshard")
    register_forward_method(model, "encode")
    model.encode(randn(2, 6))
    wrapped = FSDP(coder())
    with pytest.raises(ValueError, match="`no_such`"):
        register(wrapped, "no_such")
    register(wrapped, "encode")
    wrapped.encode(randn(2, 6))
    assert isinstance(model, FSDPModule)
    assert type(model) is type(copy.deepcopy(model))


@on_ranks(1)
def test_methods_that_are_replaced_on_the_class():
    """Sharded instances, old and new, run the methods that their class has now."""

    class Other(Coder):
        pass

    plain, old = Other(), shard(Other())
    x = randn(3, 6)
    assert torch.equal(old(x), plain(x))
    Other.forward = lambda self, x: self.decode(self.encode(x)["code"]) + 1
    Other.both = lambda self, x: self(x) * 2
    for model in (old, shard(Other())):
        assert torch.equal(model(x), plain(x))
        assert torch.equal(model.both(x), plain.both(x))
