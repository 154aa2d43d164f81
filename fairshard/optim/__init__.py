"""Optimizers and loss scaling for sharded models."""

from fairshard.optim.cpu_optimizer import CPUOptimizer
from fairshard.optim.muon import Muon
from fairshard.optim.sharded_grad_scaler import ShardedGradScaler

__all__ = ["CPUOptimizer", "Muon", "ShardedGradScaler"]
