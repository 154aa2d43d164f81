"""A step issues exactly the collectives that its units need, and moves exactly their bytes."""

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.engine import exchange
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import fully_shard
from fairshard.utils.collectives import counters, reset_counters
from tests.kit import CollectiveCounter
from tests.models import mlp, wrap_each
from tests.on_ranks import on_ranks
from tests.reference import randn, sgd

pytestmark = pytest.mark.behaviour("collective counts")

WIDTHS = (6, 11, 7, 5)
SIZES = [before * after + after for before, after in itertools.pairwise(WIDTHS)]


def step(model, sync=True, train=True):
    with contextlib.nullcontext() if sync else model.no_sync(), torch.set_grad_enabled(train):
        loss = model(randn(4, WIDTHS[0])).sum()
        if train:
            loss.backward()


def counts_of(model, **kwargs):
    """Collectives of the fourth step, the first unchecked one, by our counters and by torch.distributed."""
    for _ in range(3):
        step(model)
    sgd(model).step()
    reset_counters()
    with CollectiveCounter() as patched:
        step(model, **kwargs)
    return counters(), patched


def gathered(sizes, itemsize):
    """Number and received bytes of one gather of each unit: the padded line without this rank's own part."""
    others = dist.get_world_size() - 1
    return len(sizes), sum(others * -(-size // (others + 1)) * itemsize for size in sizes)


def message():
    """Number and received bytes of the exchange at the start of a backward."""
    return 1, (dist.get_world_size() - 1) * exchange.FIRST_NBYTES


def add(*pairs):
    return tuple(map(sum, zip(*pairs, strict=True)))


@pytest.mark.pairs
@on_ranks(2, 3, 4)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp32_reduce"])
@pytest.mark.parametrize("bucket", [0, 25])
def test_a_step_gathers_and_reduces_as_often_as_the_formula_says(reshard, precision, bucket):
    """Each unit is gathered for forward, again for backward if resharded; gradients go bucket by bucket."""
    settings = {"mixed_precision": True, "compute_dtype": torch.bfloat16} if precision != "fp32" else {}
    settings |= {"fp32_reduce_scatter": True} if precision == "fp32_reduce" else {}
    compute, reduce = {"fp32": (4, 4), "bf16": (2, 2), "fp32_reduce": (2, 4)}[precision]
    model = wrap_each(mlp(*WIDTHS), reshard_after_forward=reshard, bucket_cap_mb=bucket, **settings)
    ours, patched = counts_of(model)
    once = gathered(SIZES, compute)
    _, sent = gathered(SIZES, reduce)  # all bucket rows but this rank's own are sent: the same sum
    assert ours == {
        "all_gather": add(once, once) if reshard else once,
        "reduce_scatter": (len(SIZES) if bucket == 0 else 1, sent),
        "agreement": message(),
    }
    if torch.distributed.get_backend() == "gloo" and dist.get_world_size() < 4:
        assert patched.nbytes("recv") == patched.nbytes("send") == sum(nbytes for _, nbytes in ours.values())
        others = dist.get_world_size() - 1
        assert patched.count("recv") == others * sum(number for number, _ in ours.values())
        assert {method for method, _ in patched.calls} == {"send", "recv"}


@on_ranks(2, 3)
def test_the_root_is_gathered_once():
    """The outermost unit stays gathered between forward and backward, whatever ``reshard_after_forward`` says."""
    model = FSDP(mlp(*WIDTHS))
    ours, _ = counts_of(model)
    assert ours["all_gather"] == gathered([sum(SIZES)], 4)
    assert ours["reduce_scatter"] == gathered([sum(SIZES)], 4)


@on_ranks(2)
def test_unflattened_parameters_are_gathered_one_by_one():
    """Without flattening, every parameter has its own gather; gradients still share buckets."""
    model = mlp(*WIDTHS)
    numels = [param.numel() for param in model.parameters()]
    ours, _ = counts_of(FSDP(model, flatten_parameters=False))
    assert ours["all_gather"] == gathered(numels, 4)
    assert ours["reduce_scatter"] == (1, gathered(numels, 4)[1])


@on_ranks(2)
def test_buckets_are_filled_up_to_the_cap():
    """Buckets take units in backward order while they fit: here the last two, then the first."""
    padded = [2 * -(-size // 2) * 4 for size in SIZES]
    cap = (padded[2] + padded[1]) / 2**20
    ours, _ = counts_of(wrap_each(mlp(*WIDTHS), bucket_cap_mb=cap))
    assert ours["reduce_scatter"] == (2, sum(padded) // 2)


@on_ranks(2, 3)
def test_no_sync_sends_no_gradients():
    """Under ``no_sync`` only parameters are sent."""
    ours, _ = counts_of(wrap_each(mlp(*WIDTHS)), sync=False)
    once = gathered(SIZES, 4)
    assert ours == {"all_gather": add(once, once), "agreement": message()}


@on_ranks(2, 3)
def test_a_pass_without_grad_gathers_once():
    """Under ``no_grad`` each unit is gathered for forward, and nothing follows."""
    ours, _ = counts_of(wrap_each(mlp(*WIDTHS)), train=False)
    assert ours == {"all_gather": gathered(SIZES, 4)}


@on_ranks(2)
def test_frozen_units_send_no_gradients():
    """A frozen unit in the middle is gathered for the backward that passes through it, but not reduced."""
    model = mlp(*WIDTHS)
    model[2].requires_grad_(False)
    ours, _ = counts_of(wrap_each(model, bucket_cap_mb=0))
    once = gathered(SIZES, 4)
    assert ours["all_gather"] == add(once, once)
    assert ours["reduce_scatter"] == gathered([SIZES[0], SIZES[2]], 4)


def net(door, first, last):
    """Three units in sequence, and one around them."""
    widths = (first, 8, 8, last)
    blocks = [door(nn.Sequential(nn.Linear(a, b), nn.Tanh())) for a, b in itertools.pairwise(widths)]
    return door(nn.Sequential(*blocks))


def numbers():
    return {kind: number for kind, (number, _) in counters().items()}


@on_ranks(2)
@pytest.mark.parametrize("door", [FSDP, fully_shard])
def test_a_step_of_a_gan(door):
    """The discriminator's two losses share one backward, which frees each unit between its two calls."""
    generator, discriminator = net(door, 4, 6), net(door, 6, 1)
    optimizers = [sgd(generator), sgd(discriminator)]
    for _ in range(3):
        reset_counters()
        loss = discriminator(randn(4, 6)).mean() - discriminator(generator(randn(4, 4)).detach()).mean()
        loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        discriminator(generator(randn(4, 4))).mean().backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
    # Forwards: 3 units, 5 times. Discriminator's backward: 3 and 3. Generator's: 3 and 3.
    assert numbers() == {"all_gather": 15 + 6 + 6, "reduce_scatter": 3, "agreement": 2}


@on_ranks(2)
@pytest.mark.parametrize("door", [FSDP, fully_shard])
def test_a_head_on_a_frozen_backbone(door):
    """Nothing of the backbone is gathered or reduced for the backward."""
    backbone, head = net(door, 6, 8).requires_grad_(False), door(nn.Linear(8, 1))
    for _ in range(3):
        reset_counters()
        head(backbone(randn(4, 6))).sum().backward()
    assert numbers() == {"all_gather": 3 + 1, "reduce_scatter": 1, "agreement": 1}


@on_ranks(2)
@pytest.mark.parametrize("door", [FSDP, fully_shard])
@pytest.mark.parametrize("retain", [True, False])
def test_two_losses_with_two_backwards(door, retain):
    """After one forward or two, each backward gathers the units that it reaches, and reduces each once."""
    model = net(door, 6, 8)
    for _ in range(3):
        reset_counters()
        first = model(randn(4, 6))
        second = first if retain else model(randn(4, 6))
        first.sum().backward(retain_graph=retain)
        second.pow(2).sum().backward()
        model.zero_grad()
    assert numbers() == {"all_gather": 3 + 6 if retain else 6 + 6, "reduce_scatter": 2, "agreement": 2}


@on_ranks(2)
def test_clip_is_one_all_reduce():
    """The total norm needs one all-reduce of one number."""
    model = wrap_each(mlp(*WIDTHS))
    step(model)
    reset_counters()
    model.clip_grad_norm_(1.0)
    assert counters() == {"all_reduce": (1, 4)}


@on_ranks(2)
def test_kept_parameters_are_gathered_once_a_step():
    """Without resharding each unit is gathered once a step, with the weights after the optimizer's step."""
    model = wrap_each(mlp(*WIDTHS), reshard_after_forward=False)
    optimizer = sgd(model)
    step(model)
    optimizer.step()
    for _ in range(2):
        reset_counters()
        step(model)
        assert counters()["all_gather"] == gathered(SIZES, 4)
        optimizer.step()
