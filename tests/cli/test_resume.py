"""An interrupted run resumes at its last checkpoint with its own options."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import pytest

import fairshard
from fairshard.cli import loop
from fairshard.cli.log import RunLog
from fairshard.cli.main import main
from fairshard.cli.options import OptionError, TrainOptions
from fairshard.cli.ranks import Ranks
from fairshard.cli.runs import chosen_options, read_lines

COMMAND = [sys.executable, "-m", "fairshard.cli.main", "train"]
TINY = shlex.split("--nproc 2 --layers 2 --dim 16 --heads 2 --context 16 --batch-size 8 --eval-every 15")


@pytest.fixture
def run_folder(tmp_path):
    """The folder of a run of 40 steps that has not finished."""
    options = TrainOptions(nproc=2, steps=40, lr=0.02, data=tmp_path / "text", out=tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"options": asdict(options)}, default=str))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 5.0}\n')
    return tmp_path


def test_the_options_are_those_of_the_run(run_folder):
    """Flags that are not given keep the run's values; ranks, device, threads and saving may change."""
    options = chosen_options({"out": run_folder, "resume": True, "nproc": 3, "save_every": 7})
    assert (options.lr, options.steps, options.data) == (0.02, 40, run_folder / "text")
    assert (options.nproc, options.save_every, options.out, options.resume) == (3, 7, run_folder, True)


def test_what_would_make_another_run_is_refused(run_folder):
    """A learning rate that differs from the run's is refused by name; the same value is accepted."""
    with pytest.raises(OptionError, match=r"--lr is 0.02 in the run in .*: continue it with the same command"):
        chosen_options({"out": run_folder, "resume": True, "lr": 0.5})
    assert chosen_options({"out": run_folder, "resume": True, "lr": 0.02}).lr == 0.02


def test_the_same_command_continues_its_run(run_folder):
    """Without ``--resume`` the command must be the run's: an option that is left out is the default, and differs."""
    command = {"steps": 40, "lr": 0.02, "data": run_folder / "text", "out": run_folder, "nproc": 2}
    found = chosen_options(command)
    assert (found.resume, found.lr, found.out) == (True, 0.02, run_folder)
    assert chosen_options({**command, "steps": 50}).lr_steps == 40
    assert chosen_options({**command, "nproc": 1}).nproc == 1
    del command["lr"]
    with pytest.raises(OptionError, match=r"--lr is 0\.02 in the run"):
        chosen_options(command)


def test_a_run_that_has_finished_is_resumed_to_go_on_beyond(run_folder, capfd):
    """A finished run has a summary. It resumes with more steps, at its last rate, or from an earlier checkpoint."""
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "loss": 4.0}\n{"summary": {}}\n')
    for given in (["--resume"], ["--resume", "--steps", "40"]):
        assert main(["train", *given, "--out", str(run_folder)]) == 2
        assert "has finished: there is nothing to resume. Pass --steps above 40" in capfd.readouterr().err
    assert main(["train", "--resume", "--steps", "39", "--out", str(run_folder)]) == 2
    assert "--steps is 40 in the run" in capfd.readouterr().err
    assert chosen_options({"out": run_folder, "resume_from": 20}).resume_from == 20
    longer = chosen_options({"out": run_folder, "resume": True, "steps": 450})
    assert (longer.steps, longer.lr_steps, longer.warmup_steps) == (450, 40, 20)


def test_a_finished_run_that_has_lost_its_newest_checkpoint_is_not_called_finished(run_folder):
    """The ranks say which checkpoint is missing, and what to do."""
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "loss": 4.0}\n{"summary": {}}\n')
    checkpoints = run_folder / "checkpoints"
    (checkpoints / "step-00000040").mkdir(parents=True, exist_ok=True)
    (checkpoints / "latest").write_text("step-00000040\n")
    with pytest.raises(OptionError, match="has finished"):
        chosen_options({"out": run_folder, "resume": True})
    (checkpoints / "step-00000040").rmdir()
    assert chosen_options({"out": run_folder, "resume": True}).steps == 40


def test_a_config_that_is_no_dictionary_is_quoted(run_folder):
    """The error says what it holds."""
    (run_folder / "config.json").write_text("[1]")
    with pytest.raises(OptionError, match=r"config.json cannot be read: it holds \[1\]"):
        chosen_options({"out": run_folder, "resume": True})


