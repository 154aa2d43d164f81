"""State saved along with model and optimizer: scheduler, scaler, position, each rank's random numbers."""

import copy
import random
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadItemType

from fairshard.checkpoint import Checkpointer, load, save
from fairshard.checkpoint.reader import CheckpointReader
from fairshard.engine.tree import units_below
from fairshard.errors import CheckpointError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import fully_shard
from fairshard.optim import CPUOptimizer, ShardedGradScaler
from tests.kit import rank_device
from tests.models import tiny, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state
from tests.trained import OPTIMIZERS, trained


@on_ranks(1, 2)
@pytest.mark.parametrize("async_save", [True, False])
def test_everything_goes_on(shared_folder, async_save):
    """Scheduler, scaler, position and random numbers after a resume are those of an uninterrupted run."""
    ends = []
    for resumed in (False, True):
        model = wrap_tiny(tiny(), mixed_precision=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
        scaler = ShardedGradScaler(rank_device().type, init_scale=8.0, growth_interval=2)
        position = {"text": "a", "offsets": torch.zeros(2)}
        of_all = (model, optimizer, scheduler, scaler, position)
        checkpointer = Checkpointer(f"{shared_folder}/{async_save}", every=2, async_save=async_save)
        random.seed(dist.get_rank() + 9 * resumed)
        np.random.seed(dist.get_rank() + 9 * resumed)
        torch.manual_seed(dist.get_rank() + 9 * resumed)
        done = checkpointer.load_step(2, *of_all) if resumed else 0
        drawn = []
        for step in range(done, 5):
            if step == 2 and not resumed:
                assert checkpointer.maybe_save(step, *of_all)
            loss = model(torch.randint(13, (2, 5)), torch.randn(2, 5, 6) * np.random.rand() * random.random())
            drawn = [*drawn[-2:], loss.detach().clone()]
            scaler.scale(loss.float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            position["offsets"] += 1
        checkpointer.wait()
        end = (model.state_dict(), scheduler.state_dict(), scaler.state_dict(), position, drawn)
        ends.append(end)
    (state, *rest), (its_state, *its_rest) = ends
    assert_same_state(its_state, state)
    assert its_rest[0] == rest[0]
    assert its_rest[1] == rest[1]
    assert torch.equal(its_rest[2]["offsets"].cpu(), rest[2]["offsets"].cpu())
    assert all(torch.equal(a, b) for a, b in zip(its_rest[3], rest[3], strict=True))


@on_ranks(2)
def test_an_expanded_buffer_is_restored(shared_folder):
    """A buffer whose elements share memory is saved element by element, and a later load has room for each."""

    def build(value):
        plain = nn.BatchNorm1d(4)
        plain.register_buffer("scale", torch.full((1, 4), value).expand(3, 4))
        plain.register_buffer("own", torch.full((1,), value * dist.get_rank()).expand(3))
        return FSDP(nn.Sequential(plain, nn.Linear(4, 1)))

    saved, other = build(2.0), build(5.0)
    optimizer = torch.optim.SGD(saved.parameters(), lr=0.1)
    save(f"{shared_folder}/own", saved, optimizer)
    load(f"{shared_folder}/own", other, torch.optim.SGD(other.parameters(), lr=0.2))
    assert_same_state(other.state_dict(), saved.state_dict())
    assert torch.equal(other.get_buffer("module.0.own"), torch.full((3,), 2.0 * dist.get_rank()))


@on_ranks(2)
def test_the_script_chooses_the_kernels_of_its_optimizer(shared_folder):
    """`CPUOptimizer` steps by fused kernels, which torch lacks for SGD on DTensors: the plain optimizer keeps its own.

    All other settings come from the checkpoint, and the next step is that of the optimizer that was saved.
    """
    models = [fully_shard(nn.Linear(4, 4)) for _ in range(2)]
    stepped = CPUOptimizer(models[0], torch.optim.SGD, lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(models[1].parameters(), lr=0.5, momentum=0.1, foreach=True)
    for step, (model, optimizer) in enumerate([(models[0], stepped), *zip(models, (stepped, plain), strict=True)]):
        if step == 1:
            save(shared_folder, models[0], stepped)
            load(shared_folder, models[1], plain)
            assert [plain.param_groups[0][name] for name in ("foreach", "fused", "lr")] == [True, None, 0.1]
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor())


class Choosy(torch.optim.AdamW):
    """An optimizer that takes no state."""

    def load_state_dict(self, state_dict):
        raise KeyError("a setting of this class")


@on_ranks(2)
@pytest.mark.parametrize("which", ["NAdam", "optimizer", "scheduler", "scaler"])
def test_state_of_another_class_changes_nothing(shared_folder, which):
    """A class that cannot load what another one has saved raises on all ranks, before anything has changed."""

    def build(kind, lr, schedule, enabled):
        model = FSDP(nn.Linear(4, 4))
        optimizer = kind(model.parameters(), lr=lr)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        return model, optimizer, schedule(optimizer), ShardedGradScaler("cpu", init_scale=2.0, enabled=enabled)

    def cosine(optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)

    def sequence(optimizer):
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [cosine(optimizer), cosine(optimizer)], [2])

    save(shared_folder, *build(torch.optim.AdamW, 0.1, cosine, which != "scaler"))
    torch.manual_seed(1)
    kind = {"NAdam": torch.optim.NAdam, "optimizer": Choosy}.get(which, torch.optim.AdamW)
    model, optimizer, scheduler, scaler = build(kind, 0.2, sequence if which == "scheduler" else cosine, True)
    before = [copy.deepcopy(one.state_dict()) for one in (model, optimizer, scheduler, scaler)]
    refusal = CheckpointError, f"to load as {which}, but its load_state_dict raises .* Build the {which}"
    if which == "NAdam":
        refusal = ValueError, "State to load into NAdam must be of the same optimizer"
    with pytest.raises(refusal[0], match=refusal[1]):
        load(shared_folder, model, optimizer, scheduler, scaler)
    assert_same_state(model.state_dict(), before[0])
    assert_same_state(optimizer.state_dict(), before[1])
    assert str(scheduler.state_dict()) == str(before[2])
    assert scaler.state_dict() == before[3]


@on_ranks(3)
def test_buffers_that_differ_between_ranks_stay_so(shared_folder):
    """Each rank gets its own BatchNorm statistics back; another number of ranks gets those of rank 0."""
    wrapped = FSDP(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)))
    wrapped(torch.full((4, 3), float(dist.get_rank() + 1)))
    save(f"{shared_folder}/own", wrapped)
    other = FSDP(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)))
    load(f"{shared_folder}/own", other)
    assert_same_state(other.state_dict(), wrapped.state_dict())
    plain = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    target = {"model": plain.state_dict()}
    dcp.load(target, checkpoint_id=f"{shared_folder}/own")
    assert torch.equal(target["model"]["0.running_mean"], torch.full((3,), 0.1))


