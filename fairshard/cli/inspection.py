"""``fairshard inspect``: a checkpoint as text and as JSON."""

from __future__ import annotations

from math import prod
from typing import Any

from fairshard.checkpoint.contents import Contents, is_optimizer
from fairshard.checkpoint.manifest import Manifest
from fairshard.utils.size_text import size_text
from fairshard.utils.table import table


def summary_lines(contents: Contents) -> list[str]:
    """The summary of a checkpoint: parameters, optimizer, step, size, and whether it is sound."""
    keys = contents.model
    own = [entry for entry in contents.tensors if entry.key in keys and entry.tied_to is None]
    state = [entry for entry in contents.tensors if entry.key not in keys and is_optimizer(entry.key)]
    lines = [f"checkpoint  {contents.path}"]
    if contents.tensors:
        numel = sum(prod(entry.shape) for entry in own)
        tied = sum(1 for entry in contents.tensors if entry.tied_to is not None)
        lines.append(
            f"parameters  {numel:,} in {_count(len(own), 'tensor')}{f', {tied} tied' if tied else ''}, "
            f"{size_text(sum(entry.nbytes for entry in own))}"
        )
        what = f"{_count(len(state), 'tensor')}, {size_text(sum(entry.nbytes for entry in state))}"
        lines.append(f"optimizer   {what if state else 'none'}")
    lines += _origin_lines(contents.manifest)
    total = size_text(sum(file.nbytes for file in contents.files))
    lines.append(f"size        {total} in {_count(len(contents.files), 'file')}")
    lines.append(f"sound       {_verdict(contents)}")
    return lines


def detail_lines(contents: Contents) -> list[str]:
    """Tables of tensors, objects and files."""
    lines: list[str] = []
    if contents.tensors:
        lines += [*_tensor_table(contents), ""]
    elif contents.problems:
        lines += ["The list of tensors is not reliable.", ""]
    if contents.objects:
        rows = [(entry.key, f"{entry.nbytes:,}") for entry in contents.objects]
        total = (f"{len(rows):,} in all", f"{sum(entry.nbytes for entry in contents.objects):,}")
        lines += [*table([("object", "bytes"), *rows, total], "<>"), ""]
    return [*lines, *_file_table(contents)]


def _verdict(contents: Contents) -> str:
    bad = len(contents.problems)
    if bad:
        return f"no: {bad} of {_count(len(contents.files), 'file')} damaged or missing. Use another checkpoint"
    if contents.manifest is None:
        return "unknown: there are no checksums"
    return "yes: every file has its checksum"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _origin_lines(manifest: Manifest | None) -> list[str]:
    if manifest is None:
        return ["written by  a tool other than fairshard: no step, no checksums"]
    return [
        f"step        {'unknown' if manifest.step is None else manifest.step}",
        f"world size  {manifest.world_size}",
        f"versions    {', '.join(f'{name} {text}' for name, text in sorted(manifest.versions.items()))}",
    ]


def _tensor_table(contents: Contents) -> list[str]:
    rows = []
    for entry in contents.tensors:
        tie = "" if entry.tied_to is None else f"tied to {entry.tied_to}"
        shape = " x ".join(map(str, entry.shape)) or "scalar"
        rows.append((entry.key, shape, entry.dtype, f"{entry.num_pieces:,}", f"{entry.nbytes:,}", tie))
    pieces = sum(entry.num_pieces for entry in contents.tensors)
    nbytes = sum(entry.nbytes for entry in contents.tensors)
    total = (f"{len(rows):,} in all", "", "", f"{pieces:,}", f"{nbytes:,}", "")
    return table([("tensor", "shape", "dtype", "pieces", "bytes", ""), *rows, total], "<<<>><")


def _file_table(contents: Contents) -> list[str]:
    rows = [(file.name, f"{file.nbytes:,}", file.state) for file in contents.files]
    bad = len(contents.problems)
    verdict = f"{bad} bad" if bad else "all ok" if contents.manifest is not None else "unknown"
    total = (f"{len(rows):,} in all", f"{sum(file.nbytes for file in contents.files):,}", verdict)
    return table([("file", "bytes", "checksum"), *rows, total], "<><")


def as_json(contents: Contents) -> dict[str, Any]:
    """Everything, as plain data."""
    manifest = contents.manifest
    return {
        "path": contents.path,
        "step": manifest.step if manifest else None,
        "world_size": manifest.world_size if manifest else None,
        "versions": manifest.versions if manifest else {},
        "aliases": manifest.aliases if manifest else {},
        "tensors": [
            {
                "name": entry.key,
                "shape": entry.shape,
                "dtype": entry.dtype,
                "pieces": entry.num_pieces,
                "nbytes": entry.nbytes,
                "tied_to": entry.tied_to,
            }
            for entry in contents.tensors
        ],
        "objects": [{"name": entry.key, "nbytes": entry.nbytes} for entry in contents.objects],
        "files": [
            {"name": file.name, "nbytes": file.nbytes, "state": file.state, "problem": file.problem}
            for file in contents.files
        ],
    }
