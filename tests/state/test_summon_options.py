"""What the options of ``summon_full_params`` show and keep: rank 0 alone, host memory, gradients, some units only."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.errors import FairshardError
from fairshard.nn import FSDP
from fairshard.optim import CPUOptimizer
from tests.kit import rank_device
from tests.models import mlp, tiny, tiny_batch, tiny_loss, wrap_each, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, average_grads_, randn, sgd

LAYOUTS = {
    "flat": {},
    "apart": {"flatten_parameters": False},
    "bf16": {"mixed_precision": True, "compute_dtype": torch.bfloat16},
    "offload": {"cpu_offload": True},
    "held": {"cpu_offload": True, "move_grads_to_cpu": False},
    "host": {"move_grads_to_cpu": True, "flatten_parameters": False},
}
layouts = pytest.mark.parametrize("layout", list(LAYOUTS))


def backward(model, *key):
    *inputs, targets = tiny_batch(dist.get_rank(), *key)
    tiny_loss(model(*inputs), targets).backward()


@on_ranks(1, 2)
def test_rank0_only_shows_them_there():
    """Rank 0 sees whole parameters, the other ranks see their shards, and nothing is written back."""
    model = wrap_tiny(tiny())
    outside = [(name, param.shape) for name, param in model.named_parameters()]
    with model.summon_full_params(writeback=False, rank0_only=True):
        inside = [(name, param.shape) for name, param in model.named_parameters()]
        if dist.get_rank() == 0:
            assert inside == [(name, param.shape) for name, param in tiny().named_parameters()]
            if dist.get_world_size() > 1:
                for param in model.parameters():
                    param.data.zero_()
        else:
            assert inside == outside
    assert [(name, param.shape) for name, param in model.named_parameters()] == outside
    assert_same_state(model.state_dict(), tiny().state_dict())


@on_ranks(3)
def test_rank0_only_is_the_first_rank_of_the_models_own_group():
    """A model on a subgroup is whole on the group's first rank, whatever its global rank."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    model = wrap_each(mlp(4, 5, 3), process_group=group)
    with model.summon_full_params(writeback=False, rank0_only=True):
        if dist.get_rank() == 1:
            assert_same_state(dict(model.named_parameters()), dict(mlp(4, 5, 3).named_parameters()))
        else:
            assert all(param.dim() == 1 for param in model.parameters())


@on_ranks(2)
def test_rank0_only_with_writeback_is_refused():
    """ValueError on every rank, before anything is gathered."""
    model = wrap_each(mlp(4, 5, 3))
    with pytest.raises(ValueError, match=r"`rank0_only=True` needs `writeback=False`"):
        with model.summon_full_params(rank0_only=True):
            pass
    assert model(randn(2, 4)).shape == (2, 3)


@on_ranks(2)
def test_offload_to_cpu_warns_where_it_is_wasteful():
    """Without ``rank0_only`` every rank of a host holds the model in host memory: it warns at the caller's line."""
    model = wrap_each(mlp(4, 5, 3))
    with pytest.warns(UserWarning, match="once for every rank") as caught:
        with model.summon_full_params(offload_to_cpu=True):
            assert {param.device.type for param in model.parameters()} == {"cpu"}
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with model.summon_full_params(offload_to_cpu=True, rank0_only=True, writeback=False):
            pass


@on_ranks(1)
def test_with_one_rank_writes_are_kept_in_any_case():
    """On one rank nothing is sharded: as in FSDP1, ``writeback=False`` does not discard writes."""
    model = wrap_each(mlp(4, 5, 3))
    for kwargs in ({"writeback": False}, {"writeback": False, "rank0_only": True}):
        before = model.state_dict()
        with model.summon_full_params(**kwargs), torch.no_grad():
            for param in model.parameters():
                param.add_(1)
        assert_same_state(model.state_dict(), {name: value + 1 for name, value in before.items()})


