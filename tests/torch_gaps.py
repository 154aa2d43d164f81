"""What older versions of torch lack: marks for the tests that need it, which skip them there with the reason."""

import importlib.util

import pytest
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

PREFIX = "this torch lacks "
"""The beginning of every reason: tests/test_features.py allows these skips."""


def _needs(what, is_there):
    return pytest.mark.skipif(not is_there, reason=f"{PREFIX}{what}")


needs_fsdp2_on_cpu = _needs(
    "FSDP2 on CPU: its forward raises \"'Stream' object has no attribute 'record_event'\"",
    hasattr(torch.cpu.Stream, "record_event"),
)
needs_default_comms = _needs("FSDP2's DefaultAllGather", hasattr(_fsdp_collectives, "DefaultAllGather"))
needs_1f1b_on_gloo = _needs(
    "1F1B between gloo ranks: unsharded stages wait for each other forever", torch.__version__ >= "2.7"
)
needs_readable_saved_tensor_hooks = _needs(
    "a way to see the current saved-tensor hooks, by which checkpoints made of module hooks are recognised",
    hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),
)
needs_transforms = _needs("transforms of entries of checkpoints", hasattr(filesystem, "_StorageReaderTransforms"))
needs_muon = _needs("torch.optim.Muon", hasattr(torch.optim, "Muon"))
needs_torchao = _needs(
    "torchao, which is in extra `dev` and needs a newer one", importlib.util.find_spec("torchao") is not None
)

_ASKS_NO_SUBCLASS = "`RowBlocks` and `Owned` under fully_shard need a torch that dispatches to subclasses of DTensor"


def gap_of(text):
    """The reason to skip a test that failed with ``text`` because of this torch: cells of matrices have no marks."""
    return f"{PREFIX}DTensors that can be subclassed" if _ASKS_NO_SUBCLASS in text else ""


GAPS = {name: mark.args[0] for name, mark in dict(globals()).items() if name.startswith("needs_")}
