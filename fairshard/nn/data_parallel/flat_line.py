"""Parameters laid end to end on a line: whole values to rows and back. No communication."""

import torch
from torch import Tensor

from fairshard.nn.data_parallel.param_slot import ParamSlot
from fairshard.utils.layout import FlatLayout


class FlatLine:
    """The parameters of ``slots`` on a line ``[W, S]``, of which this rank owns row ``rank``."""

    def __init__(self, slots: list[ParamSlot], rank: int, world_size: int) -> None:
        self.slots = slots
        self.rank = rank
        self.layout = FlatLayout([slot.numel for slot in slots], world_size)
        self.shard_numel = self.layout.shard_numel

    @torch.no_grad()
    def cut(self, values: list[Tensor]) -> Tensor:
        """This rank's shard ``[S]`` of whole parameters, padded with zeros; new memory, no communication."""
        with torch.inference_mode(False):
            shard = values[0].new_zeros(self.shard_numel)
        for piece in self.layout.pieces_of(self.rank):
            whole = values[piece.index].reshape(-1)
            shard[piece.target.start : piece.target.stop] = whole[piece.source.start : piece.source.stop]
        return shard

    def params_of(self, line: Tensor) -> list[Tensor]:
        """The parameters, shaped, as views of a whole line of ``W * S`` elements."""
        line = line.view(-1)
        spans = map(self.layout.param_span, range(len(self.slots)))
        return [line[span.start : span.stop].view(slot.shape) for slot, span in zip(self.slots, spans, strict=True)]

    def lay_out(self, values: list[Tensor]) -> Tensor:
        """Whole parameters as a line ``[W, S]`` in new memory, padded with zeros."""
        line = values[0].new_zeros(self.layout.padded_numel)
        for index, value in enumerate(values):
            span = self.layout.param_span(index)
            line[span.start : span.stop] = value.reshape(-1)
        return line.view(self.layout.world_size, self.shard_numel)

    def runs_of(self, values: Tensor) -> list[tuple[int, Tensor]]:
        """What this rank owns of each parameter, as views of ``values`` ``[S]``: first element, and the run."""
        runs = [(0, values[:0]) for _ in self.slots]
        for piece in self.layout.pieces_of(self.rank):
            runs[piece.index] = piece.source.start, values[piece.target.start : piece.target.stop]
        return runs