def test_a_rank_waits_for_two_minutes_on_the_cpu(monkeypatch):
    """The timeout of the process group is 120 s on the CPU, not gloo's 30 minutes; `--timeout` is another."""
    seen = []
    monkeypatch.setattr(loop.dist, "init_process_group", lambda *args, **kwargs: seen.append(kwargs["timeout"]))
    for options in (TrainOptions(device="cpu", threads=1), TrainOptions(device="cpu", threads=1, timeout=7.5)):
        loop.join(options, Ranks(0, 1, 0, 1))
    assert seen == [timedelta(seconds=120), timedelta(seconds=7.5)]


def test_without_out_it_is_the_newest_run(run_folder, tmp_path, monkeypatch):
    """Without ``--out`` the newest run below ``runs/`` is resumed; if there are no runs, the error says so."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match="but runs/ here holds none"):
        chosen_options({"resume": True})
    for name, lr, begun in (("b", 0.1, 100), ("a", 0.2, 200)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"options": {"lr": lr}}))
        os.utime(folder / "config.json", (begun, begun))
    assert chosen_options({"resume": True}).lr == 0.2


@pytest.mark.parametrize("text", ["", "{", '{"options": {"lr": "x"}}', "[]"])
def test_a_damaged_config_is_named(run_folder, text, capfd):
    """A config that cannot be read is one line and exit code 2."""
    (run_folder / "config.json").write_text(text)
    assert main(["train", "--resume", "--out", str(run_folder)]) == 2
    assert "config.json cannot be read" in capfd.readouterr().err


def test_lines_after_the_checkpoint_are_dropped(tmp_path):
    """Lines after the checkpoint's step are dropped, and so is a line that was not completely written."""
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 0, "val_loss": 5.0}, *({"step": step, "loss": 4.0} for step in (1, 2, 3))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "lo')
    assert list(read_lines(path)) == lines
    config = {"options": asdict(TrainOptions()), "world_size": 1, "device": "cpu", "model": "GPT", "parameters": 7}
    RunLog(tmp_path, config, done=2).close()
    assert list(read_lines(path)) == lines[:3]
    RunLog(tmp_path, config).close()
    assert list(read_lines(path)) == list(read_lines(tmp_path / "none")) == []


@pytest.mark.parametrize(
    "bad", ["5", "[1]", '"summary"', "{}", '{"step": "1"}', '{"step": null}', "[" * 9999, "9" * 5000, "\0" * 99, "\xff"]
)
def test_a_damaged_line_of_the_log_is_left_out(tmp_path, bad):
    """What a power failure or an editor leaves in the log stops no run; the lines around it are kept."""
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 0, "val_loss": 5.0}, {"step": 1, "loss": 4.0}]
    path.write_bytes("\n".join([json.dumps(lines[0]), bad, json.dumps(lines[1]), ""]).encode("latin-1"))
    assert list(read_lines(path)) == lines


def _environment():
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, "PYTHONPATH": str(Path(fairshard.__file__).parents[1])}


