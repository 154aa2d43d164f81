"""Rules that optimizer state must meet to be saved or loaded; a violation raises on all ranks and is named."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.checkpoint import Checkpointer
from fairshard.nn import FSDP, FullOptimStateDictConfig, StateDictType, fully_shard
from fairshard.optim import CPUOptimizer
from fairshard.state.optim_loading import ShardedOptimState, check_of_class
from fairshard.state.optim_params import OptimParams
from fairshard.utils.span_tensor import SpanTensor
from tests.models import mlp, tiny, wrap_each, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, randn
from tests.trained import full_of, shard, stepped


@on_ranks(1, 2)
def test_parameters_of_a_unit_must_agree():
    """A difference in names, dtypes, shapes or scalars within a unit is a ValueError that names the parameters."""
    model, optimizer = stepped()
    full = full_of(model, optimizer)

    def broken(name, **changes):
        state = copy.deepcopy(full)
        for key, value in changes.items():
            if value is None:
                del state["state"][name][key]
            else:
                state["state"][name][key] = value
        return state

    cases = [
        (broken("0.bias", exp_avg=None), r"same state, but `0.weight`, `0.bias` have"),
        (broken("0.bias", exp_avg=torch.zeros(5).double()), r"`exp_avg` of one unit must have one dtype.*`0.bias`"),
        (broken("0.bias", exp_avg=3.0), r"`exp_avg` of one unit must have one dtype.*float"),
        (broken("0.bias", exp_avg=torch.zeros(6)), r"for `0.bias` has \(6,\) while the parameter has \(5,\)"),
        (broken("0.weight", exp_avg=torch.zeros(4, 5)), r"for `0.weight` has \(4, 5\)"),
        (broken("0.bias", step=torch.tensor(9.0)), r"`step` .* equal .* is 1.0 for `0.weight` and 9.0 for `0.bias`"),
        (broken("0.bias", step=torch.tensor(1)), r"`step` of one unit must be equal|`step` must be equal"),
        (broken("0.bias", step=1.0), "`step` must be equal"),
    ]
    for state, text in cases:
        with pytest.raises(ValueError, match=text):
            shard(state, model, optimizer)
        first = state if dist.get_rank() == 0 else None
        with pytest.raises(ValueError, match=text):
            FSDP.scatter_full_optim_state_dict(first, model, optim=optimizer)


@on_ranks(1, 2)
def test_a_parameter_without_state():
    """A parameter without state gets zeros for state per element; a missing value per unit raises by name."""
    model, optimizer = stepped(torch.optim.SGD, lr=0.1, momentum=0.9)
    full = full_of(model, optimizer)
    del full["state"]["0.bias"]
    optimizer.load_state_dict(shard(full, model, optimizer))
    again = full_of(model, optimizer)["state"]
    assert torch.equal(again["0.weight"]["momentum_buffer"], full["state"]["0.weight"]["momentum_buffer"])
    assert again["0.bias"]["momentum_buffer"].tolist() == [0] * 5
    model, optimizer = stepped()
    for empty in (False, True):
        full = full_of(model, optimizer)
        if empty:
            full["state"]["0.bias"] = {}  # reading `optimizer.state[param]` creates an empty entry
        else:
            del full["state"]["0.bias"]
        with pytest.raises(ValueError, match=r"`step` must be present for all .* is missing for `0.bias`"):
            shard(full, model, optimizer)
    for name in ("0.weight", "0.bias"):
        full["state"][name] = {}
    assert len(shard(full, model, optimizer)["state"]) == 1


@on_ranks(1, 2)
def test_the_form_of_a_state_dict():
    """A missing "state" is a ValueError, "param_groups" may be missing, and numeric keys raise with the cure."""
    model, optimizer = stepped()
    full = full_of(model, optimizer)
    for state in ({}, {"param_groups": []}, None, {"state": None}):
        with pytest.raises(ValueError, match='must have the key "state"'):
            shard(state, model, optimizer)
        with pytest.raises(ValueError, match='must have the key "state"'):
            FSDP.scatter_full_optim_state_dict(state, model, optim=optimizer)
    without = shard({"state": full["state"]}, model, optimizer)
    assert list(without) == ["state"]
    gathered = FSDP.optim_state_dict(model, optimizer, {"state": optimizer.state_dict()["state"]})
    assert list(gathered) == ["state"]
    assert_same_state(gathered["state"]["0.weight"], full["state"]["0.weight"])
    numbered = {"state": {0: {}}, "param_groups": full["param_groups"]}
    with pytest.raises(ValueError, match="rekey_optim_state_dict"):
        shard(numbered, model, optimizer)


@on_ranks(2)
def test_unknown_keys_are_copied_with_a_warning():
    """State that belongs to no parameter, as some optimizers keep, is saved and loaded with a warning that names it."""
    model, optimizer = stepped()
    saved = optimizer.state_dict()
    saved["state"]["history"] = {"losses": [1.0, 2.0]}
    with pytest.warns(UserWarning, match="history"):
        full = FSDP.optim_state_dict(model, optimizer, saved)
    assert full["state"]["history"] == {"losses": [1.0, 2.0]}
    assert full["state"]["history"] is not saved["state"]["history"]
    with pytest.warns(UserWarning, match="history"):
        made = shard(full, model, optimizer)
    assert made["state"]["history"] == {"losses": [1.0, 2.0]}


@on_ranks(2, 3)
def test_a_rank_without_state_is_an_error_on_all():
    """Whichever rank has no state, the error on every rank names the ranks and the parameters."""
    for rank in range(dist.get_world_size()):
        model, optimizer = stepped()
        if dist.get_rank() == rank:
            del optimizer.state[model.params[0] if model.params else model[2].params[0]]
        for gather in (full_of, FSDP.full_optim_state_dict, FSDP.sharded_optim_state_dict, FSDP.optim_state_dict):
            with pytest.raises(ValueError, match=r"`2.weight`, `2.bias` is .* on rank 0 and .* on rank \d"):
                gather(model, optimizer)


@on_ranks(2)
def test_ranks_with_other_step_counts_are_an_error_on_all():
    """A step count that differs between ranks raises on all ranks, with both values."""
    model, optimizer = stepped()
    optimizer.state[model[0].params[0]]["step"] += dist.get_rank()
    with pytest.raises(ValueError, match=r"`step` of `0.weight`, `0.bias` is 1.0 .* on rank 0 and 2.0 .* on rank 1"):
        full_of(model, optimizer)


@on_ranks(2)
def test_ranks_with_other_learning_rates_are_an_error_on_all(shared_folder):
    """A scheduler that follows the loss of its own rank sets other rates; the checkpoint would hold those of rank 0."""
    model, optimizer = stepped()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for loss in (1.0, 2.0 if dist.get_rank() else 0.5):
        scheduler.step(loss)
    saver = Checkpointer(shared_folder, async_save=False)
    for save in (full_of, lambda *both: saver.save(2, *both)):
        with pytest.raises(ValueError, match=r"`lr` of the group of `0.weight` is .* on rank 0 and .* on rank 1"):
            save(model, optimizer)


@on_ranks(2)
def test_state_of_another_shape_is_refused_by_name():
    """State that cannot be split by parameter (8-bit-like blocks, lists or dicts of tensors) raises on all ranks."""
    for value, text in (
        (torch.zeros(2, 8, dtype=torch.uint8), r"has shape \(2, 8\) while the shard has \(13,\)"),
        ([torch.zeros(13)], "is a list of tensors"),
        ({"a": torch.zeros(13)}, "is a dict of tensors"),
    ):
        model, optimizer = stepped()
        if dist.get_rank() == 1:
            optimizer.state[model[0].params[0]]["exp_avg"] = value
        for gather in (full_of, FSDP.sharded_optim_state_dict):
            with pytest.raises(ValueError, match=rf"`exp_avg` of `0.weight`, `0.bias` on rank 1 {text}"):
                gather(model, optimizer)


@on_ranks(2)
def test_a_bad_state_on_one_rank_is_an_error_on_all():
    """If one rank cannot load its state, all ranks raise; otherwise the others would hang in their next step."""
    model, optimizer = stepped()
    full = full_of(model, optimizer)
    with pytest.raises(ValueError, match='"state"') as caught:
        shard(full if dist.get_rank() == 0 else {}, model, optimizer)
    assert ("Rank 1 failed, so all ranks raise" in str(caught.value)) == (dist.get_rank() == 0)
    optimizer.load_state_dict(shard(full, model, optimizer))


@on_ranks(2)
def test_what_the_other_ranks_pass_to_scatter_is_not_looked_at():
    """`scatter_full_optim_state_dict` reads rank 0's state only, which must be whole."""
    model, optimizer = stepped()
    full = full_of(model, optimizer)
    for other in (None, {}, {"nonsense": 1}, {"state": {"0.weight": {"exp_avg": torch.ones(5, 4)}}}):
        state = full if dist.get_rank() == 0 else other
        optimizer.load_state_dict(FSDP.scatter_full_optim_state_dict(state, model, optim=optimizer))
        again = full_of(model, optimizer)
        for name, entry in full["state"].items():
            assert_same_state(again["state"][name], entry)
    sharded = FSDP.sharded_optim_state_dict(model, optimizer)
    with pytest.raises(ValueError, match=r"must be whole, but `exp_avg` of `0.weight`, `0.bias` is sharded"):
        FSDP.scatter_full_optim_state_dict(sharded, model, optim=optimizer)


