"""Users' hooks on gradients: buckets that a hook reduces and averages, and the streams on which hooks run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fairshard.errors import FairshardError
from fairshard.utils.buckets import Bucket, GradSource
from fairshard.utils.storage import alloc_storage_
from fairshard.utils.streams import Stream, now

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
