"""``python -m fairshard.cli.train``: ``fairshard train``, started for each rank by a launcher: torchrun, or our own."""

import sys

from fairshard.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
