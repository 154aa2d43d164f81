"""The placeholder of a sharded parameter reports the dtype, shape and so on of the gathered one; it has no values.

Where a shard is registered under the parameter's own name, the shard answers, with its own dtype.
"""

import copy
import pickle

import pytest
import torch
from torch import nn

from fairshard.nn import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.kit import rank_device
from tests.on_ranks import on_ranks
from tests.reference import randn

QUESTIONS = {
    "dtype": lambda weight: weight.dtype,
    "device": lambda weight: weight.device,
    "shape": lambda weight: weight.shape,
    "ndim": lambda weight: weight.ndim,
    "numel": lambda weight: weight.numel(),
    "requires_grad": lambda weight: weight.requires_grad,
    "dim": lambda weight: weight.dim(),
    "size": lambda weight: weight.size(),
    "last_size": lambda weight: weight.size(-1) if weight.ndim else None,
    "is_floating_point": lambda weight: weight.is_floating_point(),
}
BF16 = {"mixed_precision": True, "compute_dtype": torch.bfloat16}


class Part(nn.Module):
    """Frozen, tied, empty, uneven and 0-d parameters, and a BatchNorm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.up = nn.Linear(3, 5)
        self.tied = nn.Linear(3, 5)
        self.tied.weight = self.up.weight
        self.norm = nn.BatchNorm1d(5)
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)
        self.none = nn.Parameter(torch.zeros(0, 4))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        x = self.norm(self.up(x) + self.tied(x)) * self.scale * self.frozen.sum()
        return x + self.none.sum()


def names():
    return [name for name, _ in Part().named_parameters(remove_duplicate=False)]


def find(part, name):
    return getattr(part.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])


def answers_of(part):
    return {name: {key: ask(find(part, name)) for key, ask in QUESTIONS.items()} for name in names()}


class Asking(nn.Module):
    """Asks an inner unit, in its own forward, about each parameter that it does not gather itself."""

    def __init__(self, part):
        super().__init__()
        self.part, self.first = part, nn.Linear(3, 3)
        self.answers = []

    def forward(self, x):
        inside = getattr(self.part, "module", self.part)
        self.answers.append(answers_of(inside))
        return self.part(self.first(x.to(self.first.weight.dtype)).to(find(inside, "up.weight").dtype))


@on_ranks(1, 2)
@pytest.mark.parametrize("kwargs", [{}, BF16, {"cpu_offload": True}, {**BF16, "cpu_offload": True}], ids=str)
def test_a_sharded_parameter_answers_as_the_gathered_one(kwargs):
    """In every state, inside another unit's forward or outside, a placeholder answers like the gathered parameter."""
    plain = Part().to(rank_device())
    dtype = torch.bfloat16 if "compute_dtype" in kwargs else torch.float32
    expected = {}
    for name in names():
        kept = torch.float32 if name.startswith("norm.") else dtype
        expected[name] = {
            key: ask(find(plain, name).detach().to(kept).requires_grad_(find(plain, name).requires_grad))
            for key, ask in QUESTIONS.items()
        }
    inside = copy.deepcopy(plain)
    model = FSDP(Asking(FSDP(inside, **kwargs)).to(rank_device()), **kwargs)

    assert answers_of(inside) == expected
    for _ in range(2):
        loss = model(randn(4, 3)).sum()
        assert answers_of(inside) == expected
        loss.backward()
        assert answers_of(inside) == expected
    assert model.module.answers == [expected, expected]


@on_ranks(2)
def test_what_follows_the_shard():
    """A placeholder follows dtype conversions before the first forward, and the flat ``requires_grad`` at any time."""
    model = FSDP(nn.Linear(3, 5))
    weight = model.module.weight
    model.half()
    assert weight.dtype == torch.float16
    model.float()
    assert weight.dtype == torch.float32
    assert weight.requires_grad
    model.requires_grad_(False)
    assert not weight.requires_grad
    with torch.no_grad():
        model(randn(2, 3))
    assert model.module.weight is weight
    assert not weight.requires_grad


@on_ranks(2)
def test_copies_answer():
    """Placeholders in a copy of the model, or of one module, answer like the original's, for the copy's own shards."""
    model = FSDP(nn.Sequential(FSDP(nn.Linear(3, 5), **BF16), nn.Linear(5, 2)), **BF16)
    for _ in range(2):
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert other[0].module.weight.dtype == torch.bfloat16
            other[0].requires_grad_(False)
            assert not other[0].module.weight.requires_grad
            assert model[0].module.weight.requires_grad
            other(randn(2, 3))
            assert other[0].module.weight.dtype == torch.bfloat16
        alone = copy.deepcopy(model[0].module)
        assert alone.weight.dtype == torch.bfloat16
        assert alone.weight.size() == (5, 3)
        model(randn(2, 3)).sum().backward()


@on_ranks(1, 2)
@pytest.mark.parametrize("how", ["apart", "orig", "rows"])
@pytest.mark.parametrize("offload", [False, True])
def test_what_is_registered_answers_for_itself(how, offload):
    """A registered shard view or DTensor has the shard's dtype (fp32 for bf16 compute): optimizers step it."""
    layer = nn.Linear(3, 5).to(rank_device())
    if how == "rows":
        more = {"offload_policy": CPUOffloadPolicy()} if offload else {}
        model = fully_shard(layer, mp_policy=MixedPrecisionPolicy(torch.bfloat16), **more)
    else:
        layout = {"flatten_parameters": False} if how == "apart" else {"use_orig_params": True}
        model = FSDP(layer, **BF16, **layout, cpu_offload=offload)
    for _ in range(2):
        assert layer.weight.dtype == torch.float32
        assert layer.weight.requires_grad
        assert layer.weight.is_floating_point()
        if how == "rows":
            assert (layer.weight.ndim, layer.weight.numel(), tuple(layer.weight.size())) == (2, 15, (5, 3))
        out = model(randn(2, 3))
        assert layer.weight.dtype == torch.float32, "also while the whole parameters wait for the backward"
        out.sum().backward()
