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

from fairshard.errors import FairshardError, ShardChangedError
from fairshard.nn import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fairshard.settings.mesh import default_mesh
from tests.copied import by_pickle, by_torch_save, losses_of
from tests.doors.fully_shard.test_meta_init import shard, whole
from tests.kit import rank_device
from tests.models import mlp, tiny, tiny_batch, tiny_loss
from tests.on_ranks import in_full, on_ranks
from tests.reference import randn, sgd


def assert_same(one, other):
    values, expected = whole(one), whole(other)
    assert list(values) == list(expected)
    assert all(torch.equal(values[name], expected[name]) for name in expected)


@on_ranks(2, in_full(1), in_full(3))
@pytest.mark.parametrize(
    ("copied_by", "num_steps"),
    [
        (copy.deepcopy, 2),
        (by_pickle, 0),
        pytest.param(by_torch_save, 2, marks=pytest.mark.full),
        pytest.param(copy.deepcopy, 0, marks=pytest.mark.full),
        pytest.param(by_pickle, 2, marks=pytest.mark.full),
    ],
)
def test_a_copy_trains_like_the_original(copied_by, num_steps):
    """A copy made before or after some steps has the same values, trains alike, and shares no memory."""
    for kwargs in (
        {},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
        {"offload_policy": CPUOffloadPolicy()},
        {"reshard_after_forward": False},
    ):
        model = shard(tiny(), **kwargs)
        losses_of(model, num_steps)
        copied = copied_by(model)
        assert type(copied) is type(model)
        assert repr(copied) == repr(model)
        assert_same(copied, model)
        before = {name: value.clone() for name, value in whole(model).items()}
        losses = losses_of(copied)
        assert all(torch.equal(value, before[name]) for name, value in whole(model).items())
        assert losses_of(model) == losses
        assert_same(copied, model)
        assert {param.device_mesh for param in copied.parameters()} == {
            param.device_mesh for param in model.parameters()
        }


@on_ranks(2)
def test_gradients_are_copied():
    """A deepcopy made between backward and step has the gradients, in its own memory."""
    model = shard(tiny())
    *inputs, targets = tiny_batch(dist.get_rank())
    for _ in range(2):
        tiny_loss(model(*inputs), targets).backward()
        copied = copy.deepcopy(model)
        for net in (model, copied):
            tiny_loss(net(*inputs), targets).backward()
        for one, other in zip(model.parameters(), copied.parameters(), strict=True):
            assert torch.equal(one.grad.full_tensor(), other.grad.full_tensor())
            other.grad.zero_()
        for net in (model, copied):
            sgd(net).step()
        assert not torch.equal(model.head.bias.full_tensor(), copied.head.bias.full_tensor())


@on_ranks(2)
def test_single_tensors():
    """Parameters, gradients and state dicts of DTensors can be saved and copied one by one."""
    model = shard(tiny())
    *inputs, targets = tiny_batch(dist.get_rank())
    tiny_loss(model(*inputs), targets).backward()
    for copied_by in (copy.deepcopy, by_pickle, by_torch_save):
        state = dict(model.named_parameters())
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
def test_optimizers_of_a_copy_are_checked():
    """On a copy, a step between forward and backward is detected, although torch does not count ``foreach`` writes."""
    model = fully_shard(mlp(4, 9, 5))
    for copied_by in (copy.deepcopy, by_pickle, by_torch_save):
        copied = copied_by(model)
        copied(randn(3, 4)).sum().backward()
        optimizer = torch.optim.SGD(copied.parameters(), lr=0.1, foreach=True)
        loss = copied(randn(3, 4)).sum()
        optimizer.step()
        with pytest.raises(ShardChangedError):
            loss.backward()


@on_ranks(2)
def test_meshes_of_copies():
    """deepcopy keeps the mesh; an unpickled model uses the default group, or the mesh set on it."""
    mesh = init_device_mesh(rank_device().type, (2,), mesh_dim_names=("data",))
    model = fully_shard(mlp(4, 6, 4), mesh=mesh)
    assert copy.deepcopy(model)[0].weight.device_mesh is mesh
    copied = by_pickle(model)
    assert copied[0].weight.device_mesh == mesh
    assert torch.equal(copied[0].weight.full_tensor(), model[0].weight.full_tensor())
    assert torch.equal(copied(randn(2, 4)), model(randn(2, 4)))
    hybrid = init_device_mesh(rank_device().type, (2, 1), mesh_dim_names=("replicas", "shards"))
    model = fully_shard(nn.Sequential(fully_shard(mlp(4, 6, 4), mesh=hybrid)), mesh=hybrid)
    copied = by_pickle(model)
    with pytest.raises(ValueError, match=r"0 of 1, but this is rank \d of 2.*set_device_mesh"):
        copied(randn(2, 4))
    copied.set_device_mesh(hybrid)
    copied(randn(2, 4)).sum().backward()
    model(randn(2, 4)).sum().backward()
    assert torch.equal(copied[0][0].weight.grad.full_tensor(), model[0][0].weight.grad.full_tensor())
    with pytest.raises(TypeError, match="`mesh` must be a DeviceMesh"):
        copied.set_device_mesh(dist.group.WORLD)


