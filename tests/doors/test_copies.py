"""A sharded model survives pickle, deepcopy, torch.save, and being sent to another process."""

import copy
import gc
import multiprocessing
import pickle
import tempfile
import weakref
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fairshard.errors import FairshardError, HeldGradientError, ShardChangedError, ShardOptimizerError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import fully_shard
from fairshard.optim import CPUOptimizer
from fairshard.settings.mesh import default_mesh
from tests.copied import by_pickle, by_torch_save, losses_of
from tests.kit import rank_device
from tests.kit.doors import DOORS, SETTINGS, both_apis, shard, whole, whole_grads
from tests.models import loss_of_tiny, mlp, tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, randn, sgd

pytestmark = pytest.mark.behaviour("copies")

COPIES = [copy.deepcopy, by_pickle, by_torch_save]


def sharded_tiny(door, **kwargs):
    return shard(tiny(), door, "first.up", "first", "second", "shared", **kwargs)


@pytest.mark.pairs
@on_ranks(1, 2)
@pytest.mark.parametrize("copied_by", COPIES)
@pytest.mark.parametrize("num_steps", [0, 2])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_copy_trains_like_the_original(copied_by, num_steps, door, setting):
    """A copy made before or after some steps has the same values, trains alike, and shares no memory."""
    model = sharded_tiny(door, setting=setting)
    losses_of(model, num_steps)
    before = whole(model)
    copied = copied_by(model)
    assert type(copied) is type(model)
    assert repr(copied) == repr(model)
    assert_same_state(whole(copied), before)
    losses = losses_of(copied)
    assert_same_state(whole(model), before)
    assert losses_of(model) == losses
    assert_same_state(whole(copied), whole(model))


@on_ranks(2)
def test_gradients_are_copied():
    """A deepcopy made between backward and step has the gradients of DTensors, in its own memory."""
    model = sharded_tiny("fully_shard")
    for _ in range(2):
        loss_of_tiny(model, ()).backward()
        copied = copy.deepcopy(model)
        for net in (model, copied):
            loss_of_tiny(net, ()).backward()
        assert_same_state(whole_grads(copied), whole_grads(model))
        for param in copied.parameters():
            param.grad.zero_()
        for net in (model, copied):
            sgd(net).step()
        assert not torch.equal(whole(model)["head.bias"], whole(copied)["head.bias"])


@on_ranks(2)
def test_single_tensors():
    """Parameters, gradients and state dicts of DTensors can be saved and copied one by one."""
    model = sharded_tiny("fully_shard")
    loss_of_tiny(model, ()).backward()
    state = dict(model.named_parameters())
    for copied_by in COPIES:
        for name, value in copied_by(state).items():
            assert torch.equal(value.to_local(), state[name].to_local())
            assert torch.equal(copied_by(state[name].grad).to_local(), state[name].grad.to_local())


@on_ranks(2)
def test_a_shallow_copy_is_the_same_unit():
    """A shallow copy shares the parameters of the original."""
    model = fully_shard(mlp(4, 6, 4))
    twin = copy.copy(model)
    assert twin[0].weight is model[0].weight
    assert torch.equal(twin(randn(2, 4)), model(randn(2, 4)))


@on_ranks(2)
@pytest.mark.parametrize("copied_by", COPIES)
def test_optimizers_of_a_copy_are_checked(copied_by):
    """On a copy, too, optimizers are refused that step too early, skip held gradients or need whole parameters."""
    copied = copied_by(fully_shard(mlp(4, 9, 5)))
    copied(randn(3, 4)).sum().backward()
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.1, foreach=True)  # whose writes torch does not count
    loss = copied(randn(3, 4)).sum()
    optimizer.step()
    with pytest.raises(ShardChangedError):
        loss.backward()
    for orig in (False, True):
        copied = copied_by(FSDP(mlp(4, 9, 5), cpu_offload=True, move_grads_to_cpu=False, use_orig_params=orig))
        copied(randn(3, 4)).sum().backward()
        with pytest.raises(HeldGradientError, match=r"CPUOptimizer"):
            sgd(copied).step()
        with pytest.raises(ShardOptimizerError, match="LBFGS needs all parameters"):
            torch.optim.LBFGS(copied.parameters()).step(lambda: 0.0)
        before = whole(copied)
        CPUOptimizer(copied, torch.optim.SGD, lr=0.1).step()
        assert not torch.equal(whole(copied)["0.weight"], before["0.weight"])


