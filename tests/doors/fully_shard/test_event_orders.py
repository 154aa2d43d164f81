"""The order in which units are gathered, freed and get their gradients: as in PyTorch's FSDP2, and by default.

With ``set_forward_prefetch(False)`` every order is that of FSDP2. By default, once a first forward has shown the order,
the forward also gathers each unit while the unit before it computes. The order of the backward is the same.
"""

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from fairshard.engine.tree import units_below
from fairshard.nn import Phase, fully_shard, observe
from tests.event_lines import CHECKPOINTED, Branches, Expert, ExpertBlock, Stack, order, tokens, without_unshards
from tests.models import DIM, VOCAB, Block
from tests.on_ranks import on_ranks
from tests.reference import sgd
from tests.torch_gaps import needs_readable_saved_tensor_hooks

pytestmark = pytest.mark.behaviour("event orders of fully_shard")

CHECKPOINTS = [None, "utils", "composable"]

FORWARD = "+root +0 -0 +1 -1 +2 -2"
AHEAD = "+root +0 +1 -0 +2 -1 -2"
BACK_THROUGH_LAYERS = "+2 +1 -2 !2 +0 -1 !1 -0 !0"
BACKWARD = f"{BACK_THROUGH_LAYERS} -root !root"


def stack(num_layers, checkpointing=None, reshard=True, ahead=False):
    """A `Stack` with each layer a unit; activations are recomputed unless ``checkpointing`` is None."""
    torch.manual_seed(1)
    model = Stack([Block() for _ in range(num_layers)], recomputes=checkpointing == "utils")
    for layer in model.layers:
        fully_shard(composable_checkpoint(layer) if checkpointing == "composable" else layer, **reshards(reshard))
    return sharded(model, reshard, ahead)


def sharded(model, reshard=True, ahead=False):
    fully_shard(model, **reshards(reshard)).set_forward_prefetch(ahead)
    return model


def reshards(value):
    return {"reshard_after_forward": value}


ALL_FREED = f"{FORWARD} -root", f"{AHEAD} -root", f"+root {BACKWARD}"
KEEPS = {  # reshard_after_forward: the forward in FSDP2's order, the forward in ours, the backward
    True: ALL_FREED,
    False: ("+root +0 +1 +2", "+root +0 +1 +2", without_unshards(BACKWARD)),
    2: ALL_FREED,
    None: (FORWARD, AHEAD, BACKWARD),
}


@on_ranks(2)
@pytest.mark.parametrize("ahead", [False, True])
def test_forward_and_backward(ahead):
    """In every iteration the backward gathers one unit ahead, and only units that the forward has freed.

    Recomputation does not change the order.
    """
    for checkpointing in CHECKPOINTS:
        for reshard, (forward, forward_ahead, backward) in KEEPS.items():
            model = stack(3, checkpointing, reshard, ahead)
            optimizer = sgd(model)
            for iteration in range(3):
                with order(model, forward_ahead if ahead and iteration else forward):
                    loss = model(tokens()).sum()
                with order(model, backward):
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=iteration % 2 == 0)


@on_ranks(2)
@pytest.mark.parametrize("ahead", [False, True])
def test_several_forwards_before_one_backward(ahead):
    """The backward goes through the later forward and then, gathering again, through the earlier one.

    Units that the first forward leaves gathered serve the second. The backward frees each unit that it has finished, so
    its second part gathers every unit except the outermost one.
    """
    for checkpointing in CHECKPOINTS:
        for reshard, (forward, forward_ahead, backward) in KEEPS.items():
            model = stack(3, checkpointing, reshard, ahead)
            again = forward_ahead if ahead else forward
            if reshard in (False, None):
                again = again.removeprefix("+root ") if reshard is None else ""
            with order(model, forward):
                first = model(tokens())
            with order(model, again):
                second = model(tokens())
            later_part = backward.removesuffix(" -root !root")
            with order(model, f"{later_part} {BACK_THROUGH_LAYERS} -root !root"):
                (first + second).sum().backward()


@on_ranks(2)
@pytest.mark.parametrize("ahead", [False, True])
def test_a_unit_that_a_backward_does_not_reach(ahead):
    """The first backward does not reach ``1.lin1`` and does not gather it; both backwards finish all units."""
    model = nn.Sequential(nn.Linear(DIM, DIM), Branches())
    for part in (model[0], model[1].lin1, model[1].lin2):
        fully_shard(part, reshard_after_forward=True)
    sharded(model, ahead=ahead)
    forwards = ["+0 -0 +1.lin1 -1.lin1 +1.lin2 -1.lin2", "+0 +1.lin1 -0 +1.lin2 -1.lin1 -1.lin2"]
    for iteration in range(2):
        with order(model, forwards[ahead and iteration]):
            first, second = model(torch.ones(4, DIM))
        model.set_is_last_backward(False)
        with order(model, "+1.lin2 +0 -1.lin2 !1.lin2 -0 !0 !1.lin1"):
            second.sum().backward(retain_graph=True)
        model.set_is_last_backward(True)
        with order(model, "+1.lin1 +0 -1.lin1 !1.lin1 -0 !0 !1.lin2"):
            first.sum().backward()
        assert not any(unit.is_gathered for _, unit in units_below(model))