@on_ranks(2)
def test_another_rank_or_world_size_is_refused():
    """A shard belongs to one rank of one world size; using it elsewhere raises an error that names both."""
    copied = by_pickle(fully_shard(mlp(4, 6, 4)))
    groups = [dist.new_group([rank]) for rank in range(2)]
    copied.set_device_mesh(DeviceMesh.from_group(groups[dist.get_rank()], rank_device().type))
    with pytest.raises(ValueError, match=rf"{dist.get_rank()} of 2.*0 of 1"):
        copied(randn(2, 4))
    parts = [None, None]
    dist.all_gather_object(parts, pickle.dumps(fully_shard(mlp(4, 6, 4))))
    foreign = pickle.loads(parts[1 - dist.get_rank()])
    with pytest.raises(ValueError, match=rf"{1 - dist.get_rank()} of 2.*{dist.get_rank()} of 2"):
        foreign(randn(2, 4))


@pytest.mark.cpu_only("memory of a device is not shared this way")
@on_ranks(2)
def test_shared_memory_is_copied_out():
    """A copy sent the way torch.multiprocessing does is not affected by later changes to the original."""
    model = fully_shard(mlp(4, 9, 5))
    copied = pickle.loads(ForkingPickler.dumps(model))
    before = {name: value.clone() for name, value in whole(copied).items()}
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    assert all(torch.equal(value, before[name]) for name, value in whole(copied).items())


def _continue_elsewhere(rank, world_size, path, model, queue):
    """The main function of a process that received a model: join a group, train, report."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    try:
        queue.put((losses_of(model), model.shared.bias.full_tensor().tolist()))
    except Exception as error:
        queue.put(repr(error))
    finally:
        dist.destroy_process_group()


@pytest.mark.cpu_only("the other process is one without the test's device")
@pytest.mark.full
@on_ranks(2, timeout=120)
def test_it_can_be_passed_to_another_process():
    """Each rank sends its model to a new process; the new processes form a group and train as the senders would."""
    path = [str(Path(tempfile.mkdtemp()) / "store")]
    dist.broadcast_object_list(path)
    model = shard(tiny())
    losses_of(model)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_continue_elsewhere, args=(dist.get_rank(), 2, path[0], model, queue))
    process.start()
    result = queue.get(timeout=100)
    process.join(30)
    assert result == (losses_of(model), model.shared.bias.full_tensor().tolist())


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
    assert torch.equal(copied.weight.full_tensor(), model.weight.full_tensor())
    model.cache.close()

    class OfItsOwn(nn.Linear):
        def __reduce__(self):
            return OfItsOwn, (4, 4)

    for copied_by in (copy.deepcopy, pickle.dumps):
        with pytest.raises(FairshardError, match="OfItsOwn has its own `__reduce__`"):
            copied_by(fully_shard(OfItsOwn(4, 4)))


@on_ranks(2)
def test_in_the_middle_of_a_pass_it_is_refused():
    """Copying a model inside its forward raises an error, because the model is not idle."""
    model = fully_shard(mlp(4, 9, 5))
    seen = []

    def copy_it(*_):
        for copied_by in (copy.deepcopy, pickle.dumps):
            with pytest.raises(ValueError, match="IDLE"):
                copied_by(model)
        seen.append(True)

    handle = model[0].register_forward_pre_hook(copy_it)
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
    assert torch.equal(copied[2].weight.grad.full_tensor(), model[2].weight.grad.full_tensor())
    with torch.no_grad():
        copied[2].weight.zero_()
    assert not torch.equal(copied(randn(2, 4)), model(randn(2, 4)))


@on_ranks(2)
def test_what_was_done_before_the_first_forward_is_copied():
    """A copy has casts and assigned values, including those of a unit's submodules, and stores nothing twice."""
    source = fully_shard(mlp(64, 64, 64))
    with torch.device("meta"):
        model = fully_shard(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)))
    model[0].load_state_dict(source[0].state_dict(), assign=True)
    model[2].load_state_dict(source[2].state_dict(), assign=True)
    assert_same(copy.deepcopy(model), source)
    cast = fully_shard(mlp(64, 64, 64))
    cast[2].double()
    for copied_by in (copy.deepcopy, by_pickle):
        copied = copied_by(cast)
        assert [param.dtype for param in copied.parameters()] == [torch.float32] * 2 + [torch.float64] * 2
        assert_same(copied, cast)
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
