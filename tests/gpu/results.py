"""Results of checks, one JSON object a line, on the disk as soon as they are known."""

import json
import os
from dataclasses import asdict, dataclass, field

FILE = "results.jsonl"

PASSED, FAILED, PARTLY, SKIPPED, STARTED = "passed", "failed", "partly", "not run", "cut off"
"""Outcomes. Partly: it passed on fewer ranks than the line needs. Cut off: its part ended in the middle of it."""


@dataclass(frozen=True)
class Result:
    """The outcome of one line: its figures by name, the reason if it did not pass, and the seconds it took."""

    line: str
    part: str
    outcome: str
    reason: str = ""
    figures: dict = field(default_factory=dict)
    seconds: float = 0.0


class Results:
    """The file of one run of a part, in ``folder``: a header, then results. Invariant: each line on it is whole."""

    def __init__(self, folder, header):
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / FILE
        self._write({"header": header})

    def add(self, result):
        self._write(asdict(result))

    def _write(self, content):
        with self._path.open("a") as file:
            file.write(json.dumps(content) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read(folder):
    """``(headers, results)`` of all files below ``folder``: of each line the latest result."""
    headers, results = [], {}
    for path in sorted(folder.rglob(FILE), key=lambda path: path.stat().st_mtime):
        for line in path.read_text().splitlines():
            content = json.loads(line)
            if "header" in content:
                headers.append(content["header"])
            else:
                results[content["line"]] = Result(**content)
    return headers, list(results.values())
