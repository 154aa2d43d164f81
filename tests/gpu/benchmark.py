"""Runs of benchmarks/ for a line: the command, the time that it may take, and the medians in its file of results."""

import json
import os
import signal
import statistics
import subprocess
import sys

from tests.gpu.check import Missed
from tests.gpu.page import ROOT

_PHASES = ("forward", "backward", "optimizer")


def run(script, flags, out, seconds):
    """Run ``benchmarks/script`` for at most ``seconds``; returns what it wrote to ``out``, whole or not.

    Raises:
        Missed: it failed, or wrote nothing in time.
    """
    command = [sys.executable, f"benchmarks/{script}", *flags.split(), "--out", str(out)]
    out.unlink(missing_ok=True)
    log = out.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if not out.exists():
        raise Missed(f"{'was cut off' if code is None else 'failed'}: {log.read_text()[-800:]}", {})
    content = json.loads(out.read_text())
    if code:
        raise Missed(f"failed: {log.read_text()[-800:]}", content.get("failures", {}))
    log.unlink()
    return {**content, "is_cut_off": code is None}


def step_ms(content):
    """Median milliseconds of a step of each engine in a file of ``run.py``: the slowest rank's, after the warm-up."""
    warmup, found = content["settings"]["warmup"], {}
    for one in content["runs"]:
        phases = [[rank["times"][phase] for phase in _PHASES] for rank in one["ranks"]]
        steps = [list(map(sum, zip(*times, strict=True))) for times in phases]
        found.setdefault(one["engine"], []).append(max(1e3 * statistics.median(own[warmup:]) for own in steps))
    return {engine: round(statistics.median(times), 1) for engine, times in found.items()}


def variant_ms(content):
    """Median milliseconds of a step of each variant in a file of ``offload.py``."""
    found = {}
    for one in content["runs"]:
        found.setdefault(one["variant"], []).append(max(rank["step_ms"] for rank in one["ranks"]))
    return {variant: round(statistics.median(times), 1) for variant, times in found.items()}


def ratio(times, ours, theirs):
    """The time of ``ours`` over the better of ``theirs``; None if one of them is missing."""
    known = [times[name] for name in theirs if name in times]
    return round(times[ours] / min(known), 3) if known and ours in times else None


def require(targets, figures, is_small, is_cut_off):
    """Return ``figures`` with the ratios of ``targets``, ``{name: (ratio, most)}``.

    Raises:
        Missed: a ratio is missing; or it is above its target, and times mean something.
    """
    shown = {f"{name} (target {most})": found for name, (found, most) in targets.items()}
    missed = [
        f"{name} is {found or 'not measured'}, target {most}"
        for name, (found, most) in targets.items()
        if not found or (found > most and not is_small)
    ]
    if is_cut_off:
        shown["cut off by the limit of its part"] = True
    if missed:
        raise Missed("; ".join(missed) + ", cut off by the limit of its part" * is_cut_off, {**figures, **shown})
    return {**figures, **shown}
