"""Peak memory of wrapping, of passes and of state dicts on a device; its host memory and its random numbers."""

import contextlib
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.checkpoint import Checkpointer
from fairshard.cli.gpt import GPT, Block, GPTConfig
from fairshard.nn import FullStateDictConfig, StateDictType, fully_shard
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn.wrap import ModuleWrapPolicy, describe
from fairshard.utils import pinned
from fairshard.utils.device import accelerator_rng_state
from tests.gpu.delays import SIMULATED, must_not_wait
from tests.kit import rank_device
from tests.on_ranks import on_ranks
from tests.sim.cells import BY_NAME
from tests.sim.training import batches, build, optimizer_of

pytestmark = pytest.mark.gpu
HEADROOM = 1.05  # the caching allocator rounds blocks up


def peak_of(function):
    """``(result, bytes)``: the most bytes that ``function`` held on the device beyond those held before."""
    module = torch.get_device_module(rank_device().type)
    module.synchronize()
    before = module.memory_allocated()
    module.reset_peak_memory_stats()
    result = function()
    module.synchronize()
    return result, module.max_memory_allocated() - before


def sizes():
    """The width of a Linear, the number of them, and the bytes of one."""
    dim, number = (64, 6) if rank_device().type == SIMULATED else (4096, 8)
    return dim, number, 4 * dim * (dim + 1)


def linears(device):
    """Linears of `sizes` on ``device``: ranks of an accelerator create new tensors on it by default."""
    torch.manual_seed(dist.get_rank())
    dim, number, _ = sizes()
    with torch.device(device):
        return [nn.Linear(dim, dim) for _ in range(number)]


@pytest.mark.parametrize(("origin", "options"), [("cpu", {}), ("cpu", {"cpu_offload": True}), ("meta", {})])
@on_ranks(1)
def test_wrapping_holds_one_unit(origin, options):
    """The peak of wrapping a module in host memory or on the meta device is the shards and a unit on its way."""
    dim, number, unit_nbytes = sizes()
    here, units = torch.device(rank_device().type, 0), linears(origin)
    inner = {"device_id": here, **options} if origin == "cpu" else {}
    model, nbytes = peak_of(lambda: FSDP(nn.Sequential(*[FSDP(unit, **inner) for unit in units]), **options))
    assert nbytes <= HEADROOM * unit_nbytes * (2 + (0 if options else number))  # offloaded shards are on the host
    model(torch.ones(1, dim, device=here)).sum().backward()


@on_ranks(2)
def test_modules_on_the_host_are_sent_by_the_device():
    """``sync_module_states`` sends modules in host memory in buckets of at most 250 MB on the device."""
    _, number, unit_nbytes = sizes()
    here = torch.device(rank_device().type, torch.get_device_module(rank_device().type).current_device())
    units = nn.Sequential(*linears("cpu"))
    model, nbytes = peak_of(lambda: FSDP(units, device_id=here, sync_module_states=True))
    sums = torch.stack([value.double().sum() for value in model.state_dict().values()]).to(here)
    first = sums.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, sums)
    assert nbytes <= HEADROOM * (2 * unit_nbytes * number + 250 * 2**20)


@on_ranks(1)
def test_a_forward_holds_two_lines_and_a_buffer():
    """With ``fully_shard`` the peak of a forward is two gathered units and the buffer that one is copied out of."""
    dim, _, unit_nbytes = sizes()
    model = nn.Sequential(*linears(rank_device()))
    for unit in (*model, model):
        fully_shard(unit)
    x = torch.ones(1, dim, device=rank_device())

    def forward():
        with torch.no_grad():
            model(x)

    forward()
    _, nbytes = peak_of(forward)
    assert nbytes <= HEADROOM * 3 * unit_nbytes


@on_ranks(1)
def test_a_state_dict_offloaded_to_the_host_holds_one_unit():
    """With ``offload_to_cpu`` a state dict is in host memory; the peak on the device is one unit."""
    model = FSDP(nn.Sequential(*[FSDP(unit) for unit in linears(rank_device())]))
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True)):
        state, nbytes = peak_of(model.state_dict)
    assert {value.device.type for value in state.values()} == {"cpu"}
    assert nbytes <= HEADROOM * 2 * sizes()[2]


CASES = {
    "fp32": {},
    "bf16": {"mixed_precision": True, "compute_dtype": torch.bfloat16},
    "offload": {"cpu_offload": True},
}


