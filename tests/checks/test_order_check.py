"""Ranks that run different units, or in a different order, raise before an optimizer can step."""

import contextlib
import gc
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairshard.checks import order_check
from fairshard.checks.order_check import OrderCheck
from fairshard.errors import RanksDisagreeError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import ShardingStrategy
from fairshard.state.full_params import gather_line
from fairshard.utils import groups
from fairshard.utils.collectives import counters, reset_counters
from tests.kit import rank_device
from tests.on_ranks import on_ranks
from tests.reference import backward_that_raises_on, randn, sgd


class Path(nn.Module):
    """Runs its layers in the order that ``path`` names; all have the same shape."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.path = self.usual
        self.checkpointing = None

    usual = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")

    def forward(self, x):
        for name in self.path:
            layer = self.get_submodule(name)
            if self.checkpointing is None:
                x = torch.tanh(layer(x))
            else:
                x = torch.tanh(checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant"))
        return x


OTHER_PATHS = {
    "other modules": (("blocks.0", "blocks.1", "experts.1", "blocks.3"), "blocks.2", "experts.1"),
    "other order": (("blocks.0", "blocks.2", "blocks.1", "blocks.3"), "blocks.1", "blocks.2"),
    "one more": (("blocks.0", "blocks.1", "blocks.1", "blocks.2", "blocks.3"), "blocks.2", "blocks.1"),
}


def wrapped_path(**kwargs):
    torch.manual_seed(1)
    model = Path().to(rank_device())
    for layers in (model.blocks, model.experts):
        for index, layer in enumerate(layers):
            layers[index] = FSDP(layer, **kwargs)
    return FSDP(model, **kwargs)


@contextlib.contextmanager
def native_collectives():
    """Match gathers by order only, as NCCL does, which does not notice another module of the same shape."""
    with mock.patch.object(groups, "EXCHANGE_RANKS", ()):
        yield


def train_step(model, key):
    model(randn(3, 4, key=key).requires_grad_()).square().sum().backward()


@on_ranks(2, 3)
@pytest.mark.parametrize(
    ("kind", "step"), [("other modules", 1), ("other order", 1), ("other order", 3), ("one more", 1), ("one more", 3)]
)
def test_ranks_that_run_other_units_are_told_before_they_can_step(kind, step):
    """Every rank raises an error with the step, both ranks and both names, and no weight has changed."""
    path, ours, theirs = OTHER_PATHS[kind]
    with native_collectives():
        model = wrapped_path(reshard_after_forward=False)
        optimizer = sgd(model)
        for number in range(1, step):
            train_step(model, number)
            optimizer.step()
            optimizer.zero_grad()
        before = [param.detach().clone() for param in model.parameters()]
        if dist.get_rank() == 1:
            model.module.path = path
        with pytest.raises(RanksDisagreeError) as raised:
            train_step(model, step)
    assert f"In step {step} rank 0 is at `{ours}` (forward), rank 1 at `{theirs}` (forward)" in str(raised.value)
    if rank_device().type == "cpu":
        assert f"This was noticed in the backward of step {step}" in str(raised.value), "before it computes"
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@on_ranks(2)
@pytest.mark.parametrize("mode", ["off", "sampled", "always"])
def test_every_step_is_compared(mode):
    """A mismatch in step 10 raises in step 10 in every mode: the exchange that plans a backward always compares."""
    with native_collectives():
        model = wrapped_path(order_check=mode)
        for step in range(1, 10):
            train_step(model, step)
        model.module.path = OTHER_PATHS["other order"][0] if dist.get_rank() == 1 else Path.usual
        with pytest.raises(RanksDisagreeError, match=r"In step 10 rank 0 is at `blocks\.1` .*, rank 1 at `blocks\.2`"):
            train_step(model, 10)


@on_ranks(2)
def test_backwards_may_reach_other_units():
    """Forwards must agree, but backwards need not: units that a rank does not reach count as zeros there."""
    branches = nn.ModuleList([FSDP(nn.Linear(4, 4), reshard_after_forward=False) for _ in range(2)])
    model = FSDP(Branches(branches))
    outputs = model(torch.ones(3, 4))
    with torch.no_grad():
        model(randn(3, 4))
    sum(output.sum() for output in outputs[dist.get_rank() :]).backward()
    for branch, share in zip(branches, (0.5, 1.0), strict=True):
        flat_param = branch._fairshard_unit.flat_params[0]
        _, bias = flat_param.line.params_of(gather_line(flat_param, flat_param.shard.grad))
        assert torch.equal(bias, torch.full((4,), 3 * share))


class Branches(nn.Module):
    """Returns the output of each branch."""

    def __init__(self, branches):
        super().__init__()
        self.branches = branches

    def forward(self, x):
        return [branch(x) for branch in self.branches]


@on_ranks(2)
def test_each_backward_exchanges_one_message():
    """There is one exchange per backward, also under no_sync, and none per forward."""
    model = wrapped_path()
    reset_counters()
    for step in range(1, 4):
        with model.no_sync():
            train_step(model, (step, 0))
        train_step(model, step)
        with torch.no_grad():
            model(randn(3, 4))
        assert counters()["agreement"][0] == 2 * step


@on_ranks(1)
def test_one_rank_compares_nothing():
    """A single rank exchanges nothing."""
    model = wrapped_path(order_check="always")
    reset_counters()
    train_step(model, 0)
    assert counters() == {}


@on_ranks(2)
@pytest.mark.parametrize("checkpointing", [None, "reentrant", "not_reentrant"])
@pytest.mark.parametrize("reshard", [True, False])
def test_ranks_that_agree_are_left_alone(checkpointing, reshard):
    """No error after accumulation, evaluation, several forwards per backward, recomputation, or a pass that raised."""
    model = wrapped_path(order_check="always", reshard_after_forward=reshard)
    model.module.checkpointing = checkpointing
    optimizer = sgd(model)
    for step in range(4):
        with model.no_sync():
            train_step(model, (step, 0))
        with torch.no_grad():
            model(randn(3, 4))
        first, second = (model(randn(3, 4, key=(step, key)).requires_grad_()) for key in (1, 2))
        model(randn(3, 4))  # never backpropagated
        (first.sum() + second.sum()).backward()
        model.module.path = ("blocks.0", "no such")
        with pytest.raises(AttributeError):
            model(randn(3, 4))
        model.module.path = Path.usual
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_evaluation_is_not_compared():
    """Forwards without gradients and without communication may differ among ranks, and training continues."""
    model = wrapped_path(order_check="always", reshard_after_forward=False)
    train_step(model, 0)
    with torch.no_grad(), native_collectives():
        if dist.get_rank() == 1:
            model.module.path = ("blocks.0", "blocks.1", "blocks.2", "blocks.3", "blocks.3")
        model(randn(3, 4))
    model.module.path = Path.usual
    train_step(model, 1)


@on_ranks(2, timeout=20)
def test_a_model_may_be_dropped_after_a_forward():
    """If only rank 0 collects the garbage of a dropped model, the next model still trains on both ranks."""
    gc.disable()
    try:
        model = wrapped_path()
        model(randn(2, 4))
        del model
        if dist.get_rank() == 0:
            gc.collect()
        model = wrapped_path()
        model(randn(2, 4)).sum().backward()
    finally:
        gc.enable()
    assert any(param.grad.any() for param in model.parameters())


@on_ranks(2)
def test_what_moves_nothing_is_not_compared():
    """With unsharded parameters, ranks may differ in accumulation, failed forwards, and units without parameters."""
    model = wrapped_path(order_check="always", sharding_strategy=ShardingStrategy.NO_SHARD)
    model.module.blocks[3] = FSDP(nn.Tanh(), order_check="always", sharding_strategy=ShardingStrategy.NO_SHARD)
    model.module.path = Path.usual[: 3 + dist.get_rank()]
    for step in range(2):
        with model.no_sync():
            for micro in range(dist.get_rank() + 1):
                train_step(model, (step, micro))
        if dist.get_rank() == 1:
            with mock.patch.object(model.module, "path", ("blocks.0", "no such")), pytest.raises(AttributeError):
                model(randn(3, 4))
        train_step(model, step)


@on_ranks(2)
def test_a_pass_that_accumulates_is_compared_with_the_one_that_reduces():
    """A backward under no_sync is also compared: if ranks ran different units, it raises."""
    with native_collectives():
        model = wrapped_path(reshard_after_forward=False)
        model.module.path = OTHER_PATHS["other order"][0] if dist.get_rank() == 1 else Path.usual
        with model.no_sync():
            with pytest.raises(RanksDisagreeError, match=r"In step 1 rank 0 is at `blocks.1` .*, rank 1 at `blocks.2`"):
                train_step(model, 0)


@on_ranks(2)
@pytest.mark.parametrize(("name", "values"), [("order_check", ("always", "off")), ("nan_check", (True, False))])
def test_inner_values_must_agree(name, values):
    """Options of the whole model must be equal in all wrappers; otherwise the first forward raises."""
    inner = FSDP(nn.Linear(4, 4), **{name: values[0]})
    model = FSDP(nn.Sequential(inner, nn.Linear(4, 4)), **{name: values[1]})
    with pytest.raises(ValueError, match=f"`{name}` must be the same in all wrappers.*unit `0`"):
        model(randn(3, 4))


@on_ranks(2)
def test_forwards_whose_backward_never_comes_do_not_add_up():
    """Under evaluation with gradients enabled the record stays bounded, and ranks still agree."""
    with mock.patch.object(order_check, "_MAX_NOTED", 20):
        model = wrapped_path()
        for _ in range(12):
            model(randn(3, 4))
        assert len(OrderCheck.of(model._unit.root).noted) <= 20 + 1 + len(model._unit.root.units)
        train_step(model, 0)


@on_ranks(1)
def test_other_values_are_refused():
    """Other values raise when the model is wrapped."""
    with pytest.raises(ValueError, match="`order_check` must be one of always, sampled, off, but is 'never'"):
        FSDP(nn.Linear(4, 4), order_check="never")


@on_ranks(2)
def test_the_rank_whose_backward_raised_is_named():
    """The next backward raises on all ranks and tells what happened on each."""
    model = wrapped_path()
    train_step(model, 0)
    backward_that_raises_on(1, model(randn(3, 4)).sum())
    expected = r"The backwards that have raised differ: 0 on rank 0; 1 on rank 1\."
    with pytest.raises(RanksDisagreeError, match=expected):
        model(randn(3, 4)).sum().backward()


@on_ranks(2)
def test_units_under_no_sync_on_one_rank_are_named():
    """Ranks that send and ranks that keep gradients differ, though they run the same units."""
    model = wrapped_path()
    train_step(model, 0)
    context = model.no_sync() if dist.get_rank() == 1 else contextlib.nullcontext()
    with context, pytest.raises(RanksDisagreeError, match=r"no_sync differ: none on rank 0; `root`, `blocks\.0`"):
        model(randn(3, 4)).sum().backward()
