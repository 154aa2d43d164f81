"""On which device a model computes, and whether the host has room for what it keeps there."""

from __future__ import annotations

import logging
import socket

import torch

from fairshard.errors import HostMemoryError
from fairshard.nn.data_parallel.config import GradHome
from fairshard.nn.data_parallel.unit import Unit
from fairshard.utils.collectives import Communicator, backend_name
from fairshard.utils.device import current_device, default_device_type
from fairshard.utils.pinned import too_much_to_pin

_log = logging.getLogger("fairshard")


def compute_device(units: list[Unit]) -> torch.device:
    """The device where ``units`` compute: that of the parameters when wrapped, or where ``.to()`` moved them since.

    Units whose parameters were on the CPU and are kept there compute on the current GPU if their group is NCCL's.
    """
    flat_params = [(unit, flat_param) for unit in units for flat_param in unit.flat_params]
    for _, flat_param in flat_params:
        kept = flat_param.slots[0].leaf if flat_param.on_cpu else flat_param.shard
        for device in (flat_param.shard.device, kept.device):
            if device.type != "cpu":
                return device
    for unit, flat_param in flat_params:
        if flat_param.on_cpu and default_device_type() == "cuda":
            device = current_device()
            if backend_name(unit.group.resolve(), device) == "nccl":
                return device
    return torch.device("cpu")


def check_host_memory(comm: Communicator, units: list[Unit], device: torch.device) -> None:
    """Say how much host memory ``units`` will pin, and raise where it is too much. **Collective.**

    Raises:
        HostMemoryError: on every rank, if any rank's host has not room for its ranks.
    """
    nbytes = sum(
        flat_param.shard.nbytes * (2 if unit.config.grad_home is GradHome.HOST and flat_param.requires_grad else 1)
        for unit in units
        for flat_param in unit.flat_params
        if flat_param.on_cpu
    )
    if device.type != "cuda" or not any(unit.config.master_on_cpu for unit in units):
        return
    hosts = comm.gather_objects(socket.gethostname())
    here = hosts.count(hosts[comm.rank])
    _log.warning("rank %d pins %.2f GiB of host memory for shards and gradients", comm.rank, nbytes / 2**30)
    problems = comm.gather_objects(too_much_to_pin(nbytes, here))
    for rank, problem in enumerate(problems):
        if problem:
            raise HostMemoryError(f"{problem} (rank {rank} on {hosts[rank]})")