@on_ranks(2)
def test_parameters_of_another_model_are_refused():
    """Saving or loading the state of an optimizer over another model raises."""
    model, optimizer = stepped()
    _, other = stepped()
    full = full_of(model, optimizer)
    with pytest.raises(ValueError, match="must belong to `model`"):
        full_of(model, other)
    with pytest.raises(ValueError, match="must belong to `model`"):
        shard(full, model, other)


@on_ranks(2)
def test_tied_names():
    """State of a tied weight is saved under its first name, and loads under any of its names."""
    model = wrap_tiny(tiny())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        param.grad = torch.full_like(param, 2.0)
    optimizer.step()
    full = full_of(model, optimizer)
    assert "embed.weight" in full["state"]
    assert "head.weight" not in full["state"]
    full["state"]["head.weight"] = full["state"].pop("embed.weight")
    assert_same_state(full_of(model, optimizer)["state"]["embed.weight"], full["state"]["head.weight"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = shard(full, model, optimizer)
    assert len(made["state"]) == len(list(model.parameters()))
    outer = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": FSDP(nn.Linear(2, 2))})
    outer["b"].weight = outer["a"].weight
    momenta = {name: {"momentum_buffer": torch.ones(2, 2)} for name in ("b.weight",)}
    made = FSDP.shard_full_optim_state_dict({"state": momenta}, outer)
    assert made["state"][0]["momentum_buffer"].tolist() == [[1, 1], [1, 1]]


@on_ranks(2)
def test_state_belongs_to_the_caller():
    """Later steps do not change state that was returned, in any form; loaded state has memory of its own."""
    for form in StateDictType:
        model, optimizer = stepped()
        with FSDP.state_dict_type(model, form):
            state = FSDP.optim_state_dict(model, optimizer)
            before = copy.deepcopy(state)
            made = FSDP.optim_state_dict_to_load(model, optimizer, state)
        model(randn(2, 4)).square().sum().backward()
        optimizer.step()
        if form is not StateDictType.LOCAL_STATE_DICT:
            optimizer.load_state_dict(made)
            model(randn(2, 4)).square().sum().backward()
            optimizer.step()
        for key, entry in before["state"].items():
            for name, value in entry.items():
                now = state["state"][key][name]
                if isinstance(value, SpanTensor):
                    now, value = now.run, value.run
                assert torch.equal(now, value)


@on_ranks(2)
def test_a_local_form_of_another_cut_is_refused():
    """Local state loads only into the same shards; otherwise the error names the first difference."""
    model, optimizer = stepped()
    other, fresh = stepped(wrap=lambda model: FSDP(model))
    for part in (model, other):
        FSDP.set_state_dict_type(part, StateDictType.LOCAL_STATE_DICT)
    state = FSDP.optim_state_dict(model, optimizer)
    with pytest.raises(RuntimeError, match="is absent while this model's is"):
        FSDP.optim_state_dict_to_load(other, fresh, state)
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))


