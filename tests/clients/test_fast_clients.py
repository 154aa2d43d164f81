"""Clients that are fast enough for every test run: the losses and norms are those of the client on torch's engine."""

import importlib.util
import os
from unittest import mock

import pytest
import torch.distributed as dist

from tests.clients.case import ENGINES, be_torchrun
from tests.clients.table import Run, case_named, outcome
from tests.kit import run_ranks
from tests.torch_gaps import needs_fsdp2_on_cpu

BESIDE_FSDP1 = (
    "accelerate v1, bf16, sharded state",
    "accelerate v1, no, full state",
    "Lightning FSDP strategy, full state",
    "PEFT, wrapper",
)
BESIDE_FSDP2 = (
    "accelerate v2, no, full state",
    "Trainer v1, full state",
    "Trainer v2, full state",
    "Trainer v2, LoRA",
    "Lightning ModelParallelStrategy",
    "Fabric no_backward_sync",
    "PEFT, fully_shard",
)
IN_FULL = (
    *("accelerate v1, no, full state", "accelerate v2, no, full state", "Trainer v1, full state"),
    *("Lightning FSDP strategy, full state", "Fabric no_backward_sync"),
)
FAST = [
    *(pytest.param(name, marks=pytest.mark.full) if name in IN_FULL else name for name in BESIDE_FSDP1),
    *(
        pytest.param(name, marks=[needs_fsdp2_on_cpu, *([pytest.mark.full] if name in IN_FULL else [])])
        for name in BESIDE_FSDP2
    ),
]


def both_engines(name):
    """Curves of one case on fairshard and on torch's engine, and their outcome."""
    case = case_named(name)
    with mock.patch.dict(os.environ):
        be_torchrun(dist.get_rank(), dist.get_world_size(), 29500)
        runs = [Run(case.program(engine).as_dict(), 0.0) for engine in ENGINES]
    return outcome(case, *runs)


@pytest.mark.cpu_only("the clients' programs run on the CPU")
@pytest.mark.parametrize("name", FAST)
def test_client_trains_as_on_torchs_engine(name):
    """The client's program gives the same losses and norms on both engines, and says which engine trained."""
    case = case_named(name)
    for package in case.packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install {package}")
    said = set(run_ranks(case.world_size, both_engines, name, timeout=240.0))
    assert len(said) == 1
    assert said.pop().startswith("equal")
