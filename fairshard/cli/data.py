"""The data of a run, as mapped arrays of token ids.

Files are listed and split first, so that bad input is reported before any rank starts. Text is then written once, by
rank 0, as ``train.bin`` and ``validation.bin`` in the run's folder: its bytes, or its tokens if there is a tokenizer.
Token files (``--tokens``) are mapped where they are:

| file | contents |
|---|---|
| ``.bin`` | token ids without a header, little-endian, as ``--token-dtype`` says: uint16 (the default) or uint32 |
| ``.npy`` | numpy's format: one dimension of uint16, uint32, int32 or int64 |

A single file is cut: its last tenth is for validation. Of several, whole files are. The split depends only on the files
and the seed.
"""

from __future__ import annotations

import json
import os
import random
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairshard.cli.options import OptionError, TrainingStopped, TrainOptions, refused
from fairshard.cli.runs import replace_file
from fairshard.utils.collectives import gather_objects
from fairshard.utils.groups import host_group

STANDARD_LIBRARY_NBYTES = 10_000_000

_VALIDATION_SHARE = 0.1
_SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"})
_SNIFFED_NBYTES = 8192
_CHUNK_NBYTES = 1 << 20
_NPY_DTYPES = ("uint16", "uint32", "int32", "int64")
_PLACES = 64  # of a part, that are looked at before training
_SEEN_BEFORE, _COMPARED = 1 << 20, 1 << 26  # tokens of a part
_DONE = "data.json"


@dataclass(frozen=True)
class Piece:
    """``num`` tokens, or bytes of text, of a file, from byte ``begin`` on."""

    path: Path
    num: int
    begin: int = 0
    dtype: str = "uint8"

    def mapped(self) -> NDArray[Any]:
        """The tokens, mapped into memory."""
        return np.memmap(self.path, self.dtype, "r", self.begin, (self.num,))


class Ids:
    """The tokens of pieces end to end, without copying them into memory; indexed by arrays of positions."""

    def __init__(self, parts: Sequence[NDArray[Any]]) -> None:
        self.parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        found = np.empty(positions.shape, np.int64)
        owner = np.searchsorted(self._ends, positions, side="right")
        for number in np.unique(owner):
            chosen = owner == number
            begin = self._ends[number] - len(self.parts[number])
            found[chosen] = self.parts[number][positions[chosen] - begin]
        return found

    def windows(self, starts: NDArray[np.int64], context: int) -> NDArray[np.int64]:
        """The ``context + 1`` tokens from each start, as ``[len(starts), context + 1]``."""
        return self[starts[:, None] + np.arange(context + 1)]


@dataclass(frozen=True)
class DataPlan:
    """The split into pieces to train and to validate on, before any of it is read."""

    source: str
    train: tuple[Piece, ...]
    validation: tuple[Piece, ...]
    is_text: bool


@dataclass(frozen=True)
class Data:
    """Both sides of the split.

    ``bytes_per_token`` is that of the validation text: 1 if tokens are bytes, None if it is unknown.
    """

    train: Ids
    validation: Ids
    bytes_per_token: float | None = None

    def entry(self) -> dict[str, Any]:
        """What ``config.json`` keeps of the data, to know them again."""
        sides = {"train_tokens": len(self.train), "validation_tokens": len(self.validation)}
        checksum = 0
        for part in (*self.train.parts, *self.validation.parts):
            checksum = zlib.crc32(_looked_at(part, _COMPARED).tobytes(), checksum)
        return {**sides, "crc32": f"{checksum:08x}"}


def plan_data(options: TrainOptions) -> DataPlan:
    """Choose and split the files of ``options``.

    Raises:
        OptionError: there is no text, a file is in another format, or a side is shorter than a window.
    """
    if options.tokens is None and options.out is not None and (options.out / _DONE).exists():
        return DataPlan(f"the text in {options.out}", (), (), True)  # a run keeps its text
    seed, root = options.seed, options.data or Path(sysconfig.get_paths()["stdlib"])
    if options.tokens is not None:
        if len(set(options.tokens)) < len(options.tokens):
            raise OptionError("each file of --tokens must be given once, but one is given twice.")
        source = " ".join(map(str, options.tokens))
        found = [_tokens_at(path, options.token_dtype or "uint16") for path in options.tokens]
    else:
        source = "the standard library's source text" if options.data is None else str(root)
        with refused("", OSError):
            found = [Piece(path, path.stat().st_size) for path in _text_files(root, options.data is None)]
        if options.data is None:  # about 10 MB of whole files; the seed chooses
            random.Random(seed).shuffle(found)
            found = _fitting(found, STANDARD_LIBRARY_NBYTES)
    if not found:
        raise OptionError(f"{source} holds no text: hidden, empty and binary files are ignored. Pass another --data.")
    train, validation = split(found, seed)
    if options.hf is None or options.tokens is not None:  # a tokenizer may make more or fewer tokens of a text
        check_lengths(source, options.context, [sum(piece.num for piece in side) for side in (train, validation)])
    return DataPlan(source, tuple(train), tuple(validation), options.tokens is None)


