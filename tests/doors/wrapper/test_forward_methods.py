"""Registered methods run with gathered parameters, as ``forward`` does; others raise an error that names the fix."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.engine.tree import units_below
from fairshard.errors import ParameterShardedError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import MixedPrecision, register_forward_method
from tests.kit import rank_device
from tests.on_ranks import on_ranks
from tests.reference import randn, train_alike


class Coder(nn.Module):
    """An encoder and a decoder, run together by ``forward`` or each on its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.down = nn.Linear(6, 4)
        self.middle = nn.Linear(4, 4)
        self.up = nn.Linear(4, 6)

    def encode(self, x, *, scale=1.0):
        return {"code": self.middle(torch.tanh(self.down(x))) * scale}

    def decode(self, code):
        return self.up(code)

    def stream(self, x):
        yield self.encode(x)

    async def later(self, x):
        return self.encode(x)

    def forward(self, x):
        return self.decode(self.encode(x)["code"])


def coder():
    return Coder().to(rank_device())


def wrap(model, *names, inner=True, layers=1, **kwargs):
    if inner:
        model.middle = FSDP(model.middle, **kwargs)
    for _ in range(layers):
        model = FSDP(model, **kwargs)
    for name in names:
        register_forward_method(model, name)
    return model


def by_methods(model, key):
    code = model.encode(randn(3, 6, key=key), scale=2.0)["code"]
    return model.decode(torch.tanh(code)).square().sum()


@on_ranks(1, 2, 3)
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"flatten_parameters": False}, {"reshard_after_forward": False}, {"cpu_offload": True}, {"layers": 2}],
    ids=str,
)
def test_training_through_methods(kwargs):
    """Training through methods gives the losses and weights of the unwrapped module."""
    wrapped = train_alike(coder(), lambda model: wrap(model, "encode", "decode", **kwargs), by_methods)
    assert not any(unit.is_gathered for _, unit in units_below(wrapped))


@on_ranks(2)
@pytest.mark.parametrize("inner", [True, False])
def test_methods_and_forward_in_turns(inner):
    """A registered method called under ``no_grad`` between passes of the whole model changes nothing."""

    def loss_of(model, key):
        with torch.no_grad():
            model.encode(randn(2, 6))
            model(randn(2, 6))
        return model(randn(3, 6, key=key)).square().sum()

    wrapped = train_alike(coder(), lambda model: wrap(model, "encode", inner=inner), loss_of)
    with torch.no_grad():
        assert not wrapped.encode(randn(2, 6))["code"].requires_grad
    assert not any(unit.is_gathered for _, unit in units_below(wrapped))


@on_ranks(2)
def test_methods_of_an_inner_unit():
    """An outer module may call a registered method of an inner wrapper in its forward."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.coder = coder()
            self.head = nn.Linear(4, 2).to(rank_device())

        def forward(self, x):
            return self.head(self.coder.encode(x)["code"]) + self.coder(x).sum()

    torch.manual_seed(5)
    plain = Outer()

    def wrapping(model):
        model.coder = wrap(model.coder, "encode")
        return FSDP(model)

    train_alike(plain, wrapping, lambda model, key: model(randn(3, 6, key=key)).square().sum())


@on_ranks(2)
def test_a_method_called_from_within():
    """A registered method that the module's own forward calls through the wrapper leaves the unit gathered."""

    class Loop(Coder):
        wrapper = ()

        def forward(self, x):
            code = (self.wrapper[0] if self.wrapper else self).encode(x)["code"]
            return self.up(code)

    model = Loop().to(rank_device())
    plain = copy.deepcopy(model)
    wrapped = wrap(model, "encode", inner=False)
    model.wrapper = (wrapped,)
    x = randn(3, 6)
    assert torch.equal(wrapped(x), plain(x))


@on_ranks(2)
def test_inputs_are_cast():
    """Under mixed precision the inputs of a registered method are cast like those of ``forward``."""
    wrapped = wrap(coder(), "decode", inner=False, mixed_precision=MixedPrecision(torch.bfloat16))
    assert wrapped.decode(randn(2, 4)).dtype == torch.bfloat16


