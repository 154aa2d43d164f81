"""The order in which units are gathered, are freed and have their gradients, as the observer reports it."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper as torch_checkpoint_wrapper

from fairshard.engine.tree import units_below
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import checkpoint_wrapper
from tests.event_lines import Branches, Expert, ExpertBlock, Stack, order, tokens, without_unshards
from tests.models import DIM, Block
from tests.on_ranks import on_ranks
from tests.reference import sgd

ROOT_TOO = {"disable_reshard_on_root": False}
AS_CALLED = {"forward_prefetch": False}

FORWARD = "+root +0 -0 +1 -1 +2 -2"
BACKWARD = "+2 +1 -2 !2 +0 -1 !1 -0 !0 -root !root"


def stack(num_layers, checkpointing=None, **kwargs):
    """A sharded `Stack`, each layer a unit; layers are checkpointed by our wrapper, torch's or not at all."""
    torch.manual_seed(1)
    wrap = {None: lambda layer: layer, "ours": checkpoint_wrapper, "torch's": torch_checkpoint_wrapper}[checkpointing]
    return FSDP(Stack(FSDP(wrap(Block()), **kwargs) for _ in range(num_layers)), **kwargs)


KEEPS = {
    "all": ({"reshard_after_forward": False}, "+root +0 +1 +2", without_unshards(BACKWARD)),
    "root": ({}, FORWARD, BACKWARD),
    "root, few ranks": ({"reshard_after_forward": 2}, FORWARD, BACKWARD),
    "nothing": (ROOT_TOO, f"{FORWARD} -root", f"+root {BACKWARD}"),
}


@on_ranks(2)
@pytest.mark.parametrize("checkpointing", [None, "ours", pytest.param("torch's", marks=pytest.mark.full)])
def test_forward_and_backward(checkpointing):
    """The backward gathers one unit ahead, in every iteration, and only units that the forward has freed."""
    for kwargs, forward, backward in KEEPS.values():
        model = stack(3, checkpointing, **kwargs, **AS_CALLED)
        optimizer = sgd(model)
        for iteration in range(3):
            with order(model, forward):
                loss = model(tokens()).sum()
            with order(model, backward):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=iteration % 2 == 0)


@on_ranks(2)
def test_forward_gathers_ahead_by_default():
    """Once the order is known, each gather is issued one event earlier; the backward is the same."""
    model = stack(3)
    for forward in (FORWARD, "+root +0 +1 -0 +2 -1 -2", "+root +0 +1 -0 +2 -1 -2"):
        with order(model, forward):
            loss = model(tokens()).sum()
        with order(model, BACKWARD):
            loss.backward()


BACK_THROUGH_LAYERS = "+2 +1 -2 !2 +0 -1 !1 -0 !0"
SEVERAL = {
    # Kept units: arguments, whether later forwards reuse them, the later forward, its part of the backward
    "all": ({"reshard_after_forward": False}, True, "", without_unshards(BACK_THROUGH_LAYERS)),
    "root": ({}, True, FORWARD.removeprefix("+root "), BACK_THROUGH_LAYERS),
    "root, few ranks": ({"reshard_after_forward": 2}, False, f"-root {FORWARD}", BACK_THROUGH_LAYERS),
    "nothing": (ROOT_TOO, False, f"{FORWARD} -root", f"+root {BACK_THROUGH_LAYERS}"),
}


@on_ranks(2)
@pytest.mark.parametrize("checkpointing", [None, "ours", pytest.param("torch's", marks=pytest.mark.full)])
def test_several_forwards_before_one_backward(checkpointing):
    """The backward goes through the later forward, then gathers again and goes through the earlier one.

    A forward frees what an earlier one has kept, unless it reuses it, before it gathers.

    Each layer is freed when the backward has finished its later call, though its gradients are not complete yet. The
    root, whose inputs have no gradients, is freed at the end. This holds in every iteration, even the first.
    """
    for keeps, (kwargs, serves, again, first_part) in SEVERAL.items():
        forward = KEEPS[keeps][1]
        model = stack(3, checkpointing, **kwargs, **AS_CALLED)
        if serves:
            keep_across_passes(model)
        optimizer = sgd(model)
        for _ in range(2):
            with order(model, f"{forward} {again}".strip()):
                losses = model(tokens()), model(tokens())
            with order(model, f"{first_part} {BACK_THROUGH_LAYERS} -root !root"):
                sum(losses).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with order(model, forward):  # as if there had never been several forwards
            loss = model(tokens()).sum()
        with order(model, KEEPS[keeps][2]):
            loss.backward()


