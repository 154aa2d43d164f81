"""A loss of outputs of inner units, saved by forward hooks; the output of the root takes no part in it."""

import copy
import operator

import pytest
import torch
import torch.distributed as dist

from fairshard.errors import ShardChangedError
from fairshard.nn import CPUOffloadPolicy, fully_shard
from tests.doors.fully_shard.models import full_state, shard_tiny
from tests.models import Tiny, loss_of_tiny, tiny, tiny_batch, wrap_tiny
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state, average_grads_, sgd, train_alike

pytestmark = pytest.mark.behaviour("losses of inner outputs")


def features_of(model, names, key):
    """One forward; returns the outputs of each call of the modules ``names``."""
    saved = []
    modules = [operator.attrgetter(name)(model) for name in names]
    hooks = [module.register_forward_hook(lambda _module, _inputs, output: saved.append(output)) for module in modules]
    *inputs, _ = tiny_batch(dist.get_rank(), *key)
    model(*inputs)
    for hook in hooks:
        hook.remove()
    return saved


def loss_of(*names):
    """A loss of the last output of each module in ``names``."""
    return lambda model, key: sum(one.square().mean() for one in features_of(model, names, key)[-len(names) :])


def freeze_norm(model):
    model.first.norm.requires_grad_(False)
    return model


CLOSE = {"rtol": 1e-5, "atol": 1e-7}  # sums over micro-batches and over ranks in another order
WRAPPERS = {
    "wrapper": wrap_tiny,
    "resharded root": lambda model: wrap_tiny(model, disable_reshard_on_root=False),
    "offloaded": lambda model: wrap_tiny(model, cpu_offload=True),
    "original": lambda model: wrap_tiny(model, use_orig_params=True),
}


@on_ranks(2, in_full(1), in_full(3))
@pytest.mark.parametrize(
    ("door", "checkpointing"),
    [("wrapper", None), ("resharded root", "not_reentrant"), ("offloaded", "not_reentrant"), ("original", None)],
)
def test_gradients_are_those_of_the_plain_model(door, checkpointing):
    """For one output or several, of a unit in a unit and of one called twice: as in plain autograd."""
    for names in (["second"], ["first.up"], ["shared"], ["first.up", "second"]):
        train_alike(tiny(checkpointing), WRAPPERS[door], loss_of(*names), num_steps=2, num_micro=2, **CLOSE)


@on_ranks(2)
@pytest.mark.parametrize("kwargs", [{}, {"reshard_after_forward": True}, {"offload_policy": CPUOffloadPolicy()}])
def test_in_place(kwargs):
    """The same with `fully_shard`, accumulation and frozen layers, before and after a loss of the root's output."""
    plain = freeze_norm(tiny())
    model = shard_tiny(copy.deepcopy(plain), **kwargs)
    steppers = sgd(plain), sgd(model)
    losses = [loss_of("first.up"), loss_of("second"), loss_of_tiny, loss_of("second"), loss_of("first")]
    for step, loss in enumerate(losses):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            for net in (plain, model):
                loss(net, (step, micro)).backward()
        average_grads_(plain.parameters(), keeps_none=True)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
        assert_same_state(full_state(model), plain.state_dict(), **CLOSE)


@on_ranks(2)
def test_only_one_rank_uses_the_output_of_the_root():
    """Ranks may take their losses of different outputs, in the same forward or in two."""

    def loss_of_rank(model, key):
        return loss_of_tiny(model, key) if dist.get_rank() else loss_of("second")(model, key)

    def of_two_forwards(model, key):
        return loss_of_rank(model, key) + loss_of("first.up")(model, key)

    for loss in (loss_of_rank, of_two_forwards):
        train_alike(tiny(), wrap_tiny, loss, **CLOSE)


@on_ranks(2)
def test_several_backwards_of_one_forward():
    """Each backward gathers what it needs again."""
    plain = tiny()
    model = shard_tiny(copy.deepcopy(plain), reshard_after_forward=True)
    for net in (plain, model):
        early, late = features_of(net, ["first.up", "second"], (0,))
        late.sum().backward(retain_graph=True)
        early.sum().backward()
    average_grads_(plain.parameters(), keeps_none=True)
    for name, param in model.named_parameters():
        expected = plain.get_parameter(name).grad
        assert (param.grad is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(param.grad.full_tensor(), expected)


@on_ranks(2)
def test_changed_weights_of_the_root_are_noticed():
    """Weights of the root that change between the forward and such a backward are an error, as for any backward."""
    model = Tiny()
    fully_shard(model.second)
    fully_shard(model)
    weight = model.shared.weight
    loss = loss_of("second")(model, (0,))
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(ShardChangedError, match="between its forward and its backward"):
        loss.backward()
