"""An exception in a pass reaches the user, and the next step is clean, on all ranks or on one that retries."""

import contextlib
import copy
import gc
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairshard.checks import optimizer_check
from fairshard.engine.tree import every_root, units_below
from fairshard.errors import (
    BackwardOrderError,
    FairshardError,
    PartialGradientError,
    RanksDisagreeError,
    ShardChangedError,
)
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import fully_shard
from fairshard.nn.data_parallel import TrainingState
from fairshard.utils.groups import communicator
from tests.engine.random_nets import shard
from tests.kit import rank_device
from tests.kit.doors import gathered
from tests.models import mlp
from tests.on_ranks import on_ranks
from tests.reference import assert_same_step, randn, sgd, squares, train_both

pytestmark = pytest.mark.behaviour("exceptions")


class Fault(nn.Module):
    """Raises in forward, in backward, or not at all, as ``when`` says."""

    def __init__(self):
        super().__init__()
        self.when = None

    def forward(self, x):
        if self.when == "forward":
            raise KeyError("in forward")
        if self.when == "backward":
            x = x.clone() if x.requires_grad else x.requires_grad_()
            x.register_hook(self._raise)
        return x

    def _raise(self, grad):
        raise KeyError("in backward")


def faulty(position):
    """Three Linears and a `Fault` before, between or after them."""
    layers = list(mlp(4, 9, 7, 5))
    layers.insert(2 * position, Fault())
    return nn.Sequential(*layers).to(rank_device())


def wrap_layers(model, **kwargs):
    for index, layer in enumerate(model):
        if isinstance(layer, (nn.Linear, Fault)):
            model[index] = FSDP(layer, **kwargs)
    return FSDP(model, **kwargs)


def fault_of(model):
    return next(module for module in model.modules() if isinstance(module, Fault))


@pytest.mark.pairs
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("wrap", [FSDP, wrap_layers], ids=["one", "each"])
@pytest.mark.parametrize("reshard", [True, False])
def test_the_step_after_an_exception_is_clean(when, position, wrap, reshard):
    """The exception arrives unchanged; the next steps give the same results as without it.

    After one clean pass every unit is idle and nothing is gathered.
    """

    def loss_of(model, key):
        if model is wrapped and key[0] % 2:
            fault_of(wrapped).when = when
            with pytest.raises(KeyError, match=f"in {when}"):
                squares(wrapped, (key, "bad")).backward()
            fault_of(wrapped).when = None
            wrapped.zero_grad()
        return squares(model, key)

    wrapped = wrap(faulty(position), reshard_after_forward=reshard)
    train_both(faulty(position), wrapped, loss_of, num_steps=4)
    assert gathered(wrapped) == []
    assert all(unit.state is TrainingState.IDLE for _, unit in units_below(wrapped))


@on_ranks(2)
def test_after_a_failed_forward_everything_is_idle_at_once():
    """A forward that raised leaves no unit in FORWARD: a state dict can be taken immediately."""
    wrapped = wrap_layers(faulty(1))
    fault_of(wrapped).when = "forward"
    with pytest.raises(KeyError):
        wrapped(randn(3, 4))
    assert gathered(wrapped) == []
    assert all(unit.state is TrainingState.IDLE for _, unit in units_below(wrapped))
    assert list(wrapped.state_dict()) == list(faulty(1).state_dict())


class Freezing(nn.Linear):
    """Freezes its weight in a forward, if ``freezes``."""

    freezes = True

    def forward(self, x):
        self.weight.requires_grad_(not self.freezes)
        return super().forward(x)


