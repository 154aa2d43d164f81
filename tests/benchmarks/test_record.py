"""Results as files: a header, then one run a line."""

import argparse
import json
import math

import engines
import pytest
import record
import run
from training import PHASES

COMMITTED = sorted(record.RESULTS.glob("*.json"))
OF_RUN = [path for path in COMMITTED if '"loss_checks"' in path.read_text()]
HEADER = {"generated_by": "python benchmarks/run.py", "settings": {"repeat": 2}}


def a_run(engine, repeat, seconds):
    """One rank, four steps: the first is a warm-up, the others take the same time."""
    times = {part: [9.0, seconds, seconds, seconds] for part in (*PHASES, "cpu")}
    ranks = [{"losses": [8.5] * 4, "times": times, "peak_bytes": 3 * 2**20, "collectives": None}]
    return {"engine": engine, "repeat": repeat, "ranks": ranks}


def test_a_run_is_a_line(tmp_path):
    """Each key of the header and each run has a line of its own, and the whole is valid JSON."""
    path = tmp_path / "new" / "out.json"
    runs = [a_run("fairshard", repeat, 0.5) for repeat in range(3)]
    record.write(path, HEADER, runs=runs, overhead=[])
    lines = [line.strip().rstrip(",") for line in path.read_text().splitlines()]
    assert len(lines) == len(["{", *HEADER, '"runs": [', *runs, "]", '"overhead": []', "}"])
    assert json.loads("{" + lines[1] + "}") == {"generated_by": HEADER["generated_by"]}
    first = lines.index('"runs": [') + 1
    assert [json.loads(line) for line in lines[first : first + 3]] == runs
    assert json.loads(path.read_text()) == {**HEADER, "runs": runs, "overhead": []}


def test_what_is_read_is_what_was_written(tmp_path):
    """Floats keep six significant digits; everything else is exact, even big integers, None and non-ASCII text."""
    exact = {"bytes": 2**53 + 1, "none": None, "yes": True, "name": "Größe", "nested": [{"a": []}], "whole": 600.0}
    floats = [0.0, 1 / 3, -2e-9 / 3, 123456.789, 1e300, 8.638504028320312]
    record.write(tmp_path / "out.json", HEADER, runs=[{**exact, "floats": floats}])
    (own,) = record.read(tmp_path / "out.json")["runs"]
    assert {key: own[key] for key in exact} == exact
    # Half a unit of the sixth digit is at most 5e-6 of a number whose first digit is 1.
    assert all(math.isclose(a, b, rel_tol=5e-6) for a, b in zip(own["floats"], floats, strict=True))
    assert own["floats"][3] == 123457.0


def test_a_file_says_first_what_wrote_it(tmp_path):
    """A record without its command is not written, and other JSON is not read."""
    with pytest.raises(ValueError, match="generated_by"):
        record.write(tmp_path / "out.json", {"date": "today", **HEADER}, runs=[])
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"other\.json must have the key `generated_by`"):
        record.read(tmp_path / "other.json")


def test_a_header_names_no_folder_of_this_machine(tmp_path):
    """Absolute paths lose their folders in the command and in the settings; the rest of the command stays."""
    out, script = tmp_path / "out.json", record.ROOT / "benchmarks" / "checkpoint.py"
    options = argparse.Namespace(out=out, folder=f"{tmp_path}/disk", engines=["fsdp2"], sizes=[1, 2], against=None)
    header = record.header(str(script), options, ["--out", str(out), f"--folder={tmp_path}/disk", "--sizes", "1", "2"])
    command = "python benchmarks/checkpoint.py --out out.json --folder=disk --sizes 1 2"
    assert header["generated_by"] == command
    assert header["settings"] == {**vars(options), "out": "out.json", "folder": "disk"}
    assert str(tmp_path) not in json.dumps(header)
    assert header.keys() >= {"date", "hardware", "versions"}


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_committed_results_have_this_form(path, tmp_path):
    """A committed file that is written again stays the same, byte for byte."""
    content = record.read(path)
    lists = {key: value for key, value in content.items() if key in ("runs", "loss_checks", "overhead")}
    record.write(tmp_path / "again.json", {key: content[key] for key in content if key not in lists}, **lists)
    assert (tmp_path / "again.json").read_text() == path.read_text()
    assert sum(map(len, lists.values())) > 0


@pytest.mark.parametrize("path", OF_RUN, ids=lambda path: path.name)
def test_committed_results_can_be_shown(path, capsys):
    """``--show`` prints a row for each measured engine."""
    content = record.read(path)
    assert run.main(["--show", str(path)]) == 0
    first_words = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line}
    assert {one["engine"] for one in content["runs"]} <= first_words


def test_shown_figures_are_those_of_the_runs(tmp_path, capsys):
    """Three phases of 0.25 s are a step of 750 ms; the peer's phases of 0.5 s make the ratio 0.50."""
    peer = engines.at_commit("fairshard", "v0")
    runs = [a_run(name, repeat, seconds) for repeat in range(2) for name, seconds in (("fairshard", 0.25), (peer, 0.5))]
    header = {**HEADER, "settings": {"engines": ["fairshard", peer], "warmup": 1}, "failures": {"fsdp1": "why not"}}
    record.write(tmp_path / "out.json", header, loss_checks=[], runs=runs, overhead=[])
    run.main(["--show", str(tmp_path / "out.json")])
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["fairshard", "750", "[750..750]"] in [line[:3] for line in printed]
    assert ["fairshard", "over", peer, "0.50", "[0.50..0.50]"] in [line[:5] for line in printed]
    assert ["fsdp1:", "failed:", "why", "not"] in printed


def test_only_results_of_run_can_be_shown(tmp_path):
    """Records of other benchmarks are refused with their command."""
    record.write(tmp_path / "out.json", {"generated_by": "python benchmarks/offload.py"}, runs=[])
    with pytest.raises(SystemExit, match=r"that run\.py wrote, but `python benchmarks/offload\.py` wrote it"):
        run.main(["--show", str(tmp_path / "out.json")])


def test_results_are_marked_as_generated():
    """Reviews and statistics of the repository exclude result files."""
    lines = (record.ROOT / ".gitattributes").read_text().splitlines()
    assert "benchmarks/results/*.json linguist-generated=true -diff" in lines
