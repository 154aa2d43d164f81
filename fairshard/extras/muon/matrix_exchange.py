"""Matrices that are cut among ranks: gathered to an owner each, computed there, and sent back.

Both ways are one all-to-all of bf16 elements; a rank sends each owner the parts that it has of that owner's matrices::

    rank 0   | a a a | b | c       gets the rest of a, and sends its b and c
    rank 1   | a a a | b | c       gets the rest of b and c, and sends its a
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fairshard.checks.agreement import differing_line, raise_together, ranks_of
from fairshard.errors import RanksDisagreeError
from fairshard.extras.muon.newton_schulz import num_flops
from fairshard.extras.muon.own_part import OwnPart
from fairshard.utils.collectives import Communicator
from fairshard.utils.messages import exchange_parts
from fairshard.utils.owners import balanced_owners
from fairshard.utils.span import Span, overlap
from fairshard.utils.transfers import Transfer

_MESSAGE_NBYTES = 512
"""Size of the first message, the same for ranks with different optimizers, so that they can compare."""

_agreed: weakref.WeakKeyDictionary[Communicator, set[bytes]] = weakref.WeakKeyDictionary()
"""Digests of the matrices that the ranks of a group have agreed on."""


@dataclass(frozen=True, eq=False)
class Block:
    """A matrix ``[m, n]`` of one parameter, or a stack ``[e, m, n]`` of matrices that one rank computes.

    ``start`` is its first element in the parameter; ``held[r]``, counted from there, are the elements of rank ``r``.
    """

    part: OwnPart
    start: int
    shape: torch.Size
    held: tuple[Span, ...]

    @property
    def holder(self) -> int | None:
        """The rank that has all of it; None if it is cut."""
        holders = [rank for rank, span in enumerate(self.held) if span.numel]
        return holders[0] if len(holders) == 1 else None

    @property
    def is_cut(self) -> bool:
        """Whether no rank has all of it."""
        return self.holder is None

    @property
    def cost(self) -> int:
        """Operations of one Newton-Schulz iteration."""
        *stack, rows, columns = self.shape
        return num_flops(torch.Size(stack).numel(), rows, columns)

    def of(self, values: Tensor) -> Tensor:
        """A view of this rank's elements of the block in ``values``, this rank's elements of the parameter."""
        own = self.held[self.part.rank].shift(self.start - self.part.span.start)
        return values[own.start : own.stop] if own.numel else values[:0]

    def shaped(self, flat: Tensor) -> Tensor:
        """The block, from all its elements in the order in which they are cut."""
        return flat.view(self.shape) if self.part.is_ordered else self.part.shaped(flat)

    def flattened(self, block: Tensor) -> Tensor:
        """The elements of ``block``, in the order in which they are cut."""
        return block.reshape(-1) if self.part.is_ordered else self.part.flattened(block)

    def apply(self, function: Callable[[Tensor], Tensor], values: Tensor) -> None:
        """Replace the block in ``values``, which has all of it, by ``function`` of it."""
        if values.shape == self.shape:  # a plain tensor, perhaps not contiguous
            values.copy_(function(values))
        else:
            run = self.of(values)
            run.copy_(self.flattened(function(self.shaped(run))))


def blocks_of(part: OwnPart) -> list[Block]:
    """The matrices of a parameter of two or three dimensions; those of a stack together if a rank has all of it."""
    numel = part.shape.numel()
    is_whole = any(span.numel == numel for span in part.spans)
    num_blocks = part.shape[0] if len(part.shape) == 3 and part.is_ordered and not is_whole else 1
    if not numel:
        return []
    width = numel // num_blocks
    blocks = []
    for start in range(0, numel, width):
        held = tuple(overlap(span, Span(start, start + width)).shift(-start) for span in part.spans)
        blocks.append(Block(part, start, part.shape if num_blocks == 1 else part.shape[1:], held))
    return blocks


class MatrixExchange:
    """Steps that the ranks of ``comm`` take together for the matrices ``blocks``, if some are cut among them.

    Messages are on ``device``.
    """

    def __init__(self, comm: Communicator, device: torch.device, blocks: Sequence[Block]) -> None:
        self.comm = comm
        self.device = device
        self._blocks = blocks
        self._parts = list(dict.fromkeys(block.part for block in blocks if block.is_cut))
        # Also of matrices that one rank has whole: they are work for that rank, so all ranks count them.
        every = dict.fromkeys(block.part for block in blocks)
        self._lines = [f"{part.name} {tuple(part.shape)} cut at {part.spans}" for part in every]
        self._digest = hashlib.sha256("\n".join(self._lines).encode()).digest()[:8]
        self._jobs: list[list[Block]] = []  # for each rank, the cut blocks that it computes
        self._running: tuple[Transfer, Tensor] | None = None  # with what it sends

    @property
    def is_agreed(self) -> bool:
        """Whether all ranks have agreed before that they hold these matrices, perhaps for another optimizer."""
        return self._digest in _agreed.get(self.comm, ())

    @property
    def has_cut(self) -> bool:
        """Whether a matrix is cut."""
        return bool(self._parts)

    # ---- agreeing

    def agree(self, error: Exception | None) -> set[OwnPart]:
        """The cut parameters that have gradients, the same on every rank. **Collective**: a message of 512 bytes.

        One byte in it is for each matrix twice; what does not fit follows once all are known to hold the same matrices.

        ``error``: why this rank cannot step; then all ranks raise.

        Raises:
            RanksDisagreeError: on all ranks, if they step different parameters, or if only some ranks have a gradient.
        """
        has = [part.has_grad for part in self._parts]
        counts = [bool(part.span.numel) for part in self._parts]  # a rank without elements may have no gradient either
        head = [*self._digest, *(255 - byte for byte in self._digest), error is not None]
        own = [one and counted for one, counted in zip(has, counts, strict=True)]
        own += [not one and counted for one, counted in zip(has, counts, strict=True)]
        message = [*head, *own]
        most = self._most_of(message[:_MESSAGE_NBYTES])
        self._check(most, error)
        if len(message) > _MESSAGE_NBYTES:
            most += self._most_of(message[_MESSAGE_NBYTES:])
        _agreed.setdefault(self.comm, set()).add(self._digest)
        some, none = most[len(head) : len(head) + len(has)], most[len(head) + len(has) :][: len(has)]
        for part, present, missing in zip(self._parts, some, none, strict=True):
            if present and missing:
                self._raise_missing(part)
        return {part for part, present in zip(self._parts, some, strict=True) if present}

    def _check(self, most: bytes, error: Exception | None) -> None:
        """Raise if ranks hold different matrices, or one has an ``error``."""
        if most[:8] != self._digest or most[8:16] != bytes(255 - byte for byte in self._digest):
            raise RanksDisagreeError(
                "Muon must hold the same matrices in the same order on all ranks, but the first difference is: "
                f"{differing_line(self.comm, self._lines)}. Build its param groups from the same code on every rank."
            )
        if most[16]:
            raise_together([self.comm], error)

    def _most_of(self, own: Sequence[int]) -> bytes:
        """The largest of each of ``own`` over all ranks. **Collective.**"""
        padded = [*own, *[0] * (-len(own) % _MESSAGE_NBYTES)]
        message = torch.tensor(padded, dtype=torch.uint8, device=self.device)
        self.comm.all_reduce(message, "max").wait()
        return bytes(message.tolist())

    def _raise_missing(self, part: OwnPart) -> None:
        every = self.comm.gather_objects(part.has_grad or not part.span.numel)
        ranks = [rank for rank, has in zip(ranks_of(self.comm), every, strict=True) if not has]
        raise RanksDisagreeError(
            f"A matrix that is cut among ranks must have a gradient on all of them or on none, but {part.name} has "
            f"none on rank {', '.join(map(str, ranks))}. Drop gradients on every rank, or on none."
        )

    # ---- computing

    def start(self, updates: Mapping[OwnPart, Tensor]) -> None:
        """Begin to gather the cut matrices of ``updates``, the same parameters on every rank. **Collective.**

        The values are this rank's elements ``[n]`` of each parameter, bf16.
        """
        # *Invariant*: owners depend on what all ranks know. Of whole matrices only their own rank knows the gradients.
        blocks = [block for block in self._blocks if block.part in updates or not block.is_cut]
        owners = balanced_owners([block.cost for block in blocks], self.comm.world_size, [b.holder for b in blocks])
        self._jobs = [[] for _ in range(self.comm.world_size)]
        for block, owner in zip(blocks, owners, strict=True):
            if block.is_cut:
                self._jobs[owner].append(block)
        if any(self._jobs):
            to = [(block.of(updates[block.part]) for block in own) for own in self._jobs]
            self._send(to, from_owners=False)

    def finish(self, updates: Mapping[OwnPart, Tensor], function: Callable[[Tensor, OwnPart], Tensor]) -> None:
        """Replace the cut matrices in ``updates`` by ``function`` of each, computed by its owner. **Collective.**"""
        if not any(self._jobs):
            return
        rank = self.comm.rank
        every = range(self.comm.world_size)
        received = self._received([[block.held[r].numel for block in self._jobs[rank]] for r in every])
        results: list[list[Tensor]] = [[] for _ in every]
        for index, block in enumerate(self._jobs[rank]):
            own = block.of(updates[block.part])
            runs = [own if r == rank else received[r][index] for r in every]
            matrix = block.shaped(torch.cat(runs))  # a parameter is cut in the order of the ranks
            result = block.flattened(function(matrix, block.part))
            for r, span in enumerate(block.held):
                results[r].append(result[span.start : span.stop])
            own.copy_(results[rank][-1])
        self._send(results, from_owners=True)
        returned = self._received([[block.held[rank].numel for block in jobs] for jobs in self._jobs])
        for jobs, own_runs in zip(self._jobs, returned, strict=True):
            for block, run in zip(jobs, own_runs, strict=False):  # none from this rank itself
                block.of(updates[block.part]).copy_(run)

    def _held(self, rank: int, owner: int) -> int:
        """How many elements ``rank`` has of the matrices of ``owner``, another rank."""
        return 0 if rank == owner else sum(block.held[rank].numel for block in self._jobs[owner])

    def _send(self, to: Sequence[Iterable[Tensor]], from_owners: bool) -> None:
        rank, every = self.comm.rank, range(self.comm.world_size)
        of_others, owned = [self._held(rank, r) for r in every], [self._held(r, rank) for r in every]
        num_sent, num_received = (owned, of_others) if from_owners else (of_others, owned)
        runs = [run for rank, own in enumerate(to) if rank != self.comm.rank for run in own]
        line = torch.cat(runs) if runs else torch.empty(0, dtype=torch.bfloat16, device=self.device)
        self.comm.count("all_to_all", line.nbytes)
        received, work = exchange_parts(line, num_sent, num_received, self.comm.group)
        self._running = Transfer((work,), received), line

    def _received(self, lengths: Sequence[Sequence[int]]) -> list[list[Tensor]]:
        """Wait; for each other rank its runs, of ``lengths``; empty for this rank."""
        assert self._running is not None
        line = self._running[0].wait()
        self._running = None
        assert line is not None
        own: list[Sequence[int]] = [() if rank == self.comm.rank else each for rank, each in enumerate(lengths)]
        runs = iter(line.split([length for each in own for length in each]))
        return [[next(runs) for _ in each] for each in own]
