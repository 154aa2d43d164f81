"""torch's functions that cut whole values for DTensors, so that they also cut them for tensors placed by blocks.

``torch.distributed.checkpoint.state_dict`` loads state with ``full_state_dict=True`` through two functions of a private
module (to torch 2.13). Both know even chunks only: without this, one raises, and the other, which ranks enter while
rank 0 broadcasts, raises on some ranks and leaves the others waiting.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed import _state_dict_utils
from torch.distributed.tensor import DTensor, Placement

from fairshard.utils.ragged_tensor import RaggedShard, RaggedTensor, ragged_of, ragged_part_of

_DISTRIBUTE = "distribute_tensor"  # a whole value that every rank has
_AFTER_BROADCAST = "_distribute_tensors"  # values that rank 0 has sent, each with the DTensor that it goes into


@functools.cache
def cut_whole_values() -> None:
    """From now on, make torch's functions for full state dicts cut whole values where cuts of blocks are."""
    for name, extended in ((_DISTRIBUTE, _also_by_blocks), (_AFTER_BROADCAST, _blocks_first)):
        original = getattr(_state_dict_utils, name, None)
        if original is not None:
            setattr(_state_dict_utils, name, extended(original))


def _also_by_blocks(distribute: Callable[..., DTensor]) -> Callable[..., DTensor]:
    @functools.wraps(distribute)
    def call(tensor: Tensor, device_mesh: Any = None, placements: Any = None, **kwargs: Any) -> DTensor:
        last: Placement | None = placements[-1] if placements else None
        if isinstance(last, RaggedShard) and not isinstance(tensor, DTensor):
            return ragged_of(tensor, device_mesh, placements)
        return distribute(tensor, device_mesh, placements, **kwargs)

    return call


def _blocks_first(distribute: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(distribute)
    def call(local_state: dict[str, Any], keys: list[str], *args: Any, **kwargs: Any) -> None:
        for key in keys:
            found = local_state.get(key)
            if isinstance(found, tuple) and isinstance(found[0], RaggedTensor):
                like, whole = found
                part = ragged_part_of(whole, like._spec)
                local_state[key] = part.clone() if like.is_meta else like.copy_(part)
        distribute(local_state, keys, *args, **kwargs)  # skips those

    return call
