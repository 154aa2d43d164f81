"""Several forwards before one backward: units are freed between the parts of the backward, with the same bits."""

import gc
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.engine.tree import unit_of, units_below
from fairshard.errors import ShardChangedError
from fairshard.nn import BackwardPrefetch, observe
from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.models import loss_of_tiny, mlp, tiny, wrap_each, wrap_tiny
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state, average_grads_, await_device, randn, sgd, train_alike

pytestmark = pytest.mark.behaviour("several forwards")

FULL = pytest.mark.full
KINDS = {
    "default": {},
    "kept": {"reshard_after_forward": False},
    "nothing kept": {"disable_reshard_on_root": False},
    "gathered late": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    "never ahead": {"backward_prefetch": None, "forward_prefetch": False},
    "not flattened": {"flatten_parameters": False},
    "offloaded": {"cpu_offload": True},
}


def keep_across_passes(model):
    for _, unit in units_below(model):
        unit.config = replace(unit.config, keeps_across_passes=True)
    return model


def sum_of_three(model, key):
    return sum((3 - index) * loss_of_tiny(model, (*key, index)) for index in range(3))


def assert_nothing_is_gathered(model):
    assert not [unit.fqn for _, unit in units_below(model) if unit.is_gathered]


@on_ranks(in_full(1), 2)
@pytest.mark.parametrize("kind", ["default", "kept", *(pytest.param(kind, marks=FULL) for kind in list(KINDS)[2:])])
def test_losses_of_several_forwards(kind):
    """With nested units, one called twice in a forward, and tied weights, the sum trains as on the plain model."""
    for prepare in (keep_across_passes, lambda model: model):
        model = train_alike(
            tiny(), lambda model, prepare=prepare: prepare(wrap_tiny(model, **KINDS[kind])), sum_of_three, num_steps=2
        )
        assert_nothing_is_gathered(model)


@on_ranks(in_full(1), 2)
@pytest.mark.parametrize("checkpointing", ["reentrant", "not_reentrant"])
def test_recomputed_forwards(checkpointing):
    """Checkpoints around units and inside units: their recomputation is a forward without its own backward."""
    # A reentrant segment sums its calls separately, in another order than one backward over all of them.
    tolerance = 1e-5 if checkpointing == "reentrant" else 0.0
    model = train_alike(tiny(checkpointing), wrap_tiny, sum_of_three, rtol=tolerance, atol=tolerance)
    assert_nothing_is_gathered(model)


@on_ranks(in_full(4))
def test_units_that_keep_a_share_among_two_ranks():
    """The backward gathers each unit twice, from the shares that the last forward has kept."""
    # The reference may sum over four ranks in another order.
    train_alike(tiny(), lambda model: wrap_tiny(model, reshard_after_forward=2), sum_of_three, rtol=1e-5, atol=1e-6)


@on_ranks(in_full(1), 2, in_full(3))
def test_frozen_and_unused_parameters():
    """Units that are partly or fully frozen, or that one of the forwards does not use."""

    def build():
        model = tiny()
        model.first.up.requires_grad_(False)
        model.second.norm.requires_grad_(False)
        return model

    def loss(model, key):
        outputs = [loss_of_tiny(model, (*key, index)) for index in range(2)]
        return outputs[0] + 2 * outputs[1]

    train_alike(build, wrap_tiny, loss)
    train_alike(Switch, wrap_layers, lambda model, key: sum(model(randn(3, 4, key=key), i).sum() for i in (0, 1, 0)))


class Switch(nn.Module):
    """Three layers; the middle one can be skipped."""

    def __init__(self):
        super().__init__()
        self.layers = mlp(4, 4, 4, 4)

    def forward(self, x, leave_out):
        for index, layer in enumerate(self.layers):
            if not (leave_out and index == 2):
                x = layer(x)
        return x


def wrap_layers(model, **kwargs):
    model.layers = wrap_each(model.layers, **kwargs)
    return FSDP(model, **kwargs)


@on_ranks(in_full(1), 2)
def test_forwards_that_share_their_inputs():
    """A shared hidden input gets its gradient after all forwards, a leaf gets it immediately; bits are the same."""

    def loss(model, key):
        leaf = randn(3, 4, key=key).requires_grad_()
        hidden = leaf.tanh()
        return model(hidden).sum() + 2 * model(hidden).square().sum() + model(leaf).tanh().sum()

    assert_nothing_is_gathered(train_alike(mlp(4, 4, 4), wrap_each, loss))


@on_ranks(in_full(1), 2)
@pytest.mark.parametrize("later_first", [True, False])
def test_one_backward_for_each_of_several_forwards(later_first):
    """In either order, with all but one marked as not the last, gradients add up and nothing stays gathered."""
    states = []
    for tells in (True, False):
        model = wrap_tiny(tiny())
        optimizer = sgd(model)
        for step in range(3):
            losses = [loss_of_tiny(model, (step, index)) for index in range(3)]
            for number, loss in enumerate(losses[::-1] if later_first else losses):
                if tells:
                    model.set_is_last_backward(number == 2)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_nothing_is_gathered(model)
        states.append(model.state_dict())
    assert_same_state(*states)


