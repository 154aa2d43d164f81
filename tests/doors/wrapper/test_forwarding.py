"""A wrapper looks like the module inside it, and its repr shows its settings."""

import copy

import pytest
import torch
from torch import nn

from fairshard.nn import FSDP as ALIAS
from fairshard.nn import FlattenParamsWrapper, data_parallel
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn.data_parallel.wrapper.attributes import HIDEABLE
from tests.kit import rank_device
from tests.models import mlp, tiny, wrap_each, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import randn

pytestmark = pytest.mark.behaviour("names of wrappers")


def test_the_class_is_found_under_all_its_names():
    """The class is found under fairscale's path, and under its short name."""
    assert data_parallel.FullyShardedDataParallel is FSDP is ALIAS


# ---- attributes


class Scaled(nn.Module):
    """A module whose forward reads its attributes."""

    power = 1

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = 1.0
        self.register_buffer("shift", torch.zeros(1))
        self._offset = 0.0

    @property
    def offset(self):
        return self._offset

    @offset.setter
    def offset(self, value):
        self._offset = value

    def describe(self, suffix):
        return f"{self.power} {self.scale}{suffix}"

    def forward(self, x):
        return self.layer(x) * 0 + self.scale**self.power * self.shift + self.offset


def wrap_twice(module):
    return FSDP(FSDP(module))


@on_ranks(2)
def test_attributes_of_the_module():
    """Attributes, methods and submodules missing on a wrapper are looked up on the module, through any wrappers."""
    module = Scaled()
    wrapped = wrap_twice(module)
    assert (wrapped.power, wrapped.scale, wrapped.describe("!")) == (1, 1.0, "1 1.0!")
    assert wrapped.layer is module.layer
    assert wrapped.module.module is module
    with pytest.raises(AttributeError, match="missing"):
        wrapped.missing  # noqa: B018
    assert not hasattr(wrapped, "missing")


@on_ranks(1)
@pytest.mark.parametrize("wrap", [FSDP, wrap_twice, FlattenParamsWrapper])
def test_attributes_set_on_a_wrapper_reach_the_forward(wrap):
    """Data that the module alone has, buffers, class attributes and properties too, is set there; the rest is not."""
    module = Scaled().to(rank_device())
    wrapped = wrap(module)
    wrapped.scale, wrapped.shift, wrapped.power, wrapped.offset = 3.0, torch.full((1,), 2.0, device=rank_device()), 2, 1
    assert wrapped(randn(3, 4)).eq(3**2 * 2 + 1).all()
    assert (module.scale, module.power, module.offset) == (3.0, 2, 1)
    assert wrapped.state_dict()["shift"] == 2
    wrapped.note, wrapped.forward, wrapped._offset = "mine", wrapped.forward, 7
    wrapped.eval()
    assert not hasattr(module, "note")
    assert "forward" not in module.__dict__
    assert (wrapped._offset, module._offset) == (7, 1)
    module.note = "its own"
    wrapped.note = "mine again"
    assert module.note == "its own"


@on_ranks(1)
def test_attributes_set_on_a_wrapper_of_a_compiled_module():
    """They reach the module inside ``torch.compile``'s."""
    module = Scaled().to(rank_device())
    FSDP(torch.compile(module, backend="eager")).scale = 3.0
    assert module.scale == 3.0


@on_ranks(1)
@pytest.mark.parametrize("wrap", [FSDP, wrap_twice])
def test_submodules_set_on_a_wrapper_reach_the_forward(wrap):
    """A loop over `named_modules` that replaces modules in their parents works, with a wrapper as a parent too."""
    model = FSDP(nn.Sequential(wrap(nn.Sequential(nn.Linear(4, 4), nn.Dropout(1.0)))))
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Dropout):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, nn.Identity())
    assert model(randn(3, 4).to(rank_device())).any()
    assert not any(isinstance(module, nn.Dropout) for module in model.modules())


@on_ranks(1)
def test_attributes_are_deleted_where_they_are_set():
    """What was set on a wrapper can be deleted there: the class's value, or the wrapper's lack of one, comes back."""
    module = Scaled()
    wrapped = FSDP(module)
    wrapped.power, wrapped.note = 2, "mine"
    del wrapped.power, wrapped.note
    assert (module.power, hasattr(wrapped, "note")) == (1, False)
    with pytest.raises(AttributeError, match="missing"):
        del wrapped.missing


