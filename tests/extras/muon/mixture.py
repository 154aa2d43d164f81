"""A model with every kind of parameter that Muon treats in its own way, and what it must become, with plain torch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fairshard.nn import CPUOffloadPolicy, MixedPrecisionPolicy, Owned, ShardingStrategy, fully_shard
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.optim import CPUOptimizer, Muon
from tests.kit import rank_device
from tests.reference import Reference, randn

ROWS, WIDTH = 9, 6
OPTIONS = {"lr": 0.1, "weight_decay": 0.1, "adamw_lr_ratio": 0.5}


class Experts(nn.Module):
    """A stack of matrices ``[3, 6, 6]``: no power of two of ranks divides it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH) * 0.3)

    def forward(self, x):
        return torch.einsum("bm,emn->bn", x, self.weight)


class Mixture(nn.Module):
    """Matrices that no number of ranks divides, a tied and a frozen one, experts, and parameters that are no matrices.

    ``late`` gets its first gradient in the second step, ``unused`` never gets one.
    """

    def __init__(self, seed=1):
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(WIDTH, ROWS)
        self.down = nn.Linear(ROWS, WIDTH, bias=False)
        self.experts = Experts()
        self.tied = nn.Linear(WIDTH, ROWS)
        self.tied.weight = self.up.weight
        self.frozen = nn.Linear(ROWS, WIDTH).requires_grad_(False)
        self.late = nn.Linear(WIDTH, WIDTH)
        self.kernel = nn.Parameter(torch.randn(1, 2, 1, 3))
        self.unused = nn.Parameter(torch.ones(2, 2))

    def forward(self, x, is_late):
        x = self.experts(self.down(torch.tanh(self.up(x))))
        x = self.frozen(self.tied(x)) * self.kernel.reshape(-1)
        return self.late(x) if is_late.item() else x


def batch(step):
    """This rank's inputs of ``step``, a number or a pair that begins with it; ``late`` is used from step 1 on."""
    number = step[0] if isinstance(step, tuple) else step
    return randn(4, WIDTH, key=(step, dist.get_rank())), torch.tensor(number > 0)


def backward(model, step, scaler=None):
    """One backward on this rank's batch."""
    loss = model(*batch(step)).float().square().sum()
    (loss if scaler is None else scaler.scale(loss)).backward()


class PlainMuon:
    """torch's Muon and AdamW over a plain `Mixture`: Muon over each matrix and each expert by itself.

    ``layout``: in flat shards ``unused`` has zeros as its gradient, because it is in a unit with others.
    """

    def __init__(self, model, options=None, layout="", **muon):
        self.model = model
        self.has_zeros = is_flat(layout)
        options = {**OPTIONS, **(options or {})}
        common = {"weight_decay": options["weight_decay"]}
        trained = [param for param in model.parameters() if param.requires_grad]
        self.experts = [nn.Parameter(each.clone()) for each in model.experts.weight.detach()]
        self.muon = torch.optim.Muon(
            [*(param for param in trained if param.dim() == 2), *self.experts], lr=options["lr"], **common, **muon
        )
        self.adamw = torch.optim.AdamW(
            [param for param in trained if param.dim() not in (2, 3)],
            lr=options["lr"] * options["adamw_lr_ratio"], foreach=False, **common,
        )  # fmt: skip

    @torch.no_grad()
    def step(self):
        if self.has_zeros:
            self.model.unused.grad = torch.zeros_like(self.model.unused)
        stack = self.model.experts.weight
        for index, expert in enumerate(self.experts):
            expert.grad = None if stack.grad is None else stack.grad[index].clone()
        self.muon.step()
        self.adamw.step()
        for index, expert in enumerate(self.experts):
            stack[index] = expert

    def zero_grad(self):
        self.model.zero_grad()


def fully_sharded(model, **settings):
    for name in ("experts", "late"):
        fully_shard(getattr(model, name), **settings)
    return fully_shard(model, **settings)


def wrapped(model, **settings):
    for name in ("experts", "late"):
        setattr(model, name, FSDP(getattr(model, name), **settings))
    return FSDP(model, **settings)


