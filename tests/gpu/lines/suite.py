"""Lines that are lists of test files: the suite runs once, in several processes, and each line is judged by its files.

A test's outcome is on the disk as soon as it is known (``logged_tests.py``), so a suite that is cut off leaves those.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter

from tests.gpu.check import Missed, NotHere, on_host
from tests.gpu.logged_tests import LOG
from tests.gpu.page import ROOT

_NEEDS = ("pytest", "hypothesis")
_NUM_CORES = 2  # for each process: pytest's own, and its ranks
_LEFT_S = 10.0  # for the lines that are judged by the same run

_SMALL = (
    "tests/optim/test_grad_staging.py",
    "tests/params/test_tied_weights.py",
    "tests/engine/test_leaves.py",
    "tests/checkpoint/test_snapshot.py",
    "tests/state/test_summon_options.py",
    "tests/settings/test_reshard_to_few.py",
    "tests/doors/fully_shard/test_one_rank.py",
)
"""One file of each line, for the simulated accelerator: `make test-sim` runs the others there."""


_ELSEWHERE = (
    *("tests/sim/", "tests/gpu/", "tests/benchmarks/", "tests/clients/"),  # they choose their device
    *("tests/cli/", "tests/integrations/", "tests/checkpoint/test_kill.py", "tests/doors/wrapper/test_drill.py"),
    *("tests/doors/wrapper/test_two_hosts.py", "tests/doors/fully_shard/test_script.py"),  # start programs of two ranks
    "tests/checkpoint/test_mutations.py",  # limits the address space of a process, which a device's driver exceeds
    "tests/test_",  # the docs, the source, the list of features
)
"""Tests that ``--device`` means nothing to."""


def _groups(is_small):
    """Paths of the test files, in groups that take about as long, for one process each."""
    if is_small:
        return [list(_SMALL)]
    files = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))
    files = [path for path in files if not path.startswith(_ELSEWHERE)]
    number = max(1, (os.cpu_count() or 1) // _NUM_CORES)
    return [files[first::number] for first in range(number)]


def _run_suite(machine, seconds):
    """Run all tests with ``--device``, until they end or the time is over; logs go to ``machine.out``."""
    log, text = machine.out / LOG, machine.out / "tests.log"
    log.unlink(missing_ok=True)
    own = {**os.environ, LOG: str(log), "OMP_NUM_THREADS": "1"}
    own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.gpu.logged_tests"]
    command += ["--device", machine.device, "--ranks-per-device", str(machine.ranks_per_device), "--tb=short"]
    with text.open("w") as output, contextlib.ExitStack() as running:
        started = []
        for files in _groups(machine.is_small):
            process = subprocess.Popen([*command, *files], cwd=ROOT, env=own, stdout=output, stderr=output)
            running.callback(process.wait)
            running.callback(process.kill)
            started.append(process)
        until = time.monotonic() + seconds
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, until - time.monotonic()))
        return all(process.poll() is not None for process in started)


def _judge(machine, seconds, paths, words=()):
    """Counts of the tests of ``paths`` whose names have one of ``words``; the first line to ask runs the suite."""
    log = machine.out / LOG
    if machine not in _finished:
        _finished[machine] = _run_suite(machine, seconds - _LEFT_S)
    entries = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    own = [test for test in entries if test["id"].startswith(paths)]
    own = [test for test in own if not words or any(word in test["id"] for word in words)]
    counts = Counter(test["outcome"] for test in own)
    failed = [test["id"] for test in own if test["outcome"] == "failed"]
    if failed:
        raise Missed(f"{len(failed)} of {len(own)} failed, the first: {', '.join(failed[:5])}; see tests.log", counts)
    if not counts["passed"]:
        raise NotHere(f"none of its tests ran: {dict(counts)}")
    if not _finished[machine]:
        raise Missed(f"cut off by the limit of its part: {dict(counts)} so far", counts)
    return counts


_finished = {}


def _line(name, *paths, words=()):
    """Bind ``name`` to the tests of ``paths``."""

    def judge(machine, seconds):
        return _judge(machine, seconds, paths, words)

    judge.__doc__ = f"``pytest --device`` passes on {', '.join(paths)}."
    on_host(name, "tests", needs=_NEEDS, timeout=600.0)(judge)


_line("suite", "tests/")
_line("offload-tests", "tests/optim", "tests/params/test_offload.py")
_line("engine-tests", "tests/engine")
_line("state-tests", "tests/checkpoint", "tests/state", words=("state_dict", "summon"))
_line(
    "strategy-tests",
    "tests/settings/test_strategies.py",
    "tests/settings/test_hybrid.py",
    "tests/settings/test_reshard_to_few.py",
    "tests/nn/test_comm_hooks.py",
)
_line("fully-shard-tests", "tests/doors/fully_shard", "tests/engine/test_several_forwards.py")
