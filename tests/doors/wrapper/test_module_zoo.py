"""Modules that keep references to their parameters, or compute them, train as they do unwrapped."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence

from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.kit import rank_device
from tests.on_ranks import on_ranks
from tests.reference import randn, train_alike


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn = kind(4, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(12, 2)

    def forward(self, x):
        hidden, _ = self.rnn(x)
        return self.out(hidden)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(4, 6, batch_first=True)

    def forward(self, x):
        packed = pack_padded_sequence(x, torch.tensor([5, 3], device="cpu"), batch_first=True)
        hidden, _ = self.rnn(packed)
        return hidden.data


class Attention(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **kwargs)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Fused(nn.Module):
    """Scaled dot product attention on projections of a single weight."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x):
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        return F.scaled_dot_product_attention(q, k, v)


class Direct(nn.Module):
    """Parameters used without a module, in a list and in a dictionary, one of them twice."""

    def __init__(self):
        super().__init__()
        self.items = nn.ParameterList([nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3))])
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.randn(())), "shift": nn.Parameter(torch.randn(3))})

    def forward(self, x):
        y = x @ self.items[0] + self.items[1]
        return y * self.named["scale"] + self.named["shift"] * self.items[1]


def norms():
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.GroupNorm(5, 5), nn.RMSNorm(6))


def convolutions():
    return nn.Sequential(nn.Conv1d(5, 3, 2), nn.ConvTranspose1d(3, 2, 2), nn.PReLU())


MODELS = {
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
    "RNN": lambda: Recurrent(nn.RNN),
    "packed": Packed,
    "attention": Attention,
    "attention_kv_bias": lambda: Attention(add_bias_kv=True),
    "encoder_layer": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    "sdpa": Fused,
    "direct": Direct,
    "norms": norms,
    "convolutions": convolutions,
    "bilinear": lambda: BilinearSelf(),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
    "old_weight_norm": lambda: torch.nn.utils.weight_norm(nn.Linear(4, 3)),
    "spectral_norm": lambda: torch.nn.utils.spectral_norm(nn.Linear(4, 3)),
}


class BilinearSelf(nn.Module):
    def __init__(self):
        super().__init__()
        self.bilinear = nn.Bilinear(4, 4, 3)

    def forward(self, x):
        return self.bilinear(x, x)


RECURRENT = ("LSTM", "GRU", "packed")
ON_CPU = functools.partial(pytest.param, marks=pytest.mark.cpu_only("torch has such kernels for its own devices only"))


def loss_of(model, key):
    return model(randn(2, 5, 4, key=key)).square().sum()


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
        return FSDP(nn.Sequential(FSDP(model[0], flatten_parameters=flatten)), flatten_parameters=flatten)

    train_alike(build, wrap, loss_of)


@pytest.mark.cpu_only("sparse tensors are a feature of torch's own devices")
@on_ranks(2)
def test_sparse_embedding_gradients():
    """A sparse gradient is reduced like a dense one."""

    def build(sparse):
        torch.manual_seed(1)
        return nn.Sequential(nn.EmbeddingBag(20, 4, sparse=sparse), nn.Linear(4, 3)).to(rank_device())

    index = torch.tensor([[1, 2], [2, 5]], device=rank_device())
    states = []
    for sparse in (False, True):
        wrapped = FSDP(build(sparse))
        wrapped(index).sum().backward()
        torch.optim.SGD(wrapped.parameters(), lr=0.1).step()
        states.append(wrapped.state_dict())
    for name, value in states[0].items():
        assert torch.equal(states[1][name], value), name


@on_ranks(2)
def test_a_parametrization_of_users():
    """A module with a parameter computed from another, cached in the forward, trains as the plain one."""

    class Symmetric(nn.Module):
        def forward(self, weight):
            return weight.triu() + weight.triu(1).transpose(-1, -2)

    torch.manual_seed(1)
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Symmetric())

    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = copy.deepcopy(layer)

        def forward(self, x):
            with parametrize.cached():
                return self.layer(self.layer(x))

    train_alike(Cached().to(rank_device()), FSDP, loss_of)


@on_ranks(2)
def test_views_of_parameters_saved_for_backward():
    """Transposes and slices of weights, saved by autograd in the forward, are correct in the backward."""

    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.weight = nn.Parameter(torch.randn(6, 4))

        def forward(self, x):
            return (x @ self.weight.t()) @ self.weight[:, :3] + x @ self.weight[:4, 1:]

    def wrap(model):
        return FSDP(nn.Sequential(FSDP(model[0])))

    train_alike(nn.Sequential(Views()).to(rank_device()), wrap, lambda m, key: m(randn(3, 4, key=key)).square().sum())


@on_ranks(1, 2)
def test_outputs_that_are_parameters_or_views_of_them():
    """A unit may return a parameter and rows of another; the outer module uses both, and both get gradients."""

    class Returns(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.rows, self.scale = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(()))

        def forward(self, x):
            return x @ self.rows.t(), self.rows[: len(x)], self.scale

    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Returns()

        def forward(self, x):
            y, rows, scale = self.inner(x)
            return (y.sum(1, keepdim=True) + rows) * scale.exp()

    def wrap(model):
        model.inner = FSDP(model.inner)
        return FSDP(model)

    rtol = 0.0 if rank_device().type == "cpu" else 1e-5  # kernels may round 0-d tensors differently
    train_alike(Uses().to(rank_device()), wrap, lambda m, key: m(randn(3, 4, key=key)).square().sum(), rtol=rtol)
