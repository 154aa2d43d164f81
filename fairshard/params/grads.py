"""The gradients of shards, wherever they are kept."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fairshard.params.flat_param import FlatParam


def grads_of(flat_params: Sequence[FlatParam]) -> dict[nn.Parameter, Tensor]:
    """The gradient of each shard that has one, wherever it is kept."""
    stepped = [one for flat_param in flat_params if flat_param.grad is not None for one in flat_param.stepped]
    return {one.shard: grad for one in stepped if (grad := one.grad.value) is not None}
