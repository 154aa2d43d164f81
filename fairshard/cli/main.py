"""The ``fairshard`` command and its subcommands."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from fairshard.cli.checkpoint_commands import add_checkpoint_commands
from fairshard.cli.flags import add_train_arguments
from fairshard.cli.option_error import OneLineParser, OptionError
from fairshard.cli.plan import add_plan_command
from fairshard.cli.resume import chosen_options
from fairshard.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code: 0, 1 for a failure, 2 for bad input, 130 after Ctrl-C."""
    parser = build_parser()
    try:
        arguments, unknown = parser.parse_known_args(argv)
        if unknown:
            command = " ".join(filter(None, ("fairshard", arguments.command)))
            raise OptionError(f"unrecognized arguments: {' '.join(unknown)}. See {command} --help.")
        if arguments.run is None:
            parser.print_help()
            return 0
        code: int = arguments.run(arguments)
    except OptionError as error:
        print(f"fairshard: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


def build_parser() -> argparse.ArgumentParser:
    """Build the parser; each subcommand sets ``run``, a function of the parsed arguments that returns the exit code."""
    parser = OneLineParser("fairshard", description="ZeRO-3 for PyTorch in plain Python.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"fairshard {__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    train = commands.add_parser(
        "train",
        help="train a language model: a GPT on bytes, one of transformers, or your own",
        description="Train a language model on all ranks of this machine: a GPT on the bytes of a text, unless told "
        "otherwise. With more machines: torchrun ... -m fairshard.cli.train, with the same flags except --nproc.",
        allow_abbrev=False,
    )
    add_train_arguments(train)
    train.set_defaults(run=_train)
    add_plan_command(commands)
    add_checkpoint_commands(commands)
    return parser


def _train(arguments: argparse.Namespace) -> int:
    options = chosen_options(arguments)
    from fairshard.cli.launch import launch

    return launch(options)


if __name__ == "__main__":
    sys.exit(main())
