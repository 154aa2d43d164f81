"""What torch offers on every device, on the simulator: equal to the CPU, whatever the order of work."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.sim.ranks import on_sim

SEEDS = (None, 2, 3)


def images():
    """A model of convolutions and norms, and its input; on the CPU."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.GroupNorm(2, 4), nn.ConvTranspose2d(4, 2, 3)]
    return nn.Sequential(*layers), torch.randn(2, 2, 6, 6, device="cpu")


def words():
    """A transformer layer without dropout on embedded tokens, and its input; on the CPU."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(5, 8), layer), torch.tensor([[1, 2, 4], [0, 1, 1]], device="cpu")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("make", [images, words])
@on_sim(1)
def test_training_equals_the_cpus(make, seed):
    """Loss and gradients equal the CPU's; the tolerance is for another order of sums in its vector kernels."""
    with torch.device("cpu"):
        model, inputs = make()
    moved = copy.deepcopy(model).to("sim")
    expected, loss = model(inputs).square().mean(), moved(inputs.to("sim")).square().mean()
    expected.backward()
    loss.backward()
    torch.testing.assert_close(loss.cpu(), expected)
    for own, plain in zip(moved.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own.grad.cpu(), plain.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@on_sim(1)
def test_optimizers_equal_the_cpus(kind, how):
    """Plain, foreach and fused steps equal the CPU's plain steps."""
    with torch.device("cpu"):
        torch.manual_seed(0)
        model, inputs = nn.Linear(3, 3), torch.randn(2, 3)
    moved = copy.deepcopy(model).to("sim")
    for module, data, options in ((model, inputs, {"foreach": False}), (moved, inputs.to("sim"), how)):
        optimizer = kind(module.parameters(), lr=0.1, **options)
        for _ in range(3):
            optimizer.zero_grad()
            module(data).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(moved.weight.cpu(), model.weight)


@on_sim(1)
def test_autocast():
    """Under autocast matrix products are in the low precision, norms and losses in full; gradients in the weights'."""
    model, inputs = nn.Linear(4, 4), torch.ones(2, 4)
    with torch.autocast("sim", dtype=torch.bfloat16):
        output = model(inputs)
        loss = F.mse_loss(F.layer_norm(output, (4,)), torch.zeros(2, 4))
    assert (output.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    loss.backward()
    assert model.weight.grad.dtype == torch.float32
    assert model(inputs).dtype == torch.float32


@pytest.mark.parametrize("seed", SEEDS)
@on_sim(1)
def test_a_generator_is_its_state(seed):
    """Equal states give equal numbers, a number moves the state, and generators are apart from each other."""
    generator = torch.Generator("sim").manual_seed(3)
    torch.rand(3, generator=generator)
    state = generator.get_state()
    first = torch.rand(3, generator=generator)
    torch.rand(3)
    assert not torch.equal(torch.rand(3, generator=generator), first)
    generator.set_state(state)
    assert torch.equal(torch.rand(3, generator=generator), first)
    torch.manual_seed(5)
    mask = F.dropout(torch.ones(64))
    state = torch.sim.get_rng_state()
    second = F.dropout(torch.ones(64))
    assert set(mask.tolist()) == {0.0, 2.0}
    assert not torch.equal(mask, second)
    torch.sim.set_rng_state(state)
    assert torch.equal(F.dropout(torch.ones(64)), second)
    torch.manual_seed(5)
    assert torch.equal(F.dropout(torch.ones(64)), mask)


@pytest.mark.parametrize("reentrant", [False, True])
@on_sim(1)
def test_activation_checkpointing_keeps_the_random_state(reentrant):
    """A recomputed dropout drops what the forward dropped."""
    inputs = torch.ones(64, requires_grad=True)
    output = checkpoint(F.dropout, inputs, use_reentrant=reentrant)
    output.sum().backward()
    assert torch.equal(inputs.grad, output)


@on_sim(1)
def test_data_takes_views_and_other_devices():
    """``.data =`` takes a view of other memory, memory of the host, and what inference mode made."""
    line = torch.arange(8.0)
    weight = nn.Parameter(torch.empty(0))
    weight.data = line[2:6].view(2, 2)
    line.add_(1)
    assert weight.tolist() == [[3, 4], [5, 6]]
    weight.data = torch.ones(3, device="cpu")
    assert weight.device.type == "cpu"
    weight.data = line[:2]
    assert weight.device.type == "sim"
    with torch.inference_mode():
        nothing = torch.empty(0)
    weight.data = nothing
    assert weight.numel() == 0


@on_sim(1)
def test_memory_is_counted():
    """The allocator counts the bytes of tensors that live, and their peak."""
    before = torch.sim.memory_allocated()
    held = torch.empty(1000, dtype=torch.float32)
    more = torch.empty(500, dtype=torch.float32)
    del more
    assert torch.sim.memory_allocated() - before == held.nbytes
    assert torch.accelerator.max_memory_allocated() - before >= 6000


@on_sim(1, timeout=60.0)
def test_a_query_does_not_stop_another_threads_work():
    """A task may need Python's lock, here for the hooks of its thread, while another thread asks for an event."""
    event, is_over = torch.accelerator.current_stream().record_event(), threading.Event()

    def ask():
        while not is_over.is_set():
            event.query()

    asks = threading.Thread(target=ask)
    asks.start()
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        x = torch.ones(4, device="sim")
        for _ in range(100):
            x = x.add(1)
    is_over.set()
    asks.join()
    assert x.tolist() == [101.0] * 4
