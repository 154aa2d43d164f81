"""The list of docs/notes/gpu.md: its lines, and their ticks."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "notes" / "gpu.md"
RESULTS = ROOT / "docs" / "notes" / "gpu-results"

_ITEM = re.compile(r"^- \[(?P<tick>[ x])\] `(?P<name>[a-z0-9-]+)`: (?P<text>.*(?:\n[ ]+\S.*)*)", re.MULTILINE)
_ANY_ITEM = re.compile(r"^- \[", re.MULTILINE)


@dataclass(frozen=True)
class Line:
    """One line of the list: its name, its claim, and whether the last run on an accelerator has shown it."""

    name: str
    text: str
    is_ticked: bool


def lines_of(text):
    """The lines of the list in ``text``, by name, in their order.

    Raises:
        ValueError: an item has no name, or a name stands twice.
    """
    found = [Line(item["name"], " ".join(item["text"].split()), item["tick"] == "x") for item in _ITEM.finditer(text)]
    if len(found) != len(_ANY_ITEM.findall(text)):
        raise ValueError("Every item of the list must begin with its name: - [ ] `name`: claim.")
    by_name = {line.name: line for line in found}
    if len(by_name) != len(found):
        twice = sorted({line.name for line in found if sum(other.name == line.name for other in found) > 1})
        raise ValueError(f"Every line must have a name of its own, but these stand twice: {', '.join(twice)}.")
    return by_name


def ticked(text, passed, failed):
    """``text`` with a tick at each line of ``passed``, none at those of ``failed``, and others as they are."""

    def mark(item):
        name = item["name"]
        tick = "x" if name in passed else " " if name in failed else item["tick"]
        return f"- [{tick}]{item[0][len('- [ ]') :]}"

    return _ITEM.sub(mark, text)
