"""``use_orig_params``: gradients per original parameter stay right when a user or an optimizer changes some of them."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import ShardingStrategy
from fairshard.utils.collectives import counters, reset_counters
from tests.kit import rank_device
from tests.models import mlp, wrap_each
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state, average_grads_, randn, sgd
from tests.settings.test_hybrid import HYBRID, ZERO2, pairs

SETTINGS = {
    "device": {},
    "offload": {"cpu_offload": True},
    "wide": {"mixed_precision": True, "compute_dtype": torch.bfloat16, "fp32_reduce_scatter": True},
}
SHOWN = {"use_orig_params": True}


def build(widths=(4, 9, 7, 5), wrap=FSDP, **settings):
    """A plain model and its twin in one unit."""
    plain = mlp(*widths)
    return plain, wrap(copy.deepcopy(plain), use_orig_params=True, **settings)


def backward(model, key):
    loss = model(randn(3, 4, key=key)).float().square().sum()
    loss.backward()
    return loss.detach()


def whole_grads(model):
    """Whole gradients of a wrapped model, assembled from the parts of all ranks; None where there is none."""
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, {name: param.grad for name, param in model.named_parameters()})
    return {
        name: None if own is None else torch.cat([part[name].flatten().float() for part in every])
        for name, own in every[0].items()
    }


def assert_same_grads(wrapped, plain):
    found = whole_grads(wrapped)
    for name, param in plain.named_parameters():
        assert (found[name] is None) == (param.grad is None), name
        if param.grad is not None:
            expected = param.grad.flatten().float().cpu()
            torch.testing.assert_close(found[name].cpu(), expected, rtol=1e-6, atol=1e-6)


@on_ranks(1, in_full(2), 3)
@pytest.mark.parametrize("offload", [False, True])
def test_gradients_are_views_of_one_memory(offload):
    """After a backward each view has its run of the mean gradient; all views of a unit share one storage."""
    plain, wrapped = build(cpu_offload=offload)
    backward(plain, 0)
    backward(wrapped, 0)
    average_grads_(plain.parameters())
    assert_same_grads(wrapped, plain)
    (flat_param,) = wrapped._unit.flat_params
    storages = {p.grad.untyped_storage().data_ptr() for p in wrapped.parameters() if p.numel()}
    assert len(storages) == 1
    assert sum(grad.numel() for grad in flat_param.grad.tensors()) == flat_param.shard_numel
    wrapped.zero_grad()
    assert all(param.grad is None for param in wrapped.parameters())
    assert flat_param.grad.value is None


@on_ranks(in_full(2), 3)
def test_unused_parameters_of_a_used_unit_have_none():
    """Exactly the parameters that any rank has used have gradients, on all ranks."""
    model = nn.ModuleDict({"used": nn.Linear(4, 5), "unused": nn.Linear(4, 5), "apart": FSDP(nn.Linear(4, 5))})
    model.forward = lambda x: model["used"](x)
    wrapped = FSDP(model.to(rank_device()), use_orig_params=True)
    backward(wrapped, 0)
    grads = whole_grads(wrapped)
    assert grads["used.weight"].any()
    unused = ["unused.weight", "unused.bias", "apart.flat_param_0"]
    assert [name for name, grad in grads.items() if grad is None] == unused


@on_ranks(1, in_full(2), 3)
def test_frozen_parameters_of_a_mixed_unit_cost_no_gradient():
    """In a unit with frozen and trainable parameters no gradient of a frozen one is reduced, kept or shown."""
    plain = mlp(4, 50, 5)
    plain[0].weight.requires_grad_(False)
    wrapped = FSDP(copy.deepcopy(plain), use_orig_params=True)
    trained = sum(param.numel() for param in plain.parameters() if param.requires_grad)
    reset_counters()
    backward(plain, 0)
    backward(wrapped, 0)
    world_size = dist.get_world_size()
    if world_size > 1:
        assert counters()["reduce_scatter"][1] < (trained + world_size) * 4 + 64
    average_grads_(plain.parameters())
    assert_same_grads(wrapped, plain)
    kept = {p.grad.untyped_storage() for p in wrapped.parameters() if p.grad is not None and p.numel()}
    assert sum({s.data_ptr(): s.nbytes() for s in kept}.values()) <= (trained // world_size + 1) * 4 + 64
    assert all(slot.leaf.grad is None for fp in wrapped._unit.flat_params for slot in fp.slots)


@on_ranks(1, in_full(2), 3)
@pytest.mark.parametrize("which", ["0.weight", "2.bias", "all"])
def test_requires_grad_can_change_between_passes(which):
    """A parameter frozen after wrapping gets no gradient and lets its neighbours train; unfrozen it trains again."""
    plain, wrapped = build()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, wrapped)]
    for step, trains in enumerate((True, False, False, True)):
        for model in (plain, wrapped):
            for name, param in model.named_parameters():
                if which in (name, "all"):
                    param.requires_grad_(trains)
            x = randn(3, 4, key=step).requires_grad_()
            model(x).square().sum().backward()
            assert x.grad is not None
        average_grads_(plain.parameters())
        assert_same_grads(wrapped, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    exact = {} if dist.get_world_size() < 3 else {"rtol": 1e-5, "atol": 1e-6}
    assert_same_state(wrapped.state_dict(), plain.state_dict(), **exact)


@pytest.mark.pairs
@on_ranks(1, 3)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("is_synced", [True, False])
def test_one_of_two_optimizers_may_drop_what_was_accumulated(settings, to_none, is_synced):
    """If only biases are zeroed between two backwards, they have the last gradient, and weights the sum of both."""
    plain, wrapped = build(**SETTINGS[settings])
    for model in (plain, wrapped):
        biases = torch.optim.SGD([p for name, p in model.named_parameters() if name.endswith("bias")], lr=0.1)
        if model is plain or is_synced:
            backward(model, 0)
        else:
            with model.no_sync():
                backward(model, 0)
        biases.zero_grad(set_to_none=to_none)
        backward(model, 1)
    average_grads_(plain.parameters())
    if settings != "wide":
        assert_same_grads(wrapped, plain)
        return
    twin = FSDP(copy.deepcopy(plain), **SETTINGS[settings])  # bf16: compare the biases with a backward of their own
    backward(twin, 1)
    with FSDP.summon_full_params(twin, with_grads=True), FSDP.summon_full_params(wrapped, with_grads=True):
        for ours, other in zip(wrapped.module, twin.module, strict=True):
            if isinstance(ours, nn.Linear):
                assert torch.equal(ours.bias.grad, other.bias.grad)
                assert not torch.equal(ours.weight.grad, other.weight.grad)


@on_ranks(1, in_full(2), 3)
@pytest.mark.parametrize("synced", [True, False])
def test_all_gradients_dropped_by_the_views_are_dropped(synced):
    """``optimizer.zero_grad`` after a backward, reduced or not, drops its gradients; the next forward frees memory."""
    plain, wrapped = build()
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    if synced:
        backward(wrapped, 0)
    else:
        with wrapped.no_sync():
            backward(wrapped, 0)
    optimizer.zero_grad()
    loss = wrapped(randn(3, 4, key=1)).square().sum()
    (flat_param,) = wrapped._unit.flat_params
    assert flat_param.shard.grad is None
    loss.backward()
    backward(plain, 1)
    average_grads_(plain.parameters())
    assert_same_grads(wrapped, plain)


@on_ranks(1, in_full(2), 3)
def test_gradients_that_the_user_puts_there_count():
    """Clipping and accumulation use the gradients as the user has assigned, edited or dropped them."""
    plain, wrapped = build()
    for model in (plain, wrapped):
        backward(model, 0)
    average_grads_(plain.parameters())
    for model in (plain, wrapped):
        named = dict(model.named_parameters())
        named["0.weight"].grad = torch.full_like(named["0.weight"], 2.0)
        named["2.weight"].grad.mul_(3)
        named["4.bias"].grad = None
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    torch.testing.assert_close(wrapped.clip_grad_norm_(0.5), expected)
    assert_same_grads(wrapped, plain)
    kept = {name: param.grad for name, param in plain.named_parameters()}
    plain.zero_grad()
    for model in (plain, wrapped):
        backward(model, 1)
    average_grads_(plain.parameters())
    for name, param in plain.named_parameters():
        param.grad += 0 if kept[name] is None else kept[name]
    assert_same_grads(wrapped, plain)


@on_ranks(1, in_full(2), 3)
def test_a_gradient_put_where_none_was_counts():
    """After all gradients were dropped, a gradient that the user assigns is clipped and accumulated to."""
    plain, wrapped = build()
    backward(wrapped, 0)
    for param in wrapped.parameters():
        param.grad = None
    assert wrapped._unit.flat_params[0].grad.value is None
    for model in (plain, wrapped):
        weight = dict(model.named_parameters())["0.weight"]
        weight.grad = torch.full_like(weight, 2.0)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    torch.testing.assert_close(wrapped.clip_grad_norm_(0.5), expected)
    for model in (plain, wrapped):
        backward(model, 1)
    average_grads_(plain.parameters())
    assert_same_grads(wrapped, plain)


@on_ranks(1, in_full(2), 3)
def test_hooks_on_views_see_the_reduced_gradient():
    """A post-accumulate-grad hook runs once per backward, sees the view's run of the mean, and may drop it."""
    plain, wrapped = build(wrap=wrap_each)
    seen = {}

    def note(name):
        def hook(param):
            seen[name] = param.grad.clone()
            param.grad = None

        return hook

    for name, param in wrapped.named_parameters():
        param.register_post_accumulate_grad_hook(note(name))
    backward(plain, 0)
    backward(wrapped, 0)
    average_grads_(plain.parameters())
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, seen)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(torch.cat([part[name].flatten() for part in every]), param.grad.flatten())
    assert wrapped.params_with_grad == []