def _train(*arguments):
    result = subprocess.run([*COMMAND, *arguments], env=_environment(), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def _folder_of(of_run):
    """The folder of the run of `unbroken`, beside its text."""
    return Path(of_run[of_run.index("--data") + 1]).parent


def _losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {(line["step"], kind): line[kind] for line in lines for kind in ("loss", "val_loss") if kind in line}


def _kill_session(leader):
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(process.name)) == leader:
                os.kill(int(process.name), signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def _ranks_of(launcher):
    """The processes that ``launcher`` has started, and their children."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == launcher and b"resource_tracker" not in (entry / "cmdline").read_bytes():
                found += [int(entry.name), *_ranks_of(int(entry.name))]
    return found


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The arguments of an uninterrupted run on two ranks, and its losses."""
    folder = tmp_path_factory.mktemp("unbroken")
    text = folder / "text"
    text.mkdir()
    (text / "long.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    (text / "short.txt").write_text("the lazy dog jumps over the quick brown fox\n" * 20)
    of_run = [*TINY, "--data", str(text), "--steps", "60", "--save-every", "10"]
    _train(*of_run, "--out", str(folder / "run"))
    return of_run, _losses(folder / "run")


@pytest.mark.parametrize("signalled", [pytest.param("first", marks=pytest.mark.full), "last"])
def test_a_rank_that_dies_is_started_again(tmp_path, unbroken, signalled):
    """With ``--max-restarts`` a run resumes its newest checkpoint by itself, and ends as an unbroken run does."""
    of_run, expected = unbroken
    broken = tmp_path / "broken"
    with subprocess.Popen(
        [*COMMAND, *of_run, "--out", str(broken), "--max-restarts", "1"],
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        while not (broken / "checkpoints" / "latest").exists() and process.poll() is None:
            time.sleep(0.01)
        ranks = sorted(_ranks_of(process.pid))
        os.kill(ranks[0 if signalled == "first" else -1], signal.SIGKILL)
        printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0, printed
    assert "resumed after step" in printed
    assert _losses(broken) == expected


@pytest.mark.full
def test_a_killed_run_ends_as_if_it_had_not_been(tmp_path, unbroken):
    """After all processes were killed, the resumed run has every loss of the unbroken run, to the bit."""
    of_run, expected = unbroken
    broken = tmp_path / "broken"
    with subprocess.Popen(
        [*COMMAND, *of_run, "--out", str(broken)],
        env=_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        while not (broken / "checkpoints" / "latest").exists() and process.poll() is None:
            time.sleep(0.01)
        _kill_session(process.pid)
    assert len(_losses(broken)) < len(expected)
    assert "resumed after step" in _train("--resume", "--out", str(broken))
    assert _losses(broken) == expected


def _last_line(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}") and "summary" not in line), default=0)


def _stop(of_run, folder, number, send):
    """Start the run, ``send`` it the signal at about step 15, and return its exit code and its output."""
    process = subprocess.Popen(
        [*COMMAND, *of_run, "--out", str(folder), "--max-restarts", "1", "--signal", "USR1"],
        env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    with process:
        while _last_line(folder) < 15 and process.poll() is None:
            time.sleep(0.002)
        ranks = sorted(_ranks_of(process.pid))
        os.kill({"launcher": process.pid, "rank": ranks[-1]}[send], number)
        printed, _ = process.communicate(timeout=120)
    return process.returncode, printed


@pytest.mark.parametrize(
    ("number", "send"),
    [
        (signal.SIGTERM, "rank"),
        pytest.param(signal.SIGTERM, "launcher", marks=pytest.mark.full),
        pytest.param(signal.SIGUSR1, "launcher", marks=pytest.mark.full),
        pytest.param(signal.SIGUSR1, "rank", marks=pytest.mark.full),
    ],
)
def test_a_signal_stops_a_run_that_then_goes_on_beyond(tmp_path, unbroken, number, send):
    """Status 75 with the last step saved, not restarted; resumed with more steps, it has every loss of the others."""
    of_run, expected = unbroken
    folder = tmp_path / "stopped"
    code, printed = _stop(of_run, folder, number, send)
    assert code == 75, printed
    last = _last_line(folder)
    assert 15 <= last < 60
    assert (folder / "checkpoints" / "latest").read_text() == f"step-{last:08}\n"
    assert re.search(rf"stopped by .* after step {last}, which is saved. To continue: --resume --out", printed)
    assert "resumed after step" not in printed
    assert f"resumed after step {last}" in _train("--resume", "--steps", "63", "--out", str(folder))
    found = _losses(folder)
    assert {step for step, kind in found if kind == "loss"} == set(range(1, 64))
    assert {key: found[key] for key in expected} == expected
    rates = {line["step"]: line["lr"] for line in map(json.loads, (folder / "metrics.jsonl").open()) if "lr" in line}
    assert rates[63] == rates[60] < rates[59]


@pytest.mark.full
@pytest.mark.parametrize("send", ["launcher", "rank"])
def test_under_torchrun_a_signal_saves_the_step(tmp_path, unbroken, send):
    """torchrun passes SIGTERM on and returns 1. It reports the ranks' 75 if only one of them was signalled."""
    of_run, expected = unbroken
    folder = tmp_path / "stopped"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "fairshard.cli.train"]
    with subprocess.Popen(
        [*torchrun, *of_run[of_run.index("--layers") :], "--out", str(folder)],
        env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        while _last_line(folder) < 15 and process.poll() is None:
            time.sleep(0.002)
        ranks = sorted(_ranks_of(process.pid))
        os.kill({"launcher": process.pid, "rank": ranks[-1]}[send], signal.SIGTERM)
        printed, _ = process.communicate(timeout=120)
    assert process.returncode == 1, printed
    last = _last_line(folder)
    assert (folder / "checkpoints" / "latest").read_text() == f"step-{last:08}\n"
    assert re.search(rf"stopped by .* after step {last}, which is saved", printed)
    assert ("exitcode  : 75" in printed) == (send == "rank")
    assert f"resumed after step {last}" in _train("--resume", "--out", str(folder))
    assert _losses(folder) == expected


@pytest.mark.full
def test_more_steps_are_those_of_a_longer_run(tmp_path, unbroken):
    """A finished run that goes on has the losses of a run that was as long from the start, with the same schedule."""
    of_run, _ = unbroken
    longer, again = tmp_path / "longer", tmp_path / "again"
    at = of_run.index("--steps")
    _train(*of_run[:at], "--steps", "75", "--lr-steps", "60", *of_run[at + 2 :], "--out", str(longer))
    shutil.copytree(_folder_of(of_run) / "run", again)
    _train("--resume", "--steps", "75", "--out", str(again))
    assert _losses(again) == _losses(longer)


@pytest.mark.full
def test_a_stopped_rank_is_named_in_time_and_the_ranks_are_restarted(tmp_path, unbroken):
    """A rank that SIGSTOP stops is named within `--timeout` and a few seconds; the restarted run ends as the others."""
    of_run, expected = unbroken
    folder = tmp_path / "hung"
    with subprocess.Popen(
        [*COMMAND, *of_run, "--out", str(folder), "--max-restarts", "1", "--timeout", "4"],
        env=_environment(), stdout=(tmp_path / "out").open("w"), stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        while not (folder / "checkpoints" / "latest").exists() and process.poll() is None:
            time.sleep(0.01)
        os.kill(sorted(_ranks_of(process.pid))[-1], signal.SIGSTOP)
        stopped_at, named_after, printed = time.monotonic(), None, []
        for line in process.stderr:
            printed.append(line)
            if named_after is None and "rank 1: silent: its process has ended or is stopped" in line:
                named_after = time.monotonic() - stopped_at
    assert process.returncode == 0, "".join(printed)
    assert named_after is not None, "".join(printed)
    assert named_after < 4 + 10
    assert any("resumed after step" in line for line in (tmp_path / "out").open())
    assert _losses(folder) == expected


@pytest.mark.full
def test_a_run_goes_back_to_an_earlier_step_on_fewer_ranks(tmp_path, unbroken):
    """``--resume-from`` with another ``--nproc`` drops the later lines and computes them again, closely the same."""
    of_run, expected = unbroken
    again = tmp_path / "again"
    shutil.copytree(_folder_of(of_run) / "run", again)
    # On one rank instead of two, gradients are summed in another order: fp32's last bits, over ten steps.
    _train("--resume-from", "50", "--out", str(again), "--nproc", "1")
    assert _losses(again) == pytest.approx(expected, rel=1e-4)
    assert _losses(again) != expected


@pytest.mark.full
def test_every_model_engine_and_data_stops_restarts_and_resumes(tmp_path):
    """`fully_shard`, a factory and token files: killed once, then stopped by SIGTERM, a run has the unbroken losses."""
    words = b"the quick brown fox jumps over the lazy dog\n" * 100
    (tmp_path / "ids.bin").write_bytes(b"".join(bytes([letter, 0]) for letter in words))
    parts = f"--tokens {tmp_path}/ids.bin --factory tests.cli.own_models:with_loss --engine fully_shard"
    of_run = shlex.split(f"{parts} --nproc 2 --context 16 --batch-size 8 --eval-every 15 --steps 60 --save-every 10")
    _train(*of_run, "--out", str(tmp_path / "whole"))
    expected = _losses(tmp_path / "whole")
    test_a_rank_that_dies_is_started_again(tmp_path, (of_run, expected), "last")
    code, printed = _stop(of_run, tmp_path / "stopped", signal.SIGTERM, "launcher")
    assert code == 75, printed
    assert "resumed after step" in _train("--resume", "--out", str(tmp_path / "stopped"))
    assert _losses(tmp_path / "stopped") == expected
