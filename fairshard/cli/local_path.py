"""Paths on the command line: checked before anything is opened."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

_MAX_NAME_NBYTES = 255
_MAX_OUTPUT_NAME_NBYTES = 230  # names of work folders are longer
_MAX_PATH_NBYTES = 4095
_KERNEL = ("/proc", "/sys", "/dev")
_SHARED_MEMORY = "/dev/shm"
_MAX_LINE = 1000


def local_path(text: str) -> Path:
    """Type of an argument that is a path on this machine.

    Raises:
        ArgumentTypeError: it cannot be one.
    """
    try:
        nbytes = [len(name.encode()) for name in text.split("/")]
    except UnicodeEncodeError:  # it could not be printed
        raise argparse.ArgumentTypeError(f"a path must be valid UTF-8, but is {text!r}") from None
    if not text:
        raise argparse.ArgumentTypeError("a path must have a name, but is empty")
    if "\0" in text:
        raise argparse.ArgumentTypeError(f"a path cannot contain a NUL, but is {text!r}")
    if max(nbytes) > _MAX_NAME_NBYTES or sum(nbytes) + len(nbytes) - 1 > _MAX_PATH_NBYTES:
        raise argparse.ArgumentTypeError(
            f"a name in a path must have at most {_MAX_NAME_NBYTES} bytes, a path {_MAX_PATH_NBYTES}, but {text!r} is "
            "longer"
        )
    if "://" in text:
        raise argparse.ArgumentTypeError(f"it must be on this machine, but is the URL {text!r}")
    return Path(text)


def problem_with_output(out: Path) -> str | None:
    """Why nothing new can be written as ``out``; None if it can. Only looks."""
    parents = [out, *out.absolute().parents]
    try:
        if len(os.fsencode(out.name)) > _MAX_OUTPUT_NAME_NBYTES:
            return f"its name must have at most {_MAX_OUTPUT_NAME_NBYTES} bytes"
        if (link := dangling_link(out)) is not None:
            return link
        if is_kernel_made(out):
            return "it is made by the kernel, not on a disk"
        folder = next(parent for parent in parents if os.path.lexists(parent))
    except OSError as error:
        return f"{error.strerror}"
    if not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
        return f"{folder} is not a writable folder"
    return None


def dangling_link(path: Path) -> str | None:
    """The error text for a link whose target does not exist; None for anything else."""
    if os.path.islink(path) and not os.path.exists(path):
        return f"it is a link to {os.readlink(path)}, which does not exist"
    return None


def is_kernel_made(path: Path) -> bool:
    """Whether ``path`` lies below ``/proc``, ``/sys`` or ``/dev``: its files may block, never end, or act when read."""
    real = os.path.realpath(path)
    inside = [folder for folder in (*_KERNEL, _SHARED_MEMORY) if real == folder or real.startswith(f"{folder}/")]
    return bool(inside) and inside[-1] != _SHARED_MEMORY


def one_line(text: str) -> str:
    """``text`` in one printable line of at most 1,000 characters: it may quote names of any kind."""
    shown = printable(" ".join(text.split()))
    return shown if len(shown) <= _MAX_LINE else f"{shown[: _MAX_LINE // 2]} ... {shown[-_MAX_LINE // 2 :]}"


def printable(text: str) -> str:
    """``text`` with escapes instead of control characters, which could move a terminal's cursor or worse."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
