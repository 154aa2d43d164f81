"""``fairshard train`` as its users run it, in its own processes."""

import contextlib
import json
import os
import re
import signal
import subprocess
from dataclasses import fields

import pytest

from fairshard.cli.log import StepMetrics, Summary
from tests.cli.processes import COMMAND, TORCHRUN, lines_of, run, started

STEPS, BATCH, CONTEXT = 30, 8, 16
TINY = f"--layers 2 --dim 16 --heads 2 --context {CONTEXT} --batch-size {BATCH} --steps {STEPS} --lr 2e-2".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two files of text that is easy to learn."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "long.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    (folder / "short.txt").write_text("the lazy dog jumps over the quick brown fox\n" * 20)
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data):
    """A finished run on two ranks: its result and its folder, which it named itself."""
    cwd = tmp_path_factory.mktemp("work")
    result = run([*COMMAND, *TINY, "--nproc", "2", "--eval-every", "20", "--trace", "5", "--data", data], cwd)
    assert result.returncode == 0, result.stderr
    (folder,) = (cwd / "runs").iterdir()
    return result, folder


def test_each_step_is_a_line_with_all_its_fields(finished):
    """Each step has one line, in order, with exactly the fields of ``StepMetrics``; tokens add up."""
    steps = [line for line in lines_of(finished[1]) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    for line in steps:
        assert list(line) == [field.name for field in fields(StepMetrics)]
        assert line["tokens"] == line["step"] * BATCH * CONTEXT
        assert len(line["mem_bytes"]) == 2
        assert line["collectives"] > 0


def test_the_loss_goes_down(finished):
    """Thirty steps on two sentences: the validation loss falls from ln 256 = 5.5 by two nats at least."""
    validations = {line["step"]: line["val_loss"] for line in lines_of(finished[1]) if "val_loss" in line}
    assert list(validations) == [0, 20, STEPS]
    assert 5 < validations[0] < 6
    assert validations[STEPS] < validations[0] - 2


def test_the_last_line_is_the_summary_of_the_others(finished):
    """The summary has the last validation loss and the peak of each rank."""
    *lines, last = lines_of(finished[1])
    assert list(last["summary"]) == [field.name for field in fields(Summary)]
    assert last["summary"]["val_loss"] == lines[-1]["val_loss"]
    assert len(last["summary"]["peak_bytes"]) == 2


def test_config_holds_every_option_and_version(finished, data):
    """The config holds every option of the run, defaults included, and the versions that computed it."""
    config = json.loads((finished[1] / "config.json").read_text())
    assert config["options"]["context"] == CONTEXT
    assert config["options"]["data"] == str(data)
    assert config["options"]["clip"] == 1.0
    assert config["world_size"] == 2
    assert config["data"]["train_tokens"] == 100 * 44
    assert {"fairshard", "torch", "numpy", "python"} <= set(config["versions"])


def test_the_trace_shows_one_step_of_both_ranks(finished):
    """Each rank has its lanes: forward and backward of every unit, gathers, one or more reductions, the optimizer."""
    assert (finished[1] / "trace.png").read_bytes().startswith(b"\x89PNG")
    entries = json.loads((finished[1] / "trace.json").read_text())["traceEvents"]
    for rank in (0, 1):
        names = {entry["name"] for entry in entries if entry["pid"] == rank and entry["ph"] == "X"}
        units = ("root", "blocks.0", "blocks.1")
        expected = {f"{kind} {unit}" for kind in ("forward", "backward", "gather") for unit in units}
        assert expected | {"optimizer step"} <= names
        assert any(name.startswith("reduce ") for name in names)
    step = next(line for line in lines_of(finished[1]) if line["step"] == 5)
    spans = [(entry["ts"], entry["ts"] + entry["dur"]) for entry in entries if entry["ph"] == "X"]
    assert all(0 <= start <= end <= 1e6 * (step["step_s"] + 1) for start, end in spans)


def test_the_terminal_shows_units_progress_and_summary(finished):
    """A user sees the table of units, the progress and the summary on stdout, and nothing on stderr."""
    result, folder = finished
    assert (folder / "run.png").read_bytes().startswith(b"\x89PNG")
    for words in (
        "world size 2 on cpu over gloo",
        "(root)",
        "blocks.1",
        "validation loss",
        "peak memory",
        f"runs/{folder.name}",
    ):
        assert words in result.stdout
    assert result.stderr == ""


def test_a_failure_in_training_is_exit_1_and_one_line(tmp_path, data):
    """A learning rate that blows up stops both ranks at the same step, with one line and no traceback."""
    result = run([*COMMAND, *TINY, "--nproc", "2", "--data", data, "--lr", "1e30", "--warmup", "0"], tmp_path)
    assert result.returncode == 1
    words = r"fairshard train: error: rank [01]: TrainingStopped: the loss is nan on rank 0, nan on rank 1 at step "
    assert re.match(words, result.stderr)
    assert result.stderr.count("\n") == 1


@pytest.mark.full
def test_ctrl_c_ends_all_ranks_with_exit_130(tmp_path, data):
    """SIGINT to the whole group, as a terminal sends it, gives exit code 130, one message, no traceback, no orphan."""
    command = [*COMMAND, *TINY, "--nproc", "2", "--data", data, "--steps", "100000", "--eval-every", "5"]
    process = started(command, tmp_path, stderr=subprocess.PIPE, start_new_session=True)
    try:
        assert any("validation loss" in line for line in process.stdout)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert err == "fairshard train: stopped by SIGINT.\n"


@pytest.mark.full
def test_torchrun_trains_as_the_command_does(finished, tmp_path, data):
    """The same options give the same losses under torchrun, and the files are written to ``--out``."""
    out = tmp_path / "deep" / "out"
    result = run([*TORCHRUN, *TINY, "--eval-every", "20", "--data", data, "--out", out], tmp_path)
    assert result.returncode == 0, result.stderr
    losses = [[line["loss"] for line in lines_of(folder) if "loss" in line] for folder in (out, finished[1])]
    assert losses[0] == losses[1]
