"""The files and messages of a run, without any rank."""

import errno
import json
import math
import os
import re
import time
from dataclasses import asdict

import pytest

from fairshard.cli.log import RunLog, StepMetrics, summarize
from fairshard.cli.options import TrainOptions
from fairshard.cli.runs import make_run_folder, write_config


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
    )


def _config(steps):
    return {
        "options": asdict(TrainOptions(steps=steps)),
        "world_size": 2,
        "device": "cpu",
        "model": "m",
        "parameters": 1,
    }


def _summary(lines, bytes_per_token=1.0, has_own_loss=False):
    return summarize(lines, (7, 8), bytes_per_token, has_own_loss)


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path, monkeypatch):
    """Three runs within one second: no clash, the same time in all three names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "gmtime", lambda: time.struct_time((2026, 1, 2, 3, 4, 5, 0, 2, 0)))
    names = [make_run_folder(None).as_posix() for _ in range(3)]
    assert names == ["runs/20260102T030405Z", "runs/20260102T030405Z-2", "runs/20260102T030405Z-3"]


def test_a_config_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    """A full disk, or a kill while it is written, leaves no half of a config, with which a run could not be resumed."""

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_config(tmp_path, {"options": {}})
    assert not list(tmp_path.iterdir())
    write_config(tmp_path, {"options": {}})
    assert json.loads((tmp_path / "config.json").read_text())["options"] == {}


@pytest.mark.parametrize("first", [3, 4])
def test_a_run_whose_log_is_lost_ends_all_the_same(tmp_path, monkeypatch, capfd, first):
    """Resumed after step 2 with damaged lines, the run sums up what is left, or says that it cannot."""
    lines = [{"step": 0, "val_loss": "x"}, {**asdict(_metrics(1)), "loss": "x"}, {"step": 2, "loss": 3.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = _config(3)
    log = RunLog(tmp_path, config, done=2)
    for step in range(first, 4):
        log.step(_metrics(step))
        log.validation(step, 2.0)
    log.finish((1, 2))
    written = capfd.readouterr().out
    assert ("from 2.000 at the start" in written) == (first == 3)
    assert ("metrics.jsonl has lost the steps of this run" in written) == (first == 4)


def test_the_summary_is_taken_over_all_steps():
    """Tokens per second are all tokens over all seconds, not a mean of rates; counts are means over the steps."""
    steps = _metrics(1, seconds=4.0, collectives=12), _metrics(2, seconds=1.0), _metrics(3, seconds=1.0)
    summary, _ = _summary([*map(asdict, steps), {"step": 3, "val_loss": 1.5}])
    assert summary.tokens_per_s == 300 / 6.0
    assert summary.collectives_per_step == (12 + 10 + 10) / 3
    assert summary.bytes_per_step == 1000 * (12 + 10 + 10) / 3
    assert (summary.val_loss, summary.peak_bytes) == (1.5, (7, 8))


def test_every_line_of_metrics_is_json_on_disk_at_once(tmp_path):
    """Each line can be read while the run goes on; an overflowed norm is null, because JSON has no infinity."""
    log = RunLog(tmp_path, _config(10))
    log.step(_metrics(1))
    log.step(_metrics(2))
    entries = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    with pytest.raises(ValueError, match="JSON compliant"):
        log.validation(2, math.inf)
    log.close()
    assert [entry["grad_norm"] for entry in entries] == [1.0, None]


def test_without_a_terminal_progress_is_some_twenty_lines(tmp_path, capsys):
    """In a pipe 1000 steps give 20 lines, each with loss, tokens/s and the memory of each rank; no control codes."""
    log = RunLog(tmp_path, _config(1000))
    for step in range(1, 1001):
        log.step(_metrics(step))
    log.validation(1000, 1.25)
    log.close()
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == 20
    text = "step   50/1000  loss 2.000, 200 tokens/s, memory 1 B | 2 B, "
    assert re.fullmatch(re.escape(text) + r"\d+:\d+ left", lines[0])
    assert lines[-1].endswith(", 00:00 left")
    assert last == "step 1000/1000  validation loss 1.250"
    assert not any(mark in "".join(lines) for mark in "\r\x1b")


@pytest.mark.parametrize(
    ("units", "words"),
    [((1.0,), "2.000 nats per byte (2.885 bits per byte)"), ((4.0,), "2.000 nats per token (0.721 bits per byte)"),
     ((None,), "2.000 nats per token"), ((1.0, True), "2.000"), ((None, True), "2.000")],
)  # fmt: skip
def test_a_loss_is_in_bits_per_byte_where_bytes_are_known(units, words):
    """2 nats are 2 / ln 2 = 2.885 bits, over the bytes of a token; a loss of the user's own has no units."""
    lines = [{"step": 0, "val_loss": 5.5}, asdict(_metrics(1)), {"step": 1, "val_loss": 2.0}]
    summary, first = _summary(lines, *units)
    assert summary.lines(first)[0].split("  ")[1] == f"{words}, from 5.500 at the start"
