"""What tests of checkpoints share."""

import pytest


@pytest.fixture
def shared_folder(tmp_path):
    """A folder that all ranks of a test see, as text."""
    return str(tmp_path)
