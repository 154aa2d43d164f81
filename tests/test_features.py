"""The page of compatibility says what became of every name in the seed documents, and which test shows it."""

import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.torch_gaps import GAPS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "compatibility.md"
PYTORCHS_TESTS = ROOT / "docs" / "notes" / "fully-shard-tests.md"
NAMES = ROOT / "tests" / "data" / "seed_names.txt"

# Number of names and checksum of the file that tests/data/make_seed_names.py writes.
NUM_NAMES = 359
SHA256 = "b9c8ab8859a1813934e54d1390b8b0165a8b8837d30c10290ac12d14cdb27eec"

# What users call the systems of the five seed documents.
SYSTEMS = {"000": "FSDP1", "001": "fairscale", "002": "FSDP1", "003": "FSDP1", "004": "FSDP2"}

# Number of rows that wait for each version; ``pytest --strict-features`` fails while there are any. A row that names
# its test fails as soon as the test exists: the row must then be updated.
NUM_NOT_YET = {}

FSDP = "FullyShardedDataParallel"
TEST, NOT_HERE = r"`(tests/[\w/]+\.py::\w+)`", r"not here: .{10}.*"
NOT_YET = rf"not yet: (\d\.\d)(?:, {TEST})?"

# Run by `collected`: writes, for each test, whether pytest would skip it, other than for a gap of an older torch, or
# expects it to fail.
COLLECT = """
import json, sys
import pytest
from _pytest.skipping import evaluate_skip_marks, evaluate_xfail_marks
from tests.torch_gaps import PREFIX

class Collection:
    def pytest_collection_finish(self, session):
        for item in session.items:
            name = item.nodeid.partition("[")[0]
            skipped = evaluate_skip_marks(item)
            runs = not (skipped and not skipped.reason.startswith(PREFIX) or evaluate_xfail_marks(item))
            found[name] = found.get(name, False) or runs

found = {}
status = pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *sys.argv[2:]], plugins=[Collection()])
with open(sys.argv[1], "w") as file:
    json.dump(found, file)
sys.exit(status)
"""


@dataclass(frozen=True)
class Row:
    """One line of a table: its cells and its line number."""

    line: int
    name: str
    systems: str
    what: str
    shown_by: str

    def names(self):
        """``(name, own)`` of each name in the row, arguments separately; not ``own`` if the name has arguments."""
        for code in re.findall(r"`([^`]+)`", self.name):
            owner, _, arguments = code.rstrip(")").partition("(")
            owner = re.sub(r"^FSDP(?=\.|$)", FSDP, owner)
            yield owner, not arguments
            for argument in filter(None, arguments.split(", ")):
                yield f"{owner}({argument})", True


def rows():
    """Every row of the tables of features."""
    found = []
    is_body = False
    for number, line in enumerate(PAGE.read_text().splitlines(), 1):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            is_body = False
        elif is_body:
            assert len(cells) == 4, f"{PAGE.name}:{number} has {len(cells)} cells"
            found.append(Row(number, *cells))
        elif set(line) <= set("|- "):
            is_body = len(cells) == 4
    return found


ROWS = rows()
SHOWN_BY = {match[1]: row for row in ROWS if (match := re.fullmatch(TEST, row.shown_by))}


def seed_names():
    """{name: the documents that contain it}, for the five seed documents."""
    lines = [line.split() for line in NAMES.read_text().splitlines()]
    return {name: set(documents) for name, *documents in lines}


def test_the_names_are_those_that_the_script_found():
    """The list of names was not edited by hand."""
    text = NAMES.read_bytes()
    assert len(text.splitlines()) == NUM_NAMES
    assert hashlib.sha256(text).hexdigest() == SHA256


def test_every_name_is_in_a_row():
    """Every name of a seed document is in a row."""
    told = {name for row in ROWS for name, _ in row.names()}
    assert not sorted(seed_names().keys() - told)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"line {row.line}")
def test_every_cell_is_filled(row):
    """A row names the systems that have its names, and ends with a test, a reason, or the version it waits for."""
    assert row.name
    assert row.what
    assert any(re.fullmatch(kind, row.shown_by) for kind in (TEST, NOT_HERE, NOT_YET)), row.shown_by
    known = seed_names()
    names = [name for name, own in row.names() if own]
    if row.systems in ("later fairscale", "only here"):
        assert names
        assert not known.keys() & set(names), "these are in the seeds"
    elif names:
        seeds = set().union(*(known[name] for name in names))
        assert set(row.systems.split(", ")) == {SYSTEMS[number] for number in seeds}
    else:
        assert row.systems in SYSTEMS.values()


def test_no_document_is_seen_by_its_number():
    """Users do not know the seed documents: the page names systems."""
    assert not re.search(r"\b00[0-4]\b", PAGE.read_text())


