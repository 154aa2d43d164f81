"""The files and messages of a run, without any rank."""

import errno
import json
import math
import os
import re
import sys
import time
from dataclasses import asdict, replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from fairshard.cli import launch, rank
from fairshard.cli.failure import Failure, first_failure, record_failure
from fairshard.cli.metrics import MetricsFile, StepMetrics, StepTotals, make_run_folder, write_config
from fairshard.cli.options import TrainOptions
from fairshard.cli.progress import Progress, summary_lines
from fairshard.cli.ranks import Ranks
from fairshard.cli.run_log import RunLog, run_title
from fairshard.cli.run_picture import draw_run, smoothed
from fairshard.errors import CheckpointError
from fairshard.planning.summary import StateBytes
from fairshard.utils.size_text import size_text

PNG = b"\x89PNG\r\n\x1a\n"


def _metrics(step, seconds=0.5, collectives=10):
    return StepMetrics(
        step=step,
        loss=2.0,
        lr=0.1,
        grad_norm=None if step == 2 else 1.0,
        tokens=step * 100,
        tokens_per_s=100 / seconds,
        step_s=seconds,
        mem_bytes=(1, 2),
        collectives=collectives,
        comm_bytes=collectives * 1000,
        state_bytes=(3, 4),
    )


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path, monkeypatch):
    """Three runs within one second: no clash, the same time in all three names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "gmtime", lambda: time.struct_time((2026, 1, 2, 3, 4, 5, 0, 2, 0)))
    names = [make_run_folder(None).as_posix() for _ in range(3)]
    assert names == ["runs/20260102T030405Z", "runs/20260102T030405Z-2", "runs/20260102T030405Z-3"]


def test_a_config_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    """A full disk, or a kill while it is written, leaves no half of a config, with which a run could not be resumed."""
    path = tmp_path / "config.json"

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_config(path, {"options": {}})
    assert not list(tmp_path.iterdir())
    write_config(path, {"options": {}})
    with pytest.raises(FileExistsError):
        write_config(path, {"options": {}})


@pytest.mark.parametrize("first", [3, 4])
def test_a_run_whose_log_is_lost_ends_all_the_same(tmp_path, monkeypatch, capfd, first):
    """Resumed after step 2 with damaged lines, the run sums up what is left, or says that it cannot."""
    lines = [{"step": 0, "val_loss": "x"}, {**asdict(_metrics(1)), "loss": "x"}, {"step": 2, "loss": 3.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = asdict(TrainOptions(steps=3))
    config = {"options": options, "world_size": 2, "device": "cpu", "model": "m", "parameters": 1}
    with RunLog(tmp_path, config, done=2) as log:
        for step in range(first, 4):
            log.step(_metrics(step))
            log.validation(step, 2.0)
        log.finish((1, 2), StateBytes(1, 2, 3), 0.0)
    written = capfd.readouterr().out
    assert ("from 2.000 at the start" in written) == (first == 3)
    assert ("metrics.jsonl has lost the steps of this run" in written) == (first == 4)


def test_the_summary_is_taken_over_all_steps():
    """Tokens per second are all tokens over all seconds, not a mean of rates; counts are means over the steps."""
    totals = StepTotals()
    for step in (_metrics(1, seconds=4.0, collectives=12), _metrics(2, seconds=1.0), _metrics(3, seconds=1.0)):
        totals.add(step)
    summary = totals.summary(1.5, (7, 8), StateBytes(1, 2, 3), copy_wait_s=0.6)
    assert summary.tokens_per_s == 300 / 6.0
    assert summary.collectives_per_step == (12 + 10 + 10) / 3
    assert summary.bytes_per_step == 1000 * (12 + 10 + 10) / 3
    assert (summary.val_loss, summary.peak_bytes) == (1.5, (7, 8))
    assert (summary.device_bytes, summary.pinned_bytes, summary.pageable_bytes) == (1, 2, 3)
    assert summary.copy_wait_s == 0.6 / 3


def test_every_line_of_metrics_is_json_on_disk_at_once(tmp_path):
    """Each line can be read while the run goes on; an overflowed norm is null, because JSON has no infinity."""
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.step(_metrics(1))
        file.step(_metrics(2))
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        with pytest.raises(ValueError, match="JSON compliant"):
            file.validation(2, math.inf)
    assert [entry["grad_norm"] for entry in entries] == [1.0, None]
    with pytest.raises(FileExistsError):
        MetricsFile(path)


def test_sizes_are_read_in_powers_of_a_thousand():
    """Three digits and a unit, which changes before four digits are needed."""
    shown = [size_text(nbytes) for nbytes in (0, 999, 1000, 999_499, 999_500, 1_234_567, 5e9)]
    assert shown == ["0 B", "999 B", "1 kB", "999 kB", "1 MB", "1.23 MB", "5 GB"]


def test_without_a_terminal_progress_is_some_twenty_lines(capsys):
    """In a pipe 1000 steps give 20 lines, each with loss, tokens/s and the memory of each rank; no control codes."""
    with Progress(1000) as progress:
        for step in range(1, 1001):
            progress.step(_metrics(step))
        progress.validation(1000, 1.25)
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == 20
    text = "step   50/1000  loss 2.000, 200 tokens/s, memory 1 B | 2 B, of it state 3 B | 4 B, "
    assert re.fullmatch(re.escape(text) + r"\d+ s, \d+ s left", lines[0])
    assert lines[-1].endswith(" s, 0 s left")
    assert last == "step 1000/1000  validation loss 1.250"
    assert not any(mark in "".join(lines) for mark in "\r\x1b")


def test_a_damaged_checkpoint_needs_no_traceback(tmp_path, monkeypatch):
    """What is wrong with a checkpoint is told in a line; other errors have their traceback."""
    path = tmp_path / "0" / "error.json"
    path.parent.mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setattr(rank, "_NOTICE_S", 0)
    monkeypatch.setattr(rank.signal, "signal", lambda *_: None)
    monkeypatch.setattr(rank, "on_preemption", lambda *_, **__: SimpleNamespace())
    monkeypatch.setattr(rank, "_leave", sys.exit)
    for error, shown in ((CheckpointError("damaged"), ""), (RuntimeError("bug"), "Traceback")):
        monkeypatch.setattr(rank, "join", Mock(side_effect=error))
        with pytest.raises(SystemExit, match="1"):
            rank.train_rank(TrainOptions(), Ranks(0, 2, 0, 2), None, quiet=True)
        assert first_failure([path]).trace[:9] == shown


@pytest.mark.parametrize("num_steps", [1, 49, 50, 500])
def test_smoothing_takes_the_mean_of_the_neighbours(num_steps):
    """Each value is the mean of as many neighbours on both sides, so it begins and ends where the losses do."""
    losses = [math.sin(step) for step in range(num_steps)]
    reaches = [min(step, num_steps - 1 - step, num_steps // 50) for step in range(num_steps)]
    near = [losses[step - reach : step + reach + 1] for step, reach in enumerate(reaches)]
    means = smoothed(losses)
    assert means == pytest.approx([sum(values) / len(values) for values in near])
    assert (means[0], means[-1]) == pytest.approx((losses[0], losses[-1]))


@pytest.mark.parametrize("num_steps", [1, 50])
def test_the_run_is_a_png(num_steps, tmp_path):
    """The picture is a PNG, even for a run of a single step, or of a resumed one without sizes of state."""
    totals = StepTotals()
    for step in range(1, num_steps + 1):
        totals.add(replace(_metrics(step), state_bytes=(3, 4) if step % 2 else ()))
    summary = totals.summary(5.0, (7, 8), StateBytes(1, 2, 3), copy_wait_s=0.6)
    draw_run(tmp_path / "run.png", ("model", "settings " * 40), totals, {0: 5.5, 1: 5.0}, summary)
    assert (tmp_path / "run.png").read_bytes().startswith(PNG)


def test_a_long_run_keeps_some_steps_for_its_picture():
    """Of 5,000 steps at most 2,000 are kept, evenly spaced from the first; every loss is."""
    totals = StepTotals()
    for step in range(1, 5001):
        totals.add(_metrics(step))
    kept = [step.step for step in totals.shown]
    assert kept == list(range(1, 5001, 4))
    assert len(totals.losses) == 5000


@pytest.mark.parametrize(
    ("units", "words"),
    [((1.0,), "2.000 nats per byte (2.885 bits per byte)"), ((4.0,), "2.000 nats per token (0.721 bits per byte)"),
     ((None,), "2.000 nats per token"), ((1.0, True), "2.000"), ((None, True), "2.000")],
)  # fmt: skip
def test_a_loss_is_in_bits_per_byte_where_bytes_are_known(units, words):
    """2 nats are 2 / ln 2 = 2.885 bits, over the bytes of a token; a loss of the user's own has no units."""
    totals = StepTotals()
    totals.add(_metrics(1))
    summary = totals.summary(2.0, (7, 8), StateBytes(1, 2, 3), 0.0, *units)
    assert summary_lines(summary, 5.5)[0].split("  ")[1] == f"{words}, from 5.500 at the start"


