"""Modules that keep references to their parameters, or compute them, train as they do unwrapped."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence

from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.kit import rank_device
from tests.kit.doors import whole
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, randn, train_alike

pytestmark = pytest.mark.behaviour("modules of torch and of users")


class Made(nn.Module):
    """Has ``parts``, modules or parameters, and computes ``call(self, x)``."""

    def __init__(self, call, **parts):
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.call(self, x)


def recurrent(kind):
    rnn = kind(4, 6, num_layers=2, batch_first=True, bidirectional=True)
    return Made(lambda self, x: self.out(self.rnn(x)[0]), rnn=rnn, out=nn.Linear(12, 2))


def packed():
    lengths = torch.tensor([5, 3], device="cpu")

    def call(self, x):
        return self.rnn(pack_padded_sequence(x, lengths, batch_first=True))[0].data

    return Made(call, rnn=nn.GRU(4, 6, batch_first=True))


def attention(**kwargs):
    module = nn.MultiheadAttention(4, 2, batch_first=True, **kwargs)
    return Made(lambda self, x: self.attention(x, x, x, need_weights=False)[0], attention=module)


def fused():
    """Scaled dot product attention on projections of a single weight."""
    return Made(
        lambda self, x: F.scaled_dot_product_attention(*self.qkv(x).unsqueeze(1).chunk(3, dim=-1)), qkv=nn.Linear(4, 12)
    )


def direct():
    """Parameters used without a module, in a list and in a dictionary, one of them twice."""

    def call(self, x):
        y = x @ self.items[0] + self.items[1]
        return y * self.named["scale"] + self.named["shift"] * self.items[1]

    items = nn.ParameterList([nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3))])
    named = nn.ParameterDict({"scale": nn.Parameter(torch.randn(())), "shift": nn.Parameter(torch.randn(3))})
    return Made(call, items=items, named=named)


class Symmetric(nn.Module):
    """A parametrization."""

    def forward(self, weight):
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def cached():
    """A parameter computed from another, cached in the forward."""

    def call(self, x):
        with parametrize.cached():
            return self.layer(self.layer(x))

    made = Made(call, layer=nn.Linear(4, 4))
    parametrize.register_parametrization(made.layer, "weight", Symmetric())
    return made


def views():
    """Transposes and slices of weights, saved by autograd in the forward."""

    def call(self, x):
        return (x @ self.weight.t()) @ self.weight[:, :3] + x @ self.weight[:4, 1:]

    return Made(call, weight=nn.Parameter(torch.randn(6, 4)))


def returns():
    """A unit that returns a parameter and rows of another; the module around it uses both."""

    def inner(self, x):
        return x @ self.rows.t(), self.rows[: x.shape[1]], self.scale

    def outer(self, x):
        y, rows, scale = self.inner(x)
        return (y.sum(-1, keepdim=True) + rows) * scale.exp()

    parts = {"rows": nn.Parameter(torch.randn(6, 4)), "scale": nn.Parameter(torch.randn(()))}
    return Made(outer, inner=Made(inner, **parts))


MODELS = {
    "LSTM": lambda: recurrent(nn.LSTM),
    "GRU": lambda: recurrent(nn.GRU),
    "RNN": lambda: recurrent(nn.RNN),
    "packed": packed,
    "attention": attention,
    "attention_kv_bias": lambda: attention(add_bias_kv=True),
    "encoder_layer": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    "sdpa": fused,
    "direct": direct,
    "norms": lambda: nn.Sequential(
        nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.GroupNorm(5, 5), nn.RMSNorm(6)
    ),
    "convolutions": lambda: nn.Sequential(nn.Conv1d(5, 3, 2), nn.ConvTranspose1d(3, 2, 2), nn.PReLU()),
    "bilinear": lambda: Made(lambda self, x: self.bilinear(x, x), bilinear=nn.Bilinear(4, 4, 3)),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
    "old_weight_norm": lambda: torch.nn.utils.weight_norm(nn.Linear(4, 3)),
    "spectral_norm": lambda: torch.nn.utils.spectral_norm(nn.Linear(4, 3)),
    "cached": cached,
    "views": views,
    "returns": returns,
}
RECURRENT = ("LSTM", "GRU", "packed")
ON_CPU = functools.partial(pytest.param, marks=pytest.mark.cpu_only("torch has such kernels for its own devices only"))


@pytest.mark.pairs
@on_ranks(1, 2)
@pytest.mark.parametrize("name", [name if name not in RECURRENT else ON_CPU(name) for name in MODELS])
@pytest.mark.parametrize("flatten", [True, False])
def test_it_trains_as_the_plain_module(name, flatten):
    """A module trains as the plain one, as a unit inside a unit, gathered before forward and backward."""

    def build():
        torch.manual_seed(1)
        return nn.Sequential(MODELS[name]()).to(rank_device())

    def wrap(model):
        part = model[0]
        if name == "returns":
            part.inner = FSDP(part.inner, flatten_parameters=flatten)
        return FSDP(nn.Sequential(FSDP(part, flatten_parameters=flatten)), flatten_parameters=flatten)

    rtol = None if name != "returns" or rank_device().type == "cpu" else 1e-5  # kernels may round 0-d tensors otherwise
    train_alike(build, wrap, lambda model, key: model(randn(2, 5, 4, key=key)).square().sum(), rtol=rtol)


@pytest.mark.cpu_only("sparse tensors are a feature of torch's own devices")
@on_ranks(2)
def test_sparse_embedding_gradients():
    """A sparse gradient is reduced like a dense one."""
    index = torch.tensor([[1, 2], [2, 5]], device=rank_device())
    states = []
    for sparse in (False, True):
        torch.manual_seed(1)
        model = FSDP(nn.Sequential(nn.EmbeddingBag(20, 4, sparse=sparse), nn.Linear(4, 3)).to(rank_device()))
        model(index).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        states.append(whole(model))
    assert_same_state(*states)
