"""Every line of docs/notes/gpu.md has a check or a reason; what has passed is ticked; a killed part leaves results."""

import contextlib
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from torch.cuda import _sanitizer

from tests import sim
from tests.gpu import page, parts, report, results
from tests.gpu.check import Check, Machine, Missed, NotHere, Registry
from tests.gpu.lines import races
from tests.gpu.logged_tests import LOG
from tests.gpu.plants import PLANTS
from tests.gpu.results import Result, Results
from tests.on_ranks import in_full
from tests.sim.test_planted import CAUGHT

pytestmark = pytest.mark.cpu_only("tries make gpu in processes of its own")

LIST = """# The list

- [ ] `first`: a claim
- [x] `second`: a claim
  on two lines
- [ ] `third`: a claim
"""


def passes(*_unused):
    """Passes."""
    return {"number": 1}


def misses(*_unused):
    """Misses its claim."""
    raise Missed("it is late", {"seconds": 2})


def is_elsewhere(*_unused):
    """Finds out that it cannot run."""
    raise NotHere("no second device")


def breaks(*_unused):
    """Raises what nobody expects."""
    raise ZeroDivisionError


def dies(*_unused):
    """Kills its process."""
    os.kill(os.getpid(), 9)


@pytest.fixture(scope="module")
def cpu_ranks():
    with contextlib.closing(parts._Ranks("cpu")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def simulated_ranks():
    with contextlib.closing(parts._Ranks("sim")) as ranks:
        yield ranks


@pytest.fixture
def one_gpu(tmp_path):
    return Machine("cuda", 1, tmp_path)


def test_every_line_is_bound_to_a_check_or_a_reason():
    """Each line of the page has exactly one check or a reason why nothing runs it, and there are no others."""
    registry = parts.registry()
    lines = page.lines_of(page.PAGE.read_text())
    assert sorted(lines) == sorted([*registry.checks, *registry.reasons])
    assert all(check.claim for check in registry.checks.values())
    assert len(lines) > 50, "the list has shrunk: is it read to its end?"


def test_every_check_is_in_a_part_that_has_time():
    """Parts take at most 8 minutes each and 25 in all, as the page says, and each check belongs to one."""
    limits = {part.name: part.limit_s for part in parts.PARTS}
    assert max(limits.values()) <= 8 * 60
    assert sum(limits.values()) <= 24 * 60, "a minute is left to start the parts"
    for number, (name, limit) in enumerate(limits.items(), 1):
        assert f"| {number} `{name}` |" in page.PAGE.read_text()
        assert f"| {limit / 60:g} |" in page.PAGE.read_text()
        assert parts.part_named(str(number)) is parts.part_named(name)
    assert {check.part for check in parts.registry().checks.values()} == set(limits)
    with pytest.raises(ValueError, match="PART must be one of 1 "):
        parts.part_named("9")


def test_a_line_needs_a_name_of_its_own():
    """Items without a name, and names that stand twice, are errors: a tick would go astray."""
    with pytest.raises(ValueError, match="must begin with its name"):
        page.lines_of(LIST + "- [ ] no name\n")
    with pytest.raises(ValueError, match="these stand twice: first"):
        page.lines_of(LIST + "- [ ] `first`: again\n")
    registry = Registry()
    registry.leave_out("first", "no reason")
    with pytest.raises(ValueError, match="must be bound once"):
        registry.add(Check("first", "lines", passes))


def test_planted_bugs_are_sites_of_the_engine():
    """Each planted bug is a site that the simulator's table knows, so a renamed function fails here, without a GPU."""
    assert not {plant.site for plant in PLANTS} - CAUGHT.keys()
    assert len({plant.claim for plant in PLANTS}) == len(PLANTS)


def test_a_tick_is_that_of_the_last_run():
    """Passed lines get a tick, failed ones lose it, others keep what they have; nothing else in the text changes."""
    after = page.ticked(LIST, passed={"first"}, failed={"second"})
    assert [line.is_ticked for line in page.lines_of(after).values()] == [True, False, False]
    assert after.replace("[x]", "[ ]") == LIST.replace("[x]", "[ ]")
    kept = page.ticked(LIST, passed=set(), failed=set())
    assert kept == LIST
    assert page.lines_of(LIST)["second"].text == "a claim on two lines"


@pytest.mark.parametrize(
    ("function", "outcome", "reason"),
    [
        (passes, results.PASSED, ""),
        (misses, results.FAILED, "it is late"),
        (is_elsewhere, results.SKIPPED, "no second device"),
        (breaks, results.FAILED, "ZeroDivisionError"),
    ],
)
@pytest.mark.parametrize("num_ranks", [0, 1])
def test_outcomes_of_a_check(tmp_path, cpu_ranks, function, outcome, reason, num_ranks):
    """In its own process and on a rank, a check passes, fails with its figures, or says that it cannot run."""
    machine, check = Machine("cpu", 0, tmp_path), Check("first", "lines", function, num_ranks)
    found = parts._run(check, machine, parts.time.monotonic() + 60, cpu_ranks)
    assert found.outcome == outcome
    assert reason in found.reason


@pytest.mark.full
def test_the_reason_of_a_failure_is_its_error(tmp_path, cpu_ranks):
    """On two ranks the report has the first rank's error, and a file beside it has every traceback."""
    machine = Machine("cpu", 0, tmp_path)
    found = parts._run(Check("first", "lines", breaks, 2), machine, parts.time.monotonic() + 60, cpu_ranks)
    assert found.reason == "ZeroDivisionError (all of it: first.log)"
    text = (tmp_path / "first.log").read_text()
    assert text.count("in breaks") == 2
    assert parts._gist("rank 0 hung\n  at a line") == "rank 0 hung"


def test_what_a_machine_lacks_is_named(one_gpu, tmp_path, monkeypatch):
    """A check whose package, library or devices are missing is not run, and the result says what is missing."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    of_suite = Check("suite", "tests", passes, needs=("pytest", "hypothesis"))
    assert parts._why_not(of_suite, one_gpu, 100) == (
        "package pytest is not installed in this Python; package hypothesis is not installed in this Python"
    )
    of_cuda = Check("sanitizer", "races", passes, needs=("CUDA's sanitizer",))
    assert "is not part of device sim" in parts._why_not(of_cuda, Machine("sim", 1, tmp_path), 100)
    assert parts._why_not(of_cuda, one_gpu, 100) == ""
    lacking = "needs 2 ranks, but the devices have room for 1"
    assert parts._why_not(Check("a", "lines", passes, 2), one_gpu, 100) == lacking
    assert parts._why_not(Check("a", "lines", passes, 2, alone=True), one_gpu, 100) == ""
    assert parts._why_not(Check("a", "lines", passes), one_gpu, 0.5) == "no time was left in its part"


def test_fewer_devices_than_a_line_needs_pass_partly(one_gpu):
    """A check that passes on fewer devices than its line needs is reported, but not as passed."""
    found = parts._run(Check("first", "lines", passes, num_devices=2), one_gpu, parts.time.monotonic() + 60, None)
    assert (found.outcome, found.reason) == (results.PARTLY, "passed on 1 of the 2 devices that it needs")


KILLED = """
from pathlib import Path
from tests.gpu import parts, results
from tests.gpu.check import REGISTRY, Check, Machine
from tests.gpu.test_list import dies, passes

parts.registry().checks.clear()
for name, function in {"first": passes, "second": dies, "third": passes}.items():
    REGISTRY.add(Check(name, "lines", function))
machine = Machine("cpu", 0, Path(%r))
parts.run_part(machine, parts.PARTS[0], results.Results(machine.out, {"device": "cpu"}))
"""


def test_a_killed_part_leaves_what_it_had_finished(tmp_path):
    """Kill a part in the middle of its second check: the first one's result is there, and the second is cut off."""
    own = {**os.environ, "PYTHONPATH": str(page.ROOT)}
    done = subprocess.run([sys.executable, "-c", KILLED % str(tmp_path)], env=own, capture_output=True, timeout=120)
    assert done.returncode == -9, done.stderr
    headers, found = results.read(tmp_path)
    assert headers == [{"device": "cpu"}]
    assert [(result.line, result.outcome) for result in found] == [
        ("first", results.PASSED),
        ("second", results.STARTED),
    ]


def header(device):
    return {
        "part": "lines", "command": "make gpu", "date": "2027-01-02T03:04:05+00:00", "device": device, "name": "A GPU",
        "num_devices": 1, "ranks_per_device": 4, "cpus": 16, "python": "3.12", "torch": "2.11.0", "vendor": "CUDA 13.0",
    }  # fmt: skip


@pytest.mark.parametrize("device", ["cuda", "sim"])
def test_a_report_is_dated_and_ticks_the_list(tmp_path, monkeypatch, device):
    """On an accelerator the report goes to the docs and ticks the list; on the simulated one it does neither."""
    listed = page.PAGE.read_text()
    (tmp_path / "gpu.md").write_text(listed)
    monkeypatch.setattr(page, "PAGE", tmp_path / "gpu.md")
    monkeypatch.setattr(page, "RESULTS", tmp_path / "gpu-results")
    out = Results(tmp_path / "out" / "lines", header(device))  # parts may bring folders of their own
    out.add(Result("no-graph", "lines", results.PASSED, figures={"a_figure": "<b>"}))
    out.add(Result("copy-out", "lines", results.FAILED, "a | b"))
    out.add(Result("host-waits", "lines", results.PARTLY, "passed on 1 of the 2 devices that it needs"))
    path = report.write(tmp_path / "out")
    text = path.read_text()
    assert "A GPU; torch 2.11.0" in text
    assert "| `copy-out` | failed | 0 | a / b |" in text
    assert "a&#95;figure: &lt;b&gt;" in text
    assert "- `clients`: `make clients` makes an environment" in text
    assert "- `suite`: its part, tests, has not run" in text
    ticks = [line.name for line in page.lines_of((tmp_path / "gpu.md").read_text()).values() if line.is_ticked]
    if device == "cuda":
        assert path == tmp_path / "gpu-results" / "2027-01-02.md"
        assert "no-graph" in ticks
        assert "copy-out" not in ticks
        assert ("host-waits" in ticks) == page.lines_of(listed)["host-waits"].is_ticked
        assert page.lines_of((tmp_path / "out" / "gpu.md").read_text())["no-graph"].is_ticked
    else:
        assert path == tmp_path / "out" / "report.md"
        assert (tmp_path / "gpu.md").read_text() == listed


def test_reports_of_the_sanitizer_are_explained_one_by_one():
    """A report that matches a known one carries its explanation; any other one is returned as unexplained."""
    handler, address = _sanitizer.EventHandler(), 4096
    operators = [torch.ops.aten.copy_.default._schema, torch.ops.aten.relu.default._schema]
    with races.collected() as summaries:
        for stream in (1, 2):  # each writes, and waits for nothing
            handler.syncs.create_stream(stream)
            done = handler._handle_kernel_launch(
                stream, set(), {address}, set(), operators[stream - 1], {address: ["x"]}
            )
            assert done == []
    (one,) = summaries
    assert re.match(r"aten::relu \(writing to\) at .*:\d+ .* after aten::copy_ \(writing to\) at ", one)
    known = [races.Known(r"^aten::relu .* after aten::copy_", "the host has waited")]
    figures, left = races.explained([one, "aten::add at elsewhere", one], known)
    assert left == ["aten::add at elsewhere"]
    assert figures[one] == "2 times: the host has waited"
    assert figures[left[0]] == "1 times: NOT EXPLAINED"


def test_outcomes_of_tests_are_written_as_they_come(tmp_path):
    """pytest with the plugin leaves one line for each test: what passed, failed, and was skipped."""
    (tmp_path / "test_three.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\n@pytest.mark.skip\ndef test_c(): pass\n"
    )
    own = {**os.environ, "PYTHONPATH": str(page.ROOT), LOG: str(tmp_path / LOG)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.gpu.logged_tests", tmp_path]
    subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, timeout=120)
    lines = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    assert [(line["id"][-6:], line["outcome"]) for line in lines] == [
        ("test_a", "passed"),
        ("test_b", "failed"),
        ("test_c", "skipped"),
    ]


@pytest.mark.parametrize(
    "name",
    [
        in_full(name)
        for name in ("one-rank-ready", "planted-bugs", "gather-after-free", "host-waits", "zeros-step", "train-losses")
    ],
)
def test_checks_run_on_the_simulated_accelerator(tmp_path, simulated_ranks, name):
    """Checks pass there, those on ranks in two orders of work, and without a race."""
    if sim.why_missing():
        pytest.skip(sim.why_missing())
    check, machine = parts.registry().checks[name], Machine("sim", 1, tmp_path)
    found = parts._run(check, machine, parts.time.monotonic() + 120, simulated_ranks)
    assert found.outcome == results.PASSED, found.reason


def test_a_missing_accelerator_is_named():
    """Without an accelerator the command says what it has found, and how to try it without one."""
    if torch.accelerator.is_available():
        pytest.skip("needs a machine without an accelerator")
    own = {**os.environ, "PYTHONPATH": str(page.ROOT)}
    done = subprocess.run([sys.executable, "-m", "tests.gpu"], env=own, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "sees none. Without one: DEVICE=sim." in done.stderr
