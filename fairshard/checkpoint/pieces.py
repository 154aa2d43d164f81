"""Whether one checkpoint can hold the parameters of several process groups: it has one value of each name and place."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from fairshard.errors import CheckpointError
from fairshard.state.optim_params import OptimParams
from fairshard.utils.span_tensor import SpanTensor


@dataclass(frozen=True)
class Piece:
    """A box of ``name``, a parameter or its state of ``numel_of_all`` elements, and the checksum of its values."""

    name: str
    numel_of_all: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    sum: int


def shared_by_few(entries: Mapping[str, Any], params: OptimParams, num_ranks: int) -> list[Piece]:
    """This rank's pieces of what is cut among fewer ranks than the ``num_ranks`` that save ``entries``.

    Other ranks may have parameters of their own under the same names. Values that are not cut are saved by each rank
    where they differ.
    """
    names = {
        name
        for named in params
        if named.flat_param is not None and named.flat_param.comms.num_ranks < num_ranks
        for name in named.first_names
    }
    values = {name: value for name, value in entries["model"].items() if name in names}
    for name, state in entries.get("optim", {"state": {}})["state"].items():
        values.update({f"{key}` of `{name}": value for key, value in state.items() if name in names})
    values = {name: value for name, value in values.items() if _is_cut(value, num_ranks)}
    found = []
    for item in create_default_local_save_plan(values, is_coordinator=False).items:
        data = item.tensor_data
        assert data is not None
        own: Tensor = find_state_dict_object(values, item.index)
        box = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
        found.append(Piece(item.index.fqn, data.size.numel(), *box, checksum(own)))
    return found


def _is_cut(value: Any, num_ranks: int) -> bool:
    if isinstance(value, DTensor):
        return value.device_mesh.size() < num_ranks  # otherwise the rest of its mesh has other parts of it
    return isinstance(value, SpanTensor)


def check_shared(every: Sequence[Sequence[Piece]]) -> None:
    """Check the `shared_by_few` of all ranks; the same on every rank.

    Raises:
        CheckpointError: ranks have different values of a parameter, of which one would be lost.
    """
    by_name: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, int]]] = defaultdict(dict)
    for rank, pieces in enumerate(every):
        for piece in pieces:
            boxes = by_name[piece.name]
            first, known = boxes.setdefault((piece.offsets, piece.sizes), (rank, piece.sum))
            is_covered_twice = sum(torch.Size(sizes).numel() for _, sizes in boxes) > piece.numel_of_all
            if known != piece.sum or is_covered_twice:
                others = first if known != piece.sum else next(iter(boxes.values()))[0]
                problem = "is another one" if known != piece.sum else "is another one, or is cut in another way,"
                raise CheckpointError(
                    f"A checkpoint holds one value of each name, but `{piece.name}` {problem} on rank {rank} than on "
                    f"rank {others}: it is sharded among some of the ranks only, and others have weights of their own "
                    "under its name. Save such modules apart, each group its own into a folder of its own: "
                    "torch.distributed.checkpoint.save(module.state_dict(), checkpoint_id=..., process_group=group)."
                )


def checksum(value: Tensor) -> int:
    """The CRC-32 of the elements of ``value``."""
    return zlib.crc32(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
