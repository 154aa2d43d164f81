"""Shards and gradients in host memory: where they are and when they arrive; results do not change."""

import contextlib
import copy
import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fairshard.errors import HostMemoryError
from fairshard.optim import CPUOptimizer
from fairshard.params.grads import grads_of
from fairshard.params.shard_grad import GradTransfers
from fairshard.setup import placement as placement_module
from fairshard.setup.placement import check_host_memory
from fairshard.utils.streams import Event
from tests.kit import rank_device
from tests.models import mlp, wrap_each
from tests.on_ranks import on_ranks
from tests.params.state_bytes import state_bytes
from tests.reference import assert_same_state, randn, rounding, sgd

SETTINGS = {
    "device": {},
    "offload": {"cpu_offload": True},
    "master": {"move_grads_to_cpu": True},
    "held": {"cpu_offload": True, "move_grads_to_cpu": False},
}
PLACEMENTS = pytest.mark.parametrize("placement", ["offload", "master", "held"])


def build(placement="device"):
    return wrap_each(mlp(4, 9, 5), bucket_cap_mb=0, **SETTINGS[placement])


def optimizer_of(model):
    return CPUOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)


def backward(model, step):
    loss = model(randn(3, 4, key=step)).square().sum()
    loss.backward()
    return loss.detach()


def train(model, num_steps=3):
    optimizer = optimizer_of(model)
    losses = []
    for step in range(num_steps):
        losses.append(backward(model, step).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


class Late(Event):
    """A copy that runs only when it is waited for; its target holds NaN until then."""

    __slots__ = ("_source", "_target")

    def __init__(self, source, target):
        super().__init__()
        self._source, self._target = source.clone(), target.fill_(float("nan"))

    def is_completed(self):
        return self._target is None

    def synchronize(self):
        if self._target is not None:
            self._target.copy_(self._source)
            self._target = None


@contextlib.contextmanager
def late_copies(twin=False):
    """Make every copy of a gradient late; with ``twin`` nothing waits for copies."""
    made = []

    def copy_later(transfers, source, target):
        made.append(Late(source, target))
        return made[-1]

    no_wait = mock.patch.object(GradTransfers, "wait", mock.Mock())
    with mock.patch.object(GradTransfers, "copy", copy_later), no_wait if twin else contextlib.nullcontext():
        yield
    assert made, "nothing was copied"


@on_ranks(1, 2)
@PLACEMENTS
def test_what_the_optimizer_sees_is_where_the_table_says(placement):
    """Parameters are fp32 on the CPU; gradients are in ``p.grad``, or held by the unit only."""
    model = build(placement)
    backward(model, 0)
    for wrapper in (model[0], model[2]):
        (flat_param,) = wrapper._unit.flat_params
        (grad,) = grads_of(wrapper._unit.flat_params).values()
        assert flat_param.shard.device.type == "cpu"
        assert flat_param.shard.dtype == torch.float32
        assert flat_param.shows.on_cpu
        assert (flat_param.shard.grad is None) == (placement == "held")
        assert grad.shape == flat_param.shard.shape
        assert (flat_param.device_shard is not None) == (placement == "master")
    assert model.cpu_offload == (placement != "master")
    assert model.move_grads_to_cpu == (placement != "held")


@on_ranks(2)
@pytest.mark.parametrize("twin", [False, True])
def test_a_gradient_is_read_only_after_its_copy_has_landed(twin):
    """Late copies change neither ``p.grad`` nor the norm; without the waits both are NaN."""
    model, reference = build("offload"), build()
    with late_copies(twin):
        backward(model, 0)
        backward(model, 1)  # adds to the first
        norm = model.clip_grad_norm_(0.1)
    backward(reference, 0)
    backward(reference, 1)
    expected = reference.clip_grad_norm_(0.1)
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad.cpu()) != twin
    assert torch.equal(norm.cpu(), expected.cpu()) != twin


@on_ranks(2)
@PLACEMENTS
def test_late_copies_change_no_bit_of_training(placement):
    """A run in which all copies are late has the losses and weights of a run without offload, after an evaluation."""
    model, reference = build(placement), build()
    with torch.no_grad():
        assert torch.equal(model(randn(3, 4)), reference(randn(3, 4)))
    with late_copies():
        losses = train(model)
    assert losses == train(reference)
    assert_same_state(model.state_dict(), reference.state_dict())
    # Held gradients are fetched while other shards are stepped: training does not wait for them.
    if rank_device().type == "cpu":  # on a device a step also waits for its copies back
        waited_s = model._unit.root.shared.transfers.waited_s
        assert (waited_s > 0) == (placement != "held")