FOUR_BACKWARD = "+root +3 +2 -3 !3 +1 -2 !2 +0 -1 !1 -0 !0 -root !root"


@on_ranks(2)
@pytest.mark.parametrize("ahead", [False, True])
def test_named_units_in_forward(ahead):
    """Each layer gathers the next one, or the next two, from the first forward on; the backward keeps its order."""
    model = stack(4, "utils", ahead=ahead)
    forwards = "+root +0 +1 -0 +2 -1 +3 -2 -3 -root", "+root +0 +1 +2 -0 +3 -1 -2 -3 -root"
    for number, forward in enumerate(forwards, start=1):
        layers = list(model.layers)
        for index in range(4 - number):
            layers[index].set_modules_to_forward_prefetch(layers[index + 1 : index + 1 + number])
        with order(model, forward):
            loss = model(tokens()).sum()
        with order(model, FOUR_BACKWARD):
            loss.backward()


@on_ranks(2)
@pytest.mark.parametrize("ahead", [False, True])
def test_named_units_in_backward(ahead):
    """Each layer gathers the one before it, as by default, or the two before it; the forward keeps its order."""
    model = stack(4, "utils", ahead=ahead)
    forwards = ["+root +0 -0 +1 -1 +2 -2 +3 -3 -root", "+root +0 +1 -0 +2 -1 +3 -2 -3 -root"]
    backwards = FOUR_BACKWARD, "+root +3 +2 +1 -3 !3 +0 -2 !2 -1 !1 -0 !0 -root !root"
    for number, backward in enumerate(backwards, start=1):
        layers = list(model.layers)
        for index in range(number, 4):
            layers[index].set_modules_to_backward_prefetch(layers[index - number : index][::-1])
        with order(model, forwards[ahead and number > 1]):
            loss = model(tokens()).sum()
        with order(model, backward):
            loss.backward()


@on_ranks(2)
def test_names_that_are_wrong():
    """A named unit that the backward has already finished is not gathered again; nothing else changes."""
    model = stack(3)
    model.layers[2].set_modules_to_backward_prefetch([model.layers[0]])
    model.layers[0].set_modules_to_backward_prefetch([model.layers[2]])
    for _ in range(2):
        with order(model, f"{FORWARD} -root"):
            loss = model(tokens()).sum()
        with order(model, "+root +2 +0 -2 !2 +1 -1 !1 -0 !0 -root !root"):
            loss.backward()


@on_ranks(2)
def test_units_left_gathered_by_a_backward():
    """Units that a backward leaves gathered get their gradients; the next forward gathers only if weights changed."""
    model = stack(3)
    model.set_reshard_after_backward(False)
    optimizer = sgd(model)
    for forward in (f"{FORWARD} -root", "-0 -1 -2 -root", f"-root -0 -1 -2 {FORWARD} -root"):
        with order(model, forward):
            loss = model(tokens()).sum()
        with order(model, "+root +2 +1 !2 +0 !1 !0 !root"):
            loss.backward()
        if "+" not in forward:
            optimizer.step()


class Grouped(Stack):
    """A `Stack` whose first and last units have two modules each."""

    def __init__(self, layers):
        super().__init__(layers)
        self.positions = nn.Embedding(5, DIM)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        return self.head(self.norm(self.run_layers(x)))


def grouped(checkpoints, ahead=False):
    """Groups and nested units, with ``checkpoints`` as modules around them or as marks on them."""
    model = Grouped([ExpertBlock() for _ in range(3)])
    if checkpoints == "wrappers":
        for kind in (ExpertBlock, Expert):
            apply_activation_checkpointing(model, check_fn=lambda module, kind=kind: isinstance(module, kind))
    else:
        for layer in model.layers:
            composable_checkpoint(layer)
            composable_checkpoint(layer.expert)
    fully_shard([model.embed, model.positions])
    for layer in model.layers:
        fully_shard(layer.expert.w1)
        fully_shard(layer)
    fully_shard([model.norm, model.head], reshard_after_forward=True)
    return sharded(model, ahead=ahead)