@on_ranks(2)
def test_meshes_of_copies():
    """deepcopy keeps the mesh; an unpickled model uses the default group, or the mesh set on it."""
    mesh = init_device_mesh(rank_device().type, (2,), mesh_dim_names=("data",))
    model = fully_shard(mlp(4, 6, 4), mesh=mesh)
    assert copy.deepcopy(model)[0].weight.device_mesh is mesh
    copied = by_pickle(model)
    assert copied[0].weight.device_mesh == mesh
    assert torch.equal(copied(randn(2, 4)), model(randn(2, 4)))
    hybrid = init_device_mesh(rank_device().type, (2, 1), mesh_dim_names=("replicas", "shards"))
    model = fully_shard(nn.Sequential(fully_shard(mlp(4, 6, 4), mesh=hybrid)), mesh=hybrid)
    copied = by_pickle(model)
    with pytest.raises(ValueError, match=r"0 of 1, but this is rank \d of 2.*set_device_mesh"):
        copied(randn(2, 4))
    copied.set_device_mesh(hybrid)
    for each in (model, copied):
        each(randn(2, 4)).sum().backward()
    assert_same_state(whole_grads(copied), whole_grads(model))
    with pytest.raises(TypeError, match="`mesh` must be a DeviceMesh"):
        copied.set_device_mesh(dist.group.WORLD)


@on_ranks(2)
def test_groups_of_copies():
    """deepcopy keeps the group; an unpickled wrapper has none until its first use, or until it is set."""
    group = dist.new_group()
    wrapped = FSDP(nn.Linear(4, 5), process_group=group)
    assert copy.deepcopy(wrapped).process_group is group
    for given, expected in ((None, dist.group.WORLD), (group, group)):
        copied = by_pickle(wrapped)
        assert copied.process_group == "MISSING"
        if given is not None:
            copied.process_group = given
        copied(randn(2, 4)).sum().backward()
        assert copied.process_group is expected


@on_ranks(2)
@both_apis
def test_another_rank_or_world_size_is_refused(door):
    """A shard belongs to one rank of one world size; using it elsewhere raises an error that names both."""
    rank = dist.get_rank()
    copied = by_pickle(shard(mlp(4, 6, 4), door))
    alone = [dist.new_group([each]) for each in range(2)][rank]
    if door == "flat":
        copied.process_group = alone
    else:
        copied.set_device_mesh(DeviceMesh.from_group(alone, rank_device().type))
    with pytest.raises(ValueError, match=rf"{rank} of 2.*0 of 1"):
        copied(randn(2, 4))
    parts = [None, None]
    dist.all_gather_object(parts, pickle.dumps(shard(mlp(4, 6, 4), door)))
    foreign = pickle.loads(parts[1 - rank])
    with pytest.raises(ValueError, match=rf"{1 - rank} of 2.*{rank} of 2"):
        foreign(randn(2, 4))


@pytest.mark.cpu_only("memory of a device is not shared this way")
@on_ranks(2)
@both_apis
def test_shared_memory_is_copied_out(door):
    """A copy sent the way torch.multiprocessing does is not affected by later changes to the original."""
    model = shard(mlp(4, 9, 5), door, "0")
    copied = pickle.loads(ForkingPickler.dumps(model))
    before = whole(copied)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    assert_same_state(whole(copied), before)


