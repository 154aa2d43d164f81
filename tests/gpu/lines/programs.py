"""Lines about other people's programs: subclasses, tensor parallelism, compilers, profiles, trainers."""

import copy
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile

from fairshard.nn import fully_shard
from tests.gpu.check import Missed, NotHere, on_ranks
from tests.gpu.training import DIM, HIDDEN, Way, batches, build, own_part
from tests.kit import rank_device
from tests.models import Block


def steps(model, inputs):
    """The losses of one step on each of ``inputs``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    losses = []
    for each in inputs:
        loss = model(each).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@on_ranks("float8", 2, alone=True, needs=("torchao",), timeout=90.0)
def float8(is_small):
    """torchao's float8 training with a float8 all-gather equals torch's ``fully_shard`` bit for bit."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    if rank_device().type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        raise NotHere("float8 needs a GPU of capability 8.9")
    found = []
    for shard in (fully_shard, torch_fully_shard):
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)])
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=rank_device().type != "cuda")
        net = convert_to_float8_training(net.to(rank_device()).bfloat16(), config=config)
        for layer in net:
            shard(layer)
        shard(net)
        inputs = [each[:, :16].bfloat16() for each in batches(4)]
        found.append(steps(net, inputs) + [own_part(param).detach() for param in net.parameters()])
    pairs = [[getattr(value, "_tensor", value) for value in pair] for pair in zip(*found, strict=True)]
    different = sum(not torch.equal(own, other) for own, other in pairs)
    if different:
        raise Missed(f"{different} of {len(pairs)} losses and weights differ from torch's", {})
    return {"compared": len(pairs)}


@on_ranks("tensor-parallel", 2)
def tensor_parallel(is_small):
    """Tensor-parallel blocks below ``fully_shard`` train as without it, within 1e-5: sums are in another order."""
    mesh = init_device_mesh(rank_device().type, (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    torch.manual_seed(0)
    plain = nn.Sequential(*[Block(DIM, HIDDEN) for _ in range(2)]).to(rank_device())
    twin = copy.deepcopy(plain)
    for one in (plain, twin):
        for block in one:
            parallelize_module(block, mesh["tp"], plan)
    for block in twin:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(twin, mesh=mesh["dp"])
    generator = torch.Generator("cpu").manual_seed(0)
    inputs = [torch.randn(4, DIM, generator=generator, device="cpu").to(rank_device()) for _ in range(3)]
    expected, found = steps(plain, inputs), steps(twin, inputs)
    worst = max((a - b).abs().max().item() for a, b in zip(expected, found, strict=True))
    if worst > 1e-5:
        raise Missed(f"losses differ by {worst:.1e}", {})
    return {"largest difference": worst}


@on_ranks("compile", needs=("inductor on CUDA", "triton"), timeout=150.0)
def compiled(is_small):
    """Blocks compiled by inductor train as uncompiled ones; nothing is compiled after step 2; CUDA graphs are right."""
    from torch._dynamo.utils import counters

    inputs = batches(5)
    expected = steps(build(Way("fully_shard")), inputs)
    figures = {}
    for mode in (None, "reduce-overhead"):
        torch.compiler.reset()
        model = build(Way("fully_shard"))
        for block in model.blocks:
            block.compile(mode=mode)
        try:
            found = steps(model, inputs[:2])
            before = counters["stats"]["unique_graphs"]
            found += steps(model, inputs[2:])
        except RuntimeError as error:
            if mode is None:
                raise
            figures["CUDA graphs are refused"] = str(error).splitlines()[0][:120]
            continue
        again = counters["stats"]["unique_graphs"] - before
        torch.testing.assert_close(found[:2], expected[:2], rtol=1e-4, atol=1e-6)
        figures[f"graphs after step 2, mode {mode}"] = again
        if again:
            raise Missed(f"{again} graphs were compiled after step 2", figures)
    return figures


@on_ranks("profile-regions")
def profile_regions(is_small):
    """A profile has the regions of each unit; on CUDA they also lie above the kernels that they launch."""
    model, inputs = build(Way("fully_shard", bucket_cap_mb=0.0)), batches(3)
    steps(model, inputs[:2])
    kinds = [ProfilerActivity.CPU]
    if rank_device().type == "cuda":
        kinds.append(ProfilerActivity.CUDA)
    with profile(activities=kinds) as found:
        steps(model, inputs[2:])
        torch.get_device_module(rank_device().type).synchronize()
    regions = [event for event in found.events() if event.name.startswith("fairshard::")]
    missing = [index for index in range(4) if not any(f"blocks.{index}" in event.name for event in regions)]
    on_device = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in regions)
    if missing or (rank_device().type == "cuda" and not on_device):
        raise Missed(f"no regions of blocks {missing}; {on_device} regions on the device", {})
    return {"regions": len(regions), "regions above kernels": on_device}


@on_ranks("lightning-refit", needs=("lightning",), timeout=90.0)
def lightning_refit(is_small):
    """A second ``fit`` on one module trains it on, on its device, though a strategy is torn down after each."""
    if rank_device().type not in ("cpu", "cuda"):
        raise NotHere(f"Lightning has no accelerator for {rank_device().type}")
    from lightning.pytorch import LightningModule, Trainer

    from fairshard.integrations.lightning import FairshardStrategy

    class Lit(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(*[nn.Linear(DIM, DIM, device="cpu") for _ in range(2)])

        def training_step(self, batch, _index):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.set_default_device("cpu")
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", NODE_RANK="0")
    given, rows = Lit(), torch.ones(8, DIM)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
            kind = {"accelerator": "gpu" if rank_device().type == "cuda" else "cpu", "devices": 1}
            trainer = Trainer(
                **kind, **quiet, strategy=FairshardStrategy(), max_epochs=1, enable_checkpointing=False,
                default_root_dir=folder,
            )  # fmt: skip
            trainer.fit(given, torch.utils.data.DataLoader(rows, batch_size=4))
            kinds = {param.device.type for param in given.parameters()}
            if kinds != {rank_device().type}:
                raise Missed(f"after a fit the parameters are on {kinds}", {})
    return {"fits": 2}
