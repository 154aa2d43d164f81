"""One exchange at the start of a backward, in which the ranks agree on what their backwards reach.

Each rank sends a hash of what it has run, and one bit for each question that ranks may answer differently::

    header                                   units                                    forwards
    hash | flags | n | numbers of models     leaves | missing | no_part | assumed       calls | reaches_inputs | alive

The result is the union: a bit is set if any rank has set it. The first message has the same size for all models, so
ranks that have run different things notice it before the first gather of the backward. Answers that do not fit are
sent in a second message. If ranks reach different models, they repeat the exchange for all of these models.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from fairshard.utils.collectives import Communicator

_NUM_MODELS = 8  # maximum that one backward may reach
_HEADER = struct.Struct(f">QBI{_NUM_MODELS}I")
_PROBLEM, _DIFFERENT, _SEVERAL = 1, 2, 4  # flags

FIRST_NBYTES = 2048
"""Size of the first message."""


@dataclass
class Reach:
    """Answers of one rank, or of all: a byte of 0 or 1 for each question.

    Attributes:
        calls: for each call, whether the backward reaches it.
        reaches_inputs: for each call, whether a backward that reaches it continues to its inputs.
        alive: for each forward, whether a later backward could reach it.
        leaves: for each parameter, whether it has a gradient to send.
        missing: for each unit, whether it must be gathered before use.
        no_part: for each unit, whether it cannot be gathered from kept parts; see `KeptParts`.
        assumed: for each unit, whether its leaves count as reached because a checkpoint has not shown yet which are.
    """

    calls: bytearray = field(default_factory=bytearray)
    reaches_inputs: bytearray = field(default_factory=bytearray)
    alive: bytearray = field(default_factory=bytearray)
    leaves: bytearray = field(default_factory=bytearray)
    missing: bytearray = field(default_factory=bytearray)
    no_part: bytearray = field(default_factory=bytearray)
    assumed: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True)
class Peers:
    """The ranks of one communicator, and the questions that concern them, as indexes into the answers of `Reach`."""

    comm: Communicator
    calls: Sequence[int]
    alive: Sequence[int]
    leaves: Sequence[int]
    units: Sequence[int]


@dataclass(frozen=True)
class Verdict:
    """Whether the ranks have run the same things, whether any has a problem, and the models that any reaches.

    If ranks reach different models (``is_open``), nothing was compared, and `Reach` is unchanged.
    """

    agree: bool
    has_problem: bool
    models: frozenset[int]
    is_open: bool = False


@dataclass(frozen=True)
class Question:
    """One rank's part of an exchange.

    ``hashes``: for each of the ``peers``, a hash of what must be the same on them. ``models``: the numbers of the
    models that this rank reaches. ``is_final``: all ranks are known to ask about the same models.
    """

    reach: Reach
    peers: Sequence[Peers]
    hashes: Sequence[int]
    has_problem: bool
    models: Sequence[int]
    is_final: bool = False


def agree_on(question: Question) -> Verdict:
    """Set in ``question.reach`` all answers that any peer has set, one group after the other. **Collective.**

    If ranks have run different things, or one has a problem, the remaining answers stay unchanged.
    """
    flags = _PROBLEM if question.has_problem else 0
    models = set(question.models)
    for peers, number in zip(question.peers, question.hashes, strict=True):
        flags, others = _swap(question, peers, number, flags, models)
        models |= others
    is_open = bool(flags & _SEVERAL) and not question.is_final
    return Verdict(is_open or not flags & _DIFFERENT, bool(flags & _PROBLEM), frozenset(models), is_open)


def _swap(question: Question, peers: Peers, number: int, flags: int, models: set[int]) -> tuple[int, set[int]]:
    """The union of all ranks' flags and models; if nothing is wrong, sets ``question.reach`` to that of the answers."""
    reach = question.reach
    fields = [(reach.leaves, peers.leaves), (reach.missing, peers.units), (reach.no_part, peers.units)]
    fields += [(reach.assumed, peers.units), (reach.calls, peers.calls), (reach.reaches_inputs, peers.calls)]
    fields += [(reach.alive, peers.alive)]
    answers = _pack(fields)
    ordered = sorted(models)[:_NUM_MODELS]
    listed = ordered + [0] * (_NUM_MODELS - len(ordered))
    header = _HEADER.pack(number, flags, len(answers), *listed)
    messages = _exchange(peers.comm, (header + answers)[:FIRST_NBYTES].ljust(FIRST_NBYTES, b"\0"))
    heads = [_HEADER.unpack_from(message) for message in messages]
    for head in heads:
        flags |= head[1]
    others = {model for head in heads for model in head[3:] if model}
    if len({head[3:] for head in heads}) > 1:
        flags |= _SEVERAL
    if len({(head[0], head[2]) for head in heads}) > 1:
        flags |= _DIFFERENT
    if not flags & (_PROBLEM | _DIFFERENT) and (question.is_final or not flags & _SEVERAL):
        if len(answers) <= FIRST_NBYTES - _HEADER.size:
            _unpack(fields, [message[_HEADER.size : _HEADER.size + len(answers)] for message in messages])
        else:
            _unpack(fields, _exchange(peers.comm, answers))
    return flags, others


def _exchange(comm: Communicator, message: bytes) -> list[bytes]:
    """The messages of all ranks, which have the same size, in host memory. **Collective.**"""
    with torch.inference_mode(False):
        buffer = torch.empty(comm.world_size, len(message), dtype=torch.uint8, device="cpu")
    rows = buffer.numpy()
    rows[comm.rank] = np.frombuffer(message, np.uint8)
    comm.host.gather_messages(buffer).wait()
    return [row.tobytes() for row in rows]


def _pack(fields: Sequence[tuple[bytearray, Sequence[int]]]) -> bytes:
    chosen = b"".join(bytes(answers[place] for place in places) for answers, places in fields)
    return np.packbits(np.frombuffer(chosen, np.uint8)).tobytes()


def _unpack(fields: Sequence[tuple[bytearray, Sequence[int]]], messages: Sequence[bytes]) -> None:
    """Write the union of the ranks' ``messages``, each made by `_pack`, to ``fields``."""
    if not messages[0]:
        return
    union = np.bitwise_or.reduce([np.frombuffer(message, np.uint8) for message in messages])
    bits = np.unpackbits(union).tolist()
    start = 0
    for answers, places in fields:
        for place, bit in zip(places, bits[start : start + len(places)], strict=True):
            answers[place] = bit
        start += len(places)
