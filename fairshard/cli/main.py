"""The ``fairshard`` command and its subcommands."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from fairshard.cli.checkpoints import add_checkpoint_commands
from fairshard.cli.options import OneLineParser, OptionError, add_flags
from fairshard.cli.plan import add_plan_command
from fairshard.version import __version__

_GONE = {
    "--memory-every": "Pass a smaller --save-every, or an --out in /dev/shm on one machine.",
    **dict.fromkeys(("--compare", "--png"), "Run the command once for each wrapping; --json is for programs."),
    "--schedule": "docs/how_it_works/guided_path.md shows one.",
}
"""Flags of earlier versions, and what to do instead."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code: 0, 1 for a failure, 2 for bad input, 130 after Ctrl-C."""
    return run(sys.argv[1:] if argv is None else argv, _launch)


def run(argv: Sequence[str], train: Callable[[argparse.Namespace], int]) -> int:
    """`main`, where ``train`` is the function of ``fairshard train``."""
    parser = build_parser(train)
    try:
        arguments, unknown = parser.parse_known_args(argv)
        command = " ".join(filter(None, ("fairshard", vars(arguments).pop("command", None))))
        if unknown:
            cures = [f" {cure}" for gone, cure in _GONE.items() if any(word.startswith(gone) for word in unknown)]
            raise OptionError(f"unrecognized arguments: {' '.join(unknown)}. See {command} --help.{''.join(cures)}")
        chosen = vars(arguments).pop("run", None)
        if chosen is None:
            parser.print_help()
            return 0
        code: int = chosen(arguments)
    except OptionError as error:
        rank = os.environ.get("RANK")
        where = "" if rank is None else f" (rank {rank})"
        print(f"fairshard: error{where}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


def build_parser(train: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    """Build the parser; each subcommand sets ``run``, a function of the parsed arguments that returns the exit code."""
    parser = OneLineParser("fairshard", description="ZeRO-3 for PyTorch in plain Python.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"fairshard {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    added = commands.add_parser(
        "train",
        help="train a language model: a GPT on bytes, one of transformers, or your own",
        description="Train a language model on all ranks of this machine: a GPT on the bytes of a text, unless told "
        "otherwise. With more machines: torchrun ... -m fairshard.cli.train, with the same flags except --nproc.",
        allow_abbrev=False,
    )
    add_flags(added)
    added.set_defaults(run=train)
    add_plan_command(commands)
    add_checkpoint_commands(commands)
    return parser


def _launch(arguments: argparse.Namespace) -> int:
    from fairshard.cli.launch import launch  # here because it imports torch's launcher

    return launch(arguments)


if __name__ == "__main__":
    sys.exit(main())