def hybrid_mesh():
    """Two replicas, each cut among half of the ranks."""
    return init_device_mesh(rank_device().type, (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards"))


def _hybrid(model):
    strategy = ShardingStrategy.HYBRID_SHARD
    return wrapped(model, use_orig_params=True, device_mesh=hybrid_mesh(), sharding_strategy=strategy)


LAYOUTS = {
    "rows": fully_sharded,
    "columns": lambda model: fully_sharded(model, shard_placement_fn=_columns_if_even),
    "rows offload": lambda model: fully_sharded(model, offload_policy=CPUOffloadPolicy()),
    "rows hybrid": lambda model: fully_sharded(model, mesh=hybrid_mesh()),
    "rows kept": lambda model: fully_sharded(model, reshard_after_forward=False),
    "flat": wrapped,
    "flat offload": lambda model: wrapped(model, cpu_offload=True),
    "apart": lambda model: wrapped(model, flatten_parameters=False),
    "views": lambda model: wrapped(model, use_orig_params=True),
    "views offload": lambda model: wrapped(model, use_orig_params=True, cpu_offload=True),
    "views on host": lambda model: wrapped(model, use_orig_params=True, move_grads_to_cpu=True),
    "hybrid": _hybrid,
    "held": lambda model: wrapped(model, cpu_offload=True, move_grads_to_cpu=False),
    "views held": lambda model: wrapped(model, use_orig_params=True, cpu_offload=True, move_grads_to_cpu=False),
    "owned": lambda model: fully_sharded(model, shard_placement_fn=owned_matrices),
    "owned offload": lambda model: fully_sharded(
        model, shard_placement_fn=owned_matrices, offload_policy=CPUOffloadPolicy()
    ),
    "owned hybrid": lambda model: fully_sharded(model, shard_placement_fn=owned_matrices, mesh=hybrid_mesh()),
    "owned views": lambda model: wrapped(model, use_orig_params=True, placement_fn=owned_matrices),
    "unsharded": lambda model: wrapped(model, use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD),
}  # fmt: skip


def owned_matrices(param):
    """One rank has a matrix, or a stack of them; all others are placed as by default."""
    return Owned() if param.dim() in (2, 3) else None


def _columns_if_even(param):
    """The last dimension of a stack if the ranks divide it."""
    return Shard(2) if param.dim() == 3 and param.shape[2] % dist.get_world_size() == 0 else None


def muon_of(layout, model, **options):
    """Muon over ``model`` of a layout, by `CPUOptimizer` where gradients or shards need it."""
    options = {**OPTIONS, **options}
    if "held" in layout or "offload" in layout:
        return CPUOptimizer(model, Muon, num_threads=torch.get_num_threads(), **options)
    return Muon(model.parameters(), **options)


def is_flat(layout):
    """Whether the shards of a layout have no gradients for parameters without any: they have zeros."""
    return layout in ("flat", "flat offload", "held")


def in_dtype(layout, dtype):
    """``layout`` that computes in ``dtype`` and reduces in fp32, with fp32 parameters."""
    if layout == "rows":
        return lambda model: fully_sharded(model, mp_policy=MixedPrecisionPolicy(dtype, torch.float32))
    settings = {"mixed_precision": True, "compute_dtype": dtype, "fp32_reduce_scatter": True}
    return lambda model: wrapped(model, use_orig_params=layout == "views", **settings)


def full(state):
    """A state dict with whole values. **Collective.**"""
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def trained_reference(layout, num_steps=3, num_micro=1, reference=None, options=None, **muon):
    """What the model must become: gradients are averaged in rank order, then torch steps whole parameters."""
    reference = reference or Reference(Mixture().to(rank_device()), keeps_none=True)
    optimizer = PlainMuon(reference.master, options, layout, **muon)
    for step in range(num_steps):
        for micro in range(num_micro):
            backward(reference, (step, micro))
            reference.reduce_grads()
        optimizer.step()
        optimizer.zero_grad()
    return reference.master.state_dict()


def train(layout, num_steps=3, num_micro=1, wrap=None, optimizer=None, **options):
    """A `Mixture` trained in ``layout`` by our Muon, and its optimizer."""
    model = (wrap or LAYOUTS[layout])(Mixture().to(rank_device()))
    optimizer = optimizer or muon_of(layout, model, **options)
    for step in range(num_steps):
        for micro in range(num_micro):
            backward(model, (step, micro))
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer
