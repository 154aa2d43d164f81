"""What the ranks' backwards reach, agreed on by one exchange at the start of a backward.

Each rank sends a hash of what it has run and a bit for each question of which ranks may know different answers::

    header                        units                        forwards
    hash (7 bytes) | flags | n    leaves | missing | uncut | assumed     calls | alive

What comes back is the union: a bit that any rank has set. The header is compared before anything else is sent, so that
ranks that have run different things notice it before the first gather of the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from fairshard.utils.collectives import Communicator, RowGather, exchange_tag

_HEADER_NBYTES = 12
_NUM_CALLS_AT_ONCE = 1024  # in the first message, whose size all ranks know; more than these go into a second one


@dataclass
class Reach:
    """Answers of one rank, or of all: a byte of 0 or 1 for each question.

    Attributes:
        calls: for each call, whether the backward reaches it.
        alive: for each forward, whether a later backward could.
        leaves: for each parameter, whether it has a gradient to send.
        missing: for each unit, whether it must be gathered to be used.
        uncut: for each unit, whether no part of it is kept to gather it from.
        assumed: for each unit, whether its leaves count as reached because a checkpoint has yet to show which are.
    """

    calls: bytearray = field(default_factory=bytearray)
    alive: bytearray = field(default_factory=bytearray)
    leaves: bytearray = field(default_factory=bytearray)
    missing: bytearray = field(default_factory=bytearray)
    uncut: bytearray = field(default_factory=bytearray)
    assumed: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True)
class Peers:
    """The ranks of one communicator, and which questions concern them: places in the answers of `Reach`."""

    comm: Communicator
    calls: Sequence[int]
    alive: Sequence[int]
    leaves: Sequence[int]
    units: Sequence[int]


@dataclass(frozen=True)
class Verdict:
    """Whether the ranks have run the same things, and whether any has a problem."""

    agree: bool
    has_problem: bool


class _Exchange:
    """All-gathers of messages of one size, in host memory."""

    def __init__(self, comm: Communicator, nbytes: int) -> None:
        with torch.inference_mode(False):
            self._buffer = torch.zeros(comm.world_size, nbytes, dtype=torch.uint8)
        self._gather = RowGather(comm, self._buffer, "agreement")
        self._id = comm.new_id()
        self._uses = 0
        self._own = self._buffer[comm.rank].numpy()

    def swap(self, message: bytes) -> list[bytes]:
        """The message of every rank. **Collective.**"""
        self._own[:] = np.frombuffer(message, np.uint8)
        self._uses += 1
        self._gather.start(exchange_tag("all_gather", self._id, self._uses)).wait()
        return [row.tobytes() for row in self._buffer.numpy()]


class Exchanges:
    """The exchanges of one model, made as they are needed. They keep process groups alive: they go with the model."""

    def __init__(self) -> None:
        self._made: dict[tuple[Communicator, int], _Exchange] = {}

    def of(self, comm: Communicator, nbytes: int) -> _Exchange:
        """That of messages of ``nbytes`` between the ranks of ``comm``."""
        key = comm, nbytes
        if key not in self._made:
            self._made[key] = _Exchange(comm.on_host, nbytes)
        return self._made[key]


def agree_on(
    reach: Reach, peers: Sequence[Peers], hashes: Sequence[int], has_problem: bool, exchanges: Exchanges
) -> Verdict:
    """Set in ``reach`` what any rank of ``peers`` has set, one after the other; ``hashes`` has a number for each.

    Stops where ranks have run different things, or one has a problem: all of them know then. **Collective.**
    """
    agrees = True
    for one, number in zip(peers, hashes, strict=True):
        numbers, flags = _swap(reach, one, exchanges, number, int(has_problem) + 2 * (not agrees))
        agrees = agrees and len(numbers) == 1 and not flags & 2
        has_problem = has_problem or bool(flags & 1)
    return Verdict(agrees, has_problem)


def _swap(
    reach: Reach, peers: Peers, exchanges: Exchanges, number: int, flags: int
) -> tuple[set[bytes], int]:
    """The numbers of all ranks, and the union of their flags; `reach` becomes the union if there is nothing wrong."""
    fixed = [(reach.leaves, peers.leaves), (reach.missing, peers.units), (reach.uncut, peers.units)]
    fixed.append((reach.assumed, peers.units))
    by_call = [(reach.calls, peers.calls), (reach.alive, peers.alive)]
    answers = _pack(fixed)
    more = _pack(by_call)
    head = number.to_bytes(7, "big") + bytes([flags]) + len(more).to_bytes(4, "big")
    at_once = more[:_NUM_CALLS_AT_ONCE].ljust(_NUM_CALLS_AT_ONCE, b"\0")
    messages = exchanges.of(peers.comm, len(head) + len(answers) + len(at_once)).swap(head + answers + at_once)
    heads = {message[:7] + message[8:_HEADER_NBYTES] for message in messages}
    for message in messages:
        flags |= message[7]
    if len(heads) > 1 or flags:
        return heads, flags
    stop = _HEADER_NBYTES + len(answers)
    _unpack(fixed, [message[_HEADER_NBYTES:stop] for message in messages])
    if len(more) <= _NUM_CALLS_AT_ONCE:
        _unpack(by_call, [message[stop : stop + len(more)] for message in messages])
    else:
        _unpack(by_call, exchanges.of(peers.comm, len(more)).swap(more))
    return heads, flags


def _pack(fields: Sequence[tuple[bytearray, Sequence[int]]]) -> bytes:
    chosen = b"".join(bytes(answers[place] for place in places) for answers, places in fields)
    return np.packbits(np.frombuffer(chosen, np.uint8)).tobytes()


def _unpack(fields: Sequence[tuple[bytearray, Sequence[int]]], messages: Sequence[bytes]) -> None:
    """Set in ``fields`` the union of what `_pack` made of them on all ranks."""
    if not messages[0]:
        return
    union = np.bitwise_or.reduce([np.frombuffer(message, np.uint8) for message in messages])
    bits = np.unpackbits(union).tolist()
    start = 0
    for answers, places in fields:
        for place, bit in zip(places, bits[start : start + len(places)], strict=True):
            answers[place] = bit
        start += len(places)
