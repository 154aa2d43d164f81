"""Norms of what is sharded over ranks, from the norms of their parts."""

import torch
from torch import Tensor

from fairshard.utils.collectives import Communicator


def largest_norms(norms: Tensor, comm: Communicator) -> Tensor:
    """The largest of ``norms`` over ranks, element by element, NaN where it is NaN on any rank. **Collective.**

    Backends give the number as the largest of a number and NaN, so NaN is sent as a flag.
    """
    is_nan = norms.isnan()
    message = torch.stack([norms.masked_fill(is_nan, 0.0), is_nan.to(norms.dtype)])
    comm.all_reduce(message, "max").wait()
    return message[0].masked_fill(message[1] > 0, torch.nan)


def joint_norms(norms: Tensor, order: float, comm: Communicator) -> Tensor:
    """Norms of the elements of all ranks, from ``norms`` of this rank's elements, in the same dtype. **Collective.**"""
    if order == torch.inf:
        return largest_norms(norms, comm)
    powers = norms**order
    comm.all_reduce(powers).wait()
    return powers ** (1 / order)