def check_lengths(source: str, context: int, nums: Sequence[int]) -> None:
    """Require a window of ``context + 1`` tokens on both sides, which have ``nums``.

    Raises:
        OptionError: a side of the data is shorter.
    """
    for num, use in zip(nums, ("train", "validate"), strict=True):
        if num < context + 1:
            raise OptionError(
                f"a context of {context} needs {context + 1} tokens to {use} on, but {source} leaves {num}. "
                "Pass more data or a smaller --context."
            )


def split(pieces: Sequence[Piece], seed: int) -> tuple[list[Piece], list[Piece]]:
    """Split pieces into (train, validation); a single one is cut at its last tenth, rounded up.

    Several are shuffled with ``seed``. A piece goes to validation if that side then holds at most a tenth of all
    tokens, otherwise to training. If none is that small, the smallest one is the validation side.
    """
    if len(pieces) == 1:
        (piece,) = pieces
        cut = piece.num - -(-piece.num // 10)
        begin = piece.begin + cut * np.dtype(piece.dtype).itemsize
        return [replace(piece, num=cut)], [replace(piece, num=piece.num - cut, begin=begin)]
    train = sorted(pieces, key=lambda piece: piece.path)
    random.Random(seed).shuffle(train)
    validation = _fitting(train, _VALIDATION_SHARE * sum(piece.num for piece in train))
    validation = validation or [min(train, key=lambda piece: piece.num)]
    taken = set(validation)
    return [piece for piece in train if piece not in taken], validation


def _fitting(pieces: Sequence[Piece], budget: float) -> list[Piece]:
    """Those that together have at most ``budget`` tokens, taken in order."""
    chosen: list[Piece] = []
    for piece in pieces:
        if piece.num <= budget:
            chosen.append(piece)
            budget -= piece.num
    return chosen


def check_tokens(plan: DataPlan, vocab_size: int) -> None:
    """Check that a model of ``vocab_size`` tokens knows those of the plan, as far as a look into the files tells.

    Raises:
        OptionError: it does not.
    """
    if plan.is_text and vocab_size < 256:
        raise OptionError(f"text needs all 256 bytes, but the model has a vocabulary of {vocab_size}.")
    pieces = () if plan.is_text else (*plan.train, *plan.validation)
    seen = [(int(_looked_at(piece.mapped(), _SEEN_BEFORE).max()), piece.path) for piece in pieces]
    largest, path = max(seen, default=(0, None))
    if largest >= vocab_size:
        raise OptionError(
            f"{path} holds token {largest}, but the model has a vocabulary of {vocab_size}. Pass tokens of this "
            "model's tokenizer, or --vocab-size."
        )


def read_data(plan: DataPlan, folder: Path, rank: int, context: int, tokenizer: Any | None) -> Data:
    """The data of ``plan``; text from files in ``folder``, which rank 0 writes unless they are there. **Collective.**

    After each megabyte the ranks exchange a message, so none waits for long.

    Raises:
        TrainingStopped: a rank cannot read the files, or a side is shorter than a window.
    """
    if not plan.is_text:
        train, validation = (Ids([piece.mapped() for piece in side]) for side in (plan.train, plan.validation))
        return Data(train, validation)
    done = folder / _DONE
    group = host_group()
    if not gather_objects(done.exists(), group)[0]:
        work = _write(plan, folder, tokenizer) if rank == 0 else None
        while not gather_objects(work is not None and next(work, True), group)[0]:
            pass
    missing = [number for number, seen in enumerate(gather_objects(done.exists(), group)) if not seen]
    if missing:
        raise TrainingStopped(f"all ranks must see {folder}, which rank 0 has written, but rank {missing[0]} does not.")
    kept = json.loads(done.read_text(encoding="utf-8"))
    paths = [folder / f"{side}.bin" for side in ("train", "validation")]
    nums = [path.stat().st_size // np.dtype(kept["dtype"]).itemsize for path in paths]
    with refused("", OptionError, becomes=TrainingStopped):
        check_lengths(plan.source, context, nums)
    train, validation = (Ids([np.memmap(path, kept["dtype"], "r")]) for path in paths)
    return Data(train, validation, kept["bytes_per_token"])


def _write(plan: DataPlan, folder: Path, tokenizer: Any | None) -> Iterator[bool]:
    """Write the text of both sides; yields False after each chunk."""
    largest = 255 if tokenizer is None else max(tokenizer.get_vocab().values())
    dtype = np.dtype("uint8" if tokenizer is None else "uint16" if largest < 1 << 16 else "uint32")
    end = [] if tokenizer is None or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    num = 0
    for side, pieces in (("train", plan.train), ("validation", plan.validation)):
        with (folder / f"{side}.bin").open("wb") as out:
            for piece in pieces:
                for chunk in _chunks(piece):
                    if tokenizer is not None:
                        text = chunk.decode("utf-8", errors="replace")
                        chunk = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype).tobytes()
                    out.write(chunk)
                    yield False
                out.write(np.asarray(end, dtype).tobytes())
            out.flush()
            os.fsync(out.fileno())
            num = out.tell() // dtype.itemsize
    bytes_per_token = sum(piece.num for piece in plan.validation) / max(1, num)
    replace_file(folder / _DONE, json.dumps({"dtype": dtype.name, "bytes_per_token": bytes_per_token}))


def _chunks(piece: Piece) -> Iterator[bytes]:
    """The text of a piece in chunks of about a megabyte, cut between lines."""
    with piece.path.open("rb") as file:
        file.seek(piece.begin)
        left = piece.num
        while left > 0 and (lines := file.readlines(min(left, _CHUNK_NBYTES))):
            chunk = b"".join(lines)[:left]
            left -= len(chunk)
            yield chunk


def _text_files(root: Path, is_library: bool) -> list[Path]:
    """``root``, or all non-empty, non-hidden text files below it, sorted by folder and name."""
    if not root.is_dir():
        if not root.is_file():
            raise OptionError(f"--data {root} must be a file or a folder, but is neither.")
        return [root] if _is_text(root) else []
    skipped = _SKIPPED_FOLDERS if is_library else frozenset({"__pycache__"})
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in skipped and name[0] != ".")
        paths = (Path(folder, name) for name in sorted(names) if name[0] != ".")
        found += [path for path in paths if (path.suffix == ".py" or not is_library) and _is_text(path)]
    return found