def test_the_title_has_model_and_settings():
    """Two lines: what was trained, and how."""
    options = asdict(TrainOptions(accumulate=2, cpu_offload=True))
    config = {"options": options, "world_size": 2, "device": "cpu", "model": "GPT", "parameters": 1234}
    assert run_title(config) == (
        "GPT: 1,234 parameters",
        "2 ranks on cpu, wrapper, fp32, adamw, cpu-offload, learning rate 0.004, batch 32 in 2 passes",
    )


def _record(monkeypatch, folder, rank, error, expected=False):
    (folder / str(rank)).mkdir()
    path = folder / str(rank) / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    try:
        raise error
    except RuntimeError as caught:
        record_failure(caught, rank, expected)
    return ProcessFailure(local_rank=rank, pid=1, exitcode=1, error_file=str(path))


def test_the_first_failure_is_told_and_not_what_followed_from_it(tmp_path, monkeypatch, capfd):
    """Rank 1 fails, rank 0 then loses its peer, both within one second: rank 1's error and traceback are shown."""
    _record(monkeypatch, tmp_path, 1, RuntimeError("no space left"))
    follower = _record(monkeypatch, tmp_path, 0, RuntimeError("connection closed by peer"))
    assert launch._report(ChildFailedError("train", {0: follower}), tmp_path) == 1
    err = capfd.readouterr().err
    assert err.splitlines()[0] == "Traceback (most recent call last):"
    assert err.splitlines()[-1] == "fairshard train: error: rank 1 failed: RuntimeError: no space left"
    assert "peer" not in err


