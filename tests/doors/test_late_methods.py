"""Methods that change whole parameters, called on a sharded module: refused by name with the cure, or as in torch."""

import itertools

import pytest
import torch
from torch import nn

from fairshard.errors import FairshardError, ParameterShardedError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import fully_shard
from tests.on_ranks import on_ranks

DOORS = pytest.mark.parametrize("door", ["flat", "orig_params", "fully_shard"])
WHEN = pytest.mark.parametrize("has_run", [False, True])


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


IDS = torch.arange(4)


def sharded(door, has_run, is_tied=False):
    net = Language(is_tied)
    model = fully_shard(net) if door == "fully_shard" else FSDP(net, use_orig_params=door == "orig_params")
    if has_run:
        model(IDS)  # the outermost unit stays gathered for a backward
    return model


@on_ranks(2)
@DOORS
@WHEN
def test_resizing_is_refused(door, has_run):
    """If it fails, or if its writes would be lost, the error says to resize first."""
    model = sharded(door, has_run)
    with pytest.raises(ParameterShardedError, match=r"`resize_token_embeddings` of.*Language.*before sharding"):
        model.resize_token_embeddings(8)
    assert model(IDS).shape == (4, 6)


@on_ranks(2)
@pytest.mark.parametrize("door", ["flat", "orig_params"])
@WHEN
def test_resetting_is_refused_unless_parameters_are_whole(door, has_run):
    """The error names both ways to reset whole parameters, and they work."""
    model = sharded(door, has_run)
    with pytest.raises(ParameterShardedError, match=r"`reset_parameters` of.*summon_full_params.*allow_reset_param"):
        model.reset_parameters()
    with FSDP.summon_full_params(model):
        before = model.module.head.weight.clone()
        model.reset_parameters()
    with FSDP.summon_full_params(model):
        assert not torch.equal(before, model.module.head.weight)


@on_ranks(2)
def test_resetting_dtensors_works():
    """As in torch: each rank initialises its rows."""
    model = sharded("fully_shard", has_run=False)
    before = model.head.weight.full_tensor()
    model.reset_parameters()
    assert not torch.equal(before, model.head.weight.full_tensor())


@on_ranks(2)
def test_tying_flattened_weights_is_refused():
    """torch's TypeError about a placeholder becomes an error that says to tie first."""
    for is_tied, has_run in itertools.product((False, True), repeat=2):
        model = sharded("flat", has_run, is_tied=is_tied)
        with pytest.raises(ParameterShardedError, match=r"`tie_weights` of.*Language.*before sharding"):
            model.tie_weights()


@on_ranks(2)
@pytest.mark.parametrize("door", ["orig_params", "fully_shard"])
def test_tying_again_what_was_tied_before_sharding_is_allowed(door):
    """Where modules hold parameters, nothing changes, also after a forward."""
    for has_run in (False, True):
        model = sharded(door, has_run, is_tied=True)
        model.tie_weights()
        model(IDS).sum().backward()


@on_ranks(2)
def test_resizing_a_shown_parameter_is_refused():
    """A parameter of another shape inside `summon_full_params` raises at the end of the block, and is not cut."""
    model = sharded("flat", has_run=False)
    error = pytest.raises(FairshardError, match=r"`embed.weight` must keep its shape \(6, 4\).*but has \(8, 4\)")
    with error, FSDP.summon_full_params(model):
        model.module.resize_token_embeddings(8)
    assert model(IDS).shape == (4, 6)
