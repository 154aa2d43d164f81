"""Where the shards, gradients and optimizer state of a rank lie."""

from torch import Tensor

from fairshard.engine.tree import units_below
from fairshard.params.rule import GradHome


def state_bytes(model, optimizer):
    """Their bytes on the device, in pinned, and in pageable memory."""
    device, host = [], []
    for _, unit in units_below(model):
        for flat_param in unit.flat_params:
            on_cpu, grad = flat_param.shows.on_cpu, flat_param.grad
            own = host if on_cpu else device
            own.append(flat_param.shows.shard.detach())
            device += [] if flat_param.device_shard is None else [flat_param.device_shard]
            (host if grad.home is GradHome.HOST else device).extend(grad.tensors())
            states = [optimizer.state.get(stepped.shard, {}) for stepped in flat_param.stepped]
            own += [value for state in states for value in state.values() if isinstance(value, Tensor)]
    pinned = sum(tensor.nbytes for tensor in host if tensor.is_pinned())
    return sum(tensor.nbytes for tensor in device), pinned, sum(tensor.nbytes for tensor in host) - pinned