@on_ranks(in_full(1), 2)
@pytest.mark.parametrize("how", ["in place", "data in place", "data assigned", "vector"])
@pytest.mark.parametrize("settings", ["device", "offload"])
def test_a_written_view_is_seen_by_the_next_forward(how, settings):
    """However a weight is written between passes, the forward, state dict and shard have the new value."""
    plain, wrapped = build(**SETTINGS[settings])
    backward(wrapped, 0)
    for model in (plain, wrapped):
        with torch.no_grad():
            for param in model.parameters():
                if how == "in place":
                    param.mul_(0.5)
                elif how == "data in place":
                    param.data.mul_(0.5)
                elif how == "data assigned":
                    param.data = param.data * 0.5
            if how == "vector":
                vector = nn.utils.parameters_to_vector(model.parameters())
                nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
    assert torch.equal(wrapped(randn(3, 4)), plain(randn(3, 4)))
    assert_same_state(wrapped.state_dict(), plain.state_dict())


@on_ranks(in_full(1), 2)
@pytest.mark.parametrize("settings", [*SETTINGS, "own shapes"])
def test_weights_assigned_while_gradients_wait(settings):
    """Under ``no_sync``: the gradients stay, and later ones are added, as after a write in place."""
    options = {"flatten_parameters": False} if settings == "own shapes" else SETTINGS[settings] | SHOWN
    models = [FSDP(mlp(4, 9, 7, 5), **options) for _ in range(2)]
    for model in models:
        with model.no_sync():
            backward(model, 0)
        with torch.no_grad():
            for param in model.parameters():
                if model is models[0]:
                    param.mul_(0.5)
                else:
                    param.data = param.data * 0.5
        backward(model, 1)
    for grads in zip(*(tuple(param.grad for param in model.parameters()) for model in models), strict=True):
        assert torch.equal(*grads)