@on_ranks(2)
def test_an_exception_leaves_everything_sharded():
    """A method that raises leaves all units sharded, as a forward that raises does."""
    wrapped = wrap(coder(), "decode")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes"):
            wrapped.decode(randn(2, 5))
        assert not any(unit.is_gathered for _, unit in units_below(wrapped))
    assert wrapped.decode(randn(2, 4)).shape == (2, 6)


@on_ranks(2)
def test_unregistered_ways_in_raise():
    """Unregistered methods, submodules and the inner module raise, naming module, parameter and fix."""
    wrapped = wrap(coder(), inner=False)
    ways = [
        (lambda: wrapped.encode(randn(2, 6)), "down"),
        (lambda: wrapped.up(randn(2, 4)), "up"),
        (lambda: wrapped.module(randn(2, 6)), "down"),
    ]
    for repeat in range(2):
        for way, name in ways:
            with pytest.raises(ParameterShardedError, match=rf"`{name}\.(weight|bias)`.*`{name}`.*register_forward_me"):
                way()
        if not repeat:
            wrapped(randn(2, 6)).sum().backward()


class Asking(Coder):
    """Looks up its own parameters before it computes."""

    @property
    def device(self):
        return next(self.parameters()).device

    @property
    def first_shape(self):
        return next(self.parameters()).shape

    def place(self, x):
        named = {name: tuple(param.shape) for name, param in self.named_parameters()}
        return x.to(self.device), named


@on_ranks(2)
@pytest.mark.parametrize("kwargs", [{}, {"use_orig_params": True}, {"flatten_parameters": False}], ids=str)
def test_methods_that_look_for_parameters(kwargs):
    """Registered methods find the plain names; unregistered methods of a flattened module raise and name the fix."""
    model = Asking().to(rank_device())
    whole = {name: tuple(param.shape) for name, param in model.named_parameters()}
    wrapped, x = FSDP(model, **kwargs), randn(2, 6)
    names = [name for name, _ in wrapped.named_parameters()]
    if not kwargs:
        assert wrapped.device.type == rank_device().type
        for name, look in (("first_shape", lambda: wrapped.first_shape), ("place", lambda: wrapped.place(x))):
            with pytest.raises(ParameterShardedError, match=rf'`{name}` of the wrapped Asking.*wrapper, "{name}"'):
                look()
    register_forward_method(wrapped, "place")
    for _ in range(2):
        with torch.no_grad():
            placed, named = wrapped.place(x)
        assert torch.equal(placed, x)
        assert list(named) == list(whole)
        assert kwargs or named == whole
        assert [name for name, _ in wrapped.named_parameters()] == names
        wrapped(x).sum().backward()
    if not kwargs:
        with pytest.raises(ParameterShardedError):
            model.up.weight.sum()


@on_ranks(2)
def test_copies_keep_their_methods():
    """deepcopy and pickle keep registered methods."""
    wrapped = wrap(coder(), "encode")
    expected = wrapped.encode(randn(2, 6))["code"]
    for other in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert torch.equal(other.encode(randn(2, 6))["code"], expected)


@on_ranks(1)
def test_what_cannot_be_registered():
    """Modules without a wrapper, names that do not exist, and names of the wrapper's own methods are refused."""
    wrapped = wrap(coder())
    assert dist.get_world_size() == 1
    with pytest.raises(TypeError, match="Coder"):
        register_forward_method(wrapped.module, "encode")
    with pytest.raises(AttributeError, match=r"Coder.*generate"):
        register_forward_method(wrapped, "generate")
    with pytest.raises(AttributeError, match="training"):
        register_forward_method(wrapped, "training")
    for name in ("stream", "later"):
        with pytest.raises(TypeError, match=f"`{name}` of Coder is a generator or coroutine"):
            register_forward_method(wrapped, name)
    for name in ("forward", "state_dict", "no_sync"):
        with pytest.raises(ValueError, match=name):
            register_forward_method(wrapped, name)
