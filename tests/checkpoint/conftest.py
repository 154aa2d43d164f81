"""Fixtures that the checkpoint tests share."""

import shutil
from pathlib import Path

import pytest

from tests.checkpoint.saved_steps import save_steps
from tests.kit import run_ranks


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A root with checkpoints of steps 3 and 6, and the state dict of the last."""
    root = tmp_path_factory.mktemp("run") / "root"
    return root, run_ranks(2, save_steps, str(root))[0]


@pytest.fixture
def root(written, tmp_path):
    """A copy of that root, which a test may damage."""
    return Path(shutil.copytree(written[0], tmp_path / "root"))
