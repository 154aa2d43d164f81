"""Training text: finding the files, splitting them, and drawing windows of bytes or tokens.

A *plan* is made first, from names and sizes alone, so that bad input is reported before any rank starts;
``load`` then reads the bytes. The result depends only on the files and the seed: ranks that see the same files make the
same split. Ready token files (tokens.py) are planned in the same form.
"""

from __future__ import annotations

import os
import random
import sysconfig
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairshard.cli.local_path import dangling_link, is_kernel_made

Ids = NDArray[np.integer[Any]]
"""Token ids of a text, 1-D; for plain text its bytes."""

MAX_FILES = 200_000
STANDARD_LIBRARY_NBYTES = 10_000_000
VALIDATION_SHARE = 0.1
_SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"})
_SNIFFED_NBYTES = 8192
_BLOCK_NBYTES = 1 << 20
_MAX_TOKEN_BLOCKS = 256  # of a set of token files, that a checksum reads
TEXT_DTYPE = "uint8"


class TextError(ValueError):
    """The data cannot be used for training; the message is one line for the user."""


@dataclass(frozen=True)
class TextFile:
    """A file to read and its size in bytes."""

    path: Path
    nbytes: int


@dataclass(frozen=True)
class Piece:
    """The bytes ``[begin, end)`` of a file."""

    path: Path
    begin: int
    end: int


@dataclass(frozen=True)
class TextPlan:
    """The split into training and validation text, before any of it is read.

    ``dtype`` is numpy's name of a token's type. Text is ``"uint8"``: each byte is a token.
    """

    source: str
    train: tuple[Piece, ...]
    validation: tuple[Piece, ...]
    dtype: str = TEXT_DTYPE

    @property
    def train_nbytes(self) -> int:
        """Bytes to train on."""
        return sum(piece.end - piece.begin for piece in self.train)

    @property
    def validation_nbytes(self) -> int:
        """Bytes to validate on."""
        return sum(piece.end - piece.begin for piece in self.validation)

    @property
    def item_nbytes(self) -> int:
        """Bytes of a token."""
        return np.dtype(self.dtype).itemsize

    @property
    def is_text(self) -> bool:
        """Whether the files hold text, not tokens."""
        return self.dtype == TEXT_DTYPE


@dataclass(frozen=True)
class Text:
    """Both sides of the split as flat arrays of token ids.

    ``bytes_per_token`` is that of the validation text: 1 if tokens are bytes, None if it is unknown.
    """

    train: Ids | Pieces
    validation: Ids | Pieces
    bytes_per_token: float | None = 1.0


