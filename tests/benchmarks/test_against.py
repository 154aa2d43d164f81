"""Benchmarks of fairshard against fairshard at another commit."""

import ast
import itertools
import shutil
from pathlib import Path

import engines
import pytest
import report
import run
from runner import HERE, Job
from runner import run as run_jobs

PUBLIC = {"fairshard", "fairshard.checkpoint", "fairshard.nn", "fairshard.optim"}
MOVES = {"nn/data_parallel": "rooms/engine", "utils": "rooms/tools"}


def imported(path):
    """Yield the modules of fairshard that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_benchmarks_import_public_modules_only():
    """Benchmarks import public modules only, so one benchmark measures two commits between which files have moved."""
    files = sorted(HERE.rglob("*.py"))
    named = {(path.name, name) for path in files for name in imported(path) if name.partition(".")[0] == "fairshard"}
    assert {name for _, name in named} >= {"fairshard.nn", "fairshard.optim", "fairshard.checkpoint"}
    assert sorted(pair for pair in named if pair[1] not in PUBLIC) == []


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    """A copy of fairshard with its engine and its utilities in other folders."""
    tree = tmp_path_factory.mktemp("tree")
    package = tree / "fairshard"
    shutil.copytree(HERE.parent / "fairshard", package, ignore=shutil.ignore_patterns("__pycache__"))
    for old, new in MOVES.items():
        (package / new).parent.mkdir(exist_ok=True)
        (package / old).rename(package / new)
    for path in package.rglob("*.py"):
        text = path.read_text()
        for old, new in MOVES.items():
            text = text.replace(f"fairshard.{old.replace('/', '.')}", f"fairshard.{new.replace('/', '.')}")
        path.write_text(text)
    return tree


@pytest.mark.cpu_only("starts processes of its own, on gloo")
@pytest.mark.full
@pytest.mark.parametrize("door", engines.OURS)
def test_both_layouts_are_measured_alike(moved, door):
    """Losses, collectives and calls are the same wherever the files are, and memory and times are measured."""
    settings = {"model": "gpt-5m", "steps": 3, "counts": "step"}
    (now,) = run_jobs(Job("training:train", {**settings, "engine": door}))
    former = Job("training:train", {**settings, "engine": engines.at_commit(door, "v0")}, tree=str(moved))
    (former,) = run_jobs(former)
    for rank, other in zip(now, former, strict=True):
        assert rank["losses"] == other["losses"]
        assert rank["collectives"] == other["collectives"]
        assert rank["collectives"]["own_counters"]["all_gather"][0] > 0
        assert other["peak_bytes"] > 0
    tiny = {"engine": door, "passes": 1}
    ((now,),) = run_jobs(Job("overhead:measure", tiny, world=1, is_fake=True))
    ((former,),) = run_jobs(Job("overhead:measure", tiny, world=1, is_fake=True, tree=str(moved)))
    assert now["calls_per_unit"] == former["calls_per_unit"]


def test_each_door_is_compared_with_its_own_former_commit():
    """Two engines of ours against a commit give two ratios, and peers are compared with both engines."""
    door, other = engines.OURS
    variants = [door, other, engines.at_commit(door, "v-0"), engines.at_commit(other, "v-0"), "fsdp2"]
    assert [engines.adapter_of(name) for name in variants] == [door, other, door, other, "fsdp2"]
    measured = {name: {0: dict.fromkeys(report.FIGURES, index + 1.0)} for index, name in enumerate(variants)}
    pairs = [(door, variants[2]), (door, "fsdp2"), (other, variants[3]), (other, "fsdp2")]
    assert report.pairs_of(variants[2:]) == pairs
    _, _, *rows, _ = report.ratio_table(measured, pairs, report.FIGURES).splitlines()
    assert [row.split()[:3:2] for row in rows] == [list(pair) for pair in pairs]


def test_against_adds_the_former_commit_of_each_door(tmp_path):
    """``--against`` measures each of our engines twice, and raises without one of them."""
    arguments = ["--against", "v0", "--out", str(tmp_path / "out.json")]
    options = run.parse(["--engines", ",".join(["fsdp2", *engines.OURS]), *arguments])
    assert options.engines[3:] == [engines.at_commit(door, "v0") for door in engines.OURS]
    with pytest.raises(SystemExit):
        run.parse(["--engines", "fsdp2", *arguments])


@pytest.mark.cpu_only("starts processes of its own, on gloo")
def test_a_rank_takes_fairshard_from_this_checkout_or_from_the_tree(tmp_path, monkeypatch):
    """A rank imports neither an installed fairshard nor the one on the caller's PYTHONPATH."""
    (tmp_path / "where.py").write_text("import fairshard\n\ndef where(rank):\n    return fairshard.__file__\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ((now,),) = run_jobs(Job("where:where", {}, world=1))
    assert Path(now).parents[1] == HERE.parent
    (tmp_path / "tree" / "fairshard").mkdir(parents=True)
    (tmp_path / "tree" / "fairshard" / "__init__.py").touch()
    ((former,),) = run_jobs(Job("where:where", {}, world=1, tree=str(tmp_path / "tree")))
    assert Path(former).parents[1] == tmp_path / "tree"


STEPS = """
import time

def steps(rank):
    spans = []
    for _ in range(3):
        with rank.turn():
            begun = time.monotonic()
            time.sleep(0.05)
            spans.append((begun, time.monotonic()))
    return spans
"""


@pytest.mark.cpu_only("starts processes of its own, on gloo")
def test_jobs_that_take_turns_step_one_at_a_time(tmp_path, monkeypatch):
    """All jobs run at the same time, but each step begins after the step of the previous job has ended."""
    (tmp_path / "steps.py").write_text(STEPS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    by_job = [ranks[0] for ranks in run_jobs(*[Job("steps:steps", {})] * 3)]
    assert [len(spans) for spans in by_job] == [3, 3, 3]
    spans = [spans[step] for step in range(3) for spans in by_job]
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
