"""What the engine knows about accelerators, asked of the simulated one."""

import contextlib
from unittest import mock

import pytest
import torch
from torch import nn

from fairshard.errors import TrainingStateError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import fully_shard
from fairshard.nn.wrap import describe
from fairshard.utils import device
from fairshard.utils.storage import set_data
from fairshard.utils.streams import Event, Stream, now
from tests import sim
from tests.sim.ranks import on_sim
from tests.subclass_weights import Half


@on_sim(1)
def test_the_accelerator_is_found():
    """Type, count and current device are those of torch's accelerator; tensors on it are counted in bytes."""
    assert device.default_device_type() == "sim"
    assert device.current_device() == torch.device("sim", 0)
    assert (device.device_count(), device.device_count("sim"), device.device_count("cuda")) == (1, 1, 0)
    assert device.accelerators_in_use() == [torch.device("sim", 0)]
    before = device.memory_allocated(torch.device("sim"))
    held = torch.empty(1 << 20, dtype=torch.uint8)
    assert device.memory_allocated(torch.device("sim")) >= before + held.nbytes
    assert device.peak_memory(torch.device("sim")) >= before + held.nbytes


@on_sim(1)
def test_random_numbers_continue_from_a_saved_state():
    """The state of the accelerator's generator can be saved and restored."""
    saved = device.accelerator_rng_state()
    first = torch.rand(4)
    device.set_accelerator_rng_state(saved)
    assert first.tolist() == torch.rand(4).tolist()


@on_sim(1, num_devices=2)
def test_an_event_is_waited_for_on_its_own_device():
    """The current stream of the event's device waits, whatever the current device is."""
    torch.accelerator.set_device_index(0)
    other = torch.device("sim", 1)
    source = torch.zeros(8, device=other)
    side = Stream(other)
    side.wait(now(other))
    with side.use():
        source.add_(1)
        written = side.record()
    torch.accelerator.set_device_index(0)
    written.wait()
    assert (source * 2).tolist() == [2.0] * 8


@on_sim(1)
def test_events_that_were_never_recorded_have_passed():
    """An empty event is waited for by nobody."""
    event = Event()
    event.wait()
    event.synchronize()
    assert event.is_completed()


@on_sim(1)
def test_data_of_another_type_of_device_keeps_the_object():
    """Where a device refuses `.data =` across types, the parameter stays the same object, and takes gradients."""
    param = nn.Parameter(torch.ones(3))
    with mock.patch.object(torch, "_has_compatible_shallow_copy_type", return_value=False):
        set_data(param, torch.zeros(3, device="cpu"))
    assert type(param) is nn.Parameter
    assert (param.device.type, param.requires_grad, param.is_leaf) == ("cpu", True, True)
    (param.sum() * 2).backward()
    assert param.grad.tolist() == [2.0] * 3


@on_sim(1, 2)
def test_a_module_on_the_host_computes_on_the_device_that_is_asked_for():
    """`device_id` is a number or a device; the shards are there, and with offload in host memory."""
    with torch.device("cpu"):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model = FSDP(net, device_id=0)
    assert {param.device for param in model.parameters()} == {torch.device("sim", 0)}
    assert model(torch.ones(1, 4)).device.type == "sim"
    with torch.device("cpu"):
        net = nn.Linear(4, 2)
    model = FSDP(net, device_id=0, cpu_offload=True)
    model(torch.ones(1, 4)).sum().backward()
    assert {param.device.type for param in model.parameters()} == {"cpu"}


@on_sim(1, num_devices=2)
def test_a_module_on_another_accelerator_is_refused():
    """Both doors refuse parameters on another accelerator than theirs, by name, and leave the module as it was."""
    torch.accelerator.set_device_index(0)
    other = torch.device("sim", 1)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2, device=other))
    with pytest.raises(ValueError, match=r"the requested device, sim:0, but `1.weight` is on sim:1\. Move it there"):
        FSDP(net, device_id=0)
    with pytest.raises(ValueError, match=r"but `1.weight` is on sim:1.* `torch\.accelerator\.set_device_index`"):
        fully_shard(net)
    assert type(net) is nn.Sequential
    assert [param.device.index for param in net.parameters()] == [0, 0, 1, 1]


@on_sim(1)
def test_a_plan_for_the_accelerator():
    """A plan's device is by default that of this process, and any type that torch knows."""
    with torch.device("meta"):
        net = nn.Linear(4, 4)
    assert describe(net, None, 2).device == describe(net, None, 2, device="sim").device == "sim"
    assert not sim.races()


@on_sim(1)
def test_inputs_that_move_to_the_cpu_have_arrived():
    """A module that computes on the CPU waits for the copy of an input that is on the accelerator."""
    sim.configure(0, 0.0, "random")
    with torch.device("meta"):
        model = fully_shard(nn.Linear(4, 4))
    model.to_empty(device="cpu").reset_parameters()
    expected = model(torch.full((2, 4), 3.0, device="cpu"))
    assert torch.equal(model(torch.full((2, 4), 3.0)), expected)


class InBytes(Half):
    """Values that are gathered as int8."""

    def fsdp_pre_all_gather(self, mesh):
        return (self.values.view(torch.int8),), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        return (outputs[0].view(torch.float32), outputs) if out is None else None


@on_sim(2)
def test_gathered_bytes_are_copied_to_a_dtype_of_one_byte():
    """A subclass may gather one tensor of int8: the bytes are copied out of the buffer, which has another dtype."""
    layer, x = nn.Linear(8, 6), torch.ones(2, 8)
    expected = layer(x)
    layer.weight = nn.Parameter(InBytes(layer.weight.detach()))
    assert torch.equal(fully_shard(layer)(x), expected)


@on_sim(2)
def test_a_second_stream_is_refused():
    """A forward on another stream than that of the first one raises, naming both; the first stream works on."""
    model = fully_shard(nn.Linear(4, 4))
    own, other = torch.Stream("sim"), torch.Stream("sim")
    x = torch.ones(2, 4)
    own.wait_stream(torch.accelerator.current_stream())
    with own:
        model(x).sum().backward()
    for stream in (other, contextlib.nullcontext()):
        with stream, pytest.raises(TrainingStateError, match=rf"one stream, .*{own.stream_id}, .* unit `root`"):
            model(x)
    with own:
        model(x).sum().backward()
    torch.accelerator.current_stream().wait_stream(own)
    assert model.weight.grad.to_local().unique().tolist() == [4.0]  # two backwards of two rows each
