"""The parts of ``make gpu``: what each runs, in which time, and how a check is run and judged."""

import contextlib
import datetime
import functools
import importlib
import os
import platform
import re
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tests.gpu import results
from tests.gpu.check import REGISTRY, SIMULATED, Missed, NotHere
from tests.gpu.results import Result
from tests.kit.rank_pool import RankPool, RanksFailed

_LINES = ("passes", "offload", "construction", "state", "strategies", "in_place", "programs")
MODULES = (*_LINES, "suite", "races", "steps", "offload_steps", "memory", "left_out")
"""The modules of ``lines/``."""

_SHOWN = 300  # characters of an error in a report
_ERROR = re.compile(r"^(?:\[.*\] )?Traceback .*\n(?:[ ].*\n|\n)*(\S.*)", re.MULTILINE)
_COLD_S = 60.0  # the first call of a pool loads the device's libraries


@dataclass(frozen=True)
class Part:
    """A part of at most ``limit_s`` seconds."""

    name: str
    does: str
    limit_s: float


PARTS = (
    Part("lines", "small checks of single lines", 225),
    Part("tests", "pytest on the lists of files", 390),
    Part("races", "the sanitizer, and planted bugs with sleeping streams", 135),
    Part("steps", "step time beside FSDP1 and FSDP2", 255),
    Part("offload", "offloaded steps with exact clipping beside FSDP2", 315),
    Part("memory", "peak memory against the formula, and traces", 120),
)
"""At most 8 minutes each and 25 in all, with a minute to start them (tests/gpu/test_list.py)."""


def registry():
    """All checks, whose modules are imported first."""
    for name in MODULES:
        importlib.import_module(f"tests.gpu.lines.{name}")
    return REGISTRY


def part_named(name):
    """The part of that name or number, counted from 1.

    Raises:
        ValueError: there is none.
    """
    for number, part in enumerate(PARTS, 1):
        if name in (part.name, str(number)):
            return part
    known = ", ".join(f"{number} ({part.name})" for number, part in enumerate(PARTS, 1))
    raise ValueError(f"PART must be one of {known}, or report, but is {name!r}.")


def check_lines(lines):
    """Raise if ``lines``, names after commas, has one that nothing runs.

    Raises:
        ValueError: it has.
    """
    unknown = [name for name in lines.split(",") if name and name not in registry().checks]
    if unknown:
        raise ValueError(f"LINES must be names of lines that something runs, but {unknown[0]!r} is none.")


def run_part(machine, part, found, lines=None, say=print):
    """Run the checks of ``part`` in order, or those of ``lines``, and add each result to ``found`` at once."""
    deadline = time.monotonic() + part.limit_s
    with contextlib.closing(_Ranks(machine.device)) as ranks:
        for check in [check for check in registry().checks.values() if check.part == part.name]:
            if lines is not None and check.line not in lines:
                continue
            begin = time.monotonic()
            reason = _why_not(check, machine, deadline - begin)
            if reason:
                result = Result(check.line, part.name, results.SKIPPED, reason)
            else:
                found.add(Result(check.line, part.name, results.STARTED, "its part ended while it ran"))
                result = _run(check, machine, deadline, ranks)
            found.add(result)
            say(f"{result.line}: {result.outcome} {result.reason.strip()[-200:]}".strip(), flush=True)


def _why_not(check, machine, left_s):
    """Why ``check`` cannot run here and now; empty if it can."""
    lacking = [machine.lacks[name] for name in check.needs if name in machine.lacks]
    if lacking:
        return "; ".join(lacking)
    if check.num_ranks > machine.max_ranks and not (check.alone and machine.max_ranks):
        return f"needs {check.num_ranks} ranks, but the devices have room for {machine.max_ranks}"
    return "" if left_s >= 1 else "no time was left in its part"


