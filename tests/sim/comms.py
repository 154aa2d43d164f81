"""Custom communication for `fully_shard`, as users write it: the group's collectives, which the engine waits for."""

import torch
import torch.distributed as dist

from fairshard.nn import AllGather, ReduceScatter


class OwnGather(AllGather):
    """torch's all-gather."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=True)


class OwnReduce(ReduceScatter):
    """torch's reduce-scatter."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group=group, async_op=True)
