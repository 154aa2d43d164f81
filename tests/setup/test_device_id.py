"""`device_id` is where a unit computes: shards, whole buffers and inputs move there."""

import contextlib
import warnings
from collections import namedtuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pack_sequence

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn.data_parallel import running
from fairshard.setup import construction, placement
from fairshard.setup.construction import resolve_construction
from fairshard.setup.origin import move_inputs
from tests.kit import rank_device
from tests.models import mlp, wrap_each
from tests.on_ranks import in_full, on_ranks
from tests.reference import randn, train_alike

CPU = torch.device("cpu")


@contextlib.contextmanager
def gpus(number, current=0):
    """Pretend that this machine has GPUs."""
    with (
        mock.patch.object(construction, "device_count", return_value=number),
        mock.patch.object(construction, "default_device_type", return_value="cuda" if number else "cpu"),
        mock.patch.object(construction, "current_device", return_value=torch.device("cuda", current)),
    ):
        yield


def device_of(device_id=None, compute_device=None):
    return resolve_construction(None, device_id, compute_device, False).device


@pytest.mark.pairs
@on_ranks(1, in_full(2), 3)
@pytest.mark.parametrize("kwargs", [{}, {"cpu_offload": True}, {"flatten_parameters": False}], ids=str)
@pytest.mark.parametrize("name", ["device_id", "compute_device"])
def test_training_is_the_same(name, kwargs):
    """With the device where the model already is, training does not change."""
    wrap = wrap_each
    train_alike(
        mlp(4, 9, 5),
        lambda model: wrap(model, **{name: rank_device()}, **kwargs),
        lambda model, key: model(randn(3, 4, key=key)).square().sum().cpu(),
    )


def test_a_number_is_that_of_a_gpu():
    """An int, or a device with an index, names that GPU."""
    with gpus(2):
        assert device_of(1) == device_of(torch.device("cuda:1")) == torch.device("cuda:1")
        assert device_of(compute_device=torch.device("cuda:1")) == torch.device("cuda:1")
        assert device_of(CPU) == CPU
    assert device_of() is None


def test_a_gpu_without_number_is_the_current_one():
    """A device without a number means the current one, with a warning."""
    with gpus(4, current=3), pytest.warns(UserWarning, match=r"the current one is used, cuda:3"):
        assert device_of(torch.device("cuda")) == torch.device("cuda:3")


def test_a_device_may_be_given_by_its_name():
    """A string names the device that ``torch.device`` makes of it; a string that names none raises."""
    with gpus(2):
        assert device_of("cpu") == device_of(compute_device="cpu") == CPU
        assert device_of("cuda:1") == device_of(compute_device="cuda:1") == torch.device("cuda:1")
        with pytest.raises(ValueError, match="is cuda:2, and this process sees 2 accelerators"):
            device_of("cuda:2")
    with pytest.raises(ValueError, match="`compute_device` must name a device, but is 'disk'"):
        device_of(compute_device="disk")


def test_devices_that_are_not_there_are_refused():
    """A number too high, a GPU on a machine without GPUs, the meta device, and two different devices raise."""
    with gpus(2), pytest.raises(ValueError, match=r"is 2, and this process sees 2 accelerators"):
        device_of(2)
    for given in (torch.device("cuda"), 0):
        with gpus(0), pytest.raises(ValueError, match=r"this process sees 0 accelerators"):
            device_of(given)
    with pytest.raises(ValueError, match="a device with memory"):
        device_of(torch.device("meta"))
    with gpus(2), pytest.raises(ValueError, match="must not differ"):
        device_of(1, torch.device("cuda:0"))


