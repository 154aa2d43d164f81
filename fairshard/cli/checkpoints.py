"""``fairshard consolidate``, ``inspect`` and ``import-fairscale``: checkpoints, without a process group."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from fairshard.checkpoint.consolidate import MAX_SHARD_NBYTES, consolidate_safetensors, consolidate_torch
from fairshard.checkpoint.contents import Contents, is_optimizer, read_contents
from fairshard.checkpoint.import_fairscale import import_fairscale
from fairshard.cli.options import OptionError, local_path, one_line, printable
from fairshard.cli.runs import CHECKPOINTS
from fairshard.utils.size_text import size_text
from fairshard.utils.table import table

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_CKPT = "folder of a checkpoint; or of a run or its checkpoints, for the latest one"


def add_checkpoint_commands(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the three commands; each sets ``run``."""
    parser = commands.add_parser(
        "consolidate",
        help="write a checkpoint's weights as one file, or as a Hugging Face folder",
        description="Write the weights of the model in a checkpoint under their original names. Checksums are compared "
        "first. Memory for one parameter is enough; during the write the output's disk needs room for the weights a "
        "second time (safetensors: for one shard).",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="CKPT", help=_CKPT)
    parser.add_argument("out", metavar="OUT", type=local_path, help="new file (torch) or new folder (safetensors)")
    parser.add_argument(
        "--format", choices=("torch", "safetensors"), default="torch",
        help="torch: a dict for torch.load, tied weights share memory; safetensors: a folder for transformers, "
        "tied weights once under their first name (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--max-shard-size", type=size_argument, metavar="SIZE", help="of a safetensors file, as 500MB (default: 5GB)"
    )
    parser.add_argument(
        "--config", type=local_path, metavar="DIR",
        help="copy config.json, generation config and tokenizer from here (default: those of a run of --hf)",
    )  # fmt: skip
    parser.add_argument(
        "--allow-unverified", action="store_true", help="also read a checkpoint whose list of checksums is lost"
    )
    parser.set_defaults(run=_consolidate)
    parser = commands.add_parser(
        "inspect",
        help="show the contents of a checkpoint, and whether its files are intact",
        description="Compare every file of a checkpoint with its checksum, and show its size and contents. The exit "
        "code is 1 if a file is damaged or missing.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="CKPT", help=_CKPT)
    parser.add_argument("--all", action="store_true", help="also show every tensor, object and file")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with everything")
    parser.set_defaults(run=_inspect)
    parser = commands.add_parser(
        "import-fairscale",
        help="make a checkpoint from the shards that fairscale's FSDP saved",
        description='Make a checkpoint from one file per rank, each a torch.save of {"shard_weights": '
        'fsdp.local_state_dict(), "shard_metadata": fsdp.local_metadata_dict()}. Parameters, buffers (those of rank 0) '
        "and tied weights are imported under their original names; optimizer states are not.",
        epilog="Pass the files in the order of ranks, because fairscale's metadata do not hold the rank: $(ls -v "
        "shard_*.pt). An order that contradicts padding or file names is an error.",
        allow_abbrev=False,
    )
    parser.add_argument("shards", metavar="SHARD_FILE", nargs="+", type=local_path, help="file of one rank")
    parser.add_argument("out", metavar="OUT", type=local_path, help="new folder")
    parser.set_defaults(run=_import_fairscale)


def size_argument(text: str) -> int:
    """Type of an argument that is a size, such as 500MB or 1.5 GiB; the bytes.

    Raises:
        ArgumentTypeError: it is not one.
    """
    found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]+)?) ?([A-Za-z]*)", text)
    unit = _UNITS.get(found[2].upper(), 0) if found else 0
    if found is None or float(found[1]) * unit < 1:
        raise argparse.ArgumentTypeError(f"a size must be a number with kB, MB, GB, KiB, MiB or GiB, but is {text!r}")
    return int(float(found[1]) * unit)


def _consolidate(arguments: argparse.Namespace) -> int:
    is_folder = arguments.format == "safetensors"
    if not is_folder and (arguments.max_shard_size is not None or arguments.config is not None):
        raise OptionError("--max-shard-size and --config need --format safetensors: torch's format is one file.")
    checkpoint = _checkpoint_in(arguments.checkpoint)
    _check_new(arguments.out)
    if arguments.config is not None and not os.path.isfile(arguments.config / "config.json"):
        raise OptionError(f"--config must be a folder with a config.json, but {arguments.config} has none.")
    if is_folder:
        limit = arguments.max_shard_size or MAX_SHARD_NBYTES
        config = arguments.config or _config_of_run(checkpoint)
        found = consolidate_safetensors(checkpoint, arguments.out, limit, config, arguments.allow_unverified)
    else:
        found = consolidate_torch(checkpoint, arguments.out, arguments.allow_unverified)
    tied = f", {len(found.aliases):,} tied" if found.aliases else ""
    print(f"{found.num_tensors:,} tensors, {found.nbytes:,} bytes{tied}")
    print("\n".join(f"  {file}" for file in found.files))
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    contents = read_contents(_checkpoint_in(arguments.checkpoint))
    if arguments.json:
        print(json.dumps(as_json(contents), indent=1))
    else:
        lines = [*summary_lines(contents), *(["", *detail_lines(contents)] if arguments.all else ())]
        print("\n".join(map(printable, lines)))  # keys may be anything
    for problem in contents.problems:
        print(f"fairshard: error: {one_line(problem)}", file=sys.stderr)
    return 1 if contents.problems else 0


