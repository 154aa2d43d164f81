"""``python -m tests.gpu``: see ``make gpu``."""

import argparse
import shlex
import signal
import sys
from pathlib import Path

import torch

from tests.gpu import page, parts, report, results
from tests.gpu.check import SIMULATED, Machine

REPORT = "report"


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="Runs the list of docs/notes/gpu.md.")
    parser.add_argument("--part", default="", help="a part by number or name, or report; default: all")
    parser.add_argument("--lines", default="", help="names of lines, after commas; default: all of the part")
    parser.add_argument("--out", type=Path, default=page.ROOT / "runs" / "gpu", help="folder of the results")
    parser.add_argument("--device", default="", help="type of the device; default: that of this machine")
    parser.add_argument("--ranks-per-device", type=int, default=1, help="ranks of one line that share a device")
    given = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `finally` ends what the part has started
    try:
        chosen = [] if given.part == REPORT else [parts.part_named(given.part)] if given.part else list(parts.PARTS)
        parts.check_lines(given.lines)
        machine = _machine(given)
    except ValueError as error:
        print(f"make gpu: {error}", file=sys.stderr)
        return 2
    chosen_part = [f"PART={given.part}"] if given.part else []
    shared = [f"RANKS={given.ranks_per_device}"] if given.ranks_per_device > 1 else []
    shared += [f"LINES={given.lines}"] if given.lines else []
    command = shlex.join(["make", "gpu", *chosen_part, f"DEVICE={machine.device}", *shared])
    for part in chosen:
        print(f"== {part.name}: {part.does}, at most {part.limit_s:.0f} s", flush=True)
        found = results.Results(machine.out, parts.header(machine, part, command))
        try:
            parts.run_part(machine, part, found, given.lines.split(",") if given.lines else None)
        finally:
            report.write(machine.out)
    path = report.write(machine.out)
    print(f"written: {path}")
    _, outcomes = results.read(machine.out)
    return int(any(result.outcome == results.FAILED for result in outcomes))


def _machine(given):
    """The machine that the arguments name.

    Raises:
        ValueError: it has no such device.
    """
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = given.device or (found.type if found else "")
    if given.part == REPORT:
        return Machine(kind or "cpu", 0, given.out)
    if kind == SIMULATED:
        from tests import sim

        if sim.why_missing():
            raise ValueError(f"DEVICE=sim {sim.why_missing()}")
        sim.build()  # not in the time of a check
        return Machine(kind, 1, given.out)
    if found is None or found.type != kind:
        here = f"torch {torch.__version__} sees {'none' if found is None else found.type}"
        raise ValueError(
            f"an accelerator{f' {kind!r}' if kind else ''} is needed, but {here}. Without one: DEVICE=sim."
        )
    return Machine(kind, torch.get_device_module(kind).device_count(), given.out, given.ranks_per_device)


if __name__ == "__main__":
    sys.exit(main())
