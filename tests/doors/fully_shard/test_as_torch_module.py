"""A module that `fully_shard` has sharded is torch's FSDPModule, without any of torch's behaviour."""

import pytest
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from fairshard.nn import FSDPModule, UnshardHandle, fully_shard
from fairshard.nn.data_parallel.in_place.torch_state import TorchFSDPModule
from tests.models import tiny
from tests.on_ranks import on_ranks

THEIRS = [name for name, value in vars(torch_fsdp.FSDPModule).items() if not name.startswith("__") or callable(value)]


@on_ranks(1)
def test_it_is_torchs_fsdp_module():
    """Sharded modules, and only they, are instances of torch's class, so code that asks for it configures them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    assert isinstance(model[0], torch_fsdp.FSDPModule)
    assert isinstance(model[0], nn.Linear)
    assert not isinstance(model, torch_fsdp.FSDPModule)
    fully_shard(model)
    assert isinstance(model, torch_fsdp.FSDPModule)
    assert issubclass(FSDPModule, torch_fsdp.FSDPModule)
    assert isinstance(model.unshard(async_op=True), torch_fsdp.UnshardHandle)
    assert issubclass(UnshardHandle, torch_fsdp.UnshardHandle)


@on_ranks(1)
def test_no_member_of_torchs_class_is_used():
    """Every member of torch's class is one of fairshard's or of nn.Module, or is refused by name."""
    model = fully_shard(nn.Linear(4, 4))
    refused = []
    for name in THEIRS:
        owner = next(base for base in type(model).__mro__ if name in vars(base))
        assert owner is not torch_fsdp.FSDPModule, name
        if owner is TorchFSDPModule:
            refused.append(name)
            with pytest.raises(NotImplementedError, match=f"`{name}` of torch's FSDPModule"):
                getattr(model, name)()
    assert all(name.startswith("_") for name in refused), "a public method that fairshard lacks"


@on_ranks(1)
def test_the_original_class_is_where_torch_looks_for_it():
    """``_orig_cls_mro_index`` of torch is the place of the original class."""
    for model in (fully_shard(nn.Linear(4, 4)), fully_shard(tiny())):
        cls = type(model)
        assert cls.__mro__[cls._orig_cls_mro_index] is cls._fairshard_class
