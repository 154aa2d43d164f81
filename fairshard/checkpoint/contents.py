"""Contents of a checkpoint, and whether its files are intact."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from fairshard.checkpoint.manifest import FileEntry, Manifest, read_manifest, verify_file
from fairshard.checkpoint.metadata import is_marked
from fairshard.checkpoint.reader import METADATA, CheckpointReader
from fairshard.checkpoint.storage import MANIFEST, Storage, storage_of
from fairshard.errors import CheckpointError

LATEST = "latest"
OK, CHANGED, MISSING, UNKNOWN = "ok", "changed", "missing", "unknown"

_OPTIMIZER = {"optim", "optimizer"}
_MAX_DIGITS = 20
_MAX_PACKED = 64  # bytes of a tensor in one byte of a file: subclasses of tensors pack theirs, to a bit at best
_BESIDE_MODEL = [["scheduler"], ["scaler"], ["rank"], ["extra"]]


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint; ``tied_to`` is the key of a tied weight's first name."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    num_pieces: int
    nbytes: int
    tied_to: str | None = None


@dataclass(frozen=True)
class ObjectEntry:
    """An entry that is not a tensor: a pickle of ``nbytes``."""

    key: str
    nbytes: int


@dataclass(frozen=True)
class FileState:
    """State of one file: `OK`, `CHANGED`, `MISSING`, or `UNKNOWN` if there is no manifest.

    ``problem`` is a sentence that describes a changed or missing file and names it.
    """

    name: str
    nbytes: int
    state: str
    problem: str | None = None


@dataclass(frozen=True)
class Contents:
    """A checkpoint without its values; ``manifest`` is None if plain torch wrote it.

    ``tensors`` and ``objects`` are empty if the metadata that list them are changed or missing. ``model`` has the keys
    of the model's tensors.
    """

    path: str
    manifest: Manifest | None
    tensors: tuple[TensorEntry, ...]
    objects: tuple[ObjectEntry, ...]
    files: tuple[FileState, ...]
    model: frozenset[str] = frozenset()

    @property
    def problems(self) -> list[str]:
        """One sentence for each changed or missing file."""
        return [file.problem for file in self.files if file.problem is not None]


def checkpoint_folder(path: str | os.PathLike[str]) -> str:
    """The checkpoint at ``path``, or the one that ``latest`` in the folder ``path`` names.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    folder = os.fspath(path).rstrip("/") or "/"
    storage = storage_of(folder)
    if any(storage.exists(storage.join(folder, name)) for name in (METADATA, MANIFEST)):
        return folder
    pointer = storage.join(folder, LATEST)
    if not storage.exists(pointer):
        raise CheckpointError(
            f"A checkpoint must be a folder with {METADATA} in it, or with a file `{LATEST}` that names such a "
            f"folder, but {folder} has neither."
        )
    name = read_pointer(storage, pointer)
    found = storage.join(folder, name)
    if not name.isprintable() or "/" in name or name in ("", ".", "..") or not storage.exists(found):
        raise CheckpointError(
            f"{pointer} must name a folder beside it, but says {name!r:.80}. Name a step folder yourself."
        )
    return found


