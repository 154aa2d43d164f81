"""The code in the docs and in public docstrings runs as printed."""

import doctest
import importlib
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

import fairshard
from tests.kit import run_ranks

ROOT = Path(__file__).parent.parent
# Built pages, and scripts of other packages: tests/integrations/test_pages.py runs those.
NOT_HERE = {"_build", "changelog.d", "integrations"}
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    if not NOT_HERE & set(page.relative_to(ROOT).parts)
)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page):
    return BLOCK.findall((ROOT / page).read_text())


def run_page(page):
    """Run the blocks of one page in order, in one namespace, as a script would; the process group exists already."""
    names = {"__name__": page}
    with (
        mock.patch.object(torch.distributed, "init_process_group"),
        mock.patch.object(torch.distributed, "destroy_process_group"),
    ):
        for number, block in enumerate(blocks(page), 1):
            exec(compile(block, f"{page}, block {number}", "exec"), names)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])
def test_code_of_a_page_runs_on_two_ranks(page):
    """Every python block of the README and of the docs runs, top to bottom, as one script on two ranks."""
    run_ranks(2, run_page, page)


def test_pages_with_code_were_found():
    """The quickstart and a guide hold code: if none is found, the search is broken."""
    assert len(blocks("docs/start/ten_minutes.md")) >= 8
    assert "clip_grad_norm_" in "".join(blocks("docs/guides/fully_shard.md"))


def run_doctests(module_names):
    """Run the examples of the given modules; return how many there were."""
    attempted = 0
    for name in module_names:
        result = doctest.testmod(importlib.import_module(name), raise_on_error=True)
        attempted += result.attempted
    return attempted


def test_examples_in_docstrings_run():
    """Every ``>>>`` example in the package runs and prints what it says."""
    package = Path(fairshard.__file__).parent
    names = [
        ".".join(["fairshard", *path.relative_to(package).with_suffix("").parts]).removesuffix(".__init__")
        for path in package.rglob("*.py")
        if re.search(r"^\s*>>> ", path.read_text(), re.MULTILINE)
    ]
    assert "fairshard.nn.data_parallel.fully_sharded_data_parallel" in names
    assert all(attempted > 0 for attempted in run_ranks(2, run_doctests, sorted(names)))