@on_ranks(2)
def test_a_call_that_cannot_begin_ends():
    """A flat parameter cannot freeze a part of itself: its unit's next call raises, and no pass is left behind."""
    inner = FSDP(Freezing(4, 4))
    model = FSDP(nn.Sequential(inner, nn.Tanh(), inner))
    with pytest.raises(FairshardError, match="requires_grad"):
        model(randn(3, 4))
    model.assert_state(TrainingState.IDLE)
    assert model._unit.root.engine.is_between_passes
    inner.module.freezes = False
    with model.summon_full_params(model):
        inner.module.weight.requires_grad_(True)
    model(randn(3, 4)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(2)
def test_what_no_sync_accumulated_survives_a_failed_pass():
    """An exception drops the gradients of its own pass, not those of earlier ones."""
    plain = faulty(1)
    wrapped = wrap_layers(copy.deepcopy(plain))
    with wrapped.no_sync():
        squares(wrapped, 0).backward()
        fault_of(wrapped).when = "forward"
        with pytest.raises(KeyError):
            squares(wrapped, 1)
        fault_of(wrapped).when = None
    squares(wrapped, 2).backward()
    for key in (0, 2):
        squares(plain, key).backward()
    assert_same_step(plain, wrapped)


@on_ranks(2)
def test_no_optimizer_steps_a_part_of_a_gradient():
    """A backward that raised has consumed what `no_sync` accumulated in one unit: a step raises until `zero_grad`."""
    wrapped = wrap_layers(faulty(1), bucket_cap_mb=0)
    optimizer = sgd(wrapped)
    with wrapped.no_sync():
        squares(wrapped, 0).backward()
    fault_of(wrapped).when = "backward"  # the last layer is sent before it raises
    with pytest.raises(KeyError):
        squares(wrapped, 1).backward()
    fault_of(wrapped).when = None
    before = wrapped.state_dict()
    squares(wrapped, 2).backward()
    with pytest.raises(PartialGradientError, match="zero_grad"):
        optimizer.step()
    for name, value in wrapped.state_dict().items():
        assert torch.equal(value, before[name]), name
    optimizer.zero_grad()
    squares(wrapped, 3).backward()
    optimizer.step()
    assert not torch.equal(wrapped.state_dict()["0.weight"], before["0.weight"])


@on_ranks(2, 3)
@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
@pytest.mark.parametrize("comes_after", ["nothing", "a backward"])
def test_a_skipped_batch_leaves_no_mixture_of_gradients(door, comes_after):
    """The second batch raised after some of its sums were added: the step raises, even on a rank without rows."""
    model = faulty(1)
    model[-1] = nn.Linear(model[-1].in_features, 1, device=rank_device())  # the last ranks hold no part of it
    for layer in model.modules():
        layer.is_unit = isinstance(layer, nn.Linear) or layer is model
    wrapped = shard(model, door, bucket_cap_mb=0)
    optimizer = sgd(wrapped)
    squares(wrapped, 0).backward()
    fault_of(wrapped).when = "backward"
    with pytest.raises(KeyError):
        squares(wrapped, 1).backward()
    fault_of(wrapped).when = None
    if comes_after == "a backward":
        squares(wrapped, 2).backward()
    with pytest.raises(PartialGradientError, match="zero_grad"):
        optimizer.step()
    optimizer.zero_grad()
    squares(wrapped, 3).backward()
    optimizer.step()


class Skipping(nn.Module):
    """A first layer that only rank 0 trains, and two that all train."""

    is_unit = True

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        for layer in self.children():
            layer.is_unit = True

    def forward(self, x):
        first = self.first(x)
        return self.third(self.second(first if dist.get_rank() == 0 else first.detach()))


class NoMemory:
    """Replaces ``FlatParam.write_grads``, where the copy of a gradient finds no memory."""

    def __init__(self, flat_param):
        self.flat_param = flat_param

    def __call__(self, views):
        self.flat_param.drop_grads()
        raise MemoryError("for a gradient")


@on_ranks(2, 3)
@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
@pytest.mark.parametrize("fault", [ShardChangedError, MemoryError])
@pytest.mark.parametrize("bucket_cap_mb", [0, 25])
def test_a_fault_of_one_rank_holds_up_no_other(door, fault, bucket_cap_mb):
    """Rank 0 raises where its backward reaches a layer; the others serve that layer, end, and hear of it next."""
    wrapped = shard(Skipping().to(rank_device()), door, bucket_cap_mb=bucket_cap_mb)
    wrapped(randn(3, 4)).sum().backward()
    wrapped.zero_grad()
    loss = wrapped(randn(3, 4)).sum()
    flat_param = next(unit for name, unit in units_below(wrapped) if name.endswith("first")).flat_params[0]
    if fault is ShardChangedError:
        with torch.no_grad():
            flat_param.shard.mul_(2)
    elif dist.get_rank() == 0:
        flat_param.write_grads = NoMemory(flat_param)
    with pytest.raises(fault) if dist.get_rank() == 0 else contextlib.nullcontext():
        loss.backward()
    flat_param.__dict__.pop("write_grads", None)
    with pytest.raises(RanksDisagreeError, match="1 on rank 0; 0 on rank"):
        wrapped(randn(3, 4)).sum().backward()


class Checkpointed(nn.Linear):
    """A layer in a reentrant checkpoint, which makes its graph in the backward."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


@on_ranks(2)
@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
def test_a_late_gradient_of_one_rank_holds_up_no_other(door):
    """Ranks compare what a reentrant checkpoint has reached, after the backward: also with a rank that then raises."""
    layers = nn.Sequential(Checkpointed(4, 4), nn.Linear(4, 4)).to(rank_device())
    layers.is_unit = layers[0].is_unit = layers[1].is_unit = True
    wrapped = shard(layers, door)
    x = randn(3, 4).requires_grad_()
    leaf = units_below(wrapped)[-1][1].flat_params[0].slots[0].leaf

    def come_late(grad):
        leaf.grad = torch.zeros_like(leaf)

    if dist.get_rank() == 0:
        x.register_hook(come_late)
    loss = wrapped(x).sum()
    with pytest.raises(BackwardOrderError) if dist.get_rank() == 0 else contextlib.nullcontext():
        loss.backward()
    with pytest.raises(RanksDisagreeError, match="1 on rank 0; 0 on rank"):
        wrapped(x.detach()).sum().backward()


@on_ranks(2)
def test_keyboard_interrupt_is_not_swallowed():
    """Ctrl-C inside a forward reaches the user, and leaves a model that still works."""
    layer = nn.Linear(4, 5)
    wrapped = FSDP(nn.Sequential(layer))

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = layer.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        wrapped(randn(3, 4))
    handle.remove()
    wrapped(randn(3, 4)).sum().backward()
    assert wrapped.params[0].grad is not None


@on_ranks(2)
def test_wrong_arguments_are_the_modules_own_error():
    """A call with wrong arguments raises what the module raises, and the next call works."""
    wrapped = FSDP(nn.Linear(4, 5))
    with pytest.raises(TypeError):
        wrapped()
    with pytest.raises(RuntimeError):
        wrapped(randn(3, 7))
    assert wrapped(randn(3, 4)).shape == (3, 5)


def interrupted(wrap, **kwargs):
    """A model whose backward has raised on all ranks while gathers and reductions were running."""
    layers = list(mlp(4, 9, 7, 7, 5))
    model = wrap(nn.Sequential(layers[0], Fault(), *layers[1:]).to(rank_device()), **kwargs)
    fault_of(model).when = "backward"
    with pytest.raises(KeyError, match="in backward"):
        squares(model, 0).backward()
    return model


def sharded_in_place(model, **kwargs):
    for layer in model.modules():
        layer.is_unit = isinstance(layer, nn.Linear) or layer is model
    return shard(model, "fully_shard", **kwargs)


def offloaded(model, **kwargs):
    return wrap_layers(model, cpu_offload=True, **kwargs)


@pytest.mark.parametrize(
    ("world_size", "wrap"), [(2, wrap_layers), (3, wrap_layers), (3, sharded_in_place), (2, offloaded)]
)
@on_ranks()
def test_a_dropped_model_needs_no_rank_any_more(wrap):
    """If some ranks drop a model whose backward has raised, and others keep it, all train another model."""
    earlier = every_root()  # of other tests of this process: torch's caches may keep their models
    model = interrupted(wrap, bucket_cap_mb=0)
    if dist.get_rank() == 0:
        del model
        deadline = time.monotonic() + 20  # autograd's thread of a device drops its references a moment later
        while set(every_root()) - set(earlier) and time.monotonic() < deadline:
            gc.collect()
    interrupted_here = [root.backward is not None for root in every_root() if root not in earlier]
    assert interrupted_here == ([] if dist.get_rank() == 0 else [True])
    train_both(mlp(4, 9, 5), wrap(mlp(4, 9, 5)), squares)


@pytest.mark.cpu_only("works of devices need not be waited for")
@on_ranks(2)
def test_works_of_a_dropped_model_end_with_their_group():
    """What a dropped model had sent and not waited for is kept by its group, and freed when the group is destroyed."""
    group = dist.new_group()
    model = interrupted(wrap_layers, bucket_cap_mb=0, process_group=group)
    comm = communicator(group)
    assert not comm.unfinished
    del model
    gc.collect()
    assert comm.unfinished
    reference = weakref.ref(comm)
    del comm
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert reference() is None


@on_ranks(2)
def test_ranks_clean_up_the_models_of_an_optimizer_in_one_order():
    """If backwards of two models of one optimizer have raised, its step cleans them up in the same order everywhere."""
    models = [interrupted(wrap_layers) for _ in range(2)]
    optimizer = torch.optim.SGD([param for model in models for param in model.parameters()], lr=0.1)
    ordered = sorted(every_root(), key=lambda root: root.number, reverse=dist.get_rank() == 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_check, "every_root", lambda: ordered)
        optimizer.step()
    assert not any(root.backward is not None for root in every_root())


@on_ranks(2)
@pytest.mark.parametrize("wrap", [wrap_layers, fully_shard])
@pytest.mark.parametrize("bucket_cap_mb", [0, 25])
def test_a_hook_on_a_gradient_that_raises_leaves_nothing_behind(wrap, bucket_cap_mb):
    """The backward raises its error once all is sent; after `zero_grad` the next one gives its own gradients only."""
    model, expected = (wrap(mlp(4, 9, 7, 5), bucket_cap_mb=bucket_cap_mb) for _ in range(2))

    def fail(param):
        raise KeyError("mine")

    handle = list(model.parameters())[-1].register_post_accumulate_grad_hook(fail)
    with pytest.raises(KeyError, match="mine"):
        squares(model, 0).backward()
    handle.remove()
    optimizer = sgd(model)
    with pytest.raises(PartialGradientError):
        optimizer.step()
    optimizer.zero_grad()
    for each in (model, expected):
        squares(each, 1).backward()
    for param, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert param.grad.equal(other.grad)
