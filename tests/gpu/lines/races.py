"""Lines about races: torch's CUDA sanitizer, and planted bugs that a sleeping stream must show."""

import contextlib
import itertools
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

import fairshard
from tests.gpu.check import SIMULATED, Missed, on_ranks
from tests.gpu.delays import ROLES, late
from tests.gpu.plants import PLANTS
from tests.gpu.training import Way, digest, train
from tests.kit import rank_device
from tests.sim.planted import planted

BF16 = torch.bfloat16
_PACKAGE = str(Path(fairshard.__file__).parent) + os.sep


@dataclass(frozen=True)
class Known:
    """Reports of the sanitizer that match ``pattern``, and why they are no race."""

    pattern: str
    why: str


KNOWN: tuple[Known, ...] = ()
"""Reports that have been seen and explained: none so far."""

WAYS = [
    Way(door, low, placement, optimizer)
    for door, low, (placement, optimizer) in itertools.product(
        ("wrapper", "fully_shard"), (None, BF16), (("device", "sgd"), ("offload", "sgd"), ("offload", "cpu"))
    )
]


def summary_of(report):
    """One line for a report: both operators, and where each was called from, in files of fairshard."""
    both = (report.current_access, report.previous_access)
    return " after ".join(f"{access.operator.name} ({access.type}) at {_place(access)}" for access in both)


def _place(access):
    frames = [frame for frame in access.stack_trace if frame.filename.startswith(_PACKAGE)]
    frame = frames[-1] if frames else access.stack_trace[-1]
    return f"{frame.filename.removeprefix(_PACKAGE)}:{frame.lineno} {frame.name}"


def explained(summaries, known=None):
    """``(figures, unexplained)``: counts of each report with its explanation, and those without one."""
    figures, left = {}, []
    for summary, count in Counter(summaries).items():
        whys = [entry.why for entry in (KNOWN if known is None else known) if re.search(entry.pattern, summary)]
        figures[summary] = f"{count} times: {whys[0] if whys else 'NOT EXPLAINED'}"
        if not whys:
            left.append(summary)
    return figures, left


@contextlib.contextmanager
def collected():
    """The summaries of the sanitizer's reports in this context; without it the first report would raise."""
    from torch.cuda import _sanitizer

    summaries, check = [], _sanitizer.EventHandler._handle_kernel_launch

    def collect(handler, *args, **kwargs):
        summaries.extend(map(summary_of, check(handler, *args, **kwargs)))
        return []

    handle = _sanitizer.ArgumentHandler._handle_argument

    def handle_local(handler, value, *args, **kwargs):
        return handle(handler, getattr(value, "_local_tensor", value), *args, **kwargs)  # a DTensor has no address

    patch = mock.patch.object
    with patch(_sanitizer.EventHandler, "_handle_kernel_launch", collect):
        with patch(_sanitizer.ArgumentHandler, "_handle_argument", handle_local):
            yield summaries


@contextlib.contextmanager
def sanitized():
    """`collected`, with the sanitizer on."""
    from torch.cuda._sanitizer import cuda_sanitizer

    with collected() as summaries:
        cuda_sanitizer.enable()
        try:
            yield summaries
        finally:
            cuda_sanitizer.disable()


@on_ranks("sanitizer", part="races", needs=("CUDA's sanitizer",), timeout=100.0)
def sanitizer(is_small):
    """Training under torch's CUDA sanitizer: it sees a planted race, and each of its other reports is explained."""
    with sanitized() as found:
        target = torch.zeros(1024, device=rank_device())
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            target.add_(1)
        if not found:
            raise Missed("the sanitizer has not reported a planted race, so it does not look", {})
        torch.cuda.synchronize()
        found.clear()
        for way in WAYS:
            train(way, num_steps=3)
    figures, left = explained(found)
    if left:
        raise Missed(f"{len(left)} kinds of reports are not explained in tests/gpu/lines/races.py", figures)
    return {"ways of training": len(WAYS), "reports": len(found), **figures}


@on_ranks("sleeping-streams", part="races", timeout=60.0)
def sleeping_streams(is_small):
    """Without planted bugs, a sleep on any stream, before all of its work, changes no bit of any way of training."""
    ways = [*WAYS, Way(placement="held", optimizer="overlap"), Way("orig", placement="offload", optimizer="overlap")]
    ways = ways[::3] if is_small else ways
    expected = {way: digest(train(way)) for way in ways}
    compared = 0
    for role, way in itertools.product(ROLES, ways):
        try:
            with late(role):
                found = digest(train(way))
        except Missed:  # nothing runs on this stream in this way of training
            continue
        compared += 1
        if found != expected[way]:
            raise Missed(f"a late {role} stream changes the weights of {way}", {"compared": compared})
    return {"compared": compared}


@on_ranks("planted-bugs", part="races", timeout=90.0)
def planted_bugs(is_small):
    """Each wait that is removed from the engine changes some bit when the stream that it waits for sleeps."""
    from fairshard.utils.streams import is_asynchronous

    assert is_asynchronous(rank_device()), "waits mean nothing on the CPU"
    outcomes = {}
    for plant in PLANTS:
        expected = digest(train(plant.way))
        with planted(f"fairshard.{plant.site}"), late(plant.late):
            found = digest(train(plant.way))
        is_caught = bool(_num_races()) or found != expected
        outcomes[plant.claim] = f"caught, late {plant.late}" if is_caught else "missed"
    missed = [claim for claim, outcome in outcomes.items() if outcome == "missed"]
    if missed:
        raise Missed(f"not caught: {', '.join(missed)}", outcomes)
    return outcomes


def _num_races():
    """The number of races that the simulated accelerator has found since the last call; 0 on other devices.

    An order of work that happens to be right shows a planted bug there all the same.
    """
    if rank_device().type != SIMULATED:
        return 0
    from tests.sim.outcome import races_taken

    return len(races_taken())