def _is_text(path: Path) -> bool:
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        return b"\0" not in file.read(_SNIFFED_NBYTES)


def _tokens_at(path: Path, dtype: str) -> Piece:
    with refused(f"--tokens {path} cannot be read: ", OSError, ValueError, EOFError, MemoryError, OverflowError):
        if path.suffix == ".npy":
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            tokens = np.memmap(path, np.dtype(dtype).newbyteorder("<"), "r")
    kinds = [np.dtype(name).newbyteorder("<") for name in _NPY_DTYPES]
    if not isinstance(tokens, np.memmap) or tokens.ndim != 1 or tokens.dtype not in kinds or not len(tokens):
        raise OptionError(
            f"--tokens {path} must be one dimension of {', '.join(_NPY_DTYPES)}, little-endian, but is "
            f"{getattr(tokens, 'dtype', type(tokens).__name__)} of shape {list(getattr(tokens, 'shape', ()))}."
        )
    seen = _looked_at(tokens, _SEEN_BEFORE)
    if tokens.dtype == np.uint16 and len(seen) >= _PLACES and seen[0::2].any() and not seen[1::2].any():
        raise OptionError(f"--tokens {path} looks like uint32: every second uint16 is 0. Pass --token-dtype uint32.")
    if seen.min() < 0:
        raise OptionError(f"--tokens {path} must hold token ids of at least 0, but holds {seen.min()}.")
    return Piece(path, len(tokens), tokens.offset, tokens.dtype.name)


def _looked_at(tokens: NDArray[Any], most: int) -> NDArray[Any]:
    """Up to ``most`` tokens from 64 places of equal, even length."""
    each = most // _PLACES
    if len(tokens) <= most:
        return np.asarray(tokens)
    starts = np.linspace(0, len(tokens) - each, _PLACES).astype(np.int64) & ~1
    return np.concatenate([tokens[start : start + each] for start in starts])
