"""Messages that a user of `fully_shard` sees name what that user can do."""

import pytest
import torch
from torch import nn

from fairshard.nn import fully_shard
from tests.kit import rank_device
from tests.on_ranks import on_ranks
from tests.reference import randn


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4)).to(rank_device())


@on_ranks(1)
def test_autocast_names_the_policy():
    """The warning about autocast names ``mp_policy``."""
    model = fully_shard(mlp())
    with (
        torch.autocast(rank_device().type, torch.bfloat16),
        pytest.warns(UserWarning, match=r"mp_policy=MixedPrecisionPolicy\(param_dtype=torch.bfloat16\)"),
    ):
        model(randn(3, 4))


@on_ranks(1)
def test_a_late_cast_names_parameter_and_policy():
    """A cast after the first forward raises with a parameter's own name, and names ``mp_policy``."""
    model = fully_shard(mlp())
    model(randn(3, 4))
    with pytest.raises(TypeError, match=r"`0\.weight` would go from .*`mp_policy` of fully_shard"):
        model.half()


@on_ranks(1)
def test_tied_weights_name_the_list_of_modules():
    """A weight shared with a module that is a unit already: the error names ``fully_shard([first, second])``."""
    first, second = nn.Linear(4, 4, device=rank_device()), nn.Linear(4, 4, device=rank_device())
    second.weight = first.weight
    model = nn.Sequential(first, second)
    fully_shard(first)
    with pytest.raises(ValueError, match=r"fully_shard\(\[first, second\]\)"):
        fully_shard(model)
