"""Consolidate a checkpoint into one file of weights or a Hugging Face folder: offline, in one process.

A model of any size needs memory for only one parameter: values are read one at a time into tensors in a
memory-mapped file on the output's disk (`mapped_like`), and torch or safetensors writes them out. The disk must hold
the mapped file as well: the whole model a second time for torch's format, one shard for safetensors.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fairshard.checkpoint.contents import checkpoint_folder, model_keys, whole_entry
from fairshard.checkpoint.reader import CheckpointReader, SafePlanner, first_line
from fairshard.checkpoint.storage import Storage
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
    weights = _Weights(checkpoint, allow_unverified)
    with new_output(out, is_file=True) as work:
        values = weights.read(work, weights.names)
        values |= {name: values[first] for name, first in weights.aliases.items()}
        _save_torch(values, work / Path(out).name)
    return weights.consolidated(Path(out))


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
    weights = _Weights(checkpoint, allow_unverified)
    with new_output(out) as work:
        shards = _shards(weights, max_shard_nbytes)
        for file, names in shards.items():
            _save_shard(weights.read(work, names), work / file)
        if len(shards) > 1:
            (work / _INDEX).write_text(_index(weights, shards), encoding="utf-8")
        for name in (CONFIG, *BESIDE_CONFIG) if config is not None else ():
            if (Path(config or "") / name).is_file():
                shutil.copyfile(Path(config or "") / name, work / name)
    return weights.consolidated(*sorted(Path(out).iterdir()))


class _Weights:
    """The model's tensors in a checkpoint, by original ``names``; tied weights by their first name.

    With a manifest, all files are verified first.
    """

    def __init__(self, checkpoint: str | os.PathLike[str], allow_unverified: bool) -> None:
        folder = checkpoint_folder(checkpoint)
        self._reader = CheckpointReader(folder)
        self._reader.check_files(allow_unverified)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._key = model_keys(self._metadata)
        if not self._key:
            raise CheckpointError(
                f"A checkpoint must hold a model to consolidate it, but {folder} has no tensors of one."
            )
        self._like = {name: self._empty_like(folder, key) for name, key in self._key.items()}
        aliases = self._reader.manifest.aliases if self._reader.manifest is not None else {}
        self.aliases = {name: first for name, first in aliases.items() if {name, first} <= self._like.keys()}
        for name, first in self.aliases.items():
            one, other = self._like[name], self._like[first]
            if first in self.aliases or (one.shape, one.dtype) != (other.shape, other.dtype):
                raise CheckpointError(
                    f"Tied weights must be one tensor under two names, but `{name}` and `{first}` of {folder} are not. "
                    "Its manifest belongs to another checkpoint."
                )
        self.names = [name for name in self._key if name not in self.aliases]

    def consolidated(self, *files: Path) -> Consolidated:
        """The summary of ``files``, which have been written."""
        return Consolidated(len(self.names), self.nbytes(self.names), self.aliases, files)

    def nbytes(self, names: Sequence[str]) -> int:
        """Bytes of the tensors ``names``."""
        return sum(self._like[name].nbytes for name in names)

    def read(self, folder: Path, names: Sequence[str]) -> dict[str, Tensor]:
        """The tensors ``names``, in memory-mapped files in ``folder``."""
        values = mapped_like(folder, {name: self._like[name] for name in names})
        planner = SafePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        by_key = {self._key[name]: value for name, value in values.items()}
        planner.set_up_planner(by_key, self._metadata, is_coordinator=True)
        self._reader.read_data(planner.create_local_plan(), planner)
        return values

    def _empty_like(self, folder: str, key: str) -> Tensor:
        entry = whole_entry(folder, self._metadata, key)
        return torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")


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


# ---- a new file or folder, written atomically; and tensors in memory-mapped files


@contextlib.contextmanager
def new_output(out: str | os.PathLike[str], is_file: bool = False) -> Iterator[Path]:
    """A work folder beside ``out``, on the same disk, which is renamed to ``out`` when the ``with`` block ends.

    If ``is_file``, it is the file of that name in the work folder that becomes ``out``. After an error nothing is left.

    Raises:
        CheckpointError: ``out`` exists, its parent is no folder, or an OSError in the block: it cannot be written.
    """
    target, storage = Path(out), Storage()
    work = target.parent / f"{target.name}.tmp-{os.getpid()}"
    _check_new(target)
    try:
        work.mkdir()
        yield work
        for path in work.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        _check_new(target)
        storage.publish(str(work / target.name if is_file else work), str(target))
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {first_line(error)}") from error
    finally:
        storage.remove(str(work))


def _check_new(out: Path) -> None:
    if os.path.lexists(out):
        raise CheckpointError(f"{out} exists, and is never overwritten. Pass a new name, or remove it.")
    if not os.path.isdir(out.parent):
        raise CheckpointError(f"The parent of {out} must be a folder, but is not one. Create it.")


def mapped_like(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Empty tensors like ``tensors`` (which may be on the meta device), each with its own storage.

    The memory of each is an unlinked file in ``folder``. The kernel writes its pages back under memory pressure, so
    tensors larger than memory fit. The space is freed with the tensor. It is allocated now: a full disk raises OSError
    here instead of SIGBUS at the first write.
    """
    found = {}
    for name, like in tensors.items():
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, max(like.nbytes, 1))
            data = torch.from_file(file.name, shared=True, size=like.nbytes, dtype=torch.uint8, device="cpu")
        found[name] = data.view(like.dtype).view(like.shape) if like.nbytes else torch.empty_like(like, device="cpu")
    return found
