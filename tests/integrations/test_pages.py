"""The scripts in docs/guides/integrations run as printed, on two ranks."""

import importlib.util
import os
import re
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.clients.case import be_torchrun
from tests.kit import run_ranks

FOLDER = Path(__file__).parents[2] / "docs" / "guides" / "integrations"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = {"accelerate": ("accelerate", "transformers"), "lightning": ("lightning",)}


def run_page(name, folder):
    """Run each block of a page as a script of its own, in an empty folder."""
    with mock.patch.dict(os.environ), mock.patch.object(dist, "destroy_process_group"):
        be_torchrun(dist.get_rank(), dist.get_world_size(), 29500)
        os.chdir(folder)
        try:
            for block in BLOCK.findall((FOLDER / f"{name}.md").read_text()):
                with warnings.catch_warnings():
                    warnings.filterwarnings("error", "All ranks should begin with the same weights")
                    exec(compile(block, f"{name}.md", "exec"), {"__name__": "__main__"})
        finally:
            os.chdir(FOLDER)


@pytest.mark.cpu_only("the scripts of the pages run on the CPU")
@pytest.mark.parametrize("name", PAGES)
def test_scripts_of_a_page_run_on_two_ranks(name, tmp_path):
    """Every python block of the page is a whole script, and trains without the warning of differing ranks."""
    for package in PAGES[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install {package}")
    assert BLOCK.findall((FOLDER / f"{name}.md").read_text())
    run_ranks(2, run_page, name, str(tmp_path), timeout=240.0)


def test_every_page_is_run_or_named_here():
    """A new page with a script must be added to the pages that run; torchtitan needs more than a script."""
    assert {page.stem for page in FOLDER.glob("*.md")} == {*PAGES, "torchtitan", "index"}
