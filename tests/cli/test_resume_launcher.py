"""Resuming a run under another launcher, and from an earlier step."""

import json
from dataclasses import asdict

import pytest

from fairshard.cli import train
from fairshard.cli.options import TrainOptions
from fairshard.cli.runs import chosen_options


@pytest.fixture
def run(tmp_path):
    """The folder of a run that `fairshard train --nproc 2 --max-restarts 3` has begun, with a checkpoint of step 2."""
    options = asdict(TrainOptions(nproc=2, max_restarts=3))
    (tmp_path / "config.json").write_text(json.dumps({"options": options}, default=str))
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    return tmp_path


def under_torchrun(monkeypatch, **more):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    values = dict(zip(names, ("0", "1", "0", "1"), strict=True), MASTER_ADDR="localhost", MASTER_PORT="1", **more)
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_torchrun_resumes_a_run_of_fairshard_train(run, monkeypatch):
    """The number of ranks and of restarts are those of the launcher, not of the run."""
    under_torchrun(monkeypatch)
    options = chosen_options({"out": run, "resume": True})
    assert (options.nproc, options.max_restarts) == (None, 0)


def test_a_run_with_restarts_can_go_back(run):
    """`--resume-from` leaves out the restarts that the run began with."""
    options = chosen_options({"out": run, "resume_from": 2})
    assert (options.resume_from, options.max_restarts) == (2, 0)


def test_a_run_that_goes_back_is_not_restarted_by_torchrun(run, monkeypatch, capsys):
    """A restart before the first save would continue from a checkpoint that the run went back from."""
    under_torchrun(monkeypatch, TORCHELASTIC_MAX_RESTARTS="1")
    assert train.main(["--resume-from", "2", "--out", str(run)]) == 2
    assert "torchrun --max-restarts continues from the newest checkpoint" in capsys.readouterr().err