def _continue_elsewhere(rank, world_size, path, model, queue):
    """The main function of a process that received a model: join a group, train, report."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    try:
        queue.put((losses_of(model), whole(model)["shared.bias"].tolist()))
    except Exception as error:
        queue.put(repr(error))
    finally:
        dist.destroy_process_group()


@pytest.mark.cpu_only("the other process is one without the test's device")
@on_ranks(2, timeout=120)
@pytest.mark.parametrize("door", ["flat", pytest.param("fully_shard", marks=pytest.mark.full)])
def test_it_can_be_passed_to_another_process(door):
    """Each rank sends its model to a new process; the new processes form a group and train as the senders would."""
    path = [str(Path(tempfile.mkdtemp()) / "store")]
    dist.broadcast_object_list(path)
    model = sharded_tiny(door)
    losses_of(model)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_continue_elsewhere, args=(dist.get_rank(), 2, path[0], model, queue))
    process.start()
    result = queue.get(timeout=100)
    process.join(30)
    assert result == (losses_of(model), whole(model)["shared.bias"].tolist())


class WithLock(nn.Linear):
    """Defines which of its state is pickled."""

    def __init__(self):
        super().__init__(4, 4)
        self.cache = open("/dev/null")  # noqa: SIM115 (cannot be pickled)

    def __getstate__(self):
        return {**self.__dict__, "cache": None}


@on_ranks(2)
def test_a_module_with_its_own_getstate():
    """A user's ``__getstate__`` is respected; a class with its own ``__reduce__`` is refused."""
    model = fully_shard(WithLock())
    copied = by_pickle(model)
    assert copied.cache is None
    assert_same_state(whole(copied), whole(model))
    model.cache.close()

    class OfItsOwn(nn.Linear):
        def __reduce__(self):
            return OfItsOwn, (4, 4)

    for copied_by in (copy.deepcopy, pickle.dumps):
        with pytest.raises(FairshardError, match="OfItsOwn has its own `__reduce__`"):
            copied_by(fully_shard(OfItsOwn(4, 4)))


@on_ranks(2)
@both_apis
def test_in_the_middle_of_a_pass_it_is_refused(door):
    """Copying a model inside its forward raises an error, because the model is not idle."""
    layers = mlp(4, 9, 5)
    first, model, seen = layers[0], shard(layers, door), []

    def copy_it(*_):
        for copied_by in (copy.deepcopy, pickle.dumps):
            with pytest.raises(ValueError, match="IDLE"):
                copied_by(model)
        seen.append(True)

    handle = first.register_forward_pre_hook(copy_it)
    model(randn(2, 4))
    handle.remove()
    assert seen == [True]


@on_ranks(2)
def test_units_of_several_modules():
    """A list of modules that is one unit is one unit in the copy, made of the copy's modules."""
    model = mlp(4, 6, 5, 4)
    fully_shard([model[0], model[2]])
    fully_shard(model)
    copied = copy.deepcopy(model)
    for net in (model, copied):
        net(randn(2, 4)).sum().backward()
    assert_same_state(whole_grads(copied), whole_grads(model))
    with torch.no_grad():
        copied[2].weight.zero_()
    assert not torch.equal(copied(randn(2, 4)), model(randn(2, 4)))


@on_ranks(2)
def test_what_was_done_before_the_first_forward_is_copied():
    """A copy has casts and assigned values, including those of a unit's submodules, and stores nothing twice."""
    source = fully_shard(mlp(64, 64, 64))
    with torch.device("meta"):
        model = fully_shard(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)))
    for index in (0, 2):
        model[index].load_state_dict(source[index].state_dict(), assign=True)
    assert_same_state(whole(copy.deepcopy(model)), whole(source))
    cast = fully_shard(mlp(64, 64, 64))
    cast[2].double()
    for copied_by in (copy.deepcopy, by_pickle):
        assert_same_state(whole(copied_by(cast)), whole(cast))  # dtypes too
    nbytes = sum(param.to_local().nbytes for param in source.parameters())
    assert nbytes < len(pickle.dumps(source)) < nbytes + 20_000


@on_ranks(2)
def test_the_default_mesh_is_freed_with_its_last_user():
    """The default mesh is freed with its last user; otherwise its process group and threads would never end."""
    mesh = default_mesh()
    assert default_mesh() is mesh
    known = weakref.ref(mesh)
    del mesh
    gc.collect()
    assert known() is None