@on_ranks(2)
def test_three_forwards_before_one_backward():
    """All parts of the backward are alike; after a forward whose outputs are dropped, the backward is the usual one."""
    model = stack(3, **AS_CALLED)
    with order(model, f"{FORWARD} -root {FORWARD} -root {FORWARD}"):
        losses = [model(tokens()).sum() for _ in range(3)]
    with order(model, " ".join([BACK_THROUGH_LAYERS] * 3) + " -root !root"):
        sum(losses).backward()
    model(tokens())
    loss = model(tokens()).sum()
    with order(model, BACKWARD):
        loss.backward()


@on_ranks(2)
def test_what_a_forward_keeps_stays_while_several_await_their_backward():
    """By default a backward gathers no kept weight again; each forward frees and gathers, as weights may change."""
    model = stack(3, reshard_after_forward=False, **AS_CALLED)
    with order(model, "+root +0 +1 +2 -root -0 -1 -2 +root +0 +1 +2"):
        losses = model(tokens()), model(tokens())
    with order(model, "-2 !2 -1 !1 -0 !0 -root !root"):
        sum(losses).sum().backward()


@on_ranks(2)
def test_what_serves_later_forwards_is_gathered_again_once_it_has_changed():
    """After a write to the shards that torch counts, or a step with gradients, the next forward frees and gathers."""
    model = stack(3, reshard_after_forward=False, **AS_CALLED)
    keep_across_passes(model)
    optimizer = sgd(model)
    before = model(tokens())
    with order(model, ""):
        assert torch.equal(model(tokens()), before)
    with torch.no_grad():
        for param in model.layers[1].parameters():
            param.mul_(2)
    with order(model, "-1 +1"):
        after = model(tokens())
    assert not torch.equal(after, before)
    optimizer.step()  # without gradients
    with order(model, ""):
        assert torch.equal(model(tokens()), after)
    model(tokens()).square().sum().backward()
    with order(model, "+root +0 +1 +2"):  # the backward has freed all
        assert torch.equal(model(tokens()), after)
    optimizer.step()
    with order(model, "-root -0 -1 -2 +root +0 +1 +2"):
        assert not torch.equal(model(tokens()), after)


def keep_across_passes(model):
    """Make the next forward reuse the units that a forward leaves gathered."""
    for _, unit in units_below(model):
        unit.rule = replace(unit.rule, keeps_across_passes=True)


@on_ranks(2)
def test_a_unit_that_a_backward_does_not_reach():
    """It is not gathered and has (empty) gradients at the end; a second backward that reaches it is planned alike."""
    for is_last, second_backward in (
        (True, "+1.lin1 +0 -1.lin1 !1.lin1 -0 !0 !1.lin2"),
        (False, "+1.lin1 +0 -1.lin1 !1.lin1 -0 !0 !1.lin2"),
    ):
        model = branches()
        with order(model, "+0 -0 +1.lin1 -1.lin1 +1.lin2 -1.lin2"):
            first, second = model(torch.ones(2, DIM))
        model.set_is_last_backward(is_last)
        with order(model, "+1.lin2 +0 -1.lin2 !1.lin2 -0 !0 !1.lin1"):
            second.sum().backward(retain_graph=True)
        model.set_is_last_backward(True)
        with order(model, second_backward):
            first.sum().backward()
        assert not any(unit.is_gathered for _, unit in units_below(model))


def branches():
    """A sharded Linear, and `Branches` of two units after it."""
    model = nn.Sequential(nn.Linear(DIM, DIM), Branches())
    for owner, name in ((model, "0"), (model[1], "lin1"), (model[1], "lin2")):
        setattr(owner, name, FSDP(getattr(owner, name), **AS_CALLED))
    return FSDP(model, **AS_CALLED)


