"""The notebooks of the docs run, and show what they print."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"

pytestmark = pytest.mark.cpu_only("its ranks are forks")


def notebooks():
    """The module that runs notebooks; it is no package's."""
    spec = importlib.util.spec_from_file_location("notebooks", DOCS / "notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outputs(cells):
    """What each code cell prints and shows, by kind."""
    found = []
    for cell in cells:
        for output in cell.get("outputs", ()):
            found += [("printed", output["text"])] if "text" in output else sorted(output["data"].items())
    return found


def test_the_notebook_runs_and_its_page_shows_its_outputs():
    """It runs from the first cell to the last, in a fresh ``__main__`` without a file; the committed outputs are its.

    The losses of each rank fall. What does not depend on the machine, the summary, is as committed.
    """
    pytest.importorskip("docutils")
    pytest.importorskip("matplotlib")
    path = DOCS / "start" / "notebook.ipynb"
    committed = json.loads(path.read_text())["cells"]
    cells = notebooks().played(path)
    assert [cell["source"] for cell in cells] == [cell["source"] for cell in committed]
    kinds = [kind for kind, _ in outputs(cells)]
    assert kinds == ["printed", "printed", "image/png", "text/plain"]
    assert kinds == [kind for kind, _ in outputs(committed)], "run `python docs/notebooks.py`, which writes the outputs"
    printed, table, *_ = (value for _, value in outputs(cells))
    assert table == outputs(committed)[1][1]
    steps = [[float(loss) for loss in re.findall(r"\d+\.\d+", line)] for line in printed]
    for losses in zip(*steps, strict=True):
        assert len(losses) == 5
        assert losses[-1] < losses[0] / 2
