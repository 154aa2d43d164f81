"""``fairshard.json``: step and world size of a checkpoint, and the size and checksum of each of its files.

It is written last. A folder without it may still be a checkpoint of plain torch, and is read unchecked.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from fairshard.checkpoint.storage import MANIFEST, Storage
from fairshard.errors import CheckpointError
from fairshard.version import __version__

MAX_MANIFEST_NBYTES = 1 << 23
"""Enough for the files of 50,000 ranks."""

_FORMAT = 1
_MAX_BRACKETS = 10_000
_BLOCK_NBYTES = 1 << 22


@dataclass(frozen=True)
class FileEntry:
    """Size of one file in bytes, and its CRC-32, if that is known."""

    nbytes: int
    crc32: int | None


@dataclass(frozen=True)
class Manifest:
    """Training step, number of ranks that saved, other names of tied weights, and the files."""

    step: int | None
    world_size: int
    files: dict[str, FileEntry]
    aliases: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=lambda: {"fairshard": __version__, "torch": torch.__version__})

    def to_json(self) -> str:
        """Text of the manifest file."""
        entries = {"format": _FORMAT, **asdict(self)}
        return json.dumps({**entries, "crc32": _crc_of_entries(entries)}, indent=1, sort_keys=True) + "\n"


def read_manifest(storage: Storage, folder: str, max_nbytes: int = MAX_MANIFEST_NBYTES) -> Manifest | None:
    """The manifest of a checkpoint; None if it has no manifest.

    Raises:
        CheckpointError: the manifest cannot be read, or is damaged.
    """
    path = storage.join(folder, MANIFEST)
    if not storage.exists(path):
        return None
    try:
        text = storage.read_text(path, max_nbytes)
        if text.count("[") + text.count("{") > _MAX_BRACKETS + text.count('"'):
            raise ValueError("it has other brackets than those of its files")
        return _parse(json.loads(text))
    except OSError as error:
        raise CheckpointError(f"The manifest must be readable, but {path} is not: {error}.") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"The manifest must be what fairshard wrote, but {path} is damaged: {error}. Use another checkpoint; to "
            f"read the tensors anyway, unchecked, remove {MANIFEST} and pass allow_unverified=True."
        ) from error


def verify_file(storage: Storage, folder: str, name: str, entry: FileEntry) -> None:
    """Compare a file with its entry; it is read for its checksum, if that is known.

    Raises:
        CheckpointError: the file is missing, or its size or bytes have changed.
    """
    path = storage.join(folder, name)
    if not storage.exists(path):
        raise CheckpointError(f"A checkpoint must have all its files, but {path} is missing.")
    nbytes = storage.size(path)
    if nbytes != entry.nbytes:
        raise CheckpointError(f"{path} must have {entry.nbytes} bytes, but has {nbytes}: it was cut or overwritten.")
    try:
        crc = entry.crc32 if entry.crc32 is None else crc_of(storage, path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    check_crc(path, crc, entry)


def check_crc(path: str, crc: int | None, entry: FileEntry) -> None:
    """Compare the CRC-32 of the bytes read from ``path`` with its entry.

    Raises:
        CheckpointError: they differ.
    """
    if crc != entry.crc32:
        raise CheckpointError(
            f"{path} must have the CRC-32 {entry.crc32:08x} that it was written with, but has {crc:08x}: its bytes "
            "have changed since. Use another checkpoint."
        )


def crc_of(storage: Storage, path: str) -> int:
    """The CRC-32 of a file."""
    crc = 0
    with storage.open(path, "rb") as file:
        while block := file.read(_BLOCK_NBYTES):
            crc = zlib.crc32(block, crc)
    return crc


def _parse(value: Any) -> Manifest:
    if not isinstance(value, dict) or value.pop("format", None) != _FORMAT:
        raise ValueError(f"its format is not {_FORMAT}")
    if value.pop("crc32", None) != _crc_of_entries({"format": _FORMAT, **value}):
        raise ValueError("its checksum does not match")
    files = {name: FileEntry(**entry) for name, entry in value.pop("files").items()}
    manifest = Manifest(**value, files=files)
    numbers = [number for entry in files.values() for number in (entry.nbytes, entry.crc32)]
    for number in (manifest.world_size, manifest.step or 0, *numbers):
        if type(number) is not int or number < 0:
            raise ValueError(f"{number!r} is not a number")
    for name in files:
        if "/" in name or name in ("", ".", ".."):
            raise ValueError(f"{name!r} is not the name of a file in the folder")
    if not all(isinstance(text, str) for names in (manifest.aliases, manifest.versions) for text in names.values()):
        raise ValueError("a name is not a string")
    return manifest


def _crc_of_entries(entries: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(entries, sort_keys=True).encode())
