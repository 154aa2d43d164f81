"""The ``fairshard`` command and its subcommands."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from fairshard.cli.checkpoints import add_checkpoint_commands
from fairshard.cli.options import OneLineParser, OptionError, add_flags, one_line
from fairshard.cli.plan import add_plan_command
from fairshard.errors import CheckpointError
from fairshard.version import __version__

_GONE = {
    "--memory-every": "Pass a smaller --save-every, or an --out in /dev/shm on one machine.",
    **dict.fromkeys(("--compare", "--png"), "Run the command once for each wrapping; --json is for programs."),
    "--schedule": "docs/how_it_works/guided_path.md shows one.",
}
"""Flags of earlier versions, and what to do instead."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code: 0, 1 for a failure, 2 for bad input, 130 after Ctrl-C."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = build_parser()
    try:
        arguments, unknown = parser.parse_known_args(words)
        command, chosen = vars(arguments).pop("command"), vars(arguments).pop("run", None)
        if unknown:
            cures = [f" {cure}" for gone, cure in _GONE.items() if any(word.startswith(gone) for word in unknown)]
            see = " ".join(filter(None, ("fairshard", command)))
            raise OptionError(f"unrecognized arguments: {' '.join(unknown)}. See {see} --help.{''.join(cures)}")
        if chosen is None:
            parser.print_help()
            return 0
        return int(chosen(arguments, words[1:]) if command == "train" else chosen(arguments))
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (OptionError, OSError) as error:
        text, code = str(error), 2
    except CheckpointError as error:
        text, code = str(error).replace("allow_unverified=True", "--allow-unverified"), 1
    except KeyboardInterrupt:
        return 130
    rank = os.environ.get("RANK")
    where = "" if rank is None else f" (rank {rank})"
    print(f"fairshard: error{where}: {one_line(text)}", file=sys.stderr)
    return code


def build_parser() -> argparse.ArgumentParser:
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
    added.set_defaults(run=_train)
    add_plan_command(commands)
    add_checkpoint_commands(commands)
    return parser


def _train(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    from fairshard.cli.launch import train  # here because it imports torch's launcher

    return train(vars(arguments), words)


if __name__ == "__main__":
    sys.exit(main())
