"""`load_optimizer`: an optimizer from a checkpoint of torch's that holds nothing else, into a new optimizer."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp

from fairshard.checkpoint import load_optimizer
from fairshard.errors import CheckpointError
from fairshard.nn import FSDP, StateDictType, fully_shard
from tests.checkpoint.compared import assert_same, whole
from tests.kit import run_ranks
from tests.models import mlp
from tests.on_ranks import in_full, on_ranks
from tests.reference import randn


class Named(nn.Module):
    """A model with all parameters below ``model``, as language models with an adapter have."""

    def __init__(self):
        super().__init__()
        self.model = mlp(4, 6, 5)

    def forward(self, x):
        return self.model(x)


def built(make, steps=0, **options):
    """A sharded `Named` of two units, and AdamW with two groups after some steps."""
    model = Named()
    if make == "fully_shard":
        fully_shard(model.model[0])
        fully_shard(model)
    else:
        model.model[0] = FSDP(model.model[0], **options)
        model = FSDP(model, **options)
        FSDP.set_state_dict_type(model, StateDictType[make])
    first, *others = model.parameters()
    optimizer = torch.optim.AdamW([{"params": [first]}, {"params": others, "lr": 0.5}], lr=0.1)
    for step in range(steps):
        model(randn(3, 4, key=("x", step, dist.get_rank()))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def saved_by(make, steps, folder):
    """Save the optimizer alone; its whole state."""
    model, optimizer = built(make, steps, use_orig_params=True)
    dcp.save({"optimizer": FSDP.optim_state_dict(model, optimizer)}, checkpoint_id=folder)
    return whole(model, optimizer)[1]


def loaded_by(make, folder):
    """Load it into a new optimizer; its whole state."""
    model, optimizer = built(make, use_orig_params=True)
    load_optimizer(folder, model, optimizer)
    return whole(model, optimizer)[1]


@pytest.mark.parametrize("steps", [2, 0])
@pytest.mark.parametrize("make", ["SHARDED_STATE_DICT", *(in_full(m) for m in ("FULL_STATE_DICT", "fully_shard"))])
def test_a_new_optimizer_gets_the_state_that_was_saved(shared_folder, make, steps):
    """Saved on two ranks, before its first step or after: on three ranks it has that state and groups."""
    expected = run_ranks(2, saved_by, make, steps, shared_folder)[0]
    assert bool(expected["state"]) == bool(steps)
    for found in run_ranks(3, loaded_by, make, shared_folder):
        assert_same(({}, found), ({}, expected))


@on_ranks(2)
def test_a_checkpoint_without_an_optimizer_is_refused(shared_folder):
    """A checkpoint of a model alone raises on all ranks, and the optimizer keeps its state."""
    model, optimizer = built("FULL_STATE_DICT", steps=1, use_orig_params=True)
    dcp.save({"model": model.state_dict()}, checkpoint_id=shared_folder)
    expected = whole(model, optimizer)
    with pytest.raises(CheckpointError, match="must hold an optimizer of this model"):
        load_optimizer(shared_folder, model, optimizer)
    assert_same(whole(model, optimizer), expected)
