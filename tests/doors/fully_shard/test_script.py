"""A script written for PyTorch's ``fully_shard`` runs with one line changed, and gives the same numbers."""

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state
from tests.torch_gaps import needs_fsdp2_on_cpu

pytestmark = pytest.mark.behaviour("scripts of FSDP2")

SCRIPT = Path(__file__).parents[2] / "data" / "fsdp2_script.py"
THEIRS = "from torch.distributed.fsdp import FSDPModule, fully_shard\n"
OURS = "from fairshard.nn import FSDPModule, fully_shard\n"


def functions_of(line):
    """The names that the script defines with ``line`` in place of its import."""
    text = SCRIPT.read_text()
    assert text.count(THEIRS) == 1
    names = {"__name__": SCRIPT.stem}
    exec(compile(text.replace(THEIRS, line), str(SCRIPT), "exec"), names)
    return names


@pytest.mark.cpu_only("the script trains on the CPU")
@needs_fsdp2_on_cpu
@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "precision"),
    [(2, "bf16"), *(pytest.param(*each, marks=pytest.mark.full) for each in [(2, "fp32"), (4, "bf16"), (4, "fp32")])],
)
def test_only_the_import_changes(precision, tmp_path):
    """Training with clipping and accumulation, saving, loading into a new model and resuming agree bit for bit.

    4 ranks form two replicas of two shards. With two ranks in each dimension every sum has two terms, so the order of
    addition does not matter. All numbers of ranks are powers of two, so division is exact.
    """
    results = []
    for name, line in (("theirs", THEIRS), ("ours", OURS)):
        results.append(functions_of(line)["run"](tmp_path / name, precision))
    (figures, weights, moments), (our_figures, our_weights, our_moments) = results
    assert our_figures == figures
    assert figures[-1][0] < figures[0][0]
    assert_same_state(our_weights, weights)
    assert_same_state(our_moments, moments)


@pytest.mark.cpu_only("the script trains on the CPU")
@needs_fsdp2_on_cpu
@on_ranks(2, in_full(4))
def test_each_loads_what_the_other_has_saved(tmp_path):
    """Each library loads the other's checkpoint, and training continues as it would have without the switch."""
    theirs, ours = functions_of(THEIRS), functions_of(OURS)
    mesh = theirs["mesh_of"](dist.get_world_size())
    for before, after in ((theirs, ours), (ours, theirs)):
        folder = tmp_path / ("theirs" if before is theirs else "ours")
        model, optimizer = before["sharded_gpt"](mesh, "fp32", seed=0)
        before["train"](model, optimizer, 2)
        before["save"](model, optimizer, folder)
        expected = before["train"](model, optimizer, 2)
        model, optimizer = after["sharded_gpt"](mesh, "fp32", seed=1)
        after["load"](model, optimizer, folder)
        assert after["train"](model, optimizer, 2) == expected
