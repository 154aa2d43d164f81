"""Weight-decay groups made by `p.dim() >= 2`: one of them has no flat shards, which warns and names the cure."""

import warnings

import pytest
import torch
from torch import nn

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import fully_shard
from tests.models import mlp
from tests.on_ranks import on_ranks
from tests.reference import randn

LAYOUTS = pytest.mark.parametrize("layout", [{}, {"use_orig_params": True}], ids=["flat", "orig_params"])


def stepped(model, chosen, decay=0.1, others=0.0, spare=None):
    """The warnings of two steps of AdamW; the parameters whose names and values are ``chosen`` have ``decay``.

    An empty group has the decay ``spare``, if given.
    """
    named = list(model.named_parameters())
    groups = [
        {"params": [param for name, param in named if chosen(name, param)], "weight_decay": decay},
        {"params": [param for name, param in named if not chosen(name, param)], "weight_decay": others},
    ]
    if spare is not None:
        groups.append({"params": [], "weight_decay": spare})
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            model(randn(3, 4)).sum().backward()
            optimizer.step()
    return [str(warning.message) for warning in found if "parameter group" in str(warning.message)]


def by_shape(name, param):
    return param.dim() >= 2


def by_name(name, param):
    return "bias" not in name


@on_ranks(2)
@LAYOUTS
def test_grouping_by_shape_warns_once(layout):
    """No shard has two dimensions, so nothing would decay: the first step says so, and what to do."""
    (text,) = stepped(FSDP(mlp(4, 6, 5), **layout), by_shape)
    assert "weight_decay=0.1 but no shards" in text
    assert "have weight_decay=0.0" in text
    assert "roup by the names" in text
    assert ("use_orig_params=True" in text) == (not layout)


@on_ranks(1)
def test_on_one_rank_grouping_by_shape_warns_for_flat_shards_only():
    """Parameters with their own names also keep their shapes on one rank, so such groups are what the user meant."""
    (text,) = stepped(FSDP(mlp(4, 6, 5)), by_shape)
    assert "weight_decay=0.1 but no shards" in text
    assert not stepped(FSDP(mlp(4, 6, 5), use_orig_params=True), by_shape)
    assert not stepped(FSDP(mlp(4, 6, 5), flatten_parameters=False), by_shape)


@on_ranks(2)
def test_grouping_by_name_warns_for_flat_shards():
    """`flat_param_0` is no bias, so everything would decay."""
    (text,) = stepped(FSDP(mlp(4, 6, 5)), by_name)
    assert "weight_decay=0.0 but no shards" in text


@on_ranks(2)
@LAYOUTS
def test_an_ignored_matrix_in_the_group_does_not_silence_the_warning(layout):
    """The group by shape has the ignored weight, and still none of the shards that were cut from matrices."""
    net = mlp(4, 6, 5)
    (text,) = stepped(FSDP(net, ignored_modules=[net[0]], **layout), by_shape)
    assert "weight_decay=0.1 but no shards" in text


@on_ranks(2)
def test_empty_groups_for_other_reasons_do_not_warn():
    """Grouped by name beside an empty group of a third decay, and all in one group with names beside an empty one."""

    def by_bias(name, param):
        return "bias" not in name

    for spare in (0.0, 0.05, 0.2):
        assert not stepped(FSDP(mlp(4, 6, 5), use_orig_params=True), by_bias, spare=spare)
    assert not stepped(FSDP(mlp(4, 6, 5), use_orig_params=True), lambda name, param: True, spare=0.0)
    net = mlp(4, 6, 5)
    assert not stepped(FSDP(net, ignored_modules=[net[0]]), lambda name, param: "flat" in name)


@on_ranks(2)
def test_groups_that_are_meant_do_not_warn():
    """By name with original parameters, by shape with DTensors, of equal decay, and of parameters of one kind only."""
    assert not stepped(FSDP(mlp(4, 6, 5), use_orig_params=True), by_name)
    assert not stepped(FSDP(mlp(4, 6, 5), flatten_parameters=False), by_name)
    assert not stepped(fully_shard(mlp(4, 6, 5)), by_shape)
    assert not stepped(FSDP(mlp(4, 6, 5)), by_shape, decay=0.0)
    assert not stepped(FSDP(nn.Linear(4, 6, bias=False)), by_name)
    assert not stepped(FSDP(nn.LayerNorm(4)), by_shape)