@on_ranks(2)
def test_index_and_length():
    """Indexing, slicing, ``len`` and ``bool`` work as on the wrapped container."""
    wrapped = wrap_each(mlp(4, 9, 5))
    assert wrapped[1] is wrapped.module[1]
    assert wrapped[-1].module.out_features == 5
    assert (len(wrapped), len(wrapped[:2])) == (3, 2)
    with pytest.raises(TypeError):
        FSDP(nn.Linear(4, 5))[0]
    assert FSDP(nn.Linear(4, 5))  # true, though it has no length


# ---- arguments

ARGUMENTS = {  # in fairscale's order, after the module and the group
    "reshard_after_forward": False,
    "mixed_precision": True,
    "fp32_reduce_scatter": True,
    "flatten_parameters": False,
    "cpu_offload": False,
    "compute_dtype": torch.bfloat16,
    "move_grads_to_cpu": False,
    "bucket_cap_mb": 3,
}


@on_ranks(2)
def test_arguments_are_attributes():
    """The arguments can be given in fairscale's order, and read back under their names."""
    group, module = torch.distributed.new_group(), nn.Linear(4, 5)
    wrapped = FSDP(module, group, *ARGUMENTS.values())
    assert {name: getattr(wrapped, name) for name in ARGUMENTS} == ARGUMENTS
    assert wrapped.process_group is group
    assert wrapped.module is module
    assert (wrapped.rank, wrapped.world_size) == (group.rank(), 2)
    assert wrapped.require_backward_grad_sync is True
    assert len(wrapped.params) == 2
    default = FSDP(nn.Linear(4, 5))
    assert (default.reshard_after_forward, default.mixed_precision) == (True, False)
    assert (default.flatten_parameters, default.bucket_cap_mb) == (True, 25)


@on_ranks(2)
def test_repr_shows_the_arguments_in_fairscales_order():
    """``extra_repr`` shows fairscale's nine fields in its order, then the bucket size."""
    wrapped = FSDP(nn.Linear(4, 5), reshard_after_forward=False, bucket_cap_mb=0.5)
    fields = [field.split("=") for field in wrapped.extra_repr().split(", ")]
    assert [name for name, _ in fields] == ["rank", "world_size", *ARGUMENTS]
    values = dict(fields)
    assert (values["rank"], values["world_size"]) == (str(torch.distributed.get_rank()), "2")
    assert (values["reshard_after_forward"], values["bucket_cap_mb"]) == ("False", "0.5")
    half = FSDP(nn.Linear(4, 5), mixed_precision=True)
    assert "mixed_precision=True" in half.extra_repr()
    assert "compute_dtype=torch.float16" in half.extra_repr()
    assert wrapped.extra_repr() in repr(wrapped)


class Tagger(nn.Module):
    """An RNN whose weights are made contiguous in each forward, as many models for several GPUs do."""

    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x):
        self.rnn.flatten_parameters()
        return self.out(self.rnn(x)[0])


@on_ranks(2)
def test_a_wrapped_rnn_keeps_its_method():
    """``flatten_parameters()`` of a wrapped RNN is the RNN's method, not the wrapper's argument."""
    torch.manual_seed(0)
    plain = Tagger().to(rank_device())
    model = copy.deepcopy(plain)
    model.rnn = wrap_twice(model.rnn)
    model = FSDP(model)
    x = randn(2, 3, 4)
    assert torch.allclose(model(x), plain(x), atol=1e-6)
    model(x).sum().backward()
    assert model.flatten_parameters is True


# ---- parameters


