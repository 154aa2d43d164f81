"""``fairshard train``: from the command line to ranks.

Two entry points call ``train_rank``::

    fairshard train --nproc 2 ...               launches its ranks on this machine (launch.py)
    torchrun ... -m fairshard.cli.train ...     torchrun launched the ranks, on one or many hosts
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from fairshard.cli.checks import check_options
from fairshard.cli.flags import add_train_arguments
from fairshard.cli.option_error import OneLineParser, OptionError
from fairshard.cli.rank import train_rank
from fairshard.cli.ranks import Ranks
from fairshard.cli.resume import check_text, chosen_options, restarted_options


def main(argv: Sequence[str] | None = None) -> int:
    """Train as a rank of torchrun, or launch the ranks as ``fairshard train`` does; returns the exit code."""
    ranks = Ranks.from_environment()
    try:
        parser = OneLineParser("fairshard train", description="Train a language model.", allow_abbrev=False)
        add_train_arguments(parser)
        options = restarted_options(chosen_options(parser.parse_args(argv)))
        if ranks is None:
            from fairshard.cli.launch import launch

            return launch(options)
        if options.nproc is not None:
            raise OptionError("--nproc is for fairshard train: torchrun has already launched the ranks.")
        if options.max_restarts:
            raise OptionError("--max-restarts is for fairshard train: pass it to torchrun, which launches the ranks.")
        if options.resume_from is not None and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0:
            raise OptionError(
                "torchrun --max-restarts continues from the newest checkpoint, which with --resume-from may belong to "
                "the dropped steps. Leave one of them out."
            )
        plan = check_options(options, ranks.size, ranks.local_size)
        if ranks.rank == 0:
            check_text(options, plan)
    except OptionError as error:
        where = "" if ranks is None else f" (rank {ranks.rank})"
        print(f"fairshard train: error{where}: {error}", file=sys.stderr)
        return 2
    train_rank(options, ranks, plan, quiet=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
