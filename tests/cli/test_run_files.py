"""The files and messages of a run, without any rank."""

import json
import math
import time

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from fairshard.cli import launch
from fairshard.cli.curve import draw_loss, smoothed
from fairshard.cli.failure import Failure, first_failure, record_failure
from fairshard.cli.metrics import MetricsFile, StepMetrics, StepTotals, make_run_folder
from fairshard.cli.progress import Progress, size_text
from fairshard.planning.summary import StateBytes

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
    )


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path, monkeypatch):
    """Three runs within one second: no clash, the same time in all three names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "gmtime", lambda: time.struct_time((2026, 1, 2, 3, 4, 5, 0, 2, 0)))
    names = [make_run_folder(None).as_posix() for _ in range(3)]
    assert names == ["runs/20260102T030405Z", "runs/20260102T030405Z-2", "runs/20260102T030405Z-3"]


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
    assert lines[0].startswith("step   50/1000  loss 2.000, 200 tokens/s, memory 1 B | 2 B, ")
    assert last == "step 1000/1000  validation loss 1.250"
    assert not any(mark in "".join(lines) for mark in "\r\x1b")


@pytest.mark.parametrize("num_steps", [1, 49, 50, 500])
def test_smoothing_takes_the_mean_of_the_neighbours(num_steps):
    """Each value is the plain mean of those at most a fiftieth of the run away, of fewer near the ends."""
    losses = [math.sin(step) for step in range(num_steps)]
    reach = num_steps // 50
    near = [losses[max(0, step - reach) : step + reach + 1] for step in range(num_steps)]
    assert smoothed(losses) == pytest.approx([sum(values) / len(values) for values in near])


def test_the_curve_is_a_png(tmp_path):
    """The curve is a PNG, even for a run of a single step."""
    draw_loss(tmp_path / "loss.png", "title", [5.0], {0: 5.5, 1: 5.0})
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)


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
