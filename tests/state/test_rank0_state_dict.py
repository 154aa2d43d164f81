"""Whole values on rank 0 only: the other ranks pass nothing, get nothing, and never hold a whole parameter."""

import contextlib
import copy
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from fairshard.nn import FSDP, FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from fairshard.state import full_params
from tests.models import SavedTransposed, mlp, tiny, wrap_each, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, randn
from tests.trained import OPTIMIZERS, trained

RANK0 = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)


def on_rank0(model):
    """Set ``model`` to save whole values on rank 0 and to load them from there."""
    FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, RANK0, FullOptimStateDictConfig(rank0_only=True))
    return model


def whole(model):
    """The whole state, on every rank."""
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return model.state_dict()


def if_first(state):
    """``state`` on rank 0, an empty dict on the others."""
    return state if dist.get_rank() == 0 else {}


class Stateful(SavedTransposed, nn.Module):
    """A layer that saves its weight transposed, with extra state and buffers."""

    def __init__(self, value=0.0):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.weight = nn.Parameter(torch.full((2, 3), value))
        self.register_buffer("mean", torch.full((2,), value))
        self.register_buffer("scratch", torch.full((2,), value), persistent=False)
        self.note = f"made with {value}"

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("flatten", [True, False])
def test_modules_with_their_own_state(flatten):
    """Buffers, extra state and modules with custom saving reach all ranks, which hold shards only."""
    source, target = (
        on_rank0(FSDP(nn.Sequential(FSDP(Stateful(value), flatten_parameters=flatten)), flatten_parameters=flatten))
        for value in (1.5, 2.5)
    )
    state = source.state_dict()
    assert bool(state) == (dist.get_rank() == 0)
    result = target.load_state_dict(state)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert target[0].module.note == "made with 1.5"
    assert target[0].module.mean.tolist() == [1.5, 1.5]
    assert target[0].module.scratch.tolist() == [2.5, 2.5], "not persistent"
    assert list(whole(target)) == list(whole(source))
    for name, value in whole(source).items():
        same = whole(target)[name]
        assert torch.equal(same, value) if isinstance(value, torch.Tensor) else same == value


@on_ranks(2)
@pytest.mark.parametrize("around", ["nothing", "plain", "ddp", "inner"])
def test_wherever_the_load_begins(around):
    """Loading the wrapper, a plain module or DDP around it, or an inner unit fills buffers and weights on all ranks."""

    def build(seed):
        wrapped = FSDP(
            nn.Sequential(FSDP(nn.Sequential(mlp(4, 5, seed=seed), nn.BatchNorm1d(5))), mlp(5, 3, seed=seed))
        )
        wrapped[0][1].running_mean.fill_(seed)
        on_rank0(wrapped)
        if around == "ddp":
            alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
            return DistributedDataParallel(wrapped, process_group=alone)
        return {"nothing": wrapped, "plain": nn.Sequential(wrapped), "inner": wrapped[0]}[around]

    source, target = build(1), build(2)
    if around == "inner":
        target.load_state_dict(if_first(source.state_dict()))
    else:
        state = source.state_dict()
        target.load_state_dict(if_first(state))
    assert_same_state(whole(target), whole(source))


@on_ranks(2)
def test_what_others_pass_is_not_looked_at():
    """A dict that another rank passes is neither loaded nor checked."""
    model = on_rank0(wrap_each(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))))
    state = whole(model)
    wrong = {name: value + 1 for name, value in state.items()}
    model.load_state_dict(state if dist.get_rank() == 0 else {**wrong, "nonsense": torch.ones(1)})
    assert_same_state(whole(model), state)


@on_ranks(2)
def test_ranks_return_and_raise_what_rank_0_does():
    """Missing, unexpected and wrongly shaped entries give the same result or error on every rank."""
    model = on_rank0(wrap_each(mlp(4, 5, 3)))
    state = whole(model)
    wrong = {name: value + 1 for name, value in state.items() if name != "0.bias"} | {"extra": torch.ones(1)}
    with pytest.raises(RuntimeError, match=r'(?s)Missing.*"0.bias".*Unexpected.*"extra"'):
        model.load_state_dict(if_first(wrong))
    model.load_state_dict(if_first(state))
    result = model.load_state_dict(if_first(wrong), strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["0.bias"], ["extra"])
    after = whole(model)
    assert torch.equal(after["0.bias"], state["0.bias"])
    assert torch.equal(after["0.weight"], state["0.weight"] + 1)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0.weight"):
        model.load_state_dict(if_first({**state, "0.weight": torch.ones(2, 2)}))
    with pytest.raises(TypeError, match="`state_dict` must be a dictionary"):
        model.load_state_dict(None if dist.get_rank() == 0 else {})
    assert model(randn(2, 4)).shape == (2, 3)


