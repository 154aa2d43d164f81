"""A launcher that starts no ranks."""

import logging
import os

import pytest

from fairshard.cli import launch


@pytest.fixture
def launched(monkeypatch):
    """The command lines with which ranks would have been started."""
    calls = []
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(launch, "elastic_launch", lambda *args: lambda *line: calls.append(line))
    yield calls
    logging.disable(logging.NOTSET)
