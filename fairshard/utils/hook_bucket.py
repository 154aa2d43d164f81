"""Buckets whose gradients a user's hook reduces and averages, in place of the sums of ``collectives.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fairshard.errors import FairshardError
from fairshard.utils.buckets import Bucket, GradSource
from fairshard.utils.hook_streams import in_turn
from fairshard.utils.storage import alloc_storage_
from fairshard.utils.streams import Stream

Hook = Callable[[Tensor, Tensor], object]
"""``hook(flat, shard)`` reduces ``flat`` ``[world_size * shard_numel]`` into ``shard`` ``[shard_numel]``."""


class HookKind:
    """The kind of the buckets of one source, called ``fqn``, whose gradients ``hook`` reduces on ``stream``."""

    def __init__(self, hook: Hook, stream: Stream, fqn: str) -> None:
        self.hook, self.stream = hook, stream
        self._fqn = fqn

    def __call__(self, sources: Sequence[GradSource]) -> HookBucket:
        """A bucket of ``sources``; there is one, because no other has this kind."""
        return HookBucket(sources, self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise FairshardError(
            "A model with a communication hook must not be pickled or copied, because the copy would lose it, but "
            f"`{self._fqn}` has one. Save its state_dict(), or register the hook on the copy instead."
        )


class HookBucket(Bucket):
    """A bucket of one source that is reduced as soon as it is written, so that it is never complete, nor sent."""

    def __init__(self, sources: Sequence[GradSource], kind: HookKind) -> None:
        super().__init__(sources)
        self._kind = kind

    def write(self, index: int, zeros: bool = False) -> bool:
        """Make the source write its gradients, or ``zeros``, and reduce them; zeros are reduced, but not delivered."""
        (source,) = self.sources
        alloc_storage_(self.data)
        try:
            if zeros:
                self.data.zero_()
            else:
                source.write_grads(source.line.bucket_views(self.data))
            with in_turn(self._kind.stream, self.data.device):
                reduced = self.data.new_empty(source.shard_numel)
                self._kind.hook(self.data.view(-1), reduced)
                if not zeros:
                    source.accept_grad(reduced)
        finally:
            self.close()
        return False
