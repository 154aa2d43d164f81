"""Consolidate a checkpoint into one file of weights or a Hugging Face folder: offline, in one process.

A model of any size needs memory for only one parameter: values are read one at a time into tensors in a
memory-mapped file on the output's disk (`mapped_like`), and torch or safetensors writes them out. The disk must hold
the mapped file as well: the whole model a second time for torch's format, one shard for safetensors.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fairshard.checkpoint.contents import (
    checkpoint_folder,
    file_state,
    files_of,
    model_keys,
    nbytes_by_file,
    whole_entry,
)
from fairshard.checkpoint.manifest import Manifest, read_manifest
from fairshard.checkpoint.output import NewOutput, mapped_like
from fairshard.checkpoint.reader import CheckpointReader, SafePlanner, first_line
from fairshard.checkpoint.storage import storage_of
from fairshard.errors import CheckpointError

MAX_SHARD_NBYTES = 5 * 10**9
CONFIG = "config.json"

_INDEX = "model.safetensors.index.json"
BESIDE_CONFIG = (
    "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja",
)  # fmt: skip


@dataclass(frozen=True)
class Consolidated:
    """Summary of the output: number of tensors, their bytes, other names of tied weights, and the files."""

    num_tensors: int
    nbytes: int
    aliases: dict[str, str]
    files: tuple[Path, ...]


def consolidate_torch(
    checkpoint: str | os.PathLike[str], out: str | os.PathLike[str], allow_unverified: bool = False
) -> Consolidated:
    """Write the model's weights as a dict that ``torch.load(out, weights_only=True)`` reads, with or without ``mmap``.

    Tied weights appear under every name and share memory. ``allow_unverified``: see `fairshard.checkpoint.load`.

    Raises:
        CheckpointError: the checkpoint is damaged or holds no model, or ``out`` exists or cannot be written.
    """
    new = NewOutput(out)
    weights = _Weights(checkpoint, allow_unverified)
    with new:
        values = weights.read(new.work, weights.names)
        values |= {name: values[first] for name, first in weights.aliases.items()}
        _save_torch(values, new.work / new.out.name)
        new.publish(new.out.name)
    return Consolidated(len(weights.names), weights.nbytes(weights.names), weights.aliases, (new.out,))


def consolidate_safetensors(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    max_shard_nbytes: int = MAX_SHARD_NBYTES,
    config: str | os.PathLike[str] | None = None,
    allow_unverified: bool = False,
) -> Consolidated:
    """Write the model's weights as a folder that transformers reads.

    It has one ``model.safetensors``, or shards of at most ``max_shard_nbytes`` (or one tensor) and their index. Tied
    weights are written once, under their first name: the format cannot share memory, and transformers ties them again.
    ``config`` is a folder whose ``config.json`` is copied, and its generation config and tokenizer if present.

    Raises:
        CheckpointError: the checkpoint is damaged or holds no model, or ``out`` exists or cannot be written, or
            ``config`` has no ``config.json``.
    """
    if config is not None and not os.path.isfile(Path(config) / CONFIG):
        raise CheckpointError(f"The folder of the config must have a {CONFIG}, but {config} has none.")
    if importlib.util.find_spec("safetensors") is None:
        raise CheckpointError("safetensors must be installed. Run: pip install 'fairshard[hf]'")
    new = NewOutput(out)
    weights = _Weights(checkpoint, allow_unverified)
    with new:
        shards = _shards(weights, max_shard_nbytes)
        for file, names in shards.items():
            _save_shard(weights.read(new.work, names), new.work / file)
        if len(shards) > 1:
            (new.work / _INDEX).write_text(_index(weights, shards), encoding="utf-8")
        if config is not None:
            for name in (CONFIG, *BESIDE_CONFIG):
                if (Path(config) / name).is_file():
                    shutil.copyfile(Path(config) / name, new.work / name)
        files = tuple(sorted(new.out / file.name for file in new.work.iterdir()))
        new.publish()
    return Consolidated(len(weights.names), weights.nbytes(weights.names), weights.aliases, files)


class _Weights:
    """The model's tensors in a checkpoint, by original ``names``; tied weights by their first name.

    With a manifest, the files that hold these tensors are verified first.
    """

    def __init__(self, checkpoint: str | os.PathLike[str], allow_unverified: bool) -> None:
        folder = checkpoint_folder(checkpoint)
        storage = storage_of(folder)
        manifest = read_manifest(storage, folder)
        self._reader = CheckpointReader(folder)
        self._reader.manifest = manifest
        self._metadata = self._reader.read_metadata()
        self._reader.check_vouched(allow_unverified)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._key = model_keys(self._metadata)
        if not self._key:
            raise CheckpointError(
                f"A checkpoint must hold a model to consolidate it, but {folder} has no tensors of one."
            )
        needed = nbytes_by_file(self._metadata)
        for name in sorted(files_of(self._metadata, set(self._key.values()))):
            problem = file_state(storage, folder, name, manifest, needed[name]).problem
            if problem is not None:
                raise CheckpointError(problem)
        self._like = {name: self._empty_like(folder, key) for name, key in self._key.items()}
        self.aliases = self._checked_aliases(folder, manifest)
        self.names = [name for name in self._key if name not in self.aliases]

    def nbytes(self, names: Sequence[str]) -> int:
        """Bytes of the tensors ``names``."""
        return sum(self._like[name].nbytes for name in names)

    def read(self, folder: Path, names: Sequence[str]) -> dict[str, Tensor]:
        """The tensors ``names``, in a memory-mapped file in ``folder``."""
        values = mapped_like(folder, {name: self._like[name] for name in names})
        for name, value in values.items():
            planner = SafePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            planner.set_up_planner({self._key[name]: value}, self._metadata, is_coordinator=True)
            self._reader.read_data(planner.create_local_plan(), planner)
        return values

    def _empty_like(self, folder: str, key: str) -> Tensor:
        entry = whole_entry(folder, self._metadata, key)
        return torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")

    def _checked_aliases(self, folder: str, manifest: Manifest | None) -> dict[str, str]:
        aliases = manifest.aliases if manifest is not None else {}
        found = {name: first for name, first in aliases.items() if {name, first} <= self._like.keys()}
        for name, first in found.items():
            one, other = self._like[name], self._like[first]
            if first in found or (one.shape, one.dtype) != (other.shape, other.dtype):
                raise CheckpointError(
                    f"Tied weights must be one tensor under two names, but `{name}` and `{first}` of {folder} are not. "
                    "Its manifest belongs to another checkpoint."
                )
        return found


def _shards(weights: _Weights, max_nbytes: int) -> dict[str, list[str]]:
    """Names of the tensors in each file, in order; a tensor that does not fit starts the next file."""
    shards: list[list[str]] = [[]]
    room = max_nbytes
    for name in weights.names:
        nbytes = weights.nbytes([name])
        if shards[-1] and nbytes > room:
            shards.append([])
            room = max_nbytes
        shards[-1].append(name)
        room -= nbytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": names for i, names in enumerate(shards, 1)}


def _save_torch(values: Mapping[str, Tensor], path: Path) -> None:
    with path.open("xb") as file:
        try:
            torch.save(values, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # torch's own error hides it
                raise error.__context__ from None
            raise


def _save_shard(values: Mapping[str, Tensor], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(values), path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(first_line(error)) from error


def _index(weights: _Weights, shards: Mapping[str, Sequence[str]]) -> str:
    weight_map = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": {"total_size": weights.nbytes(weights.names)}, "weight_map": weight_map}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"