@pytest.mark.parametrize("case", CASES)
@on_ranks(1, 2)
def test_the_peak_of_a_step_is_the_plans(case):
    """The peak of forward and backward is that of `describe` for the same model, within a tenth.

    With offload it may be less: a device that copies fast holds none of the gradients on their way to the host.
    """
    module, here, options = torch.get_device_module(rank_device().type), rank_device(), CASES[case]
    config = GPTConfig(layers=8, dim=2048, heads=16, context=64)
    config = GPTConfig(layers=4, dim=256, heads=4, context=16) if rank_device().type == SIMULATED else config
    policy = ModuleWrapPolicy({Block})
    with torch.device("meta"):
        plan = describe(GPT(config), policy, dist.get_world_size(), optimizer="adamw", device=here.type, **options)
    warm = torch.ones(64, 64, device=here, requires_grad=True)
    (warm @ warm).sum().backward()  # libraries allocate their workspaces
    with torch.autocast(here.type, torch.bfloat16):
        (warm @ warm).sum().backward()
    del warm
    before = module.memory_allocated()
    with torch.device("cpu"):
        plain = GPT(config)
    model = FSDP(plain, auto_wrap_policy=policy, device_id=torch.device(here.type, module.current_device()), **options)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens = torch.randint(256, (1, 2), device="cpu").to(here)  # their activations are nothing beside the weights
    peaks = []
    for _ in range(3):
        module.reset_peak_memory_stats()
        model(tokens).float().square().mean().backward()
        module.synchronize()
        peaks.append(module.max_memory_allocated() - before)
        optimizer.step()
        optimizer.zero_grad()
    assert max(peaks[1:]) <= 1.1 * plan.peak_nbytes
    assert max(peaks[1:]) >= (0.75 if case == "offload" else 0.9) * plan.peak_nbytes


@on_ranks(1)
def test_host_memory_is_pinned_at_its_exact_size():
    """Memory is pinned at its exact size, however small, and released with its tensor; a failure leaves no error."""
    if rank_device().type != "cuda":
        return
    for numel in ((1 << 20) + 12, 3):
        host = pinned.host_empty_like(torch.empty(numel, device=rank_device()), rank_device())
        assert host.is_pinned()
        assert host[1:].is_pinned()
        assert host.untyped_storage().nbytes() == 4 * numel
        address = host.data_ptr()
        del host
        assert int(torch.cuda.cudart().cudaHostUnregister(address)) != 0, "it is still registered"
        with contextlib.suppress(RuntimeError):
            torch.zeros((), device=rank_device())  # clears the error
    data = torch.empty(1 << 20, dtype=torch.uint8, device="cpu")
    assert pinned.host_register(data, rank_device())
    assert not pinned.host_register(data, rank_device())  # the same memory twice is an error
    assert (torch.arange(8, device=rank_device()) + 1).sum().item() == 36  # which the next launch does not report
    pinned.host_unregister(data.data_ptr(), rank_device())


@on_ranks(1)
def test_pinned_inputs_move_without_waiting():
    """Inputs in pinned memory move to the device of ``device_id`` while the host continues."""
    here = torch.device(rank_device().type, 0)
    model = FSDP(nn.Linear(64, 64).to(here), device_id=here)
    given = torch.ones(64, 64, device="cpu").pin_memory()
    model(given).sum().backward()
    assert must_not_wait(lambda: model(given)).device.type == here.type


@on_ranks(1)
def test_a_background_save_is_not_changed_by_later_steps():
    """A background save copies shards to pinned memory before the next step; random numbers go on after a load."""
    cell = BY_NAME["wrapper-fp32-device"]
    model, pairs = build(cell), batches(cell, 2)
    optimizer = optimizer_of(cell, model)

    def step(x):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(pairs[0][0])
    saved = [shard.detach().clone() for shard in model.parameters()]
    with tempfile.TemporaryDirectory() as folder, Checkpointer(folder) as checkpointer:
        checkpointer.save(1, model, optimizer)
        state = accelerator_rng_state()
        expected = torch.rand(16, device=rank_device())
        step(pairs[1][0])
        checkpointer.wait()
        checkpointer.load_latest(model, optimizer)
        found = torch.rand(16, device=rank_device())
    assert all(torch.equal(shard, old) for shard, old in zip(model.parameters(), saved, strict=True))
    assert state.nbytes
    assert torch.equal(expected, found)
