"""``reshard_after_forward=k`` keeps parameters sharded over k ranks between forward and backward."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairshard.nn import FSDP
from fairshard.params.gathered import KeptPart
from fairshard.utils.groups import communicator
from tests.models import mlp, tiny, tiny_batch, tiny_loss, wrap_each, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, randn, sgd


def trained(**kwargs):
    """Losses and state after three steps of two micro-batches."""
    model = wrap_tiny(tiny(), **kwargs)
    optimizer = sgd(model)
    losses = []
    for step in range(3):
        for micro in range(2):
            *inputs, targets = tiny_batch(dist.get_rank(), step, micro)
            loss = tiny_loss(model(*inputs), targets)
            loss.backward()
            losses.append(loss.detach())
        with torch.no_grad():
            model(*inputs)  # an evaluation in between
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), model.state_dict()


@on_ranks(2, 4)
@pytest.mark.parametrize(
    "options", [{}, {"mixed_precision": True, "compute_dtype": torch.bfloat16}, {"cpu_offload": True}]
)
def test_the_same_bits_wherever_parameters_are_kept(options):
    """Parameters kept by two ranks, by all or by none give equal losses and weights."""
    expected, state = trained(**options)
    losses, own = trained(reshard_after_forward=2, **options)
    torch.testing.assert_close(losses, expected, rtol=0, atol=0)
    assert_same_state(own, state)


@on_ranks(4)
def test_the_backward_gathers_among_few():
    """The backward gathers from half of the ranks, and frees what they kept."""
    wrapped = wrap_each(mlp(4, 9, 5), reshard_after_forward=2)
    loss = wrapped(randn(3, 4)).sum()
    inner = [part for part in wrapped.modules() if isinstance(part, FSDP) and part is not wrapped]
    kept = [part for unit in inner for part in unit._unit.parts if part.kept is not None]
    assert all(isinstance(part, KeptPart) for part in kept)
    for unit, part in zip(inner, kept, strict=True):
        assert part.kept.numel() == unit._unit.flat_params[0].line.layout.padded_numel // 2
        assert part._comm.world_size == 2
    before = {comm: dict(comm.counts) for comm in {part._comm for part in kept}}
    loss.backward()
    for comm, counts in before.items():
        assert comm.counts["all_gather"][0] == counts.get("all_gather", [0, 0])[0] + len(inner)
    assert not any(part.kept is not None for part in kept)
    assert communicator(dist.group.WORLD).world_size == 4


@on_ranks(4)
def test_a_share_from_before_the_step_is_not_used():
    """A forward without a backward leaves a kept part; a checkpoint that recomputes uses the new weights instead."""
    grads = []
    for few in (True, 2):
        wrapped = wrap_each(mlp(4, 9, 5), reshard_after_forward=few)
        layer = wrapped.module[0]
        x = randn(3, 4).requires_grad_()
        wrapped(x)
        with torch.no_grad():
            for param in wrapped.parameters():
                param.mul_(3)
        wrapped.module[0] = nn.Sequential(layer)
        wrapped.module[0].forward = lambda x, layer=layer: checkpoint(layer, x, use_reentrant=True)
        wrapped(x).square().sum().backward()
        grads.append([x.grad, *(param.grad for param in wrapped.parameters())])
    for own, expected in zip(*grads, strict=True):
        assert torch.equal(own, expected)


@on_ranks(4)
def test_sizes_that_do_not_divide_are_refused():
    """Numbers that do not divide the number of ranks raise."""
    wrapped = FSDP(mlp(4, 9), reshard_after_forward=3)
    for _ in range(2):  # a failed setup leaves nothing half set up
        with pytest.raises(ValueError, match="must divide the number of ranks, 4, but is 3"):
            wrapped(randn(3, 4))
    with pytest.raises(ValueError, match="a bool or a number of ranks, but is 0"):
        FSDP(mlp(4, 9), reshard_after_forward=0)


@on_ranks(4)
def test_a_gather_that_fails_keeps_nothing():
    """A failed gather raises its own error, and the next pass is complete."""
    wrapped = FSDP(mlp(4, 9), reshard_after_forward=2, disable_reshard_on_root=False)
    wrapped(randn(3, 4))
    (flat_param,) = wrapped._unit.flat_params
    with mock.patch.object(flat_param, "unshard", side_effect=KeyError), pytest.raises(KeyError):
        wrapped(randn(3, 4))
    wrapped(randn(3, 4)).sum().backward()


@on_ranks(2)
def test_one_rank_means_keep():
    """``reshard_after_forward=1`` warns and keeps whole parameters."""
    with pytest.warns(UserWarning, match="it means False"):
        wrapped = FSDP(mlp(4, 9), reshard_after_forward=1)
    assert wrapped.reshard_after_forward is False
