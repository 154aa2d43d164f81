"""Nested arguments keep every container's type, and every tensor in them is reached."""

import collections
import dataclasses
import queue

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from fairshard.utils.containers import apply_to_tensors, cast_inputs_to_fp16, pack_kwargs, unpack_kwargs
from fairshard.utils.nested import apply_to_all, plain_objects

Pair = collections.namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    hidden: list
    name: str = "out"


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: torch.Tensor
    scale: float = 2.0


@dataclasses.dataclass
class Derived:
    value: torch.Tensor
    doubled: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        self.doubled = self.value * 2


class ModelOutput(collections.OrderedDict):
    """As in transformers: an ordered dictionary that is also a dataclass, and omits values that are None."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                super().__setitem__(field.name, value)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


@dataclasses.dataclass
class LMOutput(ModelOutput):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    past: tuple | None = None


def add_one(tensor):
    return tensor + 1


def tensors_of(container):
    """The tensors that `apply_to_tensors` reaches, in its order."""
    found = []
    apply_to_tensors(lambda tensor: found.append(tensor) or tensor, container)
    return found


one = torch.ones(2)


@pytest.mark.parametrize(
    "container",
    [
        one,
        [one, one],
        (one, one),
        {one},
        {"a": one, "b": 3},
        collections.OrderedDict(b=one, a=one),
        Pair(one, "text"),
        Output(one, [one, one]),
        Frozen(one),
        None,
        3,
        "text",
        torch.float16,
        {"deep": [(one, {"deeper": Pair([one], Output(one, []))})]},
    ],
    ids=repr,
)
def test_containers_keep_their_type_and_other_values(container):
    """The result has the type of the argument, keys in its order, and every tensor is replaced; the argument stays."""
    before = tensors_of(container)
    result = apply_to_tensors(add_one, container)
    assert type(result) is type(container)
    assert not isinstance(container, dict) or list(result) == list(container)
    assert all(tensor is one for tensor in (*before, *tensors_of(container)))
    assert len(tensors_of(result)) == len(tensors_of(container))
    assert all(torch.equal(tensor, one + 1) for tensor in tensors_of(result))


def test_default_dict_keeps_its_factory():
    """A defaultdict keeps its factory."""
    result = apply_to_tensors(add_one, collections.defaultdict(list, a=one))
    assert type(result) is collections.defaultdict
    assert result["missing"] == []
    assert torch.equal(result["a"], one + 1)


def test_dataclass_is_not_initialised_again():
    """Fields that ``__post_init__`` computes are mapped like the others, not computed from mapped ones."""
    result = apply_to_tensors(add_one, Derived(one))
    assert torch.equal(result.value, one + 1)
    assert torch.equal(result.doubled, one * 2 + 1)


def test_model_output_stays_one():
    """Attributes and keys of a Hugging Face output agree, and None stays left out."""
    result = apply_to_tensors(add_one, LMOutput(loss=one, past=(one, one)))
    assert type(result) is LMOutput
    assert list(result) == ["loss", "past"]
    assert result.logits is None
    assert torch.equal(result.loss, one + 1)
    assert torch.equal(result["loss"], one + 1)
    assert torch.equal(result.past[1], one + 1)


def test_packed_sequence_stays_one():
    """The data is mapped; the bookkeeping (lengths, order) does not change."""
    batch = torch.arange(12.0).view(3, 4)
    packed = pack_padded_sequence(batch, torch.tensor([2, 4, 1]), batch_first=True, enforce_sorted=False)
    result = apply_to_tensors(add_one, packed)
    assert isinstance(result, PackedSequence)
    assert torch.equal(result.data, packed.data + 1)
    assert torch.equal(result.batch_sizes, packed.batch_sizes)
    assert torch.equal(result.sorted_indices, packed.sorted_indices)
    assert torch.equal(result.unsorted_indices, packed.unsorted_indices)


values = st.integers() | st.text("abc")


@given(st.lists(values), st.dictionaries(st.text("xyz"), values))
def test_unpack_undoes_pack(args, kwargs):
    """`unpack_kwargs` returns the arguments that `pack_kwargs` was called with."""
    keys, packed = pack_kwargs(*args, **{f"k{key}": value for key, value in kwargs.items()})
    assert len(packed) == len(args) + len(kwargs)
    assert unpack_kwargs(keys, packed) == (tuple(args), {f"k{key}": value for key, value in kwargs.items()})


def test_unpack_refuses_too_few_values():
    """Fewer values than keys cannot be unpacked."""
    with pytest.raises(ValueError, match="2 keys"):
        unpack_kwargs(("a", "b"), (1,))


def test_cast_inputs_casts_floating_tensors_only():
    """Floating tensors change dtype, integers and other values stay; fp16 is the default."""
    args, kwargs = cast_inputs_to_fp16(one, torch.tensor([1]), x=[one, "text"])
    assert args[0].dtype == torch.float16
    assert args[1].dtype == torch.int64
    assert kwargs["x"][0].dtype == torch.float16
    assert kwargs["x"][1] == "text"
    args, _ = cast_inputs_to_fp16(one, dtype=torch.bfloat16)
    assert args[0].dtype == torch.bfloat16


def test_cast_inputs_is_differentiable():
    """An input that requires grad gets its gradient in its own dtype."""
    x = torch.ones(3, requires_grad=True)
    (cast,), _ = cast_inputs_to_fp16(x)
    cast.sum().backward()
    assert x.grad.dtype == torch.float32
    assert x.grad.tolist() == [1, 1, 1]


class Cache:
    """Keeps tensors in attributes, as Hugging Face's caches do."""

    def __init__(self, *layers):
        self.layers, self.kind = list(layers), Cache


