"""``use_orig_params`` with replicas and with offload: changes to single parameters, and copies."""

import contextlib
import copy
import pickle

import pytest
import torch
import torch.distributed as dist

from fairshard.checkpoint import load, save
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import ShardingStrategy
from fairshard.optim import CPUOptimizer
from tests.models import mlp, wrap_each
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state, randn, sgd
from tests.settings.test_hybrid import HYBRID, ZERO2, pairs

OTHERS = [
    pytest.param(name, marks=pytest.mark.full) for name in ("_HYBRID_SHARD_ZERO2", "NO_SHARD", "SHARD_GRAD_OP", "few")
]
strategies = pytest.mark.parametrize("strategy", ["HYBRID_SHARD", *OTHERS])
APART = {"flatten_parameters": False}  # the twin has original names too, and shards of their own
PLACEMENTS = [{}, {"cpu_offload": True}, {"move_grads_to_cpu": True}, {"cpu_offload": True, "move_grads_to_cpu": False}]


def settings(strategy):
    if strategy == "few":
        return {"reshard_after_forward": 2}
    chosen = ShardingStrategy[strategy]
    return {"sharding_strategy": chosen, **({"process_group": pairs(2)} if chosen in (HYBRID, ZERO2) else {})}


def build(**kwargs):
    return wrap_each(mlp(4, 9, 7, 5), bucket_cap_mb=0, **kwargs)


def backward(model, key, accumulates=False):
    with model.no_sync() if accumulates else contextlib.nullcontext():
        loss = model(randn(3, 4, key=key)).square().sum()
        loss.backward()
    return loss.detach()


def groups_of(model):
    named = dict(model.named_parameters())
    return [
        {"params": [named[name] for name in named if name.endswith("weight")], "weight_decay": 0.1},
        {"params": [named[name] for name in named if name.endswith("bias")], "lr": 0.02},
    ]


@on_ranks(4)
@strategies
def test_param_groups_in_every_placement(strategy):
    """Stepped on the CPU, early or accumulated and clipped, param groups act as with separate parameters."""
    how = settings(strategy)
    for placement, early in zip(PLACEMENTS, (False, True, False, True), strict=True):
        model, twin = build(use_orig_params=True, **placement, **how), build(**APART, **how)
        options = {"lr": 0.1, "momentum": 0.9, "foreach": False}
        ours = CPUOptimizer(
            model,
            torch.optim.SGD,
            params=groups_of(model),
            clip_grad_norm=None if early else 0.1,
            overlap=early,
            **options,
        )
        plain = torch.optim.SGD(groups_of(twin), **options)
        for step in range(3):
            for one in (model, twin):
                backward(one, (step, 0), accumulates=True)
            backward(twin, (step, 1))
            with ours.last_backward() if early else contextlib.nullcontext():
                backward(model, (step, 1))
            if not early:
                twin.clip_grad_norm_(0.1)
            for optimizer in (ours, plain):
                optimizer.step()
                optimizer.zero_grad(set_to_none=step != 1)
        # The norm is summed in another order.
        assert_same_state(model.state_dict(), twin.state_dict(), rtol=1e-6, atol=1e-7)


@on_ranks(4)
@strategies
@pytest.mark.parametrize("placement", [in_full(PLACEMENTS[0]), PLACEMENTS[1]], ids=["device", "offload"])
def test_what_is_done_to_single_parameters(strategy, placement):
    """Freezing parameters, and dropping, zeroing, editing or assigning gradients work as with separate shards."""
    how = {**settings(strategy), **placement}
    states = []
    for layout in ({"use_orig_params": True}, APART):
        model = build(**layout, **how)
        optimizer, named = sgd(model), dict(model.named_parameters())
        for step in range(4):
            named["0.weight"].requires_grad_(step in (0, 3))
            backward(model, (step, 0), accumulates=True)
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


@on_ranks(4)
@strategies
def test_copies_and_checkpoints_train_on(strategy, tmp_path):
    """Models train on after a copy, a pickle or a checkpoint, also from or into a flat model sharded over all ranks."""
    how = {"use_orig_params": True, **settings(strategy)}
    model = build(**how)
    optimizer = sgd(model)
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    pickled = pickle.loads(pickle.dumps(model))
    for part in pickled.modules():
        if isinstance(part, FSDP) and "process_group" in how:
            part.process_group = how["process_group"]
    save(f"{tmp_path}/ours", model, optimizer)
    flat, loaded = build(), build(**how)
    of_flat, of_loaded = sgd(flat), sgd(loaded)
    load(f"{tmp_path}/ours", flat, of_flat)
    save(f"{tmp_path}/flat", flat, of_flat)
    load(f"{tmp_path}/flat", loaded, of_loaded)
    others = [(copy.deepcopy(model), None), (pickled, None), (loaded, of_loaded)]
    for other, its_optimizer in others:
        its_optimizer = its_optimizer or sgd(other)
        one = copy.deepcopy(model)
        of_one = sgd(one)
        if its_optimizer is of_loaded:
            of_one.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for key in (1, 2):
            assert torch.equal(backward(one, key), backward(other, key))
            for its in (of_one, its_optimizer):
                its.step()
                its.zero_grad()
        assert_same_state(other.state_dict(), one.state_dict())


@on_ranks(4)
@strategies
def test_whole_parameters_and_gradients_are_written_back(strategy):
    """Writes inside ``summon_full_params`` reach the views on every replica."""
    model = build(use_orig_params=True, **settings(strategy))
    backward(model, 0)
    before = {name: param.grad.clone() for name, param in model.named_parameters()}
    with FSDP.summon_full_params(model, with_grads=True), torch.no_grad():
        for param in model.parameters():
            param.fill_(0.25)
            param.grad.mul_(2)
    for name, param in model.named_parameters():
        assert torch.equal(param, torch.full_like(param, 0.25)), name
        assert torch.equal(param.grad, before[name] * 2), name
    every = [torch.empty_like(backward(model, 1)) for _ in range(dist.get_world_size())]
    dist.all_gather(every, model(torch.ones(3, 4)).sum().detach())
    assert all(torch.equal(one, every[0]) for one in every)