@on_ranks(2)
@pytest.mark.parametrize("twin", [False, True])
def test_held_gradients_are_stepped_after_their_copies_have_landed(twin):
    """`CPUOptimizer` fetches four gradients through two buffers, all late; without its waits the weights are NaN."""
    model, reference = (wrap_each(mlp(4, 9, 7, 5, 3), **SETTINGS[name]) for name in ("held", "device"))
    ours, plain = optimizer_of(model), torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, fused=True)
    backward(model, 0)
    backward(reference, 0)
    with late_copies(twin):
        ours.step()
    plain.step()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(one, other.to(one.device)) != twin


@on_ranks(2)
@pytest.mark.parametrize("placement", ["device", "offload", "master"])
def test_a_hook_on_a_shard_reads_the_reduced_gradient(placement):
    """A post-accumulate hook of the user runs once per backward and shard, after the sum has landed."""
    model, reference = build(placement), build()
    seen = {}
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda param, name=name: seen.update({name: param.grad.clone()}))
    for step in range(2):
        with late_copies() if placement != "device" else contextlib.nullcontext():
            backward(model, step)
        backward(reference, step)
        expected = {name: param.grad for name, param in reference.named_parameters()}
        assert seen.keys() == expected.keys()
        assert all(torch.equal(seen[name], grad.to(seen[name].device)) for name, grad in expected.items())


@on_ranks(2)
def test_a_gradient_that_lands_late_is_not_seen_early():
    """In the middle of a backward ``p.grad`` is None or the last sum, never memory that is still being written."""
    model = build("offload")
    params = list(model.parameters())
    seen = []
    model[0].module.register_full_backward_pre_hook(lambda *_: seen.extend(param.grad for param in params))
    with late_copies():
        backward(model, 0)
    assert seen == [None, None]
    assert all(param.grad.isfinite().all() for param in params)


@on_ranks(2)
def test_a_gradient_that_the_user_keeps_is_not_written_over():
    """The memory of gradients is reused, but not while a tensor, a view or an alias of it is alive."""
    model = build("offload")
    addresses = set()
    kept = []
    for step in range(6):
        backward(model, step)
        grad = next(iter(model.parameters())).grad
        addresses.add(grad.data_ptr())
        if step % 2:
            keep = {1: grad, 3: grad[1:], 5: grad.detach()}[step]
            kept.append((keep, keep.clone()))
        model.zero_grad()
        del grad
    assert all(torch.equal(one, other) for one, other in kept)
    assert len(addresses) < 6, "no memory was used again"


@on_ranks(2)
@PLACEMENTS
def test_a_changed_shard_is_seen_by_the_next_forward_however_it_was_changed(placement):
    """A write in place, to ``.data``, by a new ``.data`` or by an optimizer shows in the next output and state dict."""
    model, reference = build(placement), build()
    model(randn(3, 4))

    def edit(one, kind):
        with torch.no_grad():
            for param in one.parameters():
                if kind == "in place":
                    param.mul_(1.5)
                elif kind == "through data":
                    param.data.add_(0.25)
                else:
                    param.data = param.data.clone().sub_(0.5)

    for kind in ("in place", "through data", "new data"):
        edit(model, kind)
        edit(reference, kind)
        assert_same_state(model.state_dict(), reference.state_dict())
        assert torch.equal(model(randn(3, 4)), reference(randn(3, 4)))


def fail(*_):
    """A hook that raises in the middle of a pass."""
    raise ValueError("on purpose")


@on_ranks(2)
@PLACEMENTS
def test_the_step_after_an_exception_is_clean(placement):
    """After a forward or backward that raised, and `zero_grad`, gradients are those of a fresh model."""
    model, reference = build(placement), build()
    for register in ("register_forward_hook", "register_full_backward_pre_hook"):
        hook = getattr(model[0].module, register)(fail)
        with pytest.raises(ValueError, match="on purpose"):
            backward(model, 0)
        hook.remove()
        model.zero_grad()
    assert train(model) == train(reference)
    assert_same_state(model.state_dict(), reference.state_dict())


@on_ranks(1)
@PLACEMENTS
def test_gradients_of_an_interrupted_backward_do_not_come_back(placement):
    """Copies that were running when the backward raised are not added after `zero_grad`."""
    model, reference = build(placement), build()
    hook = model[0].module.register_full_backward_pre_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        (1000 * model(randn(3, 4)).square().sum()).backward()
    hook.remove()
    model.zero_grad()
    backward(model, 0)
    backward(reference, 0)
    for one, other in ((model[0], reference[0]), (model[2], reference[2])):
        (grad,), (expected,) = grads_of(one._unit.flat_params).values(), grads_of(other._unit.flat_params).values()
        torch.testing.assert_close(grad, expected, rtol=rounding()[0], atol=rounding()[1], check_device=False)


@on_ranks(1, 2)
@pytest.mark.parametrize("placement", ["offload", "master"])
def test_copies_of_an_interrupted_backward_are_dropped(placement):
    """Gradients that were being copied to host memory when the backward raised are not added to earlier ones."""
    model = build(placement)
    backward(model, 0)
    before = [param.grad.clone() for param in model.parameters()]
    hook = model[0].module.register_full_backward_pre_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        backward(model, 1)
    hook.remove()
    model.state_dict()  # cleans up
    assert all(torch.equal(param.grad, grad) for param, grad in zip(model.parameters(), before, strict=True))