class Pieces:
    """Mapped arrays end to end, without copying them into memory; indexed by arrays of positions."""

    def __init__(self, parts: Sequence[Ids]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        found = np.empty(positions.shape, np.int64)
        owner = np.searchsorted(self._ends, positions, side="right")
        for number in np.unique(owner):
            chosen = owner == number
            begin = self._ends[number] - len(self._parts[number])
            found[chosen] = self._parts[number][positions[chosen] - begin]
        return found


def plan_text(data: Path | None, seed: int, context: int) -> TextPlan:
    """Choose and split the text: the standard library's sources, or the file or folder ``data``.

    Raises:
        TextError: there is no text, or a side is shorter than a window of ``context + 1`` bytes.
    """
    if data is None:
        source = "the standard library's source text"
        files = _standard_library(seed)
    else:
        source = str(data)
        files = _files_at(data)
    plan = _split(source, files, seed)
    for side, nbytes in (("train on", plan.train_nbytes), ("validate on", plan.validation_nbytes)):
        if nbytes < context + 1:
            raise TextError(
                f"a context of {context} needs {context + 1} bytes to {side}, but {source} leaves {nbytes}. "
                "Pass more text or a smaller --context."
            )
    return plan


def split_files(files: Sequence[TextFile], seed: int) -> tuple[list[TextFile], list[TextFile]]:
    """Split whole files into (train, validation); needs at least two files.

    The files are shuffled with ``seed``. A file goes to validation if that side then holds at most a tenth of all
    bytes, otherwise to training. If no file is that small, the smallest one is the validation side.
    """
    shuffled = sorted(files, key=lambda file: file.path)
    random.Random(seed).shuffle(shuffled)
    budget = VALIDATION_SHARE * sum(file.nbytes for file in shuffled)
    train: list[TextFile] = []
    validation: list[TextFile] = []
    for file in shuffled:
        if file.nbytes <= budget:
            budget -= file.nbytes
            validation.append(file)
        else:
            train.append(file)
    if not validation:
        smallest = min(train, key=lambda file: file.nbytes)
        train.remove(smallest)
        validation.append(smallest)
    return train, validation


def split_position(nbytes: int) -> int:
    """Position at which a single file is cut: its last tenth, rounded up, is for validation."""
    return nbytes - -(-nbytes // 10)


def load(plan: TextPlan) -> Text:
    """Read both sides of a plan. A text in one piece is mapped, not copied; tokens always are."""
    if plan.is_text:
        return Text(_read(plan.train), _read(plan.validation))
    return Text(_mapped(plan.train, plan.dtype), _mapped(plan.validation, plan.dtype), None)


def checksum(plan: TextPlan) -> int:
    """CRC-32 of all bytes of a plan, those to train on first; of large token files, of 256 MB spread over them."""
    pieces = (*plan.train, *plan.validation)
    num_blocks = sum(-(-(piece.end - piece.begin) // _BLOCK_NBYTES) for piece in pieces)
    stride = 1 if plan.is_text else -(-num_blocks // _MAX_TOKEN_BLOCKS)
    found = 0
    for piece in pieces:
        with piece.path.open("rb") as file:
            for begin in range(piece.begin, piece.end, stride * _BLOCK_NBYTES):
                file.seek(begin)
                found = zlib.crc32(file.read(min(piece.end - begin, _BLOCK_NBYTES)), found)
    return found


def windows(text: Ids | Pieces, starts: NDArray[np.int64], context: int) -> NDArray[np.int64]:
    """The ``context + 1`` tokens from each start, as ``[len(starts), context + 1]``."""
    found: NDArray[np.int64] = text[starts[:, None] + np.arange(context + 1)].astype(np.int64)
    return found


def even_starts(length: int, context: int, count: int) -> NDArray[np.int64]:
    """``count`` starts of windows spread evenly over a text; windows overlap if the text is short."""
    return np.linspace(0, length - context - 1, count).astype(np.int64)


def _split(source: str, files: Sequence[TextFile], seed: int) -> TextPlan:
    if len(files) == 1:
        file = files[0]
        cut = split_position(file.nbytes)
        return TextPlan(source, (Piece(file.path, 0, cut),), (Piece(file.path, cut, file.nbytes),))
    train, validation = split_files(files, seed)
    return TextPlan(source, _whole(train), _whole(validation))


def _whole(files: Sequence[TextFile]) -> tuple[Piece, ...]:
    return tuple(Piece(file.path, 0, file.nbytes) for file in files)


def _standard_library(seed: int) -> list[TextFile]:
    """About 10 MB of Python's own sources without its tests; the seed chooses whole files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in _walk(root, _SKIPPED_FOLDERS) if file.path.suffix == ".py"]
    if not files:
        raise TextError(f"this Python has no source text in {root}. Pass --data.")
    random.Random(seed).shuffle(files)
    chosen: list[TextFile] = []
    nbytes = 0
    for file in files:
        if nbytes + file.nbytes <= STANDARD_LIBRARY_NBYTES:
            nbytes += file.nbytes
            chosen.append(file)
    return chosen


def _files_at(data: Path) -> list[TextFile]:
    try:
        data.stat()
    except FileNotFoundError:
        link = dangling_link(data)
        raise TextError(f"--data {data} does not exist{f': {link}' if link else ''}.") from None
    except (OSError, ValueError) as error:
        raise TextError(f"--data {data} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    if is_kernel_made(data) and (data.is_file() or data.is_dir()):
        raise TextError(f"--data {data} is made by the kernel, not on a disk. Pass a copy of it.")
    if data.is_file():
        try:
            file = TextFile(data, data.stat().st_size)
            text = _is_text(data)
        except OSError as error:
            raise TextError(f"--data {data} cannot be read: {error.strerror}.") from error
        if file.nbytes == 0:
            raise TextError(f"--data {data} is empty.")
        if not text:
            raise TextError(f"--data {data} is not text: its first {_SNIFFED_NBYTES} bytes contain a NUL.")
        return [file]
    if not data.is_dir():
        raise TextError(f"--data {data} is neither a file nor a folder.")
    files = _walk(data, frozenset({"__pycache__"}))
    if not files:
        raise TextError(f"--data {data} holds no text (hidden, empty and binary files are ignored).")
    return files


def _walk(root: Path, skipped: frozenset[str]) -> list[TextFile]:
    """All non-empty, non-hidden text files below ``root``, sorted by name."""
    found: list[TextFile] = []
    num_seen = 0
    for folder, subfolders, names in os.walk(root):
        num_seen += len(names) + len(subfolders)
        if num_seen > MAX_FILES:
            raise TextError(f"--data {root} holds more than {MAX_FILES:,} files and folders. Pass a smaller one.")
        subfolders[:] = sorted(name for name in subfolders if name not in skipped and name[0] != ".")
        for name in sorted(names):
            path = Path(folder, name)
            if name[0] == "." or not os.path.isfile(path):
                continue
            try:
                nbytes = path.stat().st_size
                if nbytes and _is_text(path):
                    found.append(TextFile(path, nbytes))
            except OSError as error:
                raise TextError(f"{path}, a file to train on, cannot be read: {error.strerror}.") from error
    return found


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" not in file.read(_SNIFFED_NBYTES)


def _read(pieces: Sequence[Piece]) -> Ids:
    if len(pieces) == 1:
        (piece,) = pieces
        return np.memmap(piece.path, np.uint8, "r", piece.begin, (piece.end - piece.begin,))
    return np.concatenate([np.fromfile(p.path, np.uint8, p.end - p.begin, offset=p.begin) for p in pieces])


def _mapped(pieces: Sequence[Piece], dtype: str) -> Ids | Pieces:
    size = np.dtype(dtype).itemsize
    parts = [np.memmap(p.path, dtype, "r", p.begin, ((p.end - p.begin) // size,)) for p in pieces]
    return parts[0] if len(parts) == 1 else Pieces(parts)