def fake_on_gpu(module, number=0, kind="cuda"):
    """Pretend that ``module`` is on a GPU."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty(param.shape, device=f"{kind}:{number}")))
    return module


@pytest.mark.cpu_only("names devices of several types")
@on_ranks(1)
def test_a_module_on_another_device_is_refused():
    """The error names the parameter and both devices."""
    model = nn.Sequential(nn.Linear(2, 2), fake_on_gpu(nn.Linear(2, 2), 1))
    with pytest.raises(ValueError, match=r"requested device, cpu, but `1.weight` is on cuda:1"):
        FSDP(model, device_id=CPU)
    with gpus(2), pytest.raises(ValueError, match=r"requested device, cuda:0, but `1.weight` is on cuda:1"):
        FSDP(model, device_id=0)


@pytest.mark.cpu_only("names devices of several types")
@on_ranks(1)
def test_two_devices_are_refused():
    """A unit on several devices raises; inner units and ignored modules may be elsewhere."""
    model = nn.Sequential(nn.Linear(2, 2), fake_on_gpu(nn.Linear(2, 2)))
    with pytest.raises(RuntimeError, match=r"`0.weight` on cpu and `1.weight` on cuda:0"):
        FSDP(model)
    assert len(FSDP(model, ignored_modules=[model[1]]).params) == 1


@pytest.mark.cpu_only("names devices of several types")
@on_ranks(in_full(2), 3)
@pytest.mark.parametrize("offload", [False, True], ids=["device", "offload"])
def test_a_module_on_the_host_is_never_whole_on_the_device(offload):
    """Shards and buffers move to the device, whole parameters never do; with offload shards do not either."""
    gpu, moved = torch.device("cuda:0"), []
    to = torch.Tensor.to

    def watched(tensor, device, *args, **kwargs):
        if device == gpu and tensor.device != gpu:
            moved.append(tensor.numel())
        return to(tensor, device, *args, **kwargs)

    with (
        FakeTensorMode(),
        gpus(1),
        mock.patch.object(construction, "validate_process_group"),
        mock.patch.object(torch.Tensor, "to", watched),
    ):
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
        wrapped = FSDP(model, device_id=0, cpu_offload=offload)
    (flat_param,) = wrapped._unit.flat_params
    shard_numel = -(-(8 * 16 + 16 + 16 + 16) // dist.get_world_size())
    assert flat_param.shard_numel == shard_numel
    assert all(buffer.device == gpu for buffer in model.buffers())
    leaves = [0] * len(flat_param.slots)
    assert moved == [16, 16, 1, *leaves, *([] if offload else [shard_numel])]


Pair = namedtuple("Pair", "left right")


def test_nested_inputs_move_and_keep_their_types():
    """Inputs in tuples, named tuples, lists, dicts and packed sequences move; other values stay."""
    x = torch.ones(2)
    given = ((x, Pair(x, [x, 3])), {"mask": {"deep": (x,)}, "packed": pack_sequence([x]), "flag": True})
    (first, pair), named = move_inputs(given, torch.device("meta"))
    assert first.is_meta
    assert isinstance(pair, Pair)
    assert pair.left.is_meta
    assert pair.right[0].is_meta
    assert pair.right[1] == 3
    assert named["mask"]["deep"][0].is_meta
    assert named["packed"].data.is_meta
    assert named["flag"] is True
    assert move_inputs((x,), CPU)[0] is x


def test_moved_inputs_get_their_gradients_where_they_are():
    """The move of inputs is differentiable."""
    x = torch.ones(2, requires_grad=True)
    (moved,) = move_inputs((x,), torch.device("meta"))
    assert moved.requires_grad
    assert moved.grad_fn is not None


@on_ranks(in_full(1), 2)
@pytest.mark.parametrize("name", ["device_id", "compute_device", None])
def test_the_outermost_unit_moves_inputs(name):
    """Inputs move once per forward to the device of the model, with `device_id` only."""
    wrapped = wrap_each(mlp(4, 9, 5), **({name: rank_device()} if name else {}))
    with mock.patch.object(running, "move_inputs", side_effect=move_inputs) as move:
        x = randn(2, 4)
        wrapped(x)
    assert move.call_count == (name == "device_id")
    if name == "device_id":
        ((inputs, kwargs), device), _ = move.call_args
        assert inputs[0] is x
        assert kwargs == {}
        assert device.type == rank_device().type


def messages_of(wrapped):
    """The warnings of a first forward on a machine with a GPU and a backend for it."""
    with (
        mock.patch.object(placement, "default_device_type", return_value="cuda"),
        mock.patch.object(placement, "current_device", return_value=torch.device("cuda:0")),
        mock.patch.object(placement, "communicates", return_value=True),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        wrapped(randn(2, 3))
    return [str(warning.message) for warning in caught if "on the CPU" in str(warning.message)]


@pytest.mark.cpu_only("its module stays on the CPU")
@on_ranks(1)
def test_a_module_on_the_cpu_beside_a_gpu_is_told_once():
    """A module on the CPU beside a GPU warns once, but not without a GPU, nor if the CPU was requested."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrap_each(mlp(3, 5, 4))(randn(2, 3))
    (message,) = messages_of(wrap_each(mlp(3, 5, 4)))
    assert "Pass `device_id`" in message
    assert messages_of(wrap_each(mlp(3, 5, 4), device_id=CPU)) == []


@on_ranks(1)
def test_mps_is_refused_by_name():
    """A device without collectives raises with its reason, whether it is asked for or the module is there."""
    with pytest.raises(ValueError, match=r"is on mps.*no collectives"):
        device_of("mps")
    with pytest.raises(ValueError, match=r"is on mps:0.*no collectives"):
        FSDP(fake_on_gpu(nn.Linear(2, 2), kind="mps"))
