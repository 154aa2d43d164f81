"""What tests of checkpoints share."""

import shutil
from pathlib import Path

import pytest

from fairshard.utils.testing import run_ranks
from tests.checkpoint.saved_steps import save_steps


@pytest.fixture
def shared_folder(tmp_path):
    """A folder that all ranks of a test see, as text."""
    return str(tmp_path)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A root with steps 3 and 6; and the last model."""
    root = tmp_path_factory.mktemp("run") / "root"
    return root, run_ranks(2, save_steps, str(root))[0]


@pytest.fixture
def root(written, tmp_path):
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(written[0], tmp_path / "root"))
