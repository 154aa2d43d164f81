"""``use_orig_params``: state is saved and shown per original parameter, and loads to and from every other layout."""

import copy

import pytest
import torch
import torch.distributed as dist

from fairshard.checkpoint import load, save
from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.copied import by_pickle, by_torch_save, losses_of
from tests.models import mlp, tiny, tiny_batch, tiny_loss, wrap_tiny
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state, await_device, randn

LAYOUTS = {
    "views": {"use_orig_params": True},
    "flat": {},
    "apart": {"flatten_parameters": False},
    "views apart": {"flatten_parameters": False, "use_orig_params": True},
}


def step(model, optimizer, key):
    tokens, extra, targets = tiny_batch(dist.get_rank(), key)
    loss = tiny_loss(model(tokens, extra), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def adam(params):
    return torch.optim.AdamW(params, lr=0.01, foreach=False)


def build(layout, seed=1):
    model = wrap_tiny(tiny(seed=seed), **LAYOUTS[layout])
    return model, adam(model.parameters())


def grouped(model):
    named = dict(model.named_parameters())
    norms = [param for name, param in named.items() if "norm" in name]
    others = [param for name, param in named.items() if "norm" not in name]
    return torch.optim.SGD([{"params": others}, {"params": norms, "lr": 0.5}], lr=0.1, momentum=0.9)


@on_ranks(in_full(2), 3)
def test_local_state_loads_into_a_flat_model():
    """Local state has each rank's shard, whatever is registered for it."""
    model, optimizer = build("views")
    step(model, optimizer, 0)
    other, _ = build("flat", seed=7)
    other.load_local_state_dict(model.local_state_dict())
    assert_same_state(other.state_dict(), model.state_dict())


@on_ranks(in_full(1), 3)
@pytest.mark.parametrize("into", [in_full(name) if name == "views apart" else name for name in LAYOUTS])
def test_checkpoints_across_layouts(into, tmp_path):
    """``fairshard.checkpoint`` saves with views and loads into any layout, and the reverse."""
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    for number, (first, second) in enumerate((("views", into), (into, "views"))):
        model, optimizer = build(first)
        step(model, optimizer, 0)
        save(f"{folder[0]}/{number}", model, optimizer, step=1)
        other, of_other = build(second, seed=7)
        load(f"{folder[0]}/{number}", other, of_other)
        assert_same_state(other.state_dict(), model.state_dict())
        assert torch.equal(step(model, optimizer, 1), step(other, of_other, 1))
        assert_same_state(other.state_dict(), model.state_dict())


@on_ranks(in_full(2), 3)
def test_groups_that_cut_through_a_unit_are_saved_by_name(tmp_path):
    """Two learning rates in one unit survive a checkpoint and a whole state dict, each on its parameters."""
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    model = wrap_tiny(tiny(), use_orig_params=True)
    optimizer = grouped(model)
    step(model, optimizer, 0)
    save(f"{folder[0]}/one", model, optimizer, step=1)
    whole = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    assert [group["lr"] for group in whole["param_groups"]] == [0.1, 0.5]
    assert all("norm" in name for name in whole["param_groups"][1]["params"])
    for way in ("checkpoint", "whole"):
        other = wrap_tiny(tiny(seed=7), use_orig_params=True)
        of_other = grouped(other)
        of_other.param_groups[1]["lr"] = 0.0
        if way == "checkpoint":
            load(f"{folder[0]}/one", other, of_other)
        else:
            other.load_state_dict(model.state_dict())
            of_other.load_state_dict(FSDP.shard_full_optim_state_dict(whole, other, optim=of_other))
        twin = copy.deepcopy(model)
        of_twin = grouped(twin)
        of_twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert torch.equal(step(twin, of_twin, 1), step(other, of_other, 1))
        assert_same_state(other.state_dict(), twin.state_dict())


@on_ranks(1, in_full(2), 3)
def test_whole_parameters_and_gradients_are_shown_and_written_back():
    """Inside ``summon_full_params`` names and shapes are the original ones, and writes take effect."""
    plain = mlp(4, 9, 5)
    shapes = {name: param.shape for name, param in plain.named_parameters()}
    model = FSDP(plain, use_orig_params=True)
    model(randn(3, 4)).square().sum().backward()
    views = dict(model.named_parameters())
    before = {name: param.grad.clone() for name, param in views.items()}
    with FSDP.summon_full_params(model, with_grads=True):
        assert {name: param.shape for name, param in model.named_parameters()} == shapes
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(0.25)
                param.grad.mul_(2)
    assert dict(model.named_parameters()) == views
    for name, param in views.items():
        assert torch.equal(param.grad, before[name] * 2)
        assert torch.equal(param, torch.full_like(param, 0.25))
    with FSDP.summon_full_params(model, with_grads=True):
        for param in model.parameters():
            param.grad = None
    assert all(param.grad is None for param in views.values())


@pytest.mark.pairs
@on_ranks(1, 3)
@pytest.mark.parametrize("copied_by", [copy.deepcopy, by_pickle, by_torch_save])
@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_copy_trains_on_its_own(copied_by, num_steps):
    """A copied or pickled model has views of its own shard: training and the check for changed weights still work."""
    model = wrap_tiny(tiny(), use_orig_params=True)
    losses_of(model, num_steps)
    other, before = copied_by(model), model.state_dict()
    losses = losses_of(other)
    assert_same_state(model.state_dict(), before)
    assert losses_of(model) == losses
    assert_same_state(other.state_dict(), model.state_dict())
    tokens, extra, targets = tiny_batch(0)
    loss = tiny_loss(other(tokens, extra), targets)
    with torch.no_grad():
        other.params[0].add_(1)
    await_device()  # the backward's gather, whose result is refused, does not wait for the write
    with pytest.raises(RuntimeError, match="must not change between"):
        loss.backward()


@on_ranks(in_full(1), 2)
@pytest.mark.parametrize("through", ["wrapper", "module"])
def test_conversions_before_the_first_forward(through):
    """``.double()`` on the wrapper, or on the module inside it, converts views, shard and optimizer."""
    model, twin = FSDP(mlp(4, 9, 5), use_orig_params=True), FSDP(mlp(4, 9, 5).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (model if through == "wrapper" else model.module).double()
    of_twin = torch.optim.SGD(twin.parameters(), lr=0.1)
    for one, its in ((model, optimizer), (twin, of_twin)):
        one(randn(3, 4).double()).square().sum().backward()
        its.step()
    assert_same_state(model.state_dict(), twin.state_dict())
    with pytest.raises(TypeError, match="Dtype and device must be fixed"):
        model.float()


@on_ranks(2)
def test_a_conversion_of_a_part_is_refused():
    """An error names a parameter whose dtype differs from the others of its unit."""
    model = FSDP(mlp(4, 9, 5), use_orig_params=True)
    model.module[2].double()
    with pytest.raises(TypeError, match=r"must keep one dtype and one device, but `2\.weight`"):
        model(randn(3, 4))