def test_every_test_exists_and_runs(tmp_path):
    """Every test that a row names is collected in a run without options, and neither skipped nor expected to fail."""
    awaited = {match[2]: row for row in ROWS if (match := re.fullmatch(NOT_YET, row.shown_by)) and match[2]}
    restated = re.findall(TEST, PYTORCHS_TESTS.read_text())
    files = {name.partition("::")[0] for name in {**SHOWN_BY, **awaited, **dict.fromkeys(restated)}}
    found = collected(sorted(files), tmp_path / "collected.json")
    for name in restated:
        file, function = name.split("::")
        assert re.search(rf"^def {function}\(", (ROOT / file).read_text(), re.MULTILINE), name
        assert found.get(name, True), f"{name} is skipped"  # not found if only `make test-all` runs it
    missing = [f"{PAGE.name}:{row.line}: {name}" for name, row in SHOWN_BY.items() if name not in found]
    skipped = [f"{PAGE.name}:{row.line}: {name}" for name, row in SHOWN_BY.items() if found.get(name) is False]
    due = [f"{PAGE.name}:{row.line}: {name}" for name, row in awaited.items() if name in found]
    assert not missing
    assert not skipped
    assert not due


def test_each_of_pytorchs_tests_has_one_of_ours():
    """Every class, model and function of PyTorch's test file is in a row that names our test."""
    told = set()
    for line in PYTORCHS_TESTS.read_text().splitlines():
        if line.startswith("| `"):
            name, states, ours = (cell.strip() for cell in line.strip("|").split("|"))
            told |= set(re.findall(r"`(\w+)`", name))
            assert states
            assert ours
    theirs = {part for name, own in seed_names().items() if own == {"004"} for part in name.split(".")}
    in_file = {name for name in theirs if re.match(r"Test|test_|ModuleWith|Reduce|MLPs", name)}
    assert len(in_file) == 23
    assert not in_file - told


MARKED = """
import pytest

def test_runs(): ...

@pytest.mark.skip
def test_is_skipped(): ...

@pytest.mark.skipif(True, reason="always")
def test_is_skipped_here(): ...

@pytest.mark.skipif(False, reason="never")
def test_is_not_skipped_here(): ...

@pytest.mark.skipif(True, reason="this torch lacks a thing")
def test_is_skipped_on_an_older_torch(): ...

@pytest.mark.xfail
def test_is_expected_to_fail(): ...

@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.skip), 2])
def test_is_skipped_in_part(x): ...
"""


def test_marks_that_skip_are_seen(tmp_path):
    """The check above can fail: it finds every mark that skips a test or keeps its failure from counting."""
    (tmp_path / "test_marked.py").write_text(MARKED)
    found = collected([str(tmp_path / "test_marked.py")], tmp_path / "collected.json")
    assert {name.rpartition("::")[2] for name, runs in found.items() if runs} == {
        "test_runs",
        "test_is_not_skipped_here",
        "test_is_skipped_on_an_older_torch",
        "test_is_skipped_in_part",
    }
    assert len(found) == 7


def collected(files, out):
    """{node id without parameters: whether it runs with any parameters} of the tests in ``files``."""
    env = {**os.environ, "PYTEST_ADDOPTS": ""}
    there = [file for file in files if (ROOT / file).exists()]
    command = [sys.executable, "-c", COLLECT, str(out), *there]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(out.read_text())


def refuse_skip_of_a_row(report):
    """Make ``report``, of a test that was skipped while it ran, a failure if a row names the test."""
    if report.nodeid.partition("[")[0] in SHOWN_BY:
        report.outcome = "failed"
        report.longrepr = f"a row of {PAGE.name} names this test: it must run, but was skipped: {report.longrepr}"


@pytest.mark.parametrize(("name", "outcome"), [(min(SHOWN_BY) + "[1-fp32]", "failed"), ("tests/x.py::y", "skipped")])
def test_a_test_of_a_row_must_not_skip_itself(name, outcome):
    """The check of every report, in conftest.py, fails the tests that a row names, and no others."""
    report = SimpleNamespace(nodeid=name, outcome="skipped", longrepr="no peer")
    refuse_skip_of_a_row(report)
    assert report.outcome == outcome
    assert ("it must run, but was skipped: no peer" in report.longrepr) == (outcome == "failed")


def test_the_newest_torch_lacks_nothing():
    """On the torch of constraints.txt no test is skipped for a gap of an older torch."""
    pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    if torch.__version__.partition("+")[0] == pinned:
        assert not [name for name, is_missing in GAPS.items() if is_missing]


def test_what_is_not_there_yet_is_counted(request):
    """The number of rows that wait for a version changes only together with the number in this file."""
    waiting = {}
    for row in ROWS:
        if match := re.fullmatch(NOT_YET, row.shown_by):
            waiting.setdefault(match[1], []).append(f"{PAGE.name}:{row.line}: {row.name}")
    assert {version: len(found) for version, found in waiting.items()} == NUM_NOT_YET, waiting
    if request.config.getoption("--strict-features"):
        assert not waiting
