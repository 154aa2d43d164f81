"""A published checkpoint is on the disk: each file is synced, then its folder, then its new name."""

import os
from unittest import mock

import pytest

from fairshard.checkpoint import Checkpointer
from tests.models import mlp


@pytest.fixture
def calls(tmp_path):
    """System calls of a first save of step 1 into ``run``, in order.

    ``("sync", inode)`` (a file may be renamed later, its inode stays) or ``("rename", old, new)``.
    """
    found = []
    sync, rename, replace = os.fsync, os.rename, os.replace

    def synced(descriptor):
        found.append(("sync", os.fstat(descriptor).st_ino))
        sync(descriptor)

    def renamed(call):
        def renaming(old, new):
            found.append(("rename", os.path.basename(old), os.path.basename(new)))
            call(old, new)

        return renaming

    with (
        mock.patch("os.fsync", synced),
        mock.patch("os.rename", renamed(rename)),
        mock.patch("os.replace", renamed(replace)),
    ):
        Checkpointer(tmp_path / "run", async_save=False).save(1, mlp(3, 4))
    return found


def rename_to(calls, name):
    """Position of the call that renamed something to ``name``."""
    (place,) = (at for at, (kind, *rest) in enumerate(calls) if kind == "rename" and rest[-1] == name)
    return place


def is_synced(calls, path):
    """Whether ``calls`` contain a sync of the file or folder at ``path``."""
    return ("sync", path.stat().st_ino) in calls


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "fairshard.json"])
def test_a_file_is_on_the_disk_before_the_step_has_its_name(tmp_path, calls, name):
    """A crash of the machine never leaves a step whose files are empty."""
    published = rename_to(calls, "step-00000001")
    assert is_synced(calls[:published], tmp_path / "run" / "step-00000001" / name)


def test_the_names_in_a_step_are_on_the_disk_before_it_has_its_own(tmp_path, calls):
    """The folder of the step is synced after the last file in it got its name."""
    last = rename_to(calls, "fairshard.json")
    assert is_synced(calls[last : rename_to(calls, "step-00000001")], tmp_path / "run" / "step-00000001")


def test_a_step_is_on_the_disk_before_latest_names_it(tmp_path, calls):
    """A crash of the machine never leaves a ``latest`` that names nothing."""
    published, pointed = rename_to(calls, "step-00000001"), rename_to(calls, "latest")
    assert is_synced(calls[published:pointed], tmp_path / "run")


def test_latest_is_on_the_disk_when_a_save_is_done(tmp_path, calls):
    """The text is synced before the file is renamed to ``latest``, and the new name after that."""
    pointed = rename_to(calls, "latest")
    assert is_synced(calls[:pointed], tmp_path / "run" / "latest")
    assert is_synced(calls[pointed:], tmp_path / "run")


def test_a_new_root_is_on_the_disk(tmp_path, calls):
    """The parent folder of a new root is synced before the first step is published."""
    assert is_synced(calls[: rename_to(calls, "step-00000001")], tmp_path)
