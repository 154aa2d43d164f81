"""``--log``: what stand-ins of the packages are told."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from fairshard.cli.log import RunLog, StepMetrics

CONFIG = {
    "options": {
        **{"steps": 2, "engine": "wrapper", "precision": "fp32", "optimizer": "adamw", "lr": 0.1, "batch_size": 4},
        **{"accumulate": 1, "cpu_offload": False, "move_grads_to_cpu": None},
    },
    **{"world_size": 2, "device": "cpu", "model": "GPT", "parameters": 7},
}
STEP = StepMetrics(1, 2.0, 0.1, None, 64, 128.0, 0.5, (1, 2), 3, 4000)
SENT = {
    **{"train/loss": 2.0, "train/learning_rate": 0.1, "train/tokens": 64, "train/tokens_per_s": 128.0},
    **{"train/step_s": 0.5, "communication/collectives": 3, "communication/bytes": 4000},
    **{"memory/rank_0": 1, "memory/rank_1": 2},
}


def run(folder, name, done=0):
    """Log a validation and a step through ``--log name``."""
    log = RunLog(folder, {**CONFIG, "options": {**CONFIG["options"], "log": name}}, done)
    log.validation(0, 1.0)
    log.step(STEP)
    log.close()


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_packages_with_one_run_at_a_time(name, tmp_path, monkeypatch):
    """The run has the name of its folder and continues on resume; every value has its step; it is finished."""
    told = []
    package = ModuleType(name)
    package.init = lambda **arguments: told.append(arguments)
    package.log = lambda values, step: told.append((step, values))
    package.finish = lambda: told.append("finished")
    monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setenv(f"{name.upper()}_PROJECT", "mine")
    run(tmp_path, name)
    begun, validated, stepped, finished = told
    assert (begun["project"], begun["name"], begun["resume"]) == ("mine", tmp_path.name, "allow")
    assert begun["config"]["model"] == "GPT"
    assert begun.get("id") == (tmp_path.name if name == "wandb" else None)
    assert validated == (0, {"validation/loss": 1.0, "validation/bits_per_byte": pytest.approx(1.442695)})
    assert stepped == (1, SENT)
    assert finished == "finished"


def test_tensorboard(tmp_path, monkeypatch):
    """One scalar for each value, in a folder of the run; a resumed run removes what it had after its checkpoint."""
    told = []

    class Writer:
        def __init__(self, folder, purge_step):
            told.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            told.append((name, value, step))

        def add_text(self, name, text):
            told.append(name)

        def close(self):
            told.append("closed")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    run(tmp_path, "tensorboard")
    assert told[:2] == [(str(tmp_path / "tensorboard"), None), "config"]
    assert dict(told[4:-1] and [(name, value) for name, value, _ in told[4:-1]]) == SENT
    assert told[-1] == "closed"
    told.clear()
    run(tmp_path, "tensorboard", done=5)
    assert told[:1] == [(str(tmp_path / "tensorboard"), 6)]
