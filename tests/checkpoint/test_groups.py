"""Checkpoints of models whose parts are sharded among some of the ranks only; and loads that ranks call differently."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fairshard.checkpoint import Checkpointer, load, save
from fairshard.checkpoint.saving import check_shared
from fairshard.errors import CheckpointError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import fully_shard
from tests.kit import rank_device
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state, randn

doors = pytest.mark.parametrize("door", ["wrapper", "fully_shard"])


def mixture(door, weight):
    """An expert on ranks 0 and 1, another one on 2 and 3, a layer on all; the optimizer, and this rank's group."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[dist.get_rank() // 2]
    torch.manual_seed(0)
    model = nn.ModuleDict({"common": nn.Linear(4, 4), "expert": nn.Linear(4, 4)}).to(rank_device())
    nn.init.constant_(model["expert"].weight, weight)
    if door == "wrapper":
        model["expert"] = FSDP(model["expert"], process_group=group)
        model["common"] = FSDP(model["common"])
    else:
        fully_shard(model["expert"], mesh=DeviceMesh.from_group(group, rank_device().type))
        fully_shard(model["common"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.1), group


def step(model, optimizer):
    model["expert"](model["common"](randn(2, 4))).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(model):
    return {
        key: value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        for key, value in model.state_dict().items()
    }


@on_ranks(4)
@doors
def test_parameters_of_two_groups_under_one_name_are_refused(door, shared_folder):
    """The checkpoint would hold those of one group; nothing is written. Saved apart, both are kept."""
    number = dist.get_rank() // 2
    model, optimizer, group = mixture(door, float(number))
    step(model, optimizer)
    for write in (
        lambda: save(f"{shared_folder}/one", model, optimizer),
        lambda: Checkpointer(f"{shared_folder}/run").save(1, model, optimizer),
    ):
        with pytest.raises(CheckpointError, match=r"`expert\.weight` is another one, .* on rank 2 than on rank 0"):
            write()
    dist.barrier()
    made = [name for _, folders, _ in os.walk(shared_folder) for name in folders]
    assert not [name for name in made if name.startswith(("one", "step"))]
    saved = whole(model)
    save(f"{shared_folder}/common", model["common"])
    place = {"checkpoint_id": f"{shared_folder}/expert{number}", "process_group": group}
    dcp.save(model["expert"].state_dict(), **place)
    step(model, optimizer)
    load(f"{shared_folder}/common", model["common"])
    state = model["expert"].state_dict()
    dcp.load(state, **place)
    model["expert"].load_state_dict(state)
    assert_same_state(whole(model), saved)


@on_ranks(4)
@pytest.mark.parametrize("door", [in_full("wrapper"), "fully_shard"])
def test_equal_parameters_of_two_groups_are_saved(door, shared_folder):
    """As of replicas that something else keeps equal: the pieces of one group stand for those of the other."""
    model, optimizer, _ = mixture(door, 1.0)
    saved = whole(model)
    save(f"{shared_folder}/one", model, optimizer)
    step(model, optimizer)
    load(f"{shared_folder}/one", model, optimizer)
    assert_same_state(whole(model), saved)


@on_ranks(4)
@pytest.mark.parametrize("door", [in_full("wrapper"), "fully_shard"])
def test_state_of_two_groups_under_one_name_is_refused(door, shared_folder):
    """Weights are equal after a step with a learning rate of 0, but moments are not."""
    model, optimizer, _ = mixture(door, 1.0)
    optimizer.param_groups[0]["lr"] = 0.0
    model["expert"](randn(2, 4, key=dist.get_rank())).square().sum().backward()
    optimizer.step()
    save(f"{shared_folder}/weights", model)
    with pytest.raises(
        CheckpointError, match=r"`exp_avg` of `expert\.weight` is another one, .* on rank 2 than on rank 0"
    ):
        save(f"{shared_folder}/both", model, optimizer)


def stages(door):
    """Two stages of a pipeline under names of their own, each on two ranks; one optimizer each."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stage = dist.get_rank() // 2
    torch.manual_seed(stage)
    model = nn.ModuleDict({str(stage): nn.Linear(4, 4)}).to(rank_device())
    if door == "fully_shard":
        fully_shard(model[str(stage)], mesh=DeviceMesh.from_group(groups[stage], rank_device().type))
    else:
        wrapped = FSDP(model[str(stage)], process_group=groups[stage], use_orig_params=door == "orig_params")
        model[str(stage)] = wrapped
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


@on_ranks(4)
@pytest.mark.parametrize("door", [*map(in_full, ["wrapper", "orig_params"]), "fully_shard"])
def test_ranks_may_have_parts_under_names_of_their_own(door, shared_folder):
    """A name that no rank has any more is refused, and so are settings of one place that differ."""
    model, optimizer = stages(door)
    stage = dist.get_rank() // 2

    def train():
        model[str(stage)](randn(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    saved = whole(model)
    save(f"{shared_folder}/both", model, optimizer)
    train()
    expected = whole(model)
    train()
    load(f"{shared_folder}/both", model, optimizer)
    assert_same_state(whole(model), saved)
    train()
    assert_same_state(whole(model), expected)
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + stage)
    with pytest.raises(ValueError, match=r"`lr` of param group 0 is 0\.1 on rank 0 and 0\.2 on rank 2"):
        save(f"{shared_folder}/other", model, optimizer)
    own = list(model.parameters())
    places = [{"params": own if stage == place else [], "lr": 0.1 * (1 + place)} for place in range(2)]
    optimizer = torch.optim.AdamW(places)
    train()
    save(f"{shared_folder}/other", model, optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    load(f"{shared_folder}/other", model, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    save(f"{shared_folder}/weights", model)
    if stage:
        model["renamed"] = nn.Linear(1, 1).to(rank_device())
        del model["1"]
    with pytest.raises(CheckpointError, match=r"`renamed\.\w+` is missing.*`0\.\w+` is not in the model"):
        load(f"{shared_folder}/weights", model)
    if stage:
        del model["renamed"]
    with pytest.raises(CheckpointError, match=r"but: `1\.weight` is not in the model, `1\.bias` is not in the model"):
        load(f"{shared_folder}/weights", model)


def test_pieces_that_overlap_are_of_several_parameters():
    """Groups of two and of one rank cut a parameter of their own elsewhere: the pieces are more than one."""
    one, other, all_of_it = (("x", 8, ((start,), (numel,))) for start, numel in ((0, 4), (4, 4), (0, 8)))
    check_shared([{one: 5}, {other: 6}, {}, {other: 6}])
    with pytest.raises(CheckpointError, match="`x` is another one, or is cut in another way, on rank 2 than on rank 0"):
        check_shared([{one: 5}, {other: 6}, {all_of_it: 7}])


@on_ranks(2)
@doors
def test_ranks_that_load_different_things_are_told(door, shared_folder):
    """Into other objects, or from another folder; nothing changes."""
    rank = dist.get_rank()
    model = (FSDP if door == "wrapper" else fully_shard)(nn.Linear(3, 3).to(rank_device()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(randn(2, 3)).sum().backward()
    optimizer.step()
    for number in (0, 1):
        save(f"{shared_folder}/{number}", model, optimizer)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)
    before = whole(model)
    with pytest.raises(CheckpointError, match=r"must load the same folder, but rank 0 loads .*/0, and rank 1 .*/1"):
        load(f"{shared_folder}/{rank}", model, optimizer)
    with pytest.raises(ValueError, match="besides the model rank 0 passes none, and rank 1 optimizer"):
        load(f"{shared_folder}/0", model, optimizer if rank else None)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1) if rank else None
    with pytest.raises(ValueError, match="rank 0 passes optimizer, and rank 1 optimizer, scheduler"):
        load(f"{shared_folder}/0", model, optimizer, scheduler)
    for use in (Checkpointer.lock, lambda checkpointer: checkpointer.load_latest(model)):
        with pytest.raises(ValueError, match=r"`root` of a Checkpointer must be the same .*run0 on rank 0 and .*run1"):
            use(Checkpointer(f"{shared_folder}/run{rank}"))
    assert_same_state(whole(model), before)
    load(f"{shared_folder}/0", model, optimizer)
