"""Reading a parameter outside its unit raises a Python error that names it and the cure, and never crashes.

Each operation runs in its own processes, so that a crash is reported by its exit code.
"""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fairshard.errors import FairshardError, ParameterShardedError
from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.on_ranks import on_ranks
from tests.reference import randn

OPERATIONS = {
    "sum": lambda weight: weight.sum(),
    "clone": lambda weight: weight.clone(),
    "detach": lambda weight: weight.detach(),
    "data": lambda weight: weight.data,
    "strides": lambda weight: weight.stride(),
    "add": lambda weight: weight + 1,
    "radd": lambda weight: 1 + weight,
    "matmul": lambda weight: torch.ones(2, 5) @ weight,
    "compare": lambda weight: weight > 0,
    "negate": lambda weight: -weight,
    "index": lambda weight: weight[0],
    "assign": lambda weight: weight.__setitem__(0, 1.0),
    "length": lambda weight: len(weight),
    "iterate": lambda weight: list(weight),
    "truth": lambda weight: bool(weight),
    "float": lambda weight: float(weight),
    "torch_sum": lambda weight: torch.sum(weight),
    "torch_cat": lambda weight: torch.cat([weight, weight]),
    "linear": lambda weight: F.linear(torch.ones(2, 4), weight),
    "norm": lambda weight: torch.linalg.vector_norm(weight),
    "init": lambda weight: nn.init.normal_(weight),
    "numpy": lambda weight: weight.numpy(),
    "inplace": lambda weight: weight.add_(1),
    "grad": lambda weight: weight.grad,
    "to": lambda weight: weight.to(torch.float64),
    "zeros_like": lambda weight: torch.zeros_like(weight),
    "freeze": lambda weight: weight.requires_grad_(False),
    "set_requires_grad": lambda weight: setattr(weight, "requires_grad", False),
}


def states(wrapped):
    """The model after wrapping, after a forward, after a backward, after a forward without grad."""
    yield "wrapped"
    loss = wrapped(randn(3, 4)).sum()
    yield "after forward"
    loss.backward()
    yield "after backward"
    with torch.no_grad():
        wrapped(randn(3, 4))
    yield "after eval"


class Model(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.fc = FSDP(nn.Linear(4, 5), **kwargs)
        self.out = nn.Linear(5, 2)

    def forward(self, x):
        return self.out(self.fc(x))


@on_ranks(1, 2)
@pytest.mark.parametrize("name", OPERATIONS)
def test_reading_a_sharded_parameter_raises(name):
    """Every operation on it raises, in every state, also through the wrapper; the message names it and the cure."""
    model = FSDP(Model())
    for state in states(model):
        with pytest.raises(ParameterShardedError, match=r"fc\.weight.*summon_full_params") as caught:
            OPERATIONS[name](model.fc.weight if state == "wrapped" else model.fc.module.weight)
        assert isinstance(caught.value, (FairshardError, RuntimeError)), state


@on_ranks(1, 2)
def test_its_repr_is_readable():
    """Printing the placeholder or the model works and says what the placeholder is."""
    model = FSDP(Model())
    for _ in states(model):
        text = repr(model.fc.module.weight)
        assert "fc.weight" in text
        assert "(5, 4)" in text
        assert str(model.fc.module.weight) == text
        assert f"{model.fc.module.weight}" == text
        assert "Linear(in_features=4" in repr(model)


@on_ranks(1, 2)
@pytest.mark.parametrize("kwargs", [{}, {"flatten_parameters": False}, {"use_orig_params": True}], ids=str)
def test_calling_the_inner_module_directly_raises(kwargs):
    """Calling the wrapped module past its wrapper raises instead of crashing, and the wrapper still works."""
    original = FSDP(Model(**kwargs), **kwargs)
    for model in (original, copy.deepcopy(original)):
        for _ in states(model):
            with pytest.raises(ParameterShardedError, match=r"fc\.weight.*summon_full_params"):
                model.fc.module(randn(3, 4))
        assert model(randn(3, 4)).shape == (3, 2)
        with FSDP.summon_full_params(model):
            assert model.fc.module(randn(3, 4)).shape == (3, 5)


class Vectors(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(randn(4, 4, key=1))

    def forward(self, x):
        return x @ self.matrix

    def project(self, x):
        return x @ self.matrix.T.mm(self.matrix)


@on_ranks(2)
@pytest.mark.parametrize("kwargs", [{"flatten_parameters": False}, {"use_orig_params": True}], ids=str)
def test_shards_are_not_computed_with(kwargs):
    """Computing with a shard raises even if its shape fits by chance; in a custom method the error names the cure."""
    model = FSDP(Vectors(), **kwargs)
    inner = model.module
    assert (randn(3, 8) @ inner.matrix).shape == (3,)
    with pytest.raises(ParameterShardedError, match="matrix"):
        inner(randn(3, 8))
    with pytest.raises(ParameterShardedError, match=r"register_forward_method\(wrapper, \"project\"\)"):
        model.project(randn(3, 4))
    torch.func.functional_call(inner, {"matrix": randn(8, 2)}, (randn(3, 8),))


@on_ranks(1, 2)
@pytest.mark.parametrize("flatten", [True, False])
def test_saved_references_do_not_crash(flatten):
    """Reading a Parameter kept from before wrapping does not crash in any state."""
    layer = nn.Linear(4, 5)
    weight = layer.weight
    model = FSDP(layer, flatten_parameters=flatten)
    for _ in states(model):
        repr(weight)
        weight.detach().clone().sum()
        assert weight.numel() in (0, 20)


@on_ranks(1, 2)
def test_copies_of_modules_do_not_crash():
    """deepcopy and pickle of the module below the wrapper carry the placeholder, which still raises."""
    model = FSDP(Model())
    for _ in states(model):
        for copied in (copy.deepcopy(model.fc.module), pickle.loads(pickle.dumps(model.fc.module))):
            with pytest.raises(ParameterShardedError, match=r"fc\.weight"):
                copied(randn(3, 4))


@on_ranks(1, 2)
def test_hasattr_and_isinstance_may_probe():
    """Probing a placeholder for a protocol, as libraries do, finds nothing and does not raise."""
    weight = FSDP(Model()).fc.module.weight
    assert not hasattr(weight, "__cuda_array_interface__")
    assert not isinstance(weight, torch.Tensor)
    assert getattr(weight, "__wrapped__", None) is None