@on_ranks(2)
def test_named_units_in_forward():
    """Each layer gathers the next one, or the next two; the backward is unchanged."""
    model = stack(4, "torch's", **ROOT_TOO, **AS_CALLED)
    forwards = ("+root +0 +1 -0 +2 -1 +3 -2 -3 -root", "+root +0 +1 +2 -0 +3 -1 -2 -3 -root")
    for number, forward in enumerate(forwards, start=1):
        layers = model.layers
        for index in range(4 - number):
            layers[index].set_modules_to_forward_prefetch(list(layers[index + 1 : index + 1 + number]))
        with order(model, forward):
            loss = model(tokens()).sum()
        with order(model, "+root +3 +2 -3 !3 +1 -2 !2 +0 -1 !1 -0 !0 -root !root"):
            loss.backward()


@on_ranks(2)
def test_named_units_in_backward():
    """Each layer gathers the one before it, as by default, or two; the forward gathers each when it is called."""
    model = stack(4, "torch's", **ROOT_TOO, **AS_CALLED)
    backwards = (
        "+root +3 +2 -3 !3 +1 -2 !2 +0 -1 !1 -0 !0 -root !root",
        "+root +3 +2 +1 -3 !3 +0 -2 !2 -1 !1 -0 !0 -root !root",
    )
    for number, backward in enumerate(backwards, start=1):
        layers = model.layers
        for index in range(number, 4):
            layers[index].set_modules_to_backward_prefetch(list(layers[index - number : index])[::-1])
        with order(model, "+root +0 -0 +1 -1 +2 -2 +3 -3 -root"):
            loss = model(tokens()).sum()
        with order(model, backward):
            loss.backward()


@on_ranks(2)
def test_units_inside_checkpoints():
    """Inside a checkpoint in a checkpoint, names are followed; by default each unit gathers the next one.

    The order is the layer, the unit inside it, the layer before it. The root, which has no parameters and no names,
    gathers the unit that it predicts in either case.
    """
    model = Stack(ExpertBlock() for _ in range(3))
    for layer in model.layers:
        layer.expert.w1 = FSDP(layer.expert.w1, **AS_CALLED)
    for kind in (ExpertBlock, Expert):
        apply_activation_checkpointing(model, check_fn=lambda module, kind=kind: isinstance(module, kind))
    model.embed, model.head = FSDP(model.embed, **AS_CALLED), FSDP(model.head, **AS_CALLED)
    model.layers = nn.ModuleList(FSDP(layer, **AS_CALLED) for layer in model.layers)
    model = FSDP(model, **AS_CALLED)
    forward = "+embed -embed " + " ".join(f"+{i} +{i}.expert.w1 -{i}.expert.w1 -{i}" for i in range(3)) + " +head -head"
    with order(model, forward):
        loss = model(tokens()).sum()
    with order(
        model,
        "+head +2 -head !head +2.expert.w1 +1 -2.expert.w1 !2.expert.w1 -2 !2 +1.expert.w1 +0 -1.expert.w1 "
        "!1.expert.w1 -1 !1 +0.expert.w1 +embed -0.expert.w1 !0.expert.w1 -0 !0 -embed !embed",
    ):
        loss.backward()
    embed, head, (first, second, third) = model.embed, model.head, model.layers
    head.set_modules_to_backward_prefetch([third])
    third.set_modules_to_backward_prefetch([second, second.expert.w1])
    second.set_modules_to_backward_prefetch([first, first.expert.w1])
    first.set_modules_to_backward_prefetch([embed])
    with order(model, forward):
        loss = model(tokens()).sum()
    with order(
        model,
        "+head +2 -head !head +1 +1.expert.w1 +2.expert.w1 -2.expert.w1 !2.expert.w1 -2 !2 "
        "+0 +0.expert.w1 -1.expert.w1 !1.expert.w1 -1 !1 +embed -0.expert.w1 !0.expert.w1 -0 !0 -embed !embed",
    ):
        loss.backward()
