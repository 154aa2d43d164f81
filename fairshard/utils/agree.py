"""Whether ranks agree on a number."""

import torch

from fairshard.utils.collectives import Communicator


def agree(comm: Communicator, number: int, device: torch.device) -> bool:
    """Whether every rank of ``comm`` passed the same 63-bit ``number``. **Collective.**"""
    if not comm.peers:
        return True
    both = torch.tensor([number, -number], dtype=torch.int64, device=device)
    largest = comm.all_reduce(both, "max").wait()
    assert largest is not None
    return largest[0].item() == number and -largest[1].item() == number
