"""The dated report of ``make gpu``, and the ticks of docs/notes/gpu.md."""

from tests.gpu import page, parts, results

HEAD = """---
orphan: true
---

# GPU results of {date}

Written by `make gpu`; not edited by hand. The claims of the lines are in [](../gpu.md).

"""
TRIAL_HEAD = """# A trial of `make gpu` on {name}, {date}

Sizes are small and times are left out: this shows that each check runs, and nothing about a GPU. It ticks no line.

"""
TABLE = "\n## {name}: {does}\n\n| line | outcome | seconds | figures and reasons |\n|---|---|---|---|\n"
LEFT = "\n## Lines that no part has run here\n\n"
_SPECIAL = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "/", "`": "'", "*": "&#42;", "_": "&#95;", "[": "&#91;"}


def write(folder):
    """Write the report of all results below ``folder``, and tick the list; returns the report's path.

    Results of a real accelerator go to docs/notes/ too; those of the simulated one and of the CPU stay in ``folder``.
    """
    headers, found = results.read(folder)
    text = page.PAGE.read_text()
    written = _text(headers, found, text)
    path = folder / "report.md"
    path.write_text(written)
    if headers and not any(_is_trial(header) for header in headers):
        passed = {result.line for result in found if result.outcome == results.PASSED}
        failed = {result.line for result in found if result.outcome == results.FAILED}
        ticked = page.ticked(text, passed, failed)
        (folder / "gpu.md").write_text(ticked)  # where the tree that ran is a copy, this one travels
        page.PAGE.write_text(ticked)
        page.RESULTS.mkdir(exist_ok=True)
        path = page.RESULTS / f"{headers[-1]['date'][:10]}.md"
        path.write_text(written)
    return path


def _is_trial(header):
    return header["device"] in ("cpu", "sim")


def _text(headers, found, page_text):
    """The report as markdown."""
    lines = page.lines_of(page_text)
    last = headers[-1] if headers else {"date": "without results", "name": "nothing", "device": "cpu"}
    head = TRIAL_HEAD if _is_trial(last) else HEAD
    pieces = [head.format(date=last["date"][:10], name=last["name"])]
    pieces += dict.fromkeys(_machine(header) for header in headers)
    pieces += [f"- {header['date']}: `{header['command']}`, part {header['part']}\n" for header in headers]
    for part in parts.PARTS:
        rows = [_row(result) for result in found if result.part == part.name]
        pieces += [TABLE.format(name=part.name, does=part.does), *rows] if rows else []
    registry, ran = parts.registry(), {result.line for result in found}
    reasons = {name: registry.reasons[name] for name in lines if name in registry.reasons}
    for name in lines:
        if name in registry.checks and name not in ran:
            reasons[name] = f"its part, {registry.checks[name].part}, has not run, or ended before it"
    pieces += [LEFT, *[f"- `{name}`: {reason}.\n" for name, reason in reasons.items()]]
    return "".join(pieces)


def _machine(header):
    """The device and the versions of a run, as a paragraph."""
    vendor = "" if _is_trial(header) else f", {header['vendor']}"
    devices = f"{header['num_devices']} x " if header["num_devices"] > 1 else ""
    versions = f"torch {header['torch']}{vendor}, Python {header['python']}"
    shared = header.get("ranks_per_device", 1)
    note = f" Up to {shared} ranks share a device; their NCCL uses sockets." if shared > 1 else ""
    return f"{devices}{header['name']}; {versions}, {header['cpus']} cores.{note}\n\n"


def _row(result):
    cells = [result.reason] if result.reason else []
    cells += [f"{name}: {value}" for name, value in result.figures.items()]
    shown = "<br>".join(" ".join(_plain(cell).split()) for cell in cells)
    return f"| `{result.line}` | {result.outcome} | {result.seconds:.0f} | {shown} |\n"


def _plain(text):
    """``text`` without characters that markdown would read in a cell."""
    return "".join(_SPECIAL.get(character, character) for character in text)
