"""Every behaviour has one home among the tests, and the page that says where is up to date."""

from collections import Counter

import pytest

from tests.kit.behaviours import PAGE, TESTS, homes, page

MARKED = ["doors", "engine"]  # folders in which every file names its behaviour


def test_a_behaviour_has_one_home():
    """Two files with the same mark would grow apart."""
    assert [name for name, count in Counter(name for name, _, _ in homes()).items() if count > 1] == []


@pytest.mark.parametrize("folder", MARKED)
def test_every_file_names_its_behaviour(folder):
    """A file without a mark is not on the page."""
    files = set((TESTS / folder).rglob("test_*.py"))
    assert not files - {path for _, path, _ in homes()}


def test_the_page_is_up_to_date():
    """``python -m tests.kit.behaviours`` writes it."""
    assert PAGE.read_text() == page()
