"""The streams on which users' hooks run, in turn with the current one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from fairshard.utils.streams import Stream, now


class UserStream(Stream):
    """The user's ``real`` stream; None: the current one."""

    def __init__(self, real: Any) -> None:
        self._real = real


@contextlib.contextmanager
def in_turn(stream: Stream, device: torch.device) -> Iterator[None]:
    """A context in which new work goes to ``stream``, behind that of the current stream of ``device``.

    The current stream then waits for it, also after an exception: it may reuse memory that this work reads.
    """
    stream.wait(now(device))
    try:
        with stream.use():
            yield
    finally:
        stream.record().wait()
