"""Convert shards saved by fairscale's FullyShardedDataParallel into a checkpoint: offline, in one process.

fairscale's convention is one ``torch.save`` per rank, of ``{"shard_weights": fsdp.local_state_dict(),
"shard_metadata": fsdp.local_metadata_dict()}``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.checkpoint.state_dict_saver import save_state_dict

from fairshard.checkpoint.consolidate import mapped_like, new_output
from fairshard.checkpoint.manifest import Manifest
from fairshard.checkpoint.objects import read_object_file
from fairshard.checkpoint.reader import first_line, without_warnings
from fairshard.checkpoint.storage import MANIFEST, Storage
from fairshard.checkpoint.writer import CheckpointWriter
from fairshard.errors import CheckpointError
from fairshard.state.fairscale_shards import Shard, in_order_of_ranks, parse, tied, whole_values


def import_fairscale(shards: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Manifest:
    """Write the weights in ``shards``, one file per rank, as the checkpoint folder ``out``; returns its manifest.

    Pass the files in the order of ranks; an order that contradicts padding or the numbers in file names raises. Buffers
    come from the first rank that has them. Tied weights appear under every name.

    Raises:
        ValueError: ``shards`` is empty.
        CheckpointError: a file is missing, cannot be read as data, is not fairscale's, or belongs to another model or
            rank; or ``out`` exists or cannot be written.
    """
    if not shards:
        raise ValueError("`shards` must have one file per rank, but is empty.")
    try:
        with new_output(out) as work:
            return _import(shards, work)
    except CheckpointError:
        raise
    except Exception as error:  # damaged shards can raise anything
        raise CheckpointError(
            f"The shards of {os.fspath(shards[0])} must fit together, but do not: {first_line(error)}"
        ) from error


def _import(shards: Sequence[str | os.PathLike[str]], work: Path) -> Manifest:
    files = in_order_of_ranks([_read_shard(os.fspath(path)) for path in shards])
    values = whole_values(files, lambda like: mapped_like(work, like))
    aliases = tied(files, values)
    model = {**values, **{name: values[first] for name, first in aliases.items()}}
    writer = CheckpointWriter(str(work), None)
    with without_warnings():  # from this process alone, also while it is a rank of a group
        save_state_dict({"model": model}, writer, no_dist=True)
    manifest = Manifest(step=None, world_size=len(files), files=writer.files, aliases=aliases)
    Storage().replace_text(str(work / MANIFEST), manifest.to_json())
    return manifest


def _read_shard(path: str) -> Shard:
    try:
        found = read_object_file(path)  # memory-mapped, so that shards need no memory
    except Exception as error:  # damaged files can raise anything
        raise CheckpointError(
            f"{path} must be a shard that fairscale saved, but cannot be read as data: {first_line(error)} It is "
            "damaged, or holds more than tensors, numbers, strings and containers of them."
        ) from error
    return parse(path, found)
