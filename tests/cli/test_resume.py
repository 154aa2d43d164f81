"""An interrupted run resumes at its last checkpoint with its own options."""

import json
import os
import re
import shlex
import shutil
import signal
import time
from dataclasses import asdict
from datetime import timedelta

import pytest

from fairshard.cli import loop
from fairshard.cli.log import RunLog
from fairshard.cli.main import main
from fairshard.cli.options import OptionError, TrainOptions
from fairshard.cli.ranks import Ranks
from fairshard.cli.runs import chosen_options, read_lines
from tests.cli.processes import COMMAND, TORCHRUN, lines_of, losses_of, processes_of, run, started, train

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


def test_a_command_is_that_of_its_run_or_refused(run_folder):
    """With ``--resume`` given options, without it all of them, must be the run's; steps and ranks may differ."""
    command = {"steps": 40, "lr": 0.02, "data": run_folder / "text", "out": run_folder, "nproc": 2}
    found = chosen_options(command)
    assert (found.resume, found.lr, found.out) == (True, 0.02, run_folder)
    assert chosen_options({**command, "steps": 50}).lr_steps == 40
    assert chosen_options({**command, "nproc": 1}).nproc == 1
    del command["lr"]
    for other in (command, {"out": run_folder, "resume": True, "lr": 0.5}):
        with pytest.raises(OptionError, match=r"--lr is 0.02 in the run in .*: continue it with the same command"):
            chosen_options(other)


def test_going_back_leaves_out_the_restarts_of_the_run(run_folder, monkeypatch, capsys):
    """A restart before the first save would continue from a checkpoint that the run went back from."""
    options = asdict(TrainOptions(nproc=2, max_restarts=3))
    (run_folder / "config.json").write_text(json.dumps({"options": options}, default=str))
    assert chosen_options({"out": run_folder, "resume_from": 2}).max_restarts == 0
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS")
    for name, value in zip(names, "01011", strict=True):
        monkeypatch.setenv(name, value)
    assert main(["train", "--resume-from", "2", "--out", str(run_folder)]) == 2
    assert "torchrun --max-restarts continues from the newest checkpoint" in capsys.readouterr().err


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


