"""Models sharded in place, by this library or by PyTorch, into the same units."""

from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fairshard.nn import fully_shard
from tests.kit.doors import whole


def shard_tiny(model, door=fully_shard, **kwargs):
    """Shard into the units of `wrap_tiny`: a Linear of the first block, both blocks, the shared Linear, the rest."""
    for module in (model.first.up, model.first, model.second, model.shared, model):
        door(module, **kwargs)
    return model


def torch_tiny(model, **kwargs):
    """`shard_tiny` with PyTorch's ``fully_shard``."""
    return shard_tiny(model, torch_fully_shard, **kwargs)


full_state = whole
