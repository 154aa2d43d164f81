"""The error of invalid options, and the parser that raises it."""

from __future__ import annotations

import argparse
from typing import NoReturn

from fairshard.cli.local_path import one_line


class OptionError(ValueError):
    """Invalid options; the message is one line for the user."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class OneLineParser(argparse.ArgumentParser):
    """``ArgumentParser`` that raises ``OptionError`` instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise ``OptionError`` with argparse's message."""
        raise OptionError(f"{message}. See {self.prog} --help.")
