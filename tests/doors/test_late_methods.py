"""Methods that change whole parameters, called on a sharded module: refused by name with the cure, or as in torch."""

import pytest
import torch
from torch import nn

from fairshard.errors import FairshardError, ParameterShardedError
from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.kit.doors import main_doors, shard, whole
from tests.on_ranks import on_ranks

pytestmark = pytest.mark.behaviour("late methods")

IDS = torch.arange(4)
has_run_or_not = pytest.mark.parametrize("has_run", [False, True])


class Language(nn.Module):
    """An embedding and a head, with the methods of Hugging Face's models."""

    def __init__(self, is_tied):
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        if is_tied:
            self.tie_weights()

    def forward(self, ids):
        return self.head(self.embed(ids))

    def resize_token_embeddings(self, num_rows):
        with torch.no_grad():
            old, _ = self.embed.weight.data.size()
            self.embed.weight.data = torch.cat([self.embed.weight.float(), torch.zeros(num_rows - old, 4)])

    def tie_weights(self):
        self.head.weight = self.embed.weight

    def reset_parameters(self):
        self.head.reset_parameters()


def sharded(door, has_run, is_tied=False):
    model = shard(Language(is_tied), door)
    if has_run:
        model(IDS)  # the outermost unit stays gathered for a backward
    return model


@on_ranks(2)
@main_doors
@has_run_or_not
def test_resizing_is_refused(door, has_run):
    """If it fails, or if its writes would be lost, the error says to resize first."""
    model = sharded(door, has_run)
    with pytest.raises(ParameterShardedError, match=r"`resize_token_embeddings` of.*Language.*before sharding"):
        model.resize_token_embeddings(8)
    if door == "flat":
        error = pytest.raises(FairshardError, match=r"`embed.weight` must keep its shape \(6, 4\).*but has \(8, 4\)")
        with error, FSDP.summon_full_params(model):
            model.module.resize_token_embeddings(8)
    assert model(IDS).shape == (4, 6)


@on_ranks(2)
@main_doors
@has_run_or_not
def test_resetting_is_refused_unless_parameters_are_whole_or_dtensors(door, has_run):
    """The wrapper's error names both ways to reset parameters, and they work; of DTensors ranks reset rows."""
    model = sharded(door, has_run)
    before = whole(model)["head.weight"]
    if door == "fully_shard":
        model.reset_parameters()
    else:
        with pytest.raises(
            ParameterShardedError, match=r"`reset_parameters` of.*summon_full_params.*allow_reset_param"
        ):
            model.reset_parameters()
        with FSDP.summon_full_params(model):
            model.reset_parameters()
    assert not torch.equal(before, whole(model)["head.weight"])


@on_ranks(2)
@main_doors
@has_run_or_not
def test_tying(door, has_run):
    """Tying flattened weights raises and says to tie first; where modules hold parameters, tied ones stay tied."""
    for is_tied in (False, True):
        model = sharded(door, has_run, is_tied)
        if door == "flat":
            with pytest.raises(ParameterShardedError, match=r"`tie_weights` of.*Language.*before sharding"):
                model.tie_weights()
        elif is_tied:
            model.tie_weights()
            model(IDS).sum().backward()
