"""One message at the start of a backward, in which the ranks agree on what their backwards reach.

Each rank sends a hash of all that it has run, and one bit for each call and leaf::

    hash | flags | calls | leaves

The result is the union: a bit is set if any rank has set it. The first message has one size for all models, so ranks
that have run different things notice it before the first gather of the backward. Bits that do not fit are sent in a
second message.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from fairshard.utils.collectives import Communicator

_HEADER = struct.Struct(">qB")
PROBLEM, DIFFERENT, ASSUMED = 1, 2, 4
"""Flags: a rank cannot begin; ranks have run different things; leaves count as reached that may turn out not to be."""

FIRST_NBYTES = 2048
"""Size of the first message."""


class Peers(NamedTuple):
    """The ranks of one communicator.

    ``questions``: those that concern them, as indexes into the answers. ``digest``: a hash of the calls that these
    concern: their units, checkpoints and forwards.
    """

    comm: Communicator
    questions: np.ndarray[Any, np.dtype[np.int64]]
    digest: int


def agree_on(answers: bytearray, flags: int, peers: Sequence[Peers], hashes: Sequence[int]) -> int:
    """Set in ``answers`` (a byte of 0 or 1 for each question) all that any peer has set; returns the flags of all.

    One group after the other. **Collective.** ``hashes``: for each of ``peers``, a hash of what its ranks have run. If
    they differ, or one has a problem, the remaining answers stay unchanged.
    """
    column = np.frombuffer(answers, np.uint8)
    for one, own in zip(peers, hashes, strict=True):
        packed = np.packbits(column[one.questions]).tobytes()
        first = (_HEADER.pack(own, flags) + packed)[:FIRST_NBYTES].ljust(FIRST_NBYTES, b"\0")
        messages = _exchange(one.comm, first)
        for number, found in map(_HEADER.unpack_from, messages):
            flags |= found | (DIFFERENT if number != own else 0)
        if flags & (PROBLEM | DIFFERENT) or not packed:
            continue
        fits = len(packed) <= FIRST_NBYTES - _HEADER.size
        sent = [message[_HEADER.size :] for message in messages] if fits else _exchange(one.comm, packed)
        union = np.bitwise_or.reduce([np.frombuffer(each, np.uint8) for each in sent])
        column[one.questions] = np.unpackbits(union)[: len(one.questions)]
    return flags


def _exchange(comm: Communicator, message: bytes) -> list[bytes]:
    """The messages of all ranks, which have the same size, in host memory. **Collective.**"""
    with torch.inference_mode(False):
        buffer = torch.empty(comm.world_size, len(message), dtype=torch.uint8, device="cpu")
    rows = buffer.numpy()
    rows[comm.rank] = np.frombuffer(message, np.uint8)
    comm.host.gather_messages(buffer).wait()
    return [row.tobytes() for row in rows]