class Slotted:
    """Keeps a tensor outside of ``__dict__``."""

    __slots__ = ("value",)


def test_tensors_in_attributes_are_replaced_in_place():
    """Objects of Python classes keep their identity; a function is applied to each of their tensors once."""
    inner = Cache(torch.tensor(2.0), {"a": torch.tensor(3.0)})
    outer = Cache(inner, "name", inner)
    outer.own = outer  # refers to itself
    objects = plain_objects((torch.tensor(1.0), [outer]))
    assert {id(one) for one in objects} == {id(inner), id(outer)}
    mapped = apply_to_all(lambda tensor: tensor * 10, (torch.tensor(1.0), [outer]), objects)
    assert mapped[0] == 10
    assert mapped[1][0] is outer
    assert outer.layers[0] is outer.layers[2] is inner
    assert inner.layers == [torch.tensor(20.0), {"a": torch.tensor(30.0)}]
    layers = inner.layers
    apply_to_all(lambda tensor: tensor, outer, objects)
    assert inner.layers is layers


class Queue(queue.SimpleQueue):
    """Keeps tensors in memory of a class written in C."""


@dataclasses.dataclass
class Node:
    """A node of a tree, which holds itself through its children."""

    parent: object = None
    children: list = dataclasses.field(default_factory=list)


def loop():
    root = Node()
    root.children.append(Node(root))
    return root


UNKNOWN = {
    "iterator": iter([1]),
    "slots": Slotted(),
    "module": torch.nn.Linear(1, 1),
    "function": lambda: None,
    "queue": Queue(),
}


@pytest.mark.parametrize("unknown", UNKNOWN.values(), ids=UNKNOWN)
def test_other_objects_cannot_be_looked_into(unknown):
    """Iterators, objects with slots or with memory of a C class, functions and modules may hold unseen tensors."""
    assert plain_objects(Cache(unknown)) is None
    assert plain_objects([{"a": unknown}]) is None
    assert plain_objects([{"a": torch.ones(1)}]) == []


def test_containers_that_hold_themselves_are_left_alone():
    """An object with such a container in it is not looked into, and a function that maps the output terminates."""
    cache = Cache(loop())
    objects = plain_objects(cache)
    assert objects is None
    assert apply_to_all(lambda tensor: tensor * 10, cache, objects) is cache