def read_pointer(storage: Storage, pointer: str) -> str:
    """The name in a file `LATEST`.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return storage.read_text(pointer).strip()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{pointer} must name a checkpoint, but cannot be read: {error}.") from error


def model_keys(metadata: Metadata) -> dict[str, str]:
    """The model's tensors in a checkpoint from any writer: {original name: key}, in the order of the metadata.

    Their keys start with the shortest prefix that ends in ``model.``. Without such a prefix, all tensors outside the
    optimizer's state count. A prefix must be a level of the saved dict: the ``model.`` of a bare
    ``model.layers.0.weight`` beside a bare ``lm_head.weight`` is part of the name, and stripping it would lose the
    head.
    """
    keys = [key for key, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)]
    prefix = _shortest_prefix(_levels(metadata, key) for key in keys)
    if prefix is None:  # one flat dict was saved: infer the prefix from the names
        prefix = _shortest_prefix(tuple(key.split(".")) for key in keys)
        if prefix is not None and not all(key.startswith(prefix) or _is_beside_model(key) for key in keys):
            prefix = None
    if prefix is not None:
        return {key[len(prefix) :]: key for key in keys if key.startswith(prefix)}
    return {key: key for key in keys if not _OPTIMIZER & set(key.split(".")[:-1])}


def read_contents(path: str | os.PathLike[str]) -> Contents:
    """Read the manifest and the metadata of a checkpoint, and check the files that they name.

    Values are not decoded. With a manifest, every file is read once for its checksum.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest or metadata are damaged or would run code.
    """
    folder = checkpoint_folder(path)
    storage = storage_of(folder)
    manifest = read_manifest(storage, folder)
    files = [_file_state(storage, folder, METADATA, manifest)]
    if manifest is not None and files[0].problem is not None:
        files += [_file_state(storage, folder, name, manifest) for name in sorted(manifest.files) if name != METADATA]
        return Contents(folder, manifest, (), (), tuple(files))
    metadata = CheckpointReader(folder).read_metadata()
    if manifest is None and is_marked(metadata):
        problem = f"A checkpoint of fairshard must have its {MANIFEST}, but {folder} has none: nothing is verified."
        files.append(FileState(MANIFEST, 0, MISSING, problem))
    tensors, objects = _entries(folder, metadata, manifest)
    needed: dict[str, int] = {}  # the end of the last entry in each file
    for place in metadata.storage_data.values():
        needed[place.relative_path] = max(place.offset + place.length, needed.get(place.relative_path, 0))
    names = sorted(needed.keys() | (manifest.files.keys() if manifest else set()) - {METADATA})
    files += [_file_state(storage, folder, name, manifest, needed.get(name, 0)) for name in names]
    return Contents(folder, manifest, tensors, objects, tuple(files), frozenset(model_keys(metadata).values()))


def _file_state(storage: Storage, folder: str, name: str, manifest: Manifest | None, least: int = 0) -> FileState:
    """Compare a file with its entry in the manifest; without an entry, the file must have at least ``least`` bytes."""
    path = storage.join(folder, name)
    is_there = storage.exists(path)
    nbytes = storage.size(path) if is_there else 0
    entry = manifest.files.get(name) if manifest else None
    try:
        verify_file(storage, folder, name, entry or FileEntry(max(nbytes, least), None))
    except CheckpointError as error:
        return FileState(name, nbytes, CHANGED if is_there else MISSING, str(error))
    return FileState(name, nbytes, OK if entry else UNKNOWN)


def whole_entry(folder: str, metadata: Metadata, key: str) -> TensorStorageMetadata:
    """The metadata of a tensor; all its pieces must be present.

    Raises:
        CheckpointError: pieces are missing, or the entry is invalid.
    """
    entry = metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    places = [metadata.storage_data.get(MetadataIndex(key, chunk.offsets)) for chunk in entry.chunks]
    numels = [prod(chunk.sizes) for chunk in entry.chunks]
    problem = "pieces of it are missing" if None in places or sum(numels) < prod(entry.size) else ""
    for place, numel in zip(places, numels, strict=True):
        nbytes = numel * entry.properties.dtype.itemsize
        if place is not None and nbytes > _MAX_PACKED * place.length and not place.transform_descriptors:
            problem = f"{nbytes:,} bytes of it cannot be in {place.length:,} bytes of {place.relative_path}"
    if problem:
        path = Storage.join(folder, METADATA)
        raise CheckpointError(
            f"{path} must say where all of `{key:.200}` is, but is damaged: {problem}. Use another checkpoint."
        )
    return entry


def is_optimizer(key: str) -> bool:
    """Whether an entry is part of an optimizer's state."""
    return bool(_OPTIMIZER & set(key.split(".")[:-1]))


def _levels(metadata: Metadata, key: str) -> tuple[str, ...]:
    """Keys of an entry in the nested saved dict, outermost first."""
    path = (metadata.planner_data or {}).get(key)
    return tuple(map(str, path)) if isinstance(path, tuple) else ()


def _shortest_prefix(paths: Iterable[tuple[str, ...]]) -> str | None:
    prefixes = set()
    for path in paths:
        if "model" in path[:-1]:
            levels = path[: path.index("model") + 1]
            if not _OPTIMIZER & set(levels):
                prefixes.add(".".join((*levels, "")))
    return min(prefixes, key=lambda text: (len(text), text), default=None)


def _is_beside_model(key: str) -> bool:
    levels = key.split(".")[:-1]
    return is_optimizer(key) or levels[:1] in _BESIDE_MODEL


def _entries(
    folder: str, metadata: Metadata, manifest: Manifest | None
) -> tuple[tuple[TensorEntry, ...], tuple[ObjectEntry, ...]]:
    key_of = model_keys(metadata)
    aliases = manifest.aliases if manifest else {}
    tied = {key_of[name]: key_of[first] for name, first in aliases.items() if name in key_of and first in key_of}
    tensors, objects = [], []
    for key in sorted(metadata.state_dict_metadata, key=_in_order_of_numbers):
        if isinstance(metadata.state_dict_metadata[key], TensorStorageMetadata):
            entry = whole_entry(folder, metadata, key)
            dtype = entry.properties.dtype
            nbytes = prod(entry.size) * dtype.itemsize
            text = str(dtype).removeprefix("torch.")
            tensors.append(TensorEntry(key, tuple(entry.size), text, len(entry.chunks), nbytes, tied.get(key)))
        else:
            place = metadata.storage_data.get(MetadataIndex(key))
            objects.append(ObjectEntry(key, place.length if place else 0))
    return tuple(tensors), tuple(objects)


def _in_order_of_numbers(key: str) -> list[tuple[int, int, str]]:
    """Sort key that puts ``layers.10`` after ``layers.9``."""
    parts = key.split(".")
    return [(0, int(part), "") if part.isdecimal() and len(part) < _MAX_DIGITS else (1, 0, part) for part in parts]