@on_ranks(1, 2, 3)
@layouts
def test_gradients_are_the_plain_models(layout):
    """``with_grads`` shows whole gradients, averaged over ranks; the optimizer steps with what is written to them."""
    plain, model = tiny(), wrap_tiny(tiny(), **LAYOUTS[layout])
    of_plain = sgd(plain)
    of_model = CPUOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9) if layout == "held" else sgd(model)
    backward(model, 0)
    if layout != "bf16":
        backward(plain, 0)
        average_grads_(plain.parameters())
    with model.summon_full_params(with_grads=True):
        found = dict(model.named_parameters())
        for name, param in plain.named_parameters():
            if layout == "bf16":
                param.grad = found[name].grad.to(param.device).clone()
            assert torch.equal(found[name].grad.to(param.device), param.grad), name
            assert found[name].grad.dtype == param.dtype
            for grad in (param.grad, found[name].grad):
                grad.mul_(0.5).add_(0.01)
    of_plain.step()
    of_model.step()
    assert_same_state(model.state_dict(), plain.state_dict())


@on_ranks(2)
@pytest.mark.parametrize("layout", ["flat", "apart", "held"])
def test_gradients_may_be_dropped_and_made(layout):
    """Dropping all gradients of a unit keeps none, dropping some gives zeros, and an assigned gradient is kept."""
    model = wrap_each(mlp(4, 5, 3), **LAYOUTS[layout])
    with model.summon_full_params(with_grads=True):
        assert all(param.grad is None for param in model.parameters())
    assert model.params_with_grad == []
    with model.summon_full_params(with_grads=True):
        model[0].weight.grad = torch.ones(5, 4, device=rank_device())
        model[2].bias.grad = None
    with model.summon_full_params(with_grads=True):
        assert model[0].weight.grad.sum() == 20
        assert model[0].bias.grad is None if layout == "apart" else not model[0].bias.grad.any()
        assert model[2].weight.grad is None
    with model.summon_full_params(with_grads=True):
        for param in model.parameters():
            param.grad = None
    assert model.params_with_grad == []
    model(randn(2, 4)).sum().backward()
    with model.summon_full_params(with_grads=True, writeback=False):
        for param in model.parameters():
            param.grad = None
    assert len(model.params_with_grad) == len(list(model.parameters()))


@on_ranks(2)
def test_gradients_on_rank_0():
    """With ``rank0_only`` only rank 0 has whole gradients, in host memory if asked for."""
    model = wrap_each(mlp(4, 5, 3))
    model(randn(2, 4)).sum().backward()
    with model.summon_full_params(writeback=False, rank0_only=True, offload_to_cpu=True, with_grads=True):
        if dist.get_rank() == 0:
            assert all(param.grad.shape == param.shape for param in model.parameters())
            assert {param.grad.device.type for param in model.parameters()} == {"cpu"}
        else:
            assert all(param.dim() == 1 for param in model.parameters())


@on_ranks(2)
def test_gradients_of_some_ranks_only():
    """A gradient missing on one rank counts as zeros: all ranks show the same, and none waits for another."""
    model = FSDP(nn.Linear(2, 2, bias=False))
    if dist.get_rank() == 0:
        model.params[0].grad = torch.ones_like(model.params[0])
    with model.summon_full_params(with_grads=True, writeback=False):
        assert model.weight.grad.flatten().tolist() == [1, 1, 0, 0]


@on_ranks(2)
@pytest.mark.parametrize("layout", ["flat", "bf16"])
def test_looking_at_gradients_under_no_sync_loses_none(layout):
    """Looking at gradients held by ``no_sync`` leaves them to be reduced later, once."""
    results = []
    for look in (False, True):
        model = wrap_tiny(tiny(), **LAYOUTS[layout], fp32_reduce_scatter=layout == "bf16")
        optimizer = sgd(model)
        with model.no_sync():
            backward(model, 0)
        if look:
            with model.summon_full_params(with_grads=True):
                pass
        backward(model, 1)
        optimizer.step()
        results.append(model.state_dict())
    assert_same_state(results[1], results[0])


@on_ranks(2)
def test_looking_between_forward_and_backward_is_allowed():
    """Summoning with the default ``writeback=True`` raises in the backward only if weights were changed."""
    model, plain = wrap_each(mlp(4, 5, 3)), mlp(4, 5, 3)
    loss = model(randn(2, 4)).sum()
    with model.summon_full_params():
        assert torch.equal(model[0].weight, plain[0].weight)
    loss.backward()
    plain(randn(2, 4)).sum().backward()
    average_grads_(plain.parameters())
    with model.summon_full_params(with_grads=True):
        assert torch.equal(model[0].weight.grad, plain[0].weight.grad)