@on_ranks(2, 3)
def test_outputs_that_one_rank_keeps():
    """Ranks differ in the forwards that a backward could still reach; one rank reaches an old one again."""
    kept = []

    def loss(model, key):
        total = loss_of_tiny(model, key)
        if dist.get_rank() == 0:
            kept.append(total)
        return total

    model = train_alike(tiny(), wrap_tiny, loss, num_steps=4)
    kept.clear()
    plain = tiny()
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        old = loss_of_tiny(each, (5,))
        old.backward(retain_graph=True)
        new = loss_of_tiny(each, (6,))
        if dist.get_rank() == 0:
            new = new + old
        del old
        new.backward()
    average_grads_(plain.parameters())
    for each in (model, plain):
        sgd(each).step()
    # Two sums over ranks, added, instead of one.
    assert_same_state(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)
    assert_nothing_is_gathered(model)


@on_ranks(2, 3)
def test_models_that_one_rank_drops():
    """Ranks that still have the outputs of another model train on with those that have dropped it."""
    others = [wrap_tiny(tiny())]
    outputs = [loss_of_tiny(others[0], (9,))]
    if dist.get_rank() == 0:
        others.clear()
        outputs.clear()
        gc.collect()
    assert_nothing_is_gathered(train_alike(tiny(), wrap_tiny, loss_of_tiny))


@on_ranks(1, 2)
def test_models_that_take_turns():
    """A backward plans for the forwards that it could reach, not for those of other models that are over."""
    models = [wrap_tiny(tiny()), wrap_tiny(tiny())]
    planned = []
    for step in range(3):
        for model in models:
            loss_of_tiny(model, (step,)).backward()
            root = unit_of(model).root
            planned.append(len(root.kept[0].places))
            assert sum(len(each.record.passes) for each in root.engine.roots) == 1  # the others are over
    assert len(set(planned)) == 1


@on_ranks(in_full(1), 2)
def test_weights_that_change_after_a_backward_that_is_not_the_last():
    """Units left gathered are not used after an optimizer step: the backward raises, and a forward gathers again."""
    model, plain = wrap_tiny(tiny()), tiny()
    optimizers = sgd(model), sgd(plain)
    first, second = (loss_of_tiny(model, (index,)) for index in range(2))
    model.set_is_last_backward(False)
    second.backward()
    optimizers[0].step()
    await_device()  # the backward's gather, whose result is refused, does not wait for the step
    model.set_is_last_backward(True)
    with pytest.raises(ShardChangedError, match="must not change"):
        first.backward()
    loss_of_tiny(plain, (1,)).backward()
    average_grads_(plain.parameters())
    optimizers[1].step()
    assert torch.equal(loss_of_tiny(model, (2,)), loss_of_tiny(plain, (2,)))


@on_ranks(in_full(1), 2)
def test_an_exception_between_the_parts_of_a_backward():
    """If the backward raises after the later forward's part, the next step is as if it had not been tried."""

    def loss(model, key):
        if isinstance(model, FSDP):
            earlier, later = (model(randn(3, 4, key=(key, index))) for index in range(2))
            earlier.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                (earlier + later).sum().backward()
        return sum(model(randn(3, 4, key=(key, index))).square().sum() for index in range(2))

    assert_nothing_is_gathered(train_alike(mlp(4, 4, 4, 4), wrap_each, loss))


def fail(grad):
    raise ZeroDivisionError


@on_ranks(2)
@pytest.mark.parametrize("num_forwards", [1, 2])
def test_a_unit_and_the_next_are_gathered_and_no_more(num_forwards):
    """If inputs are trained, a backward of one or several forwards gathers at most two units besides the root."""
    model = wrap_each(mlp(*[4] * 7))
    layers, most = set(), 0

    def note(event):
        nonlocal most
        if event.event == "unshard" and event.fqn:
            layers.add(event.fqn)
        elif event.event == "reshard":
            layers.discard(event.fqn)
        most = max(most, len(layers))

    for _ in range(2):
        outputs = [model(randn(3, 4, key=index).requires_grad_().tanh()) for index in range(num_forwards)]
        with observe(model, note):
            sum(outputs).sum().backward()
    assert most == 2
    assert not layers


class Steps(nn.Module):
    """Calls a net again after a backward in its own forward."""

    def __init__(self):
        super().__init__()
        self.net = mlp(4, 4, 4)

    def forward(self, x):
        self.net(x).square().sum().backward()
        return self.net(x).square().sum()


@on_ranks(2)
def test_a_backward_inside_the_forward():
    """A backward frees the units that it has finished, but not those whose forward goes on around it."""
    train_alike(Steps(), FSDP, lambda model, key: model(randn(3, 4, key=key)))

    def wrap(model):
        model.net = FSDP(model.net)
        return FSDP(model)

    train_alike(Steps(), wrap, lambda model, key: model(randn(3, 4, key=key)))
