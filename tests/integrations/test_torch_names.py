"""Names of torch.distributed.fsdp in whose place fairshard's are for a time."""

import sys
import types

import pytest
from torch.distributed.fsdp import FullyShardedDataParallel as Theirs

from fairshard.integrations.torch_names import loaded, require, swap, swapped
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
    return module


def test_inside_swapped_imports_are_fairshards(package):
    """Imports inside functions and attributes are fairshard's, and after the block torch's, also if it raises."""

    def use_and_raise():
        with swapped(NAMES):
            assert package.imported() is FullyShardedDataParallel
            assert package.read() is FullyShardedDataParallel
            raise KeyError

    with pytest.raises(KeyError):
        use_and_raise()
    assert package.imported() is Theirs
    assert package.read() is Theirs


def test_torchs_state_dict_functions_keep_torchs_class():
    """What torch imports by itself is torch's: `torch.distributed.checkpoint` was loaded before."""
    with swapped(NAMES):
        from torch.distributed.checkpoint import state_dict

        assert state_dict.FSDP is Theirs


def test_names_that_a_loaded_module_has_imported_are_swapped_and_put_back(package):
    """Only modules of the package are changed, and only names that stand for torch's objects."""
    (module,) = loaded(["some_client"])
    assert module is package
    own = dict(vars(package))
    with swap([module], NAMES):
        assert package.fully_shard is fully_shard
        assert package.imported() is Theirs
        assert {name for name, value in vars(package).items() if value is not own[name]} == {"fully_shard"}
    assert vars(package) == own


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
