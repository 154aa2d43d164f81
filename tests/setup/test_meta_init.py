"""Modules on the meta device get memory and values unit by unit, as if they had been built with them."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn.wrap import ModuleWrapPolicy
from tests.kit import rank_device
from tests.models import Block, Tiny, mlp, tiny_batch, tiny_loss, wrap_each, wrap_tiny
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state, randn, sgd, train_both


def on_meta(build, *args):
    with torch.device("meta"):
        return build(*args)


def empty_own(module):
    """A ``param_init_fn`` that only allocates memory."""
    module.to_empty(device=rank_device(), recurse=False)


def meta_mlp(*widths):
    """`mlp` on the meta device."""
    return mlp(*widths).to("meta")


@pytest.mark.pairs
@on_ranks(1, 3)
@pytest.mark.parametrize("wrap", [FSDP, wrap_each], ids=["one", "each"])
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"flatten_parameters": False}, {"cpu_offload": True}, {"mixed_precision": True}],
    ids=["flat", "unflattened", "offload", "fp16"],
)
def test_reset_parameters_gives_the_values_of_the_constructor(wrap, kwargs):
    """Seeded alike, a model from the meta device has the weights of one that was built with memory."""
    model = meta_mlp(4, 9, 7, 5)
    torch.manual_seed(1)
    wrapped = wrap(model, **kwargs)
    assert_same_state(wrapped.state_dict(), mlp(4, 9, 7, 5).state_dict())


@on_ranks(2)
def test_it_trains_as_one_that_was_built_with_memory():
    """A nested model with a BatchNorm trains two steps exactly as one that was built with memory."""

    def build():
        return nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 3))

    torch.manual_seed(2)
    plain = build()
    torch.manual_seed(2)
    wrapped = wrap_each(on_meta(build))
    train_both(plain, wrapped, lambda model, step: model(randn(5, 4, key=step)).square().sum(), num_steps=2)


@on_ranks(2)
def test_tied_weights_stay_tied():
    """An embedding tied to the output layer is one parameter after initialisation too, and trains as one."""
    wrapped = wrap_tiny(on_meta(Tiny))
    state = wrapped.state_dict()
    assert torch.equal(state["embed.weight"], state["head.weight"])
    own = [slot.fqn for flat_param in wrapped._unit.flat_params for slot in flat_param.slots]
    assert "embed.weight" in own
    assert "head.weight" not in own
    *inputs, targets = tiny_batch(0)
    loss = tiny_loss(wrapped(*inputs), targets)
    loss.backward()
    sgd(wrapped).step()
    state = wrapped.state_dict()
    assert torch.equal(state["embed.weight"], state["head.weight"])


@on_ranks(2)
@pytest.mark.parametrize("init", [None, empty_own], ids=["reset", "fn"])
def test_a_weight_shared_by_two_units_is_refused(init):
    """The error names a weight that a wrapped module shares with one outside, even if it has been replaced since."""
    model = on_meta(Tiny)
    torch.manual_seed(0)
    model.embed = FSDP(model.embed, param_init_fn=init)
    with pytest.raises(ValueError, match=r"`head.weight` is shared with `weight`"):
        FSDP(model, param_init_fn=init)


class Parent(nn.Module):
    """Owns a parameter and a child, and tensors with values as well as tensors on the meta device."""

    def __init__(self):
        super().__init__()
        self.child = nn.Linear(3, 5)
        self.scale = nn.Parameter(torch.empty(7))
        self.register_buffer("table", torch.arange(3.0, device="cpu"))
        self.register_buffer("count", torch.empty((), dtype=torch.int64), persistent=False)
        self.seen = []

    def reset_parameters(self):
        with torch.no_grad():
            self.scale.fill_(2.0)
            self.count.fill_(4)
            self.child.bias.fill_(3.0)
            self.seen.append((self.child.weight.is_meta, self.child.weight.abs().max().item() > 0))

    def forward(self, x):
        return self.child(x).sum() * self.scale.sum() + self.table.sum() + self.count


@on_ranks(in_full(1), 2)
def test_children_first_as_constructors_run():
    """A parent is reset after its children and may change their values; tensors with values keep them."""
    model = on_meta(Parent)
    wrapped = FSDP(model)
    state = wrapped.state_dict()
    assert model.seen == [(False, True)]
    assert state["scale"].tolist() == [2.0] * 7
    assert state["child.bias"].tolist() == [3.0] * 5
    assert state["table"].tolist() == [0.0, 1.0, 2.0]
    assert model.count.item() == 4


@on_ranks(2)
def test_param_init_fn_is_called_for_each_module_that_owns_something():
    """``param_init_fn`` is called once per module, parents first, and its values stay; inner units have their own."""
    calls = []

    def init(module):
        calls.append(type(module).__name__)
        empty_own(module)
        with torch.no_grad():
            for param in module.parameters(recurse=False):
                param.fill_(float(len(calls)))

    model = nn.Sequential(on_meta(Parent), on_meta(nn.Linear, 2, 3), nn.Tanh(), nn.Linear(3, 2))
    model[1] = FSDP(model[1], param_init_fn=init)
    wrapped = FSDP(model, param_init_fn=init)
    assert calls == ["Linear", "Parent", "Linear"]
    state = wrapped.state_dict()
    assert state["1.weight"].unique().tolist() == [1.0]
    assert state["0.scale"].unique().tolist() == [2.0]
    assert state["0.child.bias"].unique().tolist() == [3.0]


@on_ranks(2)
def test_weights_that_param_init_fn_unties_are_tied_again():
    """If `to_empty` splits a shared parameter in two, it is tied again, with the first one's values."""

    def init(module):
        empty_own(module)
        with torch.no_grad():
            for param in module.parameters(recurse=False):
                param.fill_(1.0 if isinstance(module, nn.Embedding) else 2.0)

    model = on_meta(Tiny)
    wrapped = FSDP(model, param_init_fn=init)
    state = wrapped.state_dict()
    assert state["embed.weight"].unique().tolist() == state["head.weight"].unique().tolist() == [1.0]
    assert len(wrapped._unit.flat_params[0].slots) == len(list(Tiny().parameters()))