@on_ranks(2)
@pytest.mark.parametrize("extra", [{"f": print}, {"a": [{"b": object()}]}, {"n": np.zeros(2)}], ids=["fn", "obj", "np"])
def test_what_is_not_plain_data_is_refused_on_all_ranks(shared_folder, extra):
    """If one rank's extra could run code when read, all ranks raise a TypeError that names it, and write nothing."""
    extra = extra if dist.get_rank() == 1 else {}
    with pytest.raises(TypeError, match=r"`extra\['\w'\]` is .* \(rank 1 of 2\)"):
        save(f"{shared_folder}/refused", FSDP(nn.Linear(2, 2)), extra=extra)


class _Position:
    """An ``extra`` that keeps its own state."""

    def __init__(self, at):
        self.at = at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, saved):
        self.at = saved["at"]


@on_ranks(1, 2)
def test_an_extra_may_keep_its_own_state(shared_folder):
    """An extra with ``state_dict`` gets back its state of this rank; a checkpoint without an extra raises."""
    model = FSDP(nn.Linear(2, 2))
    save(f"{shared_folder}/with", model, extra=_Position(dist.get_rank() + 5))
    save(f"{shared_folder}/without", model)
    position = _Position(0)
    load(f"{shared_folder}/with", model, extra=position)
    assert position.at == dist.get_rank() + 5
    with pytest.raises(CheckpointError, match="without must hold an `extra` to load one"):
        load(f"{shared_folder}/without", model, extra=position)
    load(f"{shared_folder}/with", model)


