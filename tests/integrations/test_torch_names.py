"""Names of torch.distributed.fsdp that a package reads as fairshard's: only that package does, and it can be undone."""

import sys
import types

import pytest
import torch.distributed.fsdp
from torch.distributed.fsdp import FullyShardedDataParallel as Theirs
from torch.distributed.fsdp import fully_sharded_data_parallel as where_it_is

from fairshard.integrations.torch_names import reading, redirect, require, restore
from fairshard.nn import FullyShardedDataParallel, fully_shard

SOURCE = """
import torch.distributed.fsdp
from torch.distributed.fsdp import fully_shard

def imported():
    from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel
    return FullyShardedDataParallel

def read():
    return torch.distributed.fsdp.FullyShardedDataParallel
"""
NAMES = {"FullyShardedDataParallel": FullyShardedDataParallel, "fully_shard": fully_shard}


@pytest.fixture
def package(monkeypatch):
    """A loaded module ``some_client.training`` that imports from torch.distributed.fsdp."""
    module = types.ModuleType("some_client.training")
    exec(SOURCE, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield module
    restore(["some_client"])


def test_a_redirected_package_reads_fairshards(package):
    """Imports inside functions, attributes, and names imported before: all are fairshard's."""
    redirect(["some_client"], NAMES)
    assert package.imported() is FullyShardedDataParallel
    assert package.read() is FullyShardedDataParallel
    assert package.fully_shard is fully_shard


def test_others_read_torchs(package):
    """This file, and torch's own code, still read torch's objects."""
    redirect(["some_client"], NAMES)
    from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel as now

    assert now is Theirs
    assert torch.distributed.fsdp.FullyShardedDataParallel is Theirs
    assert vars(where_it_is)["FullyShardedDataParallel"] is Theirs
    assert torch.distributed.fsdp.fully_shard is not fully_shard


def test_restore_undoes_redirect(package):
    """After `restore` the package reads torch's objects, also under names imported before."""
    redirect(["some_client"], NAMES)
    restore(["some_client"])
    assert package.imported() is Theirs
    assert package.read() is Theirs
    assert package.fully_shard is torch.distributed.fsdp.fully_shard


def test_restoring_one_package_leaves_another(package, monkeypatch):
    """Two packages are redirected; undoing one does not touch the other."""
    redirect(["some_client"], NAMES)
    redirect(["some_other"], NAMES)
    restore(["some_other"])
    assert package.imported() is FullyShardedDataParallel


def test_reading_ends_with_its_block(package):
    """Inside `reading` the package reads fairshard's, after it what it read before, also if the block raises."""

    def use_and_raise():
        with reading(["some_client"], NAMES):
            assert package.imported() is FullyShardedDataParallel
            raise KeyError

    with pytest.raises(KeyError):
        use_and_raise()
    assert package.imported() is Theirs
    redirect(["some_client"], {"FullyShardedDataParallel": str})
    with reading(["some_client"], NAMES):
        assert package.imported() is FullyShardedDataParallel
    assert package.imported() is str


def test_a_missing_name_is_missing_as_before(package):
    """The error of an attribute that torch does not have names the module and the attribute."""
    redirect(["some_client"], NAMES)
    with pytest.raises(AttributeError, match=r"'torch\.distributed\.fsdp' has no attribute 'not_there'"):
        torch.distributed.fsdp.not_there  # noqa: B018


@pytest.mark.parametrize("name", ["accelerate", "lightning", "torchtitan"])
def test_a_missing_package_is_named_with_its_command(name, monkeypatch):
    """Without the client's package, importing the integration says what to install."""
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"fairshard.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=f"needs the package `{name}`.*pip install '{name}>="):
        __import__(f"fairshard.integrations.{name}")


def test_require_accepts_what_is_there():
    """A package that can be imported raises nothing."""
    require("torch", at_least="2.6")