@on_ranks(1, 2)
def test_named_parameters_flattened():
    """Flattened, each unit that owns parameters has one 1-D shard, under the unit's name."""
    wrapped = wrap_tiny(tiny())
    named, world_size = dict(wrapped.named_parameters()), torch.distributed.get_world_size()
    units = ["", "first.", "first.up.", "shared.", "second."]
    assert list(named) == [f"{unit}flat_param_0" for unit in units]
    assert named["first.up.flat_param_0"].shape == (77 // world_size + 77 % world_size,)
    assert all(isinstance(param, nn.Parameter) and param.is_leaf for param in named.values())
    assert [id(p) for p in wrapped.parameters()] == [id(p) for p in named.values()]
    assert [name for name, _ in wrapped.named_parameters("m", recurse=False)] == ["m.flat_param_0"]
    assert next(iter(dict(wrapped.named_parameters(prefix="m")))) == "m.flat_param_0"
    norm = FSDP(nn.Sequential(FSDP(nn.BatchNorm1d(3))))
    assert [name for name, _ in norm.named_buffers()] == ["0.running_mean", "0.running_var", "0.num_batches_tracked"]


@on_ranks(1, 2)
def test_named_parameters_unflattened():
    """Not flattened, parameters have the plain model's names, each once; 1-D shards, or whole ones on one rank."""
    plain = dict(tiny().named_parameters())
    named = dict(wrap_tiny(tiny(), flatten_parameters=False).named_parameters())
    assert set(named) == set(plain)
    world_size = torch.distributed.get_world_size()
    for name, param in named.items():
        cut = torch.Size([-(-plain[name].numel() // world_size)])
        assert param.shape == (plain[name].shape if world_size == 1 else cut), name


@on_ranks(1, 2)
def test_zero_grad_reaches_the_shards():
    """``zero_grad`` zeroes or drops the gradients that ``backward`` filled."""
    wrapped = wrap_each(mlp(4, 9, 5))
    wrapped(randn(2, 4)).sum().backward()
    wrapped.zero_grad(set_to_none=False)
    assert all(not param.grad.any() for param in wrapped.parameters())
    wrapped.zero_grad()
    assert wrapped.params_with_grad == []


class Echo(nn.Linear):
    """Returns its other arguments as they are."""

    def forward(self, x, *args, flag=None, **kwargs):
        return super().forward(x), args, flag, kwargs


@on_ranks(2)
def test_non_tensor_arguments_and_outputs():
    """Arguments and outputs that are not tensors pass through unchanged."""
    wrapped, marker = FSDP(Echo(4, 4).to(rank_device())), object()
    out, args, flag, kwargs = wrapped(randn(2, 4), 1, "two", flag=marker, other=[3])
    assert (args, flag, kwargs) == ((1, "two"), marker, {"other": [3]})
    out.sum().backward()
    assert wrapped.params[0].grad is not None


# ---- names that both have


class Taken(nn.Linear):
    """A module that has an attribute for each name that a wrapper must leave to it."""

    def __init__(self, names):
        super().__init__(4, 5)
        for name in names:
            setattr(self, name, f"own {name}")


@on_ranks(2)
def test_the_modules_own_attributes_come_first():
    """Names that only we gave to wrappers are the module's if it has them, also through two wrappers, in all states.

    The wrapper itself does not read them: it trains, resets, saves, and is copied and printed as before.
    """
    names = sorted(HIDEABLE | {"forward_methods", "allow_reset_parameters", "metrics"})
    model = FSDP(FSDP(Taken(names), verbose=True), verbose=True, allow_reset_parameters=True)
    for one in (model, copy.deepcopy(model)):
        for _ in range(2):
            assert {name: getattr(one, name) for name in names} == {name: f"own {name}" for name in names}
            one(randn(2, 4)).sum().backward()
        assert "nan_check=False" in repr(one)
        assert list(one.state_dict()) == ["weight", "bias"]


@on_ranks(2)
def test_options_can_be_read_where_the_module_has_no_such_name():
    """An option is readable, each wrapper's own, and a missing name still raises."""
    model = FSDP(FSDP(nn.Linear(4, 5), nan_check=True), use_orig_params=True)
    assert (model.use_orig_params, model.module.use_orig_params) == (True, False)
    assert (model.nan_check, model.module.nan_check) == (False, True)
    assert model.verbose is False
    assert model.config is not model.module.config
    with pytest.raises(AttributeError, match="forward_methods"):
        model.forward_methods  # noqa: B018


@on_ranks(2)
def test_the_names_that_fairscale_documented_are_the_wrappers():
    """Where the module has such a name too, the wrapper's is read on the wrapper, and the module's on the module."""
    names = ["rank", "world_size", "process_group", "params", "training_state", "mixed_precision", "bucket_cap_mb"]
    model = FSDP(Taken(names), bucket_cap_mb=3)
    assert (model.rank, model.world_size, model.bucket_cap_mb) == (torch.distributed.get_rank(), 2, 3)
    assert model.mixed_precision is False
    assert [param.dim() for param in model.params] == [1]
    assert [getattr(model.module, name) for name in names] == [f"own {name}" for name in names]


class Placed(nn.Linear):
    """A module that asks its first parameter for a device and a dtype, as Hugging Face's models do."""

    @property
    def device(self):
        return next(param.device for param in self.parameters())

    @property
    def dtype(self):
        return next(param.dtype for param in self.parameters())


@on_ranks(2)
@pytest.mark.parametrize("layout", [{}, {"flatten_parameters": False}, {"cpu_offload": True}])
def test_device_and_dtype_of_a_model_without_parameters(layout):
    """``model.device`` and ``model.dtype`` are those of the shards, in each layout."""
    model = FSDP(FSDP(Placed(4, 5).double().to(rank_device()), **layout))
    assert (model.device.type, model.dtype) == (torch.device(rank_device()).type, torch.float64)