@on_ranks(1, in_full(2), 3)
@pytest.mark.parametrize("settings", [*SETTINGS, "own shapes"])
def test_weights_swapped_for_an_evaluation_come_back(settings):
    """``backup = p.data; p.data = average``, evaluate, ``p.data = backup`` leaves training as if not done."""
    options = {"flatten_parameters": False} if settings == "own shapes" else SETTINGS[settings] | SHOWN
    models = [FSDP(mlp(4, 9, 7, 5), **options) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    zeros = {name: torch.zeros_like(param) for name, param in models[0].named_parameters()}
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 1)
        before, backup = models[0].state_dict(), {}
        for name, param in models[0].named_parameters():
            backup[name] = param.data
            param.data = zeros[name]
        with torch.inference_mode(step == 1), torch.no_grad():
            assert not models[0](randn(3, 4)).any()
        assert not any(value.any() for value in models[0].state_dict().values())
        for name, param in models[0].named_parameters():
            param.data = backup[name]
        assert_same_state(models[0].state_dict(), before)
        assert_same_state(*(model.state_dict() for model in models))


@on_ranks(2)
def test_data_of_another_size_is_refused_by_name():
    """Only as many elements as the rank owns can be assigned to ``.data``."""
    _, wrapped = build()
    wrapped.module[2].weight.data = torch.zeros(7, 9, device=rank_device())
    with pytest.raises(ValueError, match=r"`2.weight` \(rank \d\) it has shape \(7, 9\)"):
        wrapped(randn(3, 4))


STRATEGIES = {
    "HYBRID_SHARD": lambda: {"sharding_strategy": HYBRID, "process_group": pairs(2)},
    "_HYBRID_SHARD_ZERO2": lambda: {"sharding_strategy": ZERO2, "process_group": pairs(2)},
    "NO_SHARD": lambda: {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "SHARD_GRAD_OP": lambda: {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "few": lambda: {"reshard_after_forward": 2},
}


@on_ranks(4)
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", *map(in_full, list(STRATEGIES)[1:])])
@pytest.mark.parametrize("offload", [in_full(False), True])
def test_what_is_done_to_single_parameters(strategy, offload):
    """Freezing parameters, and dropping, zeroing, editing or assigning gradients work as with separate shards."""
    how = {**STRATEGIES[strategy](), "cpu_offload": offload}
    states = []
    for layout in (SHOWN, {"flatten_parameters": False}):
        model = wrap_each(mlp(4, 9, 7, 5), bucket_cap_mb=0, **layout, **how)
        optimizer, named = sgd(model), dict(model.named_parameters())
        for step in range(4):
            named["0.weight"].requires_grad_(step in (0, 3))
            with model.no_sync():
                backward(model, (step, 0))
            if step == 1:
                named["2.weight"].grad = None
            elif step == 2:
                named["0.bias"].grad.zero_()
            backward(model, (step, 1))
            named["4.weight"].grad.mul_(2)
            named["4.bias"].grad = torch.full_like(named["4.bias"], 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 0)
        states.append(model.state_dict())
    assert_same_state(*states)