@pytest.mark.cpu_only("torch has kernels of LSTMs for its own devices only")
@on_ranks(2)
def test_recurrent_modules_keep_their_saved_references():
    """An LSTM, which keeps a list of its weights, computes with the gathered ones."""
    torch.manual_seed(3)
    plain = nn.LSTM(3, 5, batch_first=True)
    torch.manual_seed(3)
    wrapped = FSDP(on_meta(lambda: nn.LSTM(3, 5, batch_first=True)))
    x = randn(2, 4, 3)
    assert torch.equal(wrapped(x)[0], plain(x)[0])


@on_ranks(2)
def test_frozen_empty_and_partly_real_modules():
    """``requires_grad`` and existing values are kept, and parameters without elements are supported."""
    model = on_meta(nn.Sequential, nn.Linear(3, 0, device="meta"), nn.Linear(0, 2, device="meta"), Block(2, 3))
    model[2].to("meta")
    real = nn.Linear(2, 2)
    model.append(copy.deepcopy(real))
    model[2].up.requires_grad_(False)
    wrapped = FSDP(model)
    assert sorted(param.requires_grad for param in wrapped.params) == [False, True]
    assert torch.isfinite(wrapped(torch.ones(4, 3))).all()
    assert torch.equal(wrapped.state_dict()["3.weight"], real.weight)


