"""Optimizers and loss scaling for sharded models."""

from typing import TYPE_CHECKING

from fairshard.utils.lazy import lazy

if TYPE_CHECKING:
    from fairshard.extras.muon.muon import Muon as Muon
    from fairshard.optim.cpu_optimizer import CPUOptimizer as CPUOptimizer
    from fairshard.optim.sharded_grad_scaler import ShardedGradScaler as ShardedGradScaler

_HOMES = {
    "CPUOptimizer": "fairshard.optim.cpu_optimizer",
    "Muon": "fairshard.extras.muon.muon",
    "ShardedGradScaler": "fairshard.optim.sharded_grad_scaler",
}
if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, _HOMES)

__all__ = ["CPUOptimizer", "Muon", "ShardedGradScaler"]