def _import_fairscale(arguments: argparse.Namespace) -> int:
    for path in arguments.shards:
        if not os.path.isfile(path):
            raise OptionError(f"{path} must be a file of fairscale's, but does not exist, or is no file.")
    _check_new(arguments.out)
    manifest = import_fairscale(arguments.shards, arguments.out)
    nbytes = sum(file.nbytes for file in manifest.files.values())
    print(f"{arguments.out}: the shards of {manifest.world_size} ranks, {nbytes:,} bytes")
    return 0


def _checkpoint_in(path: str) -> str:
    """``path``, or its folder of checkpoints if it holds a run."""
    if "://" not in path and not os.path.isdir(path):
        raise OptionError(f"{path} must be the folder of a checkpoint, but does not exist, or is no folder.")
    inside = os.path.join(path, CHECKPOINTS)
    return inside if os.path.isdir(inside) else path


def _check_new(out: Path) -> None:
    if os.path.lexists(out):
        raise OptionError(f"{out} exists, and is never overwritten. Pass a new name, or remove it.")
    if not os.path.isdir(out.parent):
        raise OptionError(f"the parent of {out} must be a folder, but is not one. Create it.")


def _config_of_run(checkpoint: str) -> Path | None:
    """The folder that `fairshard train --hf` has kept beside its checkpoints; None if there is none."""
    from fairshard.cli.hugging_face import SAVED

    folder = Path(checkpoint).absolute()
    kept = (path.parent / SAVED for path in (folder, *folder.parents) if path.name == CHECKPOINTS)
    return next((path for path in kept if os.path.isfile(path / "config.json")), None)


def summary_lines(contents: Contents) -> list[str]:
    """The summary of a checkpoint: parameters, optimizer, step, size, and whether it is sound."""
    manifest, bad, num_files = contents.manifest, len(contents.problems), len(contents.files)
    model = [entry for entry in contents.tensors if entry.key in contents.model]
    own = [entry for entry in model if entry.tied_to is None]
    state = [entry for entry in contents.tensors if entry.key not in contents.model and is_optimizer(entry.key)]
    numel = sum(prod(entry.shape) for entry in own)
    tied = f", {len(model) - len(own)} tied" if len(model) > len(own) else ""
    size = size_text(sum(entry.nbytes for entry in own))
    kept = f"{len(state):,} tensors, {size_text(sum(entry.nbytes for entry in state))}" if state else "none"
    lines = [f"checkpoint  {contents.path}"]
    if contents.tensors:
        lines += [f"parameters  {numel:,} in {len(own):,} tensors{tied}, {size}", f"optimizer   {kept}"]
    if manifest is None:
        lines.append("written by  a tool other than fairshard: no step, no checksums")
    else:
        versions = ", ".join(f"{name} {text}" for name, text in sorted(manifest.versions.items()))
        step = "unknown" if manifest.step is None else manifest.step
        lines += [f"step        {step}", f"world size  {manifest.world_size}", f"versions    {versions}"]
    sound = "unknown: there are no checksums" if manifest is None else "yes: every file has its checksum"
    if bad:
        sound = f"no: {bad} of {num_files} files damaged or missing. Use another checkpoint"
    total = size_text(sum(file.nbytes for file in contents.files))
    return [*lines, f"size        {total} in {num_files:,} files", f"sound       {sound}"]


def detail_lines(contents: Contents) -> list[str]:
    """Tables of tensors, objects and files."""
    tensors = [
        (
            *(entry.key, " x ".join(map(str, entry.shape)) or "scalar", entry.dtype, f"{entry.num_pieces:,}"),
            *(f"{entry.nbytes:,}", "" if entry.tied_to is None else f"tied to {entry.tied_to}"),
        )
        for entry in contents.tensors
    ]
    objects = [(entry.key, f"{entry.nbytes:,}") for entry in contents.objects]
    files = [(file.name, f"{file.nbytes:,}", file.state) for file in contents.files]
    bad = len(contents.problems)
    verdict = f"{bad} bad" if bad else "all ok" if contents.manifest is not None else "unknown"
    pieces = sum(entry.num_pieces for entry in contents.tensors)
    total = "", "", f"{pieces:,}", _total(contents.tensors), ""
    lines = _table(("tensor", "shape", "dtype", "pieces", "bytes", ""), tensors, total, "<<<>><")
    lines += _table(("object", "bytes"), objects, (_total(contents.objects),), "<>")
    return [*lines, *_table(("file", "bytes", "checksum"), files, (_total(contents.files), verdict), "<><")[:-1]]


def _total(entries: Sequence[Any]) -> str:
    return f"{sum(entry.nbytes for entry in entries):,}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], total: Sequence[str], sides: str) -> list[str]:
    """The table and an empty line; nothing without rows."""
    return [*table([head, *rows, (f"{len(rows):,} in all", *total)], sides), ""] if rows else []


def as_json(contents: Contents) -> dict[str, Any]:
    """Everything, as plain data."""
    manifest = contents.manifest
    tensors = [dataclasses.asdict(entry) for entry in contents.tensors]
    return {
        "path": contents.path,
        "step": manifest.step if manifest else None,
        "world_size": manifest.world_size if manifest else None,
        "versions": manifest.versions if manifest else {},
        "aliases": manifest.aliases if manifest else {},
        "tensors": [{"name": each.pop("key"), "pieces": each.pop("num_pieces"), **each} for each in tensors],
        "objects": [{"name": entry.key, "nbytes": entry.nbytes} for entry in contents.objects],
        "files": [
            {"name": file.name, "nbytes": file.nbytes, "state": file.state, "problem": file.problem}
            for file in contents.files
        ],
    }
