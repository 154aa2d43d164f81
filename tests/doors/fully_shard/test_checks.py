"""`order_check` and `nan_check` name modules and ranks on models from `fully_shard`, as they do on wrappers."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fairshard.errors import NonFiniteGradientError, RanksDisagreeError
from fairshard.nn import fully_shard
from fairshard.utils import groups
from tests.doors.fully_shard.assorted import Assorted
from tests.doors.fully_shard.models import shard_tiny
from tests.kit.doors import whole
from tests.models import loss_of_tiny, mlp
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state, randn

pytestmark = pytest.mark.behaviour("checks of fully_shard")


class Branches(torch.nn.Module):
    """Runs one of several modules of the same shapes."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(mlp(4, 4) for _ in range(2))
        self.taken = 0

    def forward(self, x):
        return self.experts[self.taken](x)


def branches(**kwargs):
    model = Branches()
    for expert in model.experts:
        fully_shard(expert, **kwargs)
    return fully_shard(model, **kwargs)


@on_ranks(2, in_full(3))
@pytest.mark.parametrize("order_check", ["always", "sampled"])
def test_ranks_that_run_different_modules_raise(order_check):
    """Ranks that run different modules of the same shape raise, instead of computing with each other's weights."""
    model = branches(order_check=order_check)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = whole(model)
    model.taken = dist.get_rank() % 2
    # Without tags, gathers are matched by order alone, as with NCCL, so nothing hangs.
    untagged = mock.patch.object(groups, "EXCHANGE_RANKS", ())

    def step():
        model(randn(2, 4)).sum().backward()
        optimizer.step()

    with untagged, pytest.raises(RanksDisagreeError, match=r"(?s)experts\.0.*experts\.1|experts\.1.*experts\.0"):
        step()
    assert_same_state(whole(model), before)


@on_ranks(2, in_full(3))
def test_a_gradient_that_is_not_finite_is_named():
    """All ranks raise an error that names the parameter and the rank of origin; the next step trains again."""
    torch.manual_seed(1)
    model = shard_tiny(Assorted("no_dim"), nan_check=True)
    last = dist.get_world_size() - 1
    handle = model.second.register_full_backward_pre_hook(
        lambda module, grads: tuple(grad * float("nan") for grad in grads) if dist.get_rank() == last else grads
    )
    with pytest.raises(NonFiniteGradientError, match=rf"`second\.[a-z.]+`.* on rank {last}"):
        loss_of_tiny(model, (0,)).backward()
    handle.remove()
    model.zero_grad()
    loss_of_tiny(model, (1,)).backward()
