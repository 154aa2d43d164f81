"""`Case`: a client's program that runs on either engine; `Curve`: the losses and norms it gives."""

import os
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist

ENGINES = ("fairshard", "torch")


@dataclass
class Curve:
    """Loss of each step, averaged over ranks, and norm of the gradients where the client reports it."""

    losses: list = field(default_factory=list)
    norms: list = field(default_factory=list)
    seen: str = ""  # how a rank knows which engine trained

    def add(self, loss, norm=None):
        """Append a step. **Collective.**"""
        loss = torch.as_tensor(loss).detach().float().clone()
        dist.all_reduce(loss)
        self.losses.append(loss.item() / dist.get_world_size())
        if norm is not None:
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else torch.as_tensor(norm)
            self.norms.append(norm.detach().float().item())

    def as_dict(self):
        return asdict(self)


def grad_norm(params):
    """Norm of the gradients of all ranks, from each rank's shards. **Collective.**"""
    grads = [param.grad for param in params if param.grad is not None]
    local = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
    squares = torch.stack([part.detach().double().square().sum() for part in local]).sum()
    dist.all_reduce(squares)
    return squares.sqrt()


def fully_shard_of(engine):
    """``fully_shard`` of ``engine``."""
    from torch.distributed.fsdp import fully_shard as theirs

    from fairshard.nn import fully_shard as ours

    return ours if engine == "fairshard" else theirs


@dataclass(frozen=True)
class Case:
    """One program of a client.

    ``program(engine)`` runs on each rank and returns a `Curve`. Curves of both engines agree within ``rtol``; 0 is to
    the bit.
    """

    name: str
    program: object
    packages: tuple
    world_size: int = 2
    rtol: float = 0.0
    why: str = ""  # the reason for rtol, or what the program leaves out


def be_torchrun(rank, world_size, port):
    """Set the environment that torchrun gives to a rank."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="clients",
    )


def engine_of(model):
    """The package of the engine that has sharded ``model``."""
    owners = {type(module).__mro__ for module in model.modules()}
    names = {f"{cls.__module__}.{cls.__name__}" for mro in owners for cls in mro}
    ours = {name for name in names if name.startswith("fairshard.")}
    theirs = {name for name in names if name.startswith("torch.distributed.") and "FSDP" in name.upper()}
    theirs |= {name for name in names if name.endswith(".FullyShardedDataParallel") and name.startswith("torch.")}
    return "fairshard" if ours else "torch" if theirs else "none"