def test_a_failure_that_all_ranks_agreed_on_is_one_line(tmp_path, monkeypatch, capfd):
    """An error that training itself found is shown without a rank or a traceback."""
    failures = {rank: _record(monkeypatch, tmp_path, rank, RuntimeError("the loss is nan"), True) for rank in (0, 1)}
    assert launch._report(ChildFailedError("train", failures), tmp_path) == 1
    assert capfd.readouterr().err == "fairshard train: error: the loss is nan\n"


@pytest.mark.parametrize(("code", "words"), [(-9, "killed by SIGKILL: the machine"), (-11, "killed by SIGSEGV.")])
def test_a_rank_that_was_killed_is_named_with_the_signal(code, words, tmp_path, capfd):
    """A killed rank leaves no error file; the message says which rank and which signal."""
    failure = ProcessFailure(local_rank=1, pid=1, exitcode=code, error_file="none")
    assert launch._report(ChildFailedError("train", {1: failure}), tmp_path) == 1
    assert f"rank 1 was {words}" in capfd.readouterr().err


def test_half_an_error_file_is_passed_over(tmp_path):
    """An error file that cannot be read, because its rank was killed while writing, is skipped."""
    (tmp_path / "half.json").write_text('{"message": {"mess')
    (tmp_path / "other.json").write_text('{"message": "signal 15"}')
    assert first_failure(tmp_path.iterdir()) is None


def test_an_error_file_that_torch_wrote_is_read_too(tmp_path):
    """A rank that fails while it imports us writes only torch's keys; its folder gives the rank."""
    path = tmp_path / "3" / "error.json"
    path.parent.mkdir()
    extra = {"py_callstack": "Traceback", "timestamp": "7"}
    path.write_text(json.dumps({"message": {"message": "ImportError: x", "extraInfo": extra}}))
    assert first_failure([path]) == Failure(3, "ImportError: x", "Traceback", 7_000_000_000)
