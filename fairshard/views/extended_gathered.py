"""The memory of a parameter whose class defines what is gathered: see `Extension`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairshard.params.gathered import Gather
from fairshard.utils.collectives import Communicator, RowGather
from fairshard.views.copied_out import Beside, CopiedOut
from fairshard.views.extension import Extension


class ExtendedGathered(CopiedOut):
    """Gathers the inputs of ``extension`` in ``rows``, ``[W, nbytes]`` of uint8, and copies them to its outputs.

    Has the attributes of `Joined`, so that it can share one gather with other parameters.
    """

    compute_dtype = torch.uint8

    def __init__(
        self,
        extension: Extension,
        comm: Communicator,
        gather: Gather,
        rows: Tensor,
        together: list[CopiedOut] | None = None,
    ) -> None:
        self.extension, self.comm = extension, comm
        self.compute_device, self.shard_numel = extension.device, extension.nbytes
        columns = extension.columns(rows)
        targets = [output.view(comm.world_size, -1) for output in extension.outputs]
        # The leaf has its own memory: the view that a slot is given is not used.
        beside = Beside(extension.outputs[0], [rows.new_empty(0)], columns, targets)
        self._own = [column[comm.rank] for column in columns]
        self._is_to_complete = False
        super().__init__(gather, rows, rows[comm.rank], beside, together)
        if type(extension.leaf) is nn.Parameter:
            self.line_id = extension.leaf.untyped_storage()._cdata

    @staticmethod
    def alone(extension: Extension, comm: Communicator) -> ExtendedGathered:
        """With a buffer of its own."""
        rows = torch.empty(comm.world_size, extension.nbytes, dtype=torch.uint8, device=extension.device)
        return ExtendedGathered(extension, comm, RowGather(comm, rows), rows)

    def joined(self, gather: Gather, rows: Tensor, together: list[CopiedOut]) -> ExtendedGathered:
        """The same parameter in ``rows``, columns of a buffer that ``gather`` fills; ``together``: see `CopiedOut`."""
        return ExtendedGathered(self.extension, self.comm, gather, rows, together)

    def start(self, own: Tensor | None, tag: int) -> None:
        """Start gathering from ``own``, this rank's shard, which is a tensor subclass. **Collective.**"""
        assert own is not None
        if self.transfer is not None:  # a gather not waited for yet; its weights have changed since
            self.transfer.wait()
        inputs = self.extension.prepare(own)
        if not self._storage.nbytes():
            self._storage.resize_(self._nbytes)
        torch._foreach_copy_(self._own, inputs)
        self._is_to_complete = True
        super().start(None, tag)

    def wait(self) -> None:
        """Wait for the running gather, if any; then the leaf holds the whole parameter."""
        super().wait()
        if self._is_to_complete:
            self._is_to_complete = False
            self.extension.complete()

    def free(self) -> None:
        """Wait for the running gather, if any, and free all memory."""
        super().free()
        self._is_to_complete = False
        self.extension.free()

    def _copy_out(self) -> None:
        self.extension.allocate()
        super()._copy_out()