FIRST, LAST = "embed&positions", "norm&head"
NESTED = f"+{FIRST} -{FIRST} " + " ".join(f"+{i} +{i}.expert.w1 -{i}.expert.w1 -{i}" for i in range(3))
NESTED_AHEAD = (
    f"+{FIRST} +0 -{FIRST} +0.expert.w1 +1 -0.expert.w1 -0 +1.expert.w1 +2 -1.expert.w1 -1 "
    f"+2.expert.w1 +{LAST} -2.expert.w1 -2"
)
NESTED_FORWARDS = [f"{NESTED} +{LAST} -{LAST}", f"{NESTED_AHEAD} -{LAST}"]


@on_ranks(2)
@pytest.mark.parametrize("checkpoints", ["wrappers", pytest.param("marks", marks=needs_readable_saved_tensor_hooks)])
@pytest.mark.parametrize("ahead", [False, True])
def test_units_inside_checkpoints(checkpoints, ahead):
    """Inside nested checkpoints each unit gathers the next one ahead, or the units named for it.

    The default order is a layer, the unit inside it, then the layer before it. Names replace that order: the unit in
    the last layer, which no layer names, is gathered when it is called again, and the first layer gathers a group.
    """
    model = grouped(checkpoints, ahead)
    for iteration in range(2):
        with order(model, NESTED_FORWARDS[ahead and iteration]):
            loss = model(tokens()).sum()
        with order(
            model,
            f"+{LAST} +2 -{LAST} !{LAST} +2.expert.w1 +1 -2.expert.w1 !2.expert.w1 -2 !2 "
            "+1.expert.w1 +0 -1.expert.w1 !1.expert.w1 -1 !1 "
            f"+0.expert.w1 +{FIRST} -0.expert.w1 !0.expert.w1 -0 !0 -{FIRST} !{FIRST}",
        ):
            loss.backward()
    first, second, third = model.layers
    model.head.set_modules_to_backward_prefetch([third])
    third.set_modules_to_backward_prefetch([second, second.expert.w1])
    second.set_modules_to_backward_prefetch([first, first.expert.w1])
    first.set_modules_to_backward_prefetch([model.embed])
    for _ in range(2):
        with order(model, NESTED_FORWARDS[ahead]):
            loss = model(tokens()).sum()
        with order(
            model,
            f"+{LAST} +2 -{LAST} !{LAST} +1 +1.expert.w1 +2.expert.w1 -2.expert.w1 !2.expert.w1 -2 !2 "
            "+0 +0.expert.w1 -1.expert.w1 !1.expert.w1 -1 !1 "
            f"+{FIRST} -0.expert.w1 !0.expert.w1 -0 !0 -{FIRST} !{FIRST}",
        ):
            loss.backward()


@on_ranks(2)
def test_names_of_units():
    """A group has the names of its modules, in order; every event keeps the names of checkpoint wrappers."""
    model = grouped("wrappers")
    events = []
    with observe(model, events.append):
        model(tokens()).sum().backward()
    last, first = "norm, head", "embed, positions"
    names = [f"layers.{index}.{CHECKPOINTED}.expert.{CHECKPOINTED}.w1" for index in range(3)]
    shown = {event.fqn for event in events if not event.event.startswith("reduce")}
    assert shown == {"", last, first, *(f"layers.{index}" for index in range(3)), *names}
    gathered = [event for event in events if event.event == "unshard" and event.fqn in (last, first, names[0])]
    assert [event[:3] for event in gathered] == [
        *((fqn, "unshard", Phase.FORWARD) for fqn in (first, names[0], last)),
        *((fqn, "unshard", Phase.PRE_BACKWARD) for fqn in (last, names[0], first)),
    ]


@on_ranks(2)
def test_a_group_of_which_a_module_did_not_run():
    """A group with a module that did not run stays gathered after the forward, so its backward gathers nothing."""
    model = nn.ModuleDict({"a": nn.Linear(DIM, DIM), "b": nn.Linear(DIM, DIM), "c": nn.Linear(DIM, VOCAB)})
    fully_shard([model["a"], model["b"]], reshard_after_forward=True)
    fully_shard(model["c"], reshard_after_forward=True)
    model = sharded(Chosen(model))
    for names, forward, backward in (
        ("abc", "+parts.a&parts.b -parts.a&parts.b +parts.c -parts.c", "+parts.c +parts.a&parts.b -parts.c !parts.c"),
        ("ac", "+parts.a&parts.b +parts.c -parts.c", "+parts.c -parts.c !parts.c"),
        ("bac", "+parts.a&parts.b -parts.a&parts.b +parts.c -parts.c", "+parts.c +parts.a&parts.b -parts.c !parts.c"),
    ):
        with order(model, forward):
            loss = model(torch.ones(2, DIM), names).sum()
        with order(model, f"{backward} -parts.a&parts.b !parts.a&parts.b"):
            loss.backward()


class Chosen(nn.Module):
    """Calls the named parts, one after the other."""

    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, x, names):
        for name in names:
            x = self.parts[name](x)
        return x
