"""The device of a model, and whether its offloaded parameters fit into host memory."""

from __future__ import annotations

import logging
import socket
import warnings

import torch

from fairshard.engine.unit import Unit
from fairshard.errors import HostMemoryError
from fairshard.params.rule import GradHome
from fairshard.utils.collectives import Communicator
from fairshard.utils.device import current_device, default_device_type
from fairshard.utils.groups import communicates
from fairshard.utils.host import free_host_memory
from fairshard.utils.streams import is_asynchronous
from fairshard.utils.user_line import level_of_user

MAX_FRACTION = 0.8
_log = logging.getLogger("fairshard")


def compute_device(units: list[Unit]) -> torch.device:
    """The device where ``units`` compute: where parameters were when wrapped, or where ``.to()`` has moved them.

    Offloaded units that were on the CPU when wrapped compute on the current accelerator if their group
    communicates on it.
    """
    for unit in units:
        for flat_param in unit.flat_params:
            wrapped = flat_param.slots[0].leaf if unit.config.master_on_cpu else flat_param.shard
            for device in (flat_param.shard.device, wrapped.device):
                if device.type != "cpu":
                    return device
    if not any(unit.flat_params for unit in units):
        chosen: torch.device = units[0].origin.device
        return chosen
    device = torch.device("cpu")
    if default_device_type() != "cpu" and not any(unit.origin.is_placed for unit in units):
        accelerator = current_device()
        idle = [unit for unit in units if unit.flat_params and communicates(unit.group.resolve(), accelerator)]
        if any(unit.config.master_on_cpu for unit in idle):
            return accelerator
        if idle:
            warnings.warn(
                f"The parameters of unit `{idle[0].fqn or 'root'}` are on the CPU, where the model will compute, but "
                f"{accelerator} is available. Pass `device_id` to compute on it, or `device_id=torch.device('cpu')` to "
                "keep this and avoid the warning.",
                stacklevel=level_of_user(),
            )
    return device


def check_host_memory(comm: Communicator, units: list[Unit], device: torch.device) -> None:
    """Log how much host memory ``units`` may pin, and raise if it is too much. **Collective.**

    Raises:
        HostMemoryError: on every rank, if any host has too little memory for its ranks.
    """
    if not is_asynchronous(device) or not any(unit.config.master_on_cpu for unit in units):
        return
    nbytes = _nbytes_to_pin(units)
    hosts = comm.gather_objects((socket.gethostname(), nbytes))
    here = [own for host, own in hosts if host == hosts[comm.rank][0]]
    if comm.rank == [host for host, _ in hosts].index(hosts[comm.rank][0]):
        total = sum(here) / 2**30
        _log.warning("%d ranks on %s pin up to %.2f GiB of host memory", len(here), hosts[comm.rank][0], total)
    problems = comm.gather_objects(too_much_to_pin(sum(here), len(here)))
    for rank, problem in enumerate(problems):
        if problem:
            raise HostMemoryError(f"{problem} (rank {rank} on {hosts[rank][0]})")


def too_much_to_pin(nbytes: int, num_ranks: int) -> str:
    """Why this host's ``num_ranks`` ranks must not pin ``nbytes`` in total; empty if they may."""
    free = free_host_memory()
    if nbytes <= MAX_FRACTION * free:
        return ""
    return (
        f"Host memory to be pinned must be at most {MAX_FRACTION:.0%} of what is free, but {num_ranks} ranks here "
        f"would pin {nbytes / 2**30:.2f} GiB, with {free / 2**30:.2f} GiB free. Use more hosts, "
        "`move_grads_to_cpu=False`, or a smaller model."
    )


def _nbytes_to_pin(units: list[Unit]) -> int:
    """Bytes of host memory for shards and gradients.

    Gradients that move to the host take two buffers per shard, the second for accumulation. Gradients held on the
    device take two buffers in all, as large as the largest shard, to fetch them.
    """
    nbytes = largest_held = 0
    for unit in units:
        for flat_param in unit.flat_params:
            if flat_param.shows.on_cpu:
                nbytes += flat_param.shard.nbytes
                if flat_param.requires_grad and unit.config.rule.grad_home is GradHome.HOST:
                    nbytes += 2 * flat_param.shard.nbytes
                elif unit.config.rule.grad_home is GradHome.HELD:
                    largest_held = max(largest_held, flat_param.shard.nbytes)
    return nbytes + 2 * largest_held
