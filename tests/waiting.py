"""What a rank is told, when its collective fails, about another that has raised alone."""

from unittest import mock

import torch.distributed as dist

from fairshard.checks import watchdog
from fairshard.utils.failures import explain


def told_about(raise_alone):
    """Rank 1 calls ``raise_alone()``; returns, on all ranks, the error of rank 0 that waited for it, as text."""
    told = [""]
    with mock.patch.multiple(watchdog, _BEAT_S=0.01, _OTHERS_READ_WITHIN_S=0.0):
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank():
            raise_alone()
            store.set("raised", "")
            store.wait(["told"])
        else:
            store.wait(["raised"])
            told[0] = str(explain(RuntimeError("no answer")))
            store.set("told", "")
    dist.broadcast_object_list(told)
    return told[0]
