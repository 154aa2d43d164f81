"""Mutated files never crash, hang or fill memory, and never give a wrong value while a manifest vouches for them."""

import random
import shutil
import time
import warnings
from pathlib import Path

import pytest
import torch

from fairshard.checkpoint import Checkpointer, load
from fairshard.checkpoint.consolidate import consolidate_torch
from fairshard.checkpoint.contents import read_contents
from fairshard.checkpoint.import_fairscale import import_fairscale
from fairshard.checkpoint.manifest import read_manifest
from fairshard.checkpoint.storage import Storage
from fairshard.errors import CheckpointError
from tests.checkpoint.limited import run_limited
from tests.checkpoint.mutations import mutate
from tests.checkpoint.written import sign
from tests.models import mlp

STEP, BATCH = "step-00000002", 100
NAMES = [".metadata", "__0_0.distcp", "fairshard.json", "latest"]
MAX_SECONDS, MAX_NBYTES = 2.0, 256 * 10**6
# What a caller expects of a bad checkpoint: ValueError and TypeError are those of the optimizer that cannot take it.
EXPECTED = (CheckpointError, ValueError, TypeError)


def trained(seed=0):
    """A model after a step, and its optimizer."""
    torch.manual_seed(seed)
    model = mlp(3, 4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def tensors_of(model, optimizer):
    """Copies of all tensors of both."""
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [value.detach().clone() for value in [*model.state_dict().values(), *moments]]


def is_same(some, others):
    """Whether all are equal, bit for bit."""
    return len(some) == len(others) and all(map(torch.equal, some, others))


def shard():
    """A shard as fairscale saves it."""
    described = {"names": ["w", "b"], "shapes": [(2, 3), (2,)], "numels": [6, 2], "padding": 0}
    unit = {"fsdp_path": "", "params": {"flat_param_0": described}, "no_broadcast_optim_state": False}
    weights = {"flat_param_0": torch.arange(8.0), "steps": torch.tensor(3)}
    return {"shard_weights": weights, "shard_metadata": {"param_metadata": [unit], "buffer_names": ["steps"]}}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with a run of one step, and a shard."""
    root = tmp_path_factory.mktemp("written")
    Checkpointer(root / "run", async_save=False).save(2, *trained(), extra={"position": [1, 2.5, "text"]})
    torch.save(shard(), root / "shard.pt")
    return root


def try_mutation(written, work, seed):
    """Mutate one file and use it in one way; raises AssertionError if that does harm."""
    chance = random.Random(seed)
    if chance.random() < 0.3:
        return try_shard(written, work, seed)
    shutil.copytree(written / "run", work / "run")
    folder, name = work / "run" / STEP, chance.choice(NAMES)
    path = work / "run" / name if name == "latest" else folder / name
    path.write_bytes(mutate(path.read_bytes(), seed))
    vouches = chance.choice(["manifest", "forged", "none"])
    if vouches == "forged" and name in NAMES[:2]:
        sign(folder, step=2)
    elif vouches == "none" and name in NAMES[:2]:
        (folder / "fairshard.json").unlink()
    vouched = vouches == "manifest" or name in NAMES[2:]
    how = chance.choice(["load", "latest", "consolidate", "inspect"])
    if how == "inspect":
        found = read_contents(work / "run")
        assert not vouched or found.problems or is_unchanged(path, written)
    elif how == "consolidate":
        consolidate_torch(work / "run", work / "out.pt", allow_unverified=True)
        found = torch.load(work / "out.pt", weights_only=True)
        assert not vouched or is_same(list(found.values()), list(trained()[0].state_dict().values()))
    else:
        try_load(work / "run", how, vouched)
    return None


def is_unchanged(path, written):
    """Whether the mutation made the same file: a blank in JSON, or in `latest`, may change."""
    manifest = read_manifest(Storage(), str(written / "run" / STEP))
    return path.name == "latest" or read_manifest(Storage(), str(path.parent)) == manifest


def try_load(root, how, vouched):
    """Load; what is loaded is right if it is vouched for, and nothing changes if loading raises."""
    model, optimizer = trained(seed=1)
    before, extra = tensors_of(model, optimizer), {}
    try:
        if how == "load":
            load(root, model, optimizer, extra=extra, allow_unverified=True)
        else:
            Checkpointer(root).load_latest(model, optimizer, extra=extra)
    except EXPECTED:
        assert is_same(tensors_of(model, optimizer), before)
        raise
    if vouched:
        assert is_same(tensors_of(model, optimizer), tensors_of(*trained()))
        assert extra == {"position": [1, 2.5, "text"]}


def try_shard(written, work, seed):
    """Import a mutated shard, which nothing vouches for."""
    (work / "shard.pt").write_bytes(mutate((written / "shard.pt").read_bytes(), seed))
    import_fairscale([work / "shard.pt"], work / "out")


def try_batch(written, work, seeds):
    """The mutations ``seeds``; returns the problems, as text."""
    problems = []
    warnings.simplefilter("ignore")
    refused = 0
    for seed in seeds:
        own = work / str(seed)
        own.mkdir()
        began = time.process_time()
        try:
            try_mutation(written, own, seed)
        except EXPECTED:
            refused += 1
        except Exception as error:
            problems.append(f"seed {seed}: {type(error).__name__}: {error}"[:500])
        if time.process_time() - began > MAX_SECONDS:
            problems.append(f"seed {seed}: {time.process_time() - began:.1f} s")
        shutil.rmtree(own)
    return problems, refused


@pytest.mark.parametrize("num", [300, pytest.param(20_000, marks=pytest.mark.full)])
def test_mutated_files_do_no_harm(num, written, tmp_path):
    """Seeds 0 to ``num``: each ends within 2 seconds and 256 MB, in an error or in the right values."""
    problems, refused = [], 0
    for start in range(0, num, BATCH):
        work = Path(tmp_path, str(start))
        work.mkdir()
        outcome = run_limited(try_batch, written, work, range(start, min(start + BATCH, num)))
        assert outcome.error is None, (start, outcome)
        assert outcome.nbytes < MAX_NBYTES, (start, outcome)
        problems += outcome.value[0]
        refused += outcome.value[1]
    assert not problems, "\n".join(problems[:20])
    assert refused > num // 2