class Silent(nn.Module):
    """Has a parameter, and no way to initialise it."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(3))


@on_ranks(in_full(1), 2)
def test_a_module_without_reset_parameters_is_named():
    """A module without ``reset_parameters`` raises before anything was changed."""
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Silent()))
    with pytest.raises(ValueError, match=r"`1` \(Silent\) has none"):
        FSDP(model)
    assert model[0].weight.is_meta
    with pytest.raises(ValueError, match=r"`the module that is wrapped` \(Silent\)"):
        FSDP(on_meta(Silent))


class Masked(nn.Module):
    """Fills a buffer in its constructor only, unless ``resets`` is set."""

    def __init__(self, mask, resets=False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.register_buffer("mask", mask, persistent=False)
        self.resets = resets
        self.reset_parameters()

    def reset_parameters(self):
        with torch.no_grad():
            self.weight.data.fill_(2.0)
            if self.resets:
                self.mask.data.fill_(1)


@on_ranks(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
def test_what_reset_parameters_leaves_unwritten_is_named(dtype):
    """A buffer that only the constructor fills raises, because it would have arbitrary values."""
    with pytest.raises(ValueError, match=r"that of `1` \(Masked\) has not written `mask`"):
        FSDP(on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Masked(torch.ones(3, dtype=dtype)))))
    wrapped = FSDP(on_meta(lambda: Masked(torch.ones(3, dtype=dtype), resets=True)))
    assert wrapped.mask.tolist() == [1] * 3
    assert wrapped.state_dict()["weight"].tolist() == [2.0] * 3


@on_ranks(1)
def test_what_param_init_fn_leaves_out_is_named():
    """A ``param_init_fn`` that skips a module raises, because the module would have no memory."""
    with pytest.raises(ValueError, match=r"`1.weight` is still on the meta device"):
        FSDP(
            on_meta(lambda: nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2))),
            param_init_fn=lambda module: isinstance(module, nn.LayerNorm) and module.to_empty(device="cpu"),
        )


WIDTHS = [512, 1024, 512, 1024, 512, 1024, 512]


def wrap_by_policy(model, **kwargs):
    """`wrap_each`, but initialised by the outermost wrapper."""
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **kwargs)


def alive_and_peak(wrap):
    """The bytes alive after ``wrap()``, the peak during it, and what it returns."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        wrapped = wrap()
    alive = peak = 0
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return alive, peak, wrapped


@pytest.mark.cpu_only("measures the memory of the CPU")
@on_ranks(in_full(1), 2)
@pytest.mark.parametrize("wrap", [wrap_each, wrap_by_policy])
@pytest.mark.parametrize("offload", [False, True], ids=["device", "offload"])
def test_one_unit_at_a_time_has_memory(wrap, offload):
    """While a model is wrapped, the peak memory is that of its shards and of the largest unit, whole.

    Wrapped as a single unit, the same model needs memory for all of its units at the same time.
    """
    model = meta_mlp(*WIDTHS)
    units = [param.nbytes for layer in model if isinstance(layer, nn.Linear) for param in [layer.weight, layer.bias]]
    total, largest = sum(units), 4 * (512 * 1024 + 1024)
    assert total > 5 * largest
    alive, peak, wrapped = alive_and_peak(lambda: wrap(model, cpu_offload=offload))
    shards = sum(param.nbytes for param in wrapped.parameters())
    assert shards * dist.get_world_size() >= total
    slack = 2**18  # names, checksums and torch's own memory
    assert shards <= alive <= shards + slack
    assert shards <= peak <= shards + largest + slack
    assert alive_and_peak(lambda: FSDP(meta_mlp(*WIDTHS), cpu_offload=offload))[1] >= shards + total


@on_ranks(1, in_full(2), 3)
@pytest.mark.parametrize("flatten", [True, False], ids=["flat", "unflattened"])
def test_reset_parameters_of_a_wrapper(flatten):
    """If allowed, a wrapper's ``reset_parameters`` gives its module the values that the seed gives a plain one."""
    plain, model = nn.Linear(3, 5), nn.Linear(3, 5)
    torch.manual_seed(8)
    plain.reset_parameters()
    wrapped = FSDP(model, allow_reset_parameters=True, flatten_parameters=flatten)
    torch.manual_seed(8)
    wrapped.reset_parameters()
    assert_same_state(wrapped.state_dict(), plain.state_dict())
    assert not hasattr(FSDP(nn.Sequential(nn.Linear(1, 1)), allow_reset_parameters=True), "reset_parameters")
