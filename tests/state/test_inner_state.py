"""State dicts of modules inside a wrapper: whole inside `summon_full_params`, refused by name elsewhere."""

import copy
import pickle

import pytest
import torch.distributed as dist
from torch import nn

from fairshard.errors import ParameterShardedError
from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.models import mlp
from tests.on_ranks import on_ranks
from tests.reference import randn

LAYOUTS = pytest.mark.parametrize(
    "layout", [{}, {"flatten_parameters": False}, {"use_orig_params": True}], ids=["flat", "unflattened", "orig_params"]
)


def wrapped(**layout):
    """The first Linear is its own unit; the outer one has the second Linear and the norm."""
    net = nn.Sequential(*mlp(4, 6, 5), nn.BatchNorm1d(5))
    plain = copy.deepcopy(net)
    net[0] = FSDP(net[0], **layout)
    return FSDP(net, **layout), plain


@on_ranks(2)
@LAYOUTS
def test_saving_and_loading_inside_are_refused(layout):
    """Before and after a step, of the module, a submodule and a copy; on one rank alone too, without a collective."""
    model, plain = wrapped(**layout)
    for copies in ([copy.deepcopy(model), pickle.loads(pickle.dumps(model))], []):
        for one in (model, *copies):
            if dist.get_rank() == 0:
                for inside in (one.module, one.module[2], one.module[0].module):
                    with pytest.raises(ParameterShardedError, match=r"such as `[0-3]\.weight`.*summon_full_params"):
                        inside.state_dict()
            with pytest.raises(ParameterShardedError, match=r"`2\.weight` would be loaded"):
                one.module[2:].load_state_dict(plain[2:].state_dict(), strict=False)
        model(randn(3, 4)).sum().backward()


@on_ranks(2)
def test_modules_without_sharded_parameters_are_saved():
    """A module whose parameters all belong to other units, or to none, has its whole state dict, and loads it."""
    model = FSDP(nn.Sequential(FSDP(nn.Linear(4, 4)), nn.BatchNorm1d(4, affine=False)))
    expected = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)).state_dict()
    assert list(model.module.state_dict()) == list(expected)
    model.module[1].load_state_dict(model.module[1].state_dict())