@on_ranks(2)
def test_recurse_false_on_a_plain_module():
    """The outermost units of a plain module are shown, those inside them are not."""
    model = nn.ModuleDict({"a": wrap_each(mlp(4, 5, 3)), "b": FSDP(nn.Linear(2, 2)), "c": nn.Linear(2, 2)})
    with FSDP.summon_full_params(model, recurse=False):
        assert model["b"].weight.shape == (2, 2)
        assert [name for name, _ in model["a"].named_parameters()] == ["0.flat_param_0", "2.flat_param_0"]
    with FSDP.summon_full_params(model):
        assert model["a"][0].weight.shape == (5, 4)
    with FSDP.summon_full_params(nn.Linear(2, 2)):
        pass


@on_ranks(2)
def test_a_replaced_parameter_is_an_error_that_leaves_the_model_whole():
    """Assigning another Parameter inside raises on exit, by name; every unit is sharded again and trains."""
    model = wrap_tiny(tiny())
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(FairshardError, match=r"`first\.up\.weight` was replaced"):
        with model.summon_full_params():
            model.first.up.module.weight = nn.Parameter(torch.zeros(11, 6))
    assert [name for name, _ in model.named_parameters()] == names
    assert_same_state(model.state_dict(), tiny().state_dict())
    backward(model, 0)


@on_ranks(2)
def test_twice_in_a_row_and_after_a_pass():
    """Summoning again, after forwards, backwards and steps, shows the newest weights each time."""
    model, plain = wrap_tiny(tiny()), tiny()
    optimizer, of_plain = sgd(model), sgd(plain)
    for step in range(3):
        with FSDP.summon_full_params(model), FSDP.summon_full_params(nn.Linear(1, 1)):
            shown = {name: param.detach().clone() for name, param in model.named_parameters()}
        for name, param in plain.named_parameters():
            assert torch.equal(shown[name], param)
        for part, fitting in ((model, optimizer), (plain, of_plain)):
            backward(part, step)
            if part is plain:
                average_grads_(plain.parameters())
            fitting.step()
            fitting.zero_grad()
    assert_same_state(copy.copy(model.state_dict()), plain.state_dict())


@on_ranks(1, 2)
@pytest.mark.parametrize("options", [{}, {"flatten_parameters": False}, {"use_orig_params": True}])
def test_flags_set_inside_are_kept(options):
    """As in PyTorch's FSDP with ``use_orig_params``: what is frozen inside gets no gradient afterwards."""
    model = FSDP(nn.Sequential(*(FSDP(nn.Linear(3, 3), **options) for _ in range(2))), **options)
    inner = model.module[0]
    for trains in (False, True):
        with model.summon_full_params():
            assert {param.requires_grad for param in inner.parameters()} == {not trains}
            inner.requires_grad_(trains)
        assert {param.requires_grad for param in inner.parameters()} == {trains}
        model(randn(2, 3)).sum().backward()
        assert {param.grad is not None for param in inner.parameters()} == {trains}
    assert all(param.grad is not None for param in model.module[1].parameters())


@on_ranks(2)
def test_flags_of_single_parameters_set_inside():
    """Original parameters keep them and show them the next time; one of several in a flat parameter cannot."""
    model = FSDP(nn.Linear(3, 3), use_orig_params=True)
    with model.summon_full_params():
        model.weight.requires_grad_(False)
    with model.summon_full_params():
        assert [param.requires_grad for param in model.module.parameters()] == [False, True]
    model(randn(2, 3)).sum().backward()
    assert [param.grad is not None for param in model.parameters()] == [False, True]
    flat = FSDP(nn.Linear(3, 3))
    before = flat.state_dict()
    with pytest.raises(FairshardError, match="`weight` must not be changed on the original"), flat.summon_full_params():
        flat.weight.requires_grad_(False)
    assert_same_state(flat.state_dict(), before)
    flat(randn(2, 3)).sum().backward()


@on_ranks(2)
def test_flags_that_rank_0_alone_sets_are_not_kept():
    """The other ranks could not follow."""
    model = FSDP(nn.Linear(3, 3), use_orig_params=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with model.summon_full_params(writeback=False, rank0_only=True):
            model.module.requires_grad_(dist.get_rank() != 0)
    assert ["must be set on all ranks" in str(one.message) for one in told] == [True] * (dist.get_rank() == 0)
    assert all(param.requires_grad for param in model.parameters())