@pytest.mark.parametrize("text", ["", "{", '{"options": {"lr": "x"}}', "[1]"])
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


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The arguments of an uninterrupted run on two ranks, its losses and its folder."""
    folder = tmp_path_factory.mktemp("unbroken")
    text = folder / "text"
    text.mkdir()
    (text / "long.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    (text / "short.txt").write_text("the lazy dog jumps over the quick brown fox\n" * 20)
    of_run = [*TINY, "--data", str(text), "--steps", "60", "--save-every", "10"]
    train(*of_run, "--out", folder / "run")
    return of_run, losses_of(folder / "run"), folder / "run"


def interrupted(of_run, folder, number, victim, *more):
    """Start a run, and send ``number`` to a process of it once a checkpoint is there; what is left of it."""
    process = started([*COMMAND, *of_run, "--out", folder, *more])
    while not (folder / "checkpoints" / "latest").exists() and process.poll() is None:
        time.sleep(0.01)
    own = [process.pid, *sorted(processes_of(process.pid))]
    for pid in own if victim == "all" else [own[{"launcher": 0, "first": 1, "last": -1}[victim]]]:
        os.kill(pid, number)
    return process


@pytest.mark.parametrize("victim", [pytest.param("first", marks=pytest.mark.full), "last"])
def test_a_rank_that_dies_is_started_again(tmp_path, unbroken, victim):
    """With ``--max-restarts`` a run resumes its newest checkpoint by itself, and ends as an unbroken run does."""
    of_run, expected, _ = unbroken
    with interrupted(of_run, tmp_path / "broken", signal.SIGKILL, victim, "--max-restarts", "1") as process:
        printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0, printed
    assert "resumed after step" in printed
    assert losses_of(tmp_path / "broken") == expected


@pytest.mark.full
def test_a_killed_run_ends_as_if_it_had_not_been(tmp_path, unbroken):
    """After all processes were killed, the resumed run has every loss of the unbroken run, to the bit."""
    of_run, expected, _ = unbroken
    broken = tmp_path / "broken"
    with interrupted(of_run, broken, signal.SIGKILL, "all"):
        pass
    assert len(losses_of(broken)) < len(expected)
    assert "resumed after step" in train("--resume", "--out", broken)
    assert losses_of(broken) == expected


def last_step(folder):
    return max((line["step"] for line in lines_of(folder) if "step" in line), default=0)


def stop(command, folder, number, send):
    """Start the run, ``send`` it the signal at about step 15; returns its exit code, its output, and its last step."""
    with started([*command, "--out", folder]) as process:
        while last_step(folder) < 15 and process.poll() is None:
            time.sleep(0.002)
        ranks = sorted(processes_of(process.pid))
        os.kill({"launcher": process.pid, "rank": ranks[-1]}[send], number)
        printed, _ = process.communicate(timeout=120)
    last = last_step(folder)
    assert (folder / "checkpoints" / "latest").read_text() == f"step-{last:08}\n"
    assert re.search(rf"stopped by .* after step {last}, which is saved. To continue: --resume --out", printed)
    return process.returncode, printed, last


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
    of_run, expected, _ = unbroken
    folder = tmp_path / "stopped"
    code, printed, last = stop([*COMMAND, *of_run, "--max-restarts", "1", "--signal", "USR1"], folder, number, send)
    assert code == 75, printed
    assert 15 <= last < 60
    assert "resumed after step" not in printed
    assert f"resumed after step {last}" in train("--resume", "--steps", "63", "--out", folder)
    found = losses_of(folder)
    assert {step for step, kind in found if kind == "loss"} == set(range(1, 64))
    assert {key: found[key] for key in expected} == expected
    rates = {line["step"]: line["lr"] for line in lines_of(folder) if "lr" in line}
    assert rates[63] == rates[60] < rates[59]


@pytest.mark.full
@pytest.mark.parametrize("send", ["launcher", "rank"])
def test_under_torchrun_a_signal_saves_the_step(tmp_path, unbroken, send):
    """torchrun passes SIGTERM on and returns 1. It reports the ranks' 75 if only one of them was signalled.

    ``fairshard train --resume`` goes on with the run, and torchrun with one of ``fairshard train``.
    """
    of_run, expected, _ = unbroken
    folder = tmp_path / "stopped"
    code, printed, last = stop([*TORCHRUN, *of_run[of_run.index("--layers") :]], folder, signal.SIGTERM, send)
    assert code == 1, printed
    assert ("exitcode  : 75" in printed) == (send == "rank")
    assert f"resumed after step {last}" in train("--resume", "--out", folder)
    assert losses_of(folder) == expected
    finished = run([*TORCHRUN, "--resume", "--steps", "61", "--out", str(folder)])
    assert finished.returncode == 0, finished.stderr
    assert last_step(folder) == 61


@pytest.mark.full
def test_more_steps_are_those_of_a_longer_run(tmp_path, unbroken):
    """A finished run that goes on has the losses of a run that was as long from the start, with the same schedule."""
    of_run, _, finished = unbroken
    longer, again = tmp_path / "longer", tmp_path / "again"
    at = of_run.index("--steps")
    train(*of_run[:at], "--steps", "75", "--lr-steps", "60", *of_run[at + 2 :], "--out", longer)
    shutil.copytree(finished, again)
    train("--resume", "--steps", "75", "--out", again)
    assert losses_of(again) == losses_of(longer)


@pytest.mark.full
def test_a_stopped_rank_is_named_in_time_and_the_ranks_are_restarted(tmp_path, unbroken):
    """A rank that SIGSTOP stops is named within `--timeout` and a few seconds; the restarted run ends as the others."""
    of_run, expected, _ = unbroken
    folder, named_after, printed = tmp_path / "hung", None, []
    with interrupted(of_run, folder, signal.SIGSTOP, "last", "--max-restarts", "1", "--timeout", "4") as process:
        stopped_at = time.monotonic()
        for line in process.stdout:
            printed.append(line)
            if named_after is None and "rank 1: silent: its process has ended or is stopped" in line:
                named_after = time.monotonic() - stopped_at
    assert process.returncode == 0, "".join(printed)
    assert named_after is not None, "".join(printed)
    assert named_after < 4 + 10
    assert any("resumed after step" in line for line in printed)
    assert losses_of(folder) == expected


@pytest.mark.full
def test_a_run_goes_back_to_an_earlier_step_on_fewer_ranks(tmp_path, unbroken):
    """``--resume-from`` with another ``--nproc`` drops the later lines and computes them again, closely the same."""
    _, expected, finished = unbroken
    again = tmp_path / "again"
    shutil.copytree(finished, again)
    # On one rank instead of two, gradients are summed in another order: fp32's last bits, over ten steps.
    train("--resume-from", "50", "--out", again, "--nproc", "1")
    assert losses_of(again) == pytest.approx(expected, rel=1e-4)
    assert losses_of(again) != expected


@pytest.mark.full
def test_every_model_engine_and_data_stops_restarts_and_resumes(tmp_path):
    """`fully_shard`, a factory and token files: killed once, then stopped by SIGTERM, a run has the unbroken losses."""
    words = b"the quick brown fox jumps over the lazy dog\n" * 100
    (tmp_path / "ids.bin").write_bytes(b"".join(bytes([letter, 0]) for letter in words))
    parts = f"--tokens {tmp_path}/ids.bin --factory tests.cli.own_models:with_loss --engine fully_shard"
    of_run = shlex.split(f"{parts} --nproc 2 --context 16 --batch-size 8 --eval-every 15 --steps 60 --save-every 10")
    train(*of_run, "--out", tmp_path / "whole")
    expected = losses_of(tmp_path / "whole")
    test_a_rank_that_dies_is_started_again(tmp_path, (of_run, expected, None), "last")
    code, printed, _ = stop([*COMMAND, *of_run], tmp_path / "stopped", signal.SIGTERM, "launcher")
    assert code == 75, printed
    assert "resumed after step" in train("--resume", "--out", tmp_path / "stopped")
    assert losses_of(tmp_path / "stopped") == expected
