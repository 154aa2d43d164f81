"""``fairshard consolidate``, ``inspect`` and ``import-fairscale``: checkpoints, without a process group."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fairshard.cli.checks import check_new
from fairshard.cli.local_path import dangling_link, is_kernel_made, local_path, one_line, printable
from fairshard.cli.option_error import OptionError
from fairshard.cli.resume import CHECKPOINTS
from fairshard.cli.size_argument import size_argument
from fairshard.errors import CheckpointError

FORMATS = ("torch", "safetensors")

_CKPT = "folder of a checkpoint; or of a run or its checkpoints, for the latest one"


def add_checkpoint_commands(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the three commands; each sets ``run``."""
    add = partial(commands.add_parser, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    _add_consolidate(add)
    _add_inspect(add)
    _add_import_fairscale(add)


def _add_consolidate(add: Callable[..., argparse.ArgumentParser]) -> None:
    parser = add(
        "consolidate",
        help="write a checkpoint's weights as one file, or as a Hugging Face folder",
        description="Write the weights of the model in a checkpoint under their original names. Checksums are\n"
        "compared first. Memory for one parameter is enough; during the write the output's disk needs\n"
        "room for the weights a second time (safetensors: for one shard).",
        epilog="  fairshard consolidate runs/1 model.pt\n"
        "  fairshard consolidate runs/1/checkpoints/step-00000100 model --format safetensors --config gpt2",
    )
    parser.add_argument("checkpoint", metavar="CKPT", type=_local_or_url, help=_CKPT)
    parser.add_argument("out", metavar="OUT", type=local_path, help="new file (torch) or new folder (safetensors)")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default=FORMATS[0],
        help="torch: a dict for torch.load, tied weights share memory; safetensors: a folder for transformers, "
        "tied weights once under their first name (default: %(default)s)",
    )
    parser.add_argument(
        "--max-shard-size", type=size_argument, metavar="SIZE",
        help="size of a safetensors file, such as 500MB (default: 5GB)",
    )  # fmt: skip
    parser.add_argument(
        "--config",
        type=local_path,
        metavar="DIR",
        help="copy config.json, generation config and tokenizer from here "
        "(default: those of the run, if it is one of --hf)",
    )
    parser.add_argument(
        "--allow-unverified", action="store_true", help="also read a checkpoint whose list of checksums is lost"
    )
    parser.set_defaults(run=_or_one_line(_consolidate))


def _add_inspect(add: Callable[..., argparse.ArgumentParser]) -> None:
    parser = add(
        "inspect",
        help="show the contents of a checkpoint, and whether its files are intact",
        description="Compare every file of a checkpoint with its checksum, and show its size and contents.\n"
        "The exit code is 1 if a file is damaged or missing.",
    )
    parser.add_argument("checkpoint", metavar="CKPT", type=_local_or_url, help=_CKPT)
    parser.add_argument("--all", action="store_true", help="also show every tensor, object and file")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with everything")
    parser.set_defaults(run=_or_one_line(_inspect))


def _add_import_fairscale(add: Callable[..., argparse.ArgumentParser]) -> None:
    parser = add(
        "import-fairscale",
        help="make a checkpoint from the shards that fairscale's FSDP saved",
        description='Make a checkpoint from one file per rank, each a torch.save of {"shard_weights":\n'
        'fsdp.local_state_dict(), "shard_metadata": fsdp.local_metadata_dict()}. Parameters, buffers (those of\n'
        "rank 0) and tied weights are imported under their original names; optimizer states are not.",
        epilog="Pass the files in the order of ranks, because fairscale's metadata do not hold the rank. If padding\n"
        "identifies every rank, any order works. An order that contradicts padding or file names is an error.\n\n"
        "  fairshard import-fairscale $(ls -v shard_*.pt) checkpoint",
    )
    parser.add_argument("shards", metavar="SHARD_FILE", nargs="+", type=local_path, help="file of one rank")
    parser.add_argument("out", metavar="OUT", type=local_path, help="new folder")
    parser.set_defaults(run=_or_one_line(_import_fairscale))