@on_ranks(1)
def test_zeroing_drops_a_gradient_that_is_on_its_way():
    """A copy to host memory that has not been waited for is not added after `zero`."""
    model = build("offload")
    backward(model, 0)
    (flat_param,) = model[0]._unit.flat_params
    flat_param.grad.add(torch.ones_like(flat_param.shard), b"\1" * len(flat_param.slots))
    flat_param.grad.zero(set_to_none=True)
    flat_param.grad.land()
    assert flat_param.shard.grad is None


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("placement", SETTINGS)
def test_pending_gradients_survive_when_an_outer_model_takes_a_unit_over(placement, use_orig_params):
    """Those that a unit has kept under `no_sync` are added to those of the model around it, on every rank."""
    grads = []
    for settings in ({}, {"use_orig_params": use_orig_params, **SETTINGS[placement]}):
        model = wrap_each(mlp(4, 9, 5), bucket_cap_mb=0, **settings)
        model[2](torch.ones(3, 9)).square().sum().backward()
        with model[2].no_sync():
            model[2](torch.ones(3, 9)).square().sum().backward()
        backward(model, 0)
        (flat_param,) = model[2]._unit.flat_params
        grads.append(flat_param.grad.value)
    assert torch.equal(*grads)


@on_ranks(2)
@PLACEMENTS
@pytest.mark.parametrize("by", ["copy", "pickle"])
def test_a_copy_of_an_offloaded_model_trains_on_its_own(placement, by):
    """A model deepcopied or pickled after a step trains like the original, and does not change it."""
    model = build(placement)
    train(model, 1)
    before = model.state_dict()
    made = copy.deepcopy(model) if by == "copy" else pickle.loads(pickle.dumps(model))
    reference = build()
    train(reference, 1)
    assert train(made) == train(reference)
    assert_same_state(made.state_dict(), reference.state_dict())
    assert_same_state(model.state_dict(), before)


@on_ranks(2)
@PLACEMENTS
def test_frozen_units_have_no_gradient_memory(placement):
    """A frozen unit's shard is also on the CPU, and has neither a gradient nor a buffer for one."""
    model = mlp(4, 9, 5)
    model[0].requires_grad_(False)
    model = wrap_each(model, **SETTINGS[placement])
    optimizer = optimizer_of(model)
    backward(model, 0)
    optimizer.step()
    frozen, trained = model[0]._unit.flat_params[0], model[2]._unit.flat_params[0]
    assert not frozen.grad.tensors()
    assert len(trained.grad.tensors()) == 1
    momentum = optimizer.state[trained.shard]["momentum_buffer"].nbytes
    host = frozen.shard.nbytes + trained.shard.nbytes + momentum
    device = sum(fp.device_shard.nbytes for fp in (frozen, trained)) if placement == "master" else 0
    if placement == "held":
        device += trained.shard.nbytes
    else:
        host += trained.shard.nbytes
    pinned = 0 if rank_device().type == "cpu" else host - momentum  # what is copied to the device or from it
    assert state_bytes(model, optimizer) == (device, pinned, host - pinned)


@on_ranks(2)
@pytest.mark.parametrize("placement", ["offload", "master"])
def test_plain_optimizers_work_as_without_offload(placement):
    """SGD and fused AdamW over ``model.parameters()`` give the weights of a run on the device."""
    for make in (sgd, lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)):
        states = []
        for one in (build(placement), build()):
            optimizer = make(one)
            for step in range(3):
                backward(one, step)
                optimizer.step()
                optimizer.zero_grad()
            states.append(one.state_dict())
        assert_same_state(*states)


@on_ranks(2)
@pytest.mark.parametrize("poor", [None, 0, 1])
def test_more_pinned_memory_than_the_host_has_is_refused_on_all_ranks(poor):
    """If one rank's host has too little free memory, both ranks raise with its number; otherwise neither raises."""
    model = build("offload")
    model(randn(3, 4))
    units = [wrapper._unit for wrapper in (model, model[0], model[2])]
    shards = sum(param.nbytes for param in model.parameters())
    nbytes = 2 * 3 * shards  # a shard and two gradients, for each of this host's two ranks
    free = int(nbytes / 0.8) + 1 if dist.get_rank() != poor else int(nbytes / 0.8) - 1
    with (
        mock.patch("fairshard.setup.placement.free_host_memory", return_value=free),
        mock.patch.object(placement_module, "_log"),
    ):
        expected = contextlib.nullcontext() if poor is None else pytest.raises(HostMemoryError, match=f"rank {poor} on")
        with expected:
            check_host_memory(units[0].comm, units, torch.device("cuda"))