@on_ranks(2)
def test_a_rank_reads_what_it_owns(shared_folder):
    """On the same number of ranks, a rank reads as many elements as its shards and their optimizer state have."""
    model, optimizer = trained(wrap_tiny(tiny()), OPTIMIZERS["adamw"])
    save(f"{shared_folder}/one", model, optimizer)
    read = []
    original = CheckpointReader.read_data

    def counted(self, plan, planner):
        read.extend(item for item in plan.items if item.type is LoadItemType.TENSOR and item.lengths)
        return original(self, plan, planner)

    with mock.patch.object(CheckpointReader, "read_data", counted):
        load(f"{shared_folder}/one", model, optimizer)
    lines = [flat_param.line for _, unit in units_below(model) for flat_param in unit.flat_params]
    owned = sum(line.layout.filled(line.rank) for line in lines)
    tied = model.head.weight  # saved under two names
    assert sum(item.lengths.numel() for item in read) == 3 * owned + _num_owned(model, tied.shape)


def _num_owned(model, shape):
    """Number of elements of the tied weight, which the root owns, on this rank."""
    return sum(
        run.numel()
        for flat_param in model._unit.flat_params
        for slot, (_, run) in zip(flat_param.slots, flat_param.line.runs_of(flat_param.shard), strict=True)
        if slot.shape == shape and len(slot.owners) > 1
    )


class _Annotated(nn.Linear):
    """A module with state of its own, as ``get_extra_state`` returns it."""

    def __init__(self, noted):
        super().__init__(4, 4)
        self.noted = noted

    def get_extra_state(self):
        return self.noted

    def set_extra_state(self, state):
        self.noted = state


NOTED = {
    "dict": {"name": "a", "scale": torch.arange(3.0), "deep": {"list": [1, {"x": 2}], "none": None}},
    "empty": {},
    "numbers": {0: "a", 7: {"inner": []}},
    "inner": {"history": {}, "rest": [{}, 1]},
    "list": [1, [2, {"a": 3}]],
    "tuple": ({"a": 1},),
    "number": 5,
}


@on_ranks(2)
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_extra_state_of_modules_is_restored(shared_folder, is_wrapped):
    """What ``get_extra_state`` returned is what ``set_extra_state`` gets: dicts too, which torch's planner flattens."""
    shard = FSDP if is_wrapped else fully_shard
    model = shard(nn.Sequential(*map(_Annotated, NOTED.values())))
    save(f"{shared_folder}/noted", model)
    other = shard(nn.Sequential(*[_Annotated(type(noted)()) for noted in NOTED.values()]))
    load(f"{shared_folder}/noted", other)
    inside = other.module if is_wrapped else other
    restored = {name: module.noted for name, module in zip(NOTED, inside, strict=True)}
    assert torch.equal(restored["dict"].pop("scale"), torch.arange(3.0))
    assert restored == {**NOTED, "dict": {key: NOTED["dict"][key] for key in ("name", "deep")}}


@on_ranks(1)
def test_extra_state_that_torch_saved_is_restored(shared_folder):
    """Dicts that `dcp.save` of a plain module has flattened are read, and plain torch reads ours."""
    noted = {"name": "a", "deep": {"scale": torch.ones(2)}}
    plain = nn.Sequential(_Annotated(noted))
    dcp.save({"model": plain.state_dict()}, checkpoint_id=f"{shared_folder}/theirs")
    model = FSDP(nn.Sequential(_Annotated({})))
    load(f"{shared_folder}/theirs", model)
    assert model.module[0].noted["name"] == "a"
    save(f"{shared_folder}/ours", model)
    target = {"model": nn.Sequential(_Annotated({"name": "", "deep": {"scale": torch.zeros(2)}})).state_dict()}
    dcp.load(target, checkpoint_id=f"{shared_folder}/ours")
    assert target["model"]["0._extra_state"]["name"] == "a"
    assert torch.equal(target["model"]["0._extra_state"]["deep"]["scale"], torch.ones(2))
