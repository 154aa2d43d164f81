"""``--tokens``: ready token files, mapped into memory.

| file | contents |
|---|---|
| ``.bin`` | token ids without a header, little-endian, as ``--token-dtype`` says: uint16 (the default) or uint32 |
| ``.npy`` | numpy's format: one dimension of uint16, uint32, int32 or int64 |

One file is cut: its last tenth is for validation. Of several, whole files are for validation, as of several texts.
Files are read while training, never copied into memory as a whole.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fairshard.cli.local_path import dangling_link, is_kernel_made
from fairshard.cli.option_error import OptionError
from fairshard.cli.text import Ids, Piece, TextError, TextFile, TextPlan, split_files, split_position

TOKEN_DTYPES = ("uint16", "uint32")
_NPY_DTYPES = ("uint16", "uint32", "int32", "int64")
_SEEN = 1 << 20  # tokens of each file that are looked at before training, in 64 places
_PLACES = 64
_NUM_BYTES = 256


def plan_tokens(paths: Sequence[Path], dtype: str | None, seed: int, context: int) -> TextPlan:
    """Choose and split token files; ``dtype`` is that of ``.bin`` files, uint16 if None.

    Raises:
        TextError: a file is missing or in another format, or a side is shorter than a window of ``context + 1`` tokens.
    """
    if dtype is not None and not any(path.suffix == ".bin" for path in paths):
        raise TextError("--token-dtype is that of .bin files, but --tokens names none. Leave it out.")
    found = [_open(path, dtype or TOKEN_DTYPES[0]) for path in paths]
    dtypes = sorted({tokens.dtype.name for tokens, _ in found})
    if len(dtypes) > 1:
        raise TextError(f"all --tokens files must have one dtype, but they have {' and '.join(dtypes)}.")
    if len(set(paths)) < len(paths):
        raise TextError("each file of --tokens must be given once, but one is given twice.")
    size = np.dtype(dtypes[0]).itemsize
    begins = {path: begin for path, (_, begin) in zip(paths, found, strict=True)}
    lengths = {path: len(tokens) for path, (tokens, _) in zip(paths, found, strict=True)}

    def piece(path: Path, first: int, stop: int) -> Piece:
        return Piece(path, begins[path] + first * size, begins[path] + stop * size)

    if len(paths) == 1:
        path, cut = paths[0], split_position(lengths[paths[0]])
        sides = [[piece(path, 0, cut)], [piece(path, cut, lengths[path])]]
    else:
        split = split_files([TextFile(path, lengths[path]) for path in paths], seed)
        sides = [[piece(file.path, 0, file.nbytes) for file in side] for side in split]
    source = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    plan = TextPlan(source, tuple(sides[0]), tuple(sides[1]), dtypes[0])
    for side, nbytes in (("train on", plan.train_nbytes), ("validate on", plan.validation_nbytes)):
        if nbytes // size < context + 1:
            raise TextError(
                f"a context of {context} needs {context + 1} tokens to {side}, but {source} leaves {nbytes // size}. "
                "Pass more tokens or a smaller --context."
            )
    return plan


def largest_token(plan: TextPlan) -> tuple[int, Path]:
    """The largest token in 64 places of each file, and its file. Batches are checked too, when they are drawn."""
    largest = -1, Path()
    for piece in (*plan.train, *plan.validation):
        tokens = np.memmap(piece.path, plan.dtype, "r", piece.begin, ((piece.end - piece.begin) // plan.item_nbytes,))
        largest = max(largest, (int(_sample(tokens).max()), piece.path))
    return largest


def check_tokens(plan: TextPlan, vocab_size: int, cure: str) -> None:
    """Check that a model of ``vocab_size`` tokens knows those of the plan, as far as a look into the files tells.

    Raises:
        OptionError: it does not.
    """
    largest, path = (_NUM_BYTES - 1, None) if plan.is_text else largest_token(plan)
    if largest < vocab_size:
        return
    what = f"text needs all {_NUM_BYTES} bytes" if path is None else f"{path} holds token {largest}"
    raise OptionError(f"{what}, but the model has a vocabulary of {vocab_size}. {cure}")


def _open(path: Path, dtype: str) -> tuple[Ids, int]:
    """The mapped tokens of a file, and the byte at which they begin."""
    name = f"--tokens {path}"
    try:
        if not os.path.exists(path):
            link = dangling_link(path)
            raise TextError(f"{name} does not exist{f': {link}' if link else ''}.")
        if is_kernel_made(path):
            raise TextError(f"{name} is made by the kernel, not on a disk. Pass a copy of it.")
        if not path.is_file():
            raise TextError(f"{name} must be a file, but is not one.")
        if path.suffix == ".npy":
            tokens = _open_npy(path)
        elif path.suffix == ".bin":
            tokens = _open_bin(path, dtype)
        else:
            raise TextError(f"{name} must be a .bin or .npy file of token ids. For text pass --data.")
    except OSError as error:
        raise TextError(f"{name} cannot be read: {error.strerror or error}.") from error
    least = int(_sample(tokens).min())
    if least < 0:
        raise TextError(f"{name} must hold token ids of at least 0, but holds {least}.")
    return tokens, tokens.offset


def _open_bin(path: Path, dtype: str) -> np.memmap[Any, Any]:
    nbytes, size = path.stat().st_size, np.dtype(dtype).itemsize
    if nbytes == 0 or nbytes % size:
        raise TextError(f"--tokens {path} must hold {dtype} tokens of {size} bytes, but has {nbytes} bytes.")
    tokens = np.memmap(path, np.dtype(dtype).newbyteorder("<"), "r")
    halves = _sample(tokens)
    if dtype == "uint16" and len(tokens) >= _PLACES and halves[0::2].any() and not halves[1::2].any():
        raise TextError(f"--tokens {path} looks like uint32: every second uint16 is 0. Pass --token-dtype uint32.")
    return tokens


def _open_npy(path: Path) -> np.memmap[Any, Any]:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, SyntaxError, TypeError, MemoryError, OverflowError) as error:
        raise TextError(f"--tokens {path} is not an array in numpy's format: {error}.") from error
    if not isinstance(tokens, np.memmap) or tokens.ndim != 1 or tokens.dtype.str[1:] not in _codes():
        raise TextError(
            f"--tokens {path} must be one dimension of {', '.join(_NPY_DTYPES)}, but is "
            f"{getattr(tokens, 'dtype', type(tokens).__name__)} of shape {list(getattr(tokens, 'shape', ()))}."
        )
    if not len(tokens):
        raise TextError(f"--tokens {path} is empty.")
    if tokens.dtype.byteorder == ">":
        raise TextError(f"--tokens {path} must be little-endian, but is big-endian.")
    return tokens


def _codes() -> set[str]:
    return {np.dtype(name).str[1:] for name in _NPY_DTYPES}


def _sample(tokens: Ids) -> Ids:
    """Up to `_SEEN` tokens from `_PLACES` places of equal, even length."""
    each = _SEEN // _PLACES
    if len(tokens) <= _SEEN:
        return np.asarray(tokens)
    starts = np.linspace(0, len(tokens) - each, _PLACES).astype(np.int64) & ~1
    return np.concatenate([tokens[start : start + each] for start in starts])