@on_ranks(2)
def test_groups_that_were_not_saved_are_refused():
    """A param group raises if the saved groups contain none of its parameters."""
    model, optimizer = stepped()
    full = full_of(model, optimizer)
    params = list(model.parameters())
    extra = nn.Linear(2, 2)
    model.module.extra = extra
    grouped = torch.optim.AdamW([{"params": params}, {"params": extra.parameters()}])
    with pytest.raises(ValueError, match="for group 1 none of its parameters was saved"):
        shard(full, model, grouped)


@on_ranks(2)
def test_experts_on_groups_of_their_own():
    """Each rank saves and loads its own expert's state; loading it from rank 0 alone raises."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    model = FSDP(nn.Sequential(mlp(4, 5), FSDP(mlp(5, 3, seed=dist.get_rank()), process_group=alone)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        param.grad = torch.full_like(param, 1.0 + dist.get_rank())
    optimizer.step()
    full = full_of(model, optimizer)
    assert full["state"]["1.0.weight"]["momentum_buffer"].unique().item() == 1 + dist.get_rank()
    optimizer.load_state_dict(shard(full, model, optimizer))
    again = full_of(model, optimizer)
    for name, entry in full["state"].items():
        assert_same_state(again["state"][name], entry)
    with pytest.raises(NotImplementedError, match="several"):
        FSDP.scatter_full_optim_state_dict(full, model, optim=optimizer)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, None, FullOptimStateDictConfig(rank0_only=True)):
        with pytest.raises(NotImplementedError, match="several"):
            FSDP.optim_state_dict_to_load(model, optimizer, full)


def momentum_in(base, weight_at, bias_at):
    """Momentum of a 4 by 5 layer as two spans of ``base`` ``[25]``."""
    weight = SpanTensor(base[weight_at : weight_at + 20], 0, (5, 4))
    bias = SpanTensor(base[bias_at : bias_at + 5], 0, (5,))
    return {"state": {"0.weight": {"momentum_buffer": weight}, "0.bias": {"momentum_buffer": bias}}}


@on_ranks(1)
@pytest.mark.parametrize("weight_at", [0, 5])
def test_memory_is_adopted_only_if_it_lies_as_the_shard_does(weight_at):
    """State in the order of the shard is adopted without a copy; state with the bias first is copied."""
    model = wrap_each(mlp(4, 5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    base = torch.arange(25.0)
    saved = momentum_in(base, weight_at, bias_at=0 if weight_at else 20)
    params = OptimParams(model)
    (state,) = ShardedOptimState(model, adopts=True).make(saved, params.groups_of(optimizer))["state"].values()
    made = state["momentum_buffer"]
    assert torch.equal(made, torch.cat([base[weight_at : weight_at + 20], base[:5] if weight_at else base[20:]]))
    assert (made.data_ptr() == base.data_ptr()) == (weight_at == 0)


@on_ranks(1, 2)
def test_state_of_earlier_steps_is_not_lost_silently():
    """A dict without state, such as torch's loader returns for a new optimizer, raises if the optimizer has stepped.

    Saved before the first step, it loads into an optimizer that has not stepped; into SGD, which has no state, always.
    """
    model, optimizer = stepped()
    new = torch.optim.AdamW(model.parameters(), lr=0.5)
    empty = FSDP.optim_state_dict(model, new)
    expected = full_of(model, optimizer)
    for rank0_only in (False, True):
        config = FullOptimStateDictConfig(rank0_only=rank0_only)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, optim_state_dict_config=config):
            given = empty if dist.get_rank() == 0 or not rank0_only else {}
            with pytest.raises(ValueError, match=r"AdamW has state of earlier steps.*load_optimizer"):
                FSDP.optim_state_dict_to_load(model, optimizer, given, load_directly=True)
            other = torch.optim.AdamW(model.parameters(), lr=0.1)
            FSDP.optim_state_dict_to_load(model, other, given, load_directly=True)
            assert other.param_groups[0]["lr"] == 0.5
    assert_same_state(full_of(model, optimizer)["state"]["0.weight"], expected["state"]["0.weight"])
    model, optimizer = stepped(torch.optim.SGD, lr=0.1)
    FSDP.optim_state_dict_to_load(model, optimizer, FSDP.optim_state_dict(model, optimizer), load_directly=True)


OF_TORCH = [
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
]


@pytest.mark.parametrize("saved", OF_TORCH, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("loading", OF_TORCH, ids=lambda cls: cls.__name__)
def test_the_state_of_another_class_is_refused(saved, loading):
    """Also where it has all that the class reads, such as Adam's state for RAdam; AdamW is an Adam."""
    params = [nn.Parameter(torch.ones(2))]
    state = saved(params, lr=0.1).state_dict()
    if saved is loading or {saved, loading} == {torch.optim.Adam, torch.optim.AdamW}:
        check_of_class(state, loading(params, lr=0.1))
        return
    with pytest.raises(ValueError, match=f"State to load into {loading.__name__} must be of the same optimizer"):
        check_of_class(state, loading(params, lr=0.1))


@on_ranks(1)
def test_the_state_of_another_class_is_refused_by_cpu_optimizer():
    """It has the hyperparameters of the class that it steps with."""
    state = torch.optim.NAdam([nn.Parameter(torch.ones(2))]).state_dict()
    optimizer = CPUOptimizer(fully_shard(nn.Linear(2, 2)), torch.optim.AdamW, lr=0.1)
    with pytest.raises(ValueError, match=r"State to load into CPUOptimizer must be of the same optimizer.*`amsgrad`"):
        check_of_class(state, optimizer)


def test_state_of_a_class_of_others_needs_only_what_is_read():
    """A fused Adam of another library has no `amsgrad`, and torch's Adam takes its state."""
    params = [nn.Parameter(torch.ones(2))]
    group = {"params": [0], "lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True}
    optimizer = torch.optim.AdamW(params)
    made = {"state": {}, "param_groups": [group]}
    check_of_class(made, optimizer)
    optimizer.load_state_dict(made)
    params[0].grad = torch.ones(2)
    optimizer.step()
    assert (params[0] < 1).all()