def _run(check, machine, deadline, ranks):
    """The result of ``check``."""
    begin = time.monotonic()
    outcome, reason, figures = results.PASSED, "", {}
    num_ranks = min(check.num_ranks, machine.max_ranks)
    try:
        if check.num_ranks:
            figures = ranks.run(check, num_ranks, machine, deadline)
        else:
            figures = check.run(machine, min(check.timeout, deadline - begin)) or {}
        if machine.max_ranks < check.num_ranks:
            outcome, reason = results.PARTLY, f"passed on {num_ranks} of the {check.num_ranks} ranks that it needs"
        elif not machine.is_small and machine.num_devices < check.num_devices:
            few = f"{machine.num_devices} of the {check.num_devices} devices"
            outcome, reason = results.PARTLY, f"passed on {few} that it needs"
    except NotHere as error:
        outcome, reason = results.SKIPPED, str(error)
    except Missed as error:
        outcome, reason, figures = results.FAILED, error.reason, error.figures
    except subprocess.TimeoutExpired as error:
        outcome, reason = results.FAILED, f"took longer than {error.timeout:.0f} s"
    except Exception as error:  # any failure is that of one line
        text = str(error) if isinstance(error, RanksFailed) else traceback.format_exc()
        log = machine.out / f"{check.line}.log"
        log.write_text(text)
        outcome, reason = results.FAILED, f"{_gist(text)} (all of it: {log.name})"
    shown = {name: value for name, value in figures.items() if not machine.is_small or "bytes" in name}
    return Result(check.line, check.part, outcome, reason, shown, round(time.monotonic() - begin, 1))


def _gist(text):
    """The error of the first traceback in ``text``; without one, the first line."""
    error = _ERROR.search(text)
    return (error[1] if error else text.strip().partition("\n")[0])[:_SHOWN]


class _Ranks:
    """Ranks on the device, which are replaced after a failure: an error on a device may stay with its process."""

    def __init__(self, device):
        self._device = device
        self._pools = {}  # by the number of devices of a process, which the simulated accelerator cannot change

    def run(self, check, num_ranks, machine, deadline):
        """Rank 0's figures of ``check``; on the simulated accelerator, of the last of its seeds."""
        simulated = machine.device == SIMULATED
        is_cold = check.num_devices not in self._pools
        pool = self._pools.setdefault(check.num_devices, RankPool(self._device))
        for seed in check.seeds if simulated else (None,):
            if simulated:
                from tests.sim.ranks import watched  # needs pytest, and is for the simulator only

                pool.around = functools.partial(watched, seed, check.num_devices)
            left = max(1.0, deadline - time.monotonic())
            timeout = min(check.timeout + _COLD_S * is_cold, left)
            body = functools.partial(_body, check.run.__module__, check.run.__name__, machine.is_small)
            try:
                kind, value = pool.run(num_ranks, body, timeout=timeout)[0]
            except RanksFailed:
                self.close()
                raise
            is_cold = False
            if kind == "missed":
                raise Missed(*value)
            if kind == "not here":
                raise NotHere(value)
        return value

    def close(self):
        for pool in self._pools.values():
            pool.close()
        self._pools = {}


def _body(module, name, is_small):
    """One rank of a check."""
    function = getattr(importlib.import_module(module), name)
    try:
        return "figures", function(is_small) or {}
    except Missed as missed:
        if dist.get_world_size() > 1:
            raise  # other ranks may wait for this one: the pool ends them
        return "missed", (missed.reason, missed.figures)
    except NotHere as error:
        return "not here", str(error)


def header(machine, part, command):
    """What is true of a whole run: the device, the versions, the command, the date."""
    return {
        "part": part.name,
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": machine.device,
        "name": _device_name(machine),
        "num_devices": machine.num_devices,
        "ranks_per_device": machine.ranks_per_device,
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vendor": f"CUDA {torch.version.cuda}" if torch.version.cuda else f"HIP {torch.version.hip}",
    }


def _device_name(machine):
    """The device's name, asked in a process of its own: this one must stay without a context on the device."""
    if machine.is_small:
        return {"cpu": "no accelerator", SIMULATED: "the simulated accelerator of tests/sim"}[machine.device]
    ask = f"import torch; print(torch.get_device_module({machine.device!r}).get_device_name(0))"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=120)
    return done.stdout.strip() or "unknown"