@on_ranks(2)
def test_a_rank_that_fails_makes_all_fail():
    """Even if every rank passes the values, an error on one rank raises on all ranks and names that rank."""
    model = wrap_each(mlp(4, 5, 3))
    state = model.state_dict()
    own = state if dist.get_rank() == 0 else {**state, "extra": torch.ones(1)}
    with pytest.raises(RuntimeError, match="Unexpected") as caught:
        model.load_state_dict(own)
    assert ("Rank 1 failed, so all ranks raise" in str(caught.value)) == (dist.get_rank() == 0)
    model.load_state_dict(state)
    assert_same_state(model.state_dict(), state)


@on_ranks(2)
def test_experts_on_groups_of_their_own_are_refused():
    """Rank 0 does not have the experts of other groups: a load raises and changes no weights."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    model = on_rank0(FSDP(nn.Sequential(mlp(4, 5), FSDP(mlp(5, 3), process_group=alone))))
    state = whole(model)
    with pytest.raises(NotImplementedError, match="several"):
        model.load_state_dict(if_first(state))
    assert_same_state(whole(model), state)


# ---- memory


class Largest(TorchDispatchMode):
    """Records the bytes of the largest tensor created while the mode is on."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                self.nbytes = max(self.nbytes, value.untyped_storage().nbytes())
        return result


WIDTHS = (32, 64, 32, 64, 32)


@pytest.mark.cpu_only("measures the memory of the CPU")
@on_ranks(2, 4)
@pytest.mark.parametrize("flatten", [True, False])
def test_other_ranks_never_hold_a_whole_parameter(flatten):
    """While rank 0 saves and loads weights and optimizer state, other ranks create no tensor larger than a shard."""
    model = wrap_each(mlp(*WIDTHS), flatten_parameters=flatten)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    model(randn(2, 32)).sum().backward()
    optimizer.step()
    on_rank0(model)
    shard = max(param.nbytes for param in model.parameters())
    with Largest() as largest:
        state, optim = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
        model.load_state_dict(state)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, optim))
    if dist.get_rank() == 0:
        assert largest.nbytes >= 32 * 64 * 4
    else:
        assert largest.nbytes <= max(shard, 8192), "or a pickle of names"


@contextlib.contextmanager
def lines_alive():
    """Yield the largest number of lines, gathered or laid out, that were alive at the same time."""
    alive, most = [], [0]

    def watched(method):
        def call(*args, **kwargs):
            line = method(*args, **kwargs)
            if line is not None:
                alive.append(weakref.ref(line.untyped_storage()))
                most[0] = max(most[0], sum(ref() is not None for ref in alive))
            return line

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("gather_line", "lay_out"):
            patch.setattr(full_params, name, watched(getattr(full_params, name)))
        yield most


class Peak(TorchDispatchMode):
    """Records the peak bytes of the storages created while the mode is on; storages of ``known`` do not count."""

    def __init__(self, known):
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._alive = {}
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                storage = value.untyped_storage()
                if storage._cdata not in self._alive and storage._cdata not in self._known:
                    self._alive[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self._alive.pop, storage._cdata, None)
        self.nbytes = max(self.nbytes, sum(self._alive.values()))
        return result


@pytest.mark.cpu_only("measures the memory of the CPU")
@on_ranks(2)
@pytest.mark.parametrize("rank0_only", [True, False])
def test_whole_state_is_built_unit_by_unit(rank0_only):
    """Beside the result, building whole state holds one unit's line at a time, not a second copy of the model."""
    model, optimizer = trained(wrap_tiny(tiny()), OPTIMIZERS["adamw"])
    config = FullStateDictConfig(rank0_only=rank0_only)
    FSDP.set_state_dict_type(
        model, StateDictType.FULL_STATE_DICT, config, FullOptimStateDictConfig(rank0_only=rank0_only)
    )
    for build in (model.state_dict, lambda: FSDP.optim_state_dict(model, optimizer)):
        build()
        with lines_alive() as most:
            build()
        if rank0_only:  # gloo's thread may release a line shortly after its wait has returned
            assert most[0] <= (2 if dist.get_rank() == 0 else 0)
        else:
            assert most[0] == 1
    state, optim = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    with lines_alive() as most:
        model.load_state_dict(state)
        FSDP.optim_state_dict_to_load(model, optimizer, optim)
    assert most[0] <= 2


@pytest.mark.cpu_only("measures the memory of the CPU")
@on_ranks(2)
def test_peak_memory_of_a_whole_state_dict():
    """The peak memory is that of the result and of one unit."""
    model = wrap_each(mlp(*WIDTHS))
    with torch.no_grad():
        model(randn(2, 32))
    result = sum(value.nbytes for value in whole(model).values())
    unit = 4 * (32 * 64 + 64)
    with Peak(list(model.parameters())) as peak:
        state = model.state_dict()
    assert result <= peak.nbytes <= result + unit + 1024
    assert_same_state(copy.copy(state), mlp(*WIDTHS).state_dict())
