"""Lines of parameters some of which a GPU would compute slowly where they lie: these lines are copied to be aligned."""

from __future__ import annotations

from torch import Tensor

from fairshard.params.gathered import Gathered
from fairshard.params.line import FlatLine
from fairshard.utils.collectives import Communicator
from fairshard.views.copied_out import Beside, CopiedOut, aligned_params, is_to_align


class AlignedLine(FlatLine):
    """See `FlatLine`. On a GPU, parameters are copied out of the gathered buffer if that is faster."""

    def gathered_in(self, buffer: Tensor, comm: Communicator) -> Gathered:
        """Memory of the whole parameters, gathered into ``buffer`` ``[W, S]``, or copied out of it to be aligned."""
        if not is_to_align(self.shapes, self.layout.offsets, buffer.dtype, buffer.device):
            return super().gathered_in(buffer, comm)
        line, params = aligned_params(self.shapes, buffer, comm.world_size)
        beside = Beside(line, params, self.params_of(buffer), params)
        return CopiedOut(self.gather_of(buffer, comm), buffer, self.row_of(buffer), beside)