def _or_one_line(command: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Wrap ``command``: a ``CheckpointError`` becomes one line on stderr and exit code 1."""

    def run(arguments: argparse.Namespace) -> int:
        try:
            return command(arguments)
        except CheckpointError as error:
            text = str(error).replace("allow_unverified=True", "--allow-unverified")
            print(f"fairshard: error: {one_line(text)}", file=sys.stderr)
            return 1

    return run


def _consolidate(arguments: argparse.Namespace) -> int:
    safetensors = arguments.format == "safetensors"
    if not safetensors and (arguments.max_shard_size is not None or arguments.config is not None):
        raise OptionError("--max-shard-size and --config need --format safetensors: torch's format is one file.")
    checkpoint = _checkpoint_in(arguments.checkpoint)
    check_new(arguments.out)
    if arguments.config is not None and not os.path.isfile(arguments.config / "config.json"):
        raise OptionError(f"--config must be a folder with a config.json, but {arguments.config} has none.")

    from fairshard.checkpoint.consolidate import MAX_SHARD_NBYTES, consolidate_safetensors, consolidate_torch

    unverified = arguments.allow_unverified
    if safetensors:
        limit = arguments.max_shard_size or MAX_SHARD_NBYTES
        config = arguments.config or _config_of_run(checkpoint)
        found = consolidate_safetensors(checkpoint, arguments.out, limit, config, unverified)
    else:
        found = consolidate_torch(checkpoint, arguments.out, unverified)
    tied = f", {len(found.aliases):,} tied" if found.aliases else ""
    print(f"{found.num_tensors:,} tensors, {found.nbytes:,} bytes{tied}")
    for file in found.files:
        print(f"  {file}")
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    checkpoint = _checkpoint_in(arguments.checkpoint)
    from fairshard.checkpoint.contents import read_contents
    from fairshard.cli.inspection import as_json, detail_lines, summary_lines

    contents = read_contents(checkpoint)
    lines = [*summary_lines(contents), *(["", *detail_lines(contents)] if arguments.all else ())]
    text = "\n".join(map(printable, lines))  # keys may be anything
    print(json.dumps(as_json(contents), indent=1) if arguments.json else text)
    for problem in contents.problems:
        print(f"fairshard: error: {one_line(problem)}", file=sys.stderr)
    return 1 if contents.problems else 0


def _import_fairscale(arguments: argparse.Namespace) -> int:
    _check_there(arguments.shards)
    for path in arguments.shards:
        if not os.path.isfile(path) or is_kernel_made(path):
            raise OptionError(f"{path} must be a file of fairscale's, but is not a regular file.")
    check_new(arguments.out)
    from fairshard.checkpoint.import_fairscale import import_fairscale

    manifest = import_fairscale(arguments.shards, arguments.out)
    nbytes = sum(file.nbytes for file in manifest.files.values())
    print(f"{arguments.out}: the shards of {manifest.world_size} ranks, {nbytes:,} bytes")
    return 0


def _local_or_url(text: str) -> str:
    if "://" not in text:
        return str(local_path(text))
    if not text.isprintable():
        raise argparse.ArgumentTypeError(f"a URL must be printable, but is {text!r}")
    return text


def _checkpoint_in(path: str) -> str:
    """``path``, or its folder of checkpoints if it holds a run."""
    _check_there([path])
    if not os.path.isdir(path) and "://" not in path:
        raise OptionError(f"{path} must be the folder of a checkpoint, but is a file.")
    if is_kernel_made(Path(path)):
        raise OptionError(f"{path} is made by the kernel, not on a disk.")
    inside = os.path.join(path, CHECKPOINTS)
    return inside if os.path.isdir(inside) else path


def _config_of_run(checkpoint: str) -> Path | None:
    """The folder that `fairshard train --hf` has kept beside its checkpoints; None if there is none."""
    from fairshard.cli.hugging_face import SAVED

    folder = Path(checkpoint).absolute()
    if "://" in checkpoint:
        return None
    kept = (path.parent / SAVED for path in (folder, *folder.parents) if path.name == CHECKPOINTS)
    return next((path for path in kept if os.path.isfile(path / "config.json")), None)


def _check_there(paths: Sequence[str | os.PathLike[str]]) -> None:
    for path in paths:
        if "://" in os.fspath(path):
            from fairshard.checkpoint.storage import storage_of

            try:
                storage_of(path)
            except CheckpointError as error:
                raise OptionError(str(error)) from error
        elif not os.path.exists(path):
            link = dangling_link(Path(path))
            raise OptionError(f"{path!s} does not exist{f': {link}' if link else ''}.")
