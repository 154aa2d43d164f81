"""A launcher that starts no ranks."""

import pytest

from fairshard.cli import launch


@pytest.fixture
def launched(monkeypatch):
    """The calls that would have started ranks."""
    calls = []
    monkeypatch.setattr(launch, "elastic_launch", lambda *args: lambda *options: calls.append(options))
    return calls
