"""The tensors that a subclass gathers from a shard, and the whole parameter that it makes of them.

::

    shard      the subclass, this rank's rows
    inputs     plain tensors, which `fsdp_pre_all_gather` makes of the shard; any dtype
    outputs    [W * n] each    the inputs of all ranks, one after the other
    leaf       whatever `fsdp_post_all_gather` makes of the outputs; often it shares their memory

*Invariant*: outputs and leaf stay the same objects; their memory is freed and refilled.

Source: PyTorch's FSDP2, for the names of the extension points, their arguments, and when they are called.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fairshard.errors import FairshardError
from fairshard.utils.collectives import Communicator
from fairshard.utils.span import cut
from fairshard.utils.subclasses import POST, PRE

_ALIGNED = 16  # bytes: no dtype is wider

_keep_versions: Any = getattr(torch.autograd, "_unsafe_preserve_version_counter", None)


@dataclass(frozen=True)
class Whole:
    """The parameter ``fqn`` as `fsdp_pre_all_gather` sees it; ``mesh`` has the ranks that it is cut among."""

    fqn: str
    mesh: DeviceMesh
    shape: torch.Size
    module: nn.Module
    policy: Any

    @property
    def stride(self) -> tuple[int, ...]:
        """The strides of the whole parameter."""
        return torch.empty(self.shape, device="meta").stride()

    def arguments(self, shard: Any) -> tuple[Any, ...]:
        """The arguments of `fsdp_pre_all_gather` of ``shard``: the mesh alone, or all."""
        if len(inspect.signature(getattr(shard, PRE)).parameters) == 1:
            return (self.mesh,)
        return self.mesh, self.shape, self.stride, self.module, self.policy


class Extension:
    """The gathers of one parameter ``whole``, which computes in ``dtype``.

    Attributes:
        leaf: the whole parameter; its memory is freed between gathers.
        outputs: the gathered inputs, ``[W * n]`` each.
    """

    leaf: nn.Parameter
    outputs: list[Tensor]

    def __init__(self, whole: Whole, dtype: torch.dtype, device: torch.device) -> None:
        self.whole, self.device = whole, device
        self._dtype = dtype
        self._kinds: list[tuple[int, torch.dtype]] = []  # of each input: its number of elements, and its dtype
        self._shapes: list[torch.Size] = []
        self._arguments: tuple[Any, ...] = ()
        self._shard: Any = None  # during a gather: the shard and the metadata
        self._metadata: Any = None
        self._memory: dict[int, tuple[Any, int]] = {}  # storages of outputs and leaf, and their sizes

    @property
    def nbytes(self) -> int:
        """The size of one rank's row: its inputs one after the other, aligned."""
        return self._starts[-1]

    @property
    def _starts(self) -> list[int]:
        nbytes = [numel * dtype.itemsize for numel, dtype in self._kinds]
        return list(accumulate((cut(each, _ALIGNED) * _ALIGNED for each in nbytes), initial=0))

    def columns(self, rows: Tensor) -> list[Tensor]:
        """Each input's columns ``[W, n]`` of ``rows``, ``[W, nbytes]`` of uint8."""
        return [
            rows[:, start : start + numel * dtype.itemsize].view(dtype)
            for start, (numel, dtype) in zip(self._starts, self._kinds, strict=False)
        ]

    def prepare(self, shard: Tensor) -> list[Tensor]:
        """The flat tensors to gather of ``shard``. The subclass may communicate: **collective**.

        Raises:
            FairshardError: their sizes or dtypes are not those of the first gather.
        """
        inputs = self._inputs_of(shard)
        kinds = [(each.numel(), each.dtype) for each in inputs]
        if kinds != self._kinds:
            raise FairshardError(
                f"`{PRE}` must return tensors of the same sizes and dtypes each time, but for parameter "
                f"`{self.whole.fqn}` it first returned (elements, dtype) {self._kinds}, and now {kinds}. Return fixed "
                "sizes, and pass what changes as metadata."
            )
        return inputs

    def first(self, shard: Tensor, comm: Communicator, requires_grad: bool) -> None:
        """Gather for the first time, and make ``outputs`` and ``leaf``. **Collective.**

        Raises:
            ValueError: on all ranks, the inputs of the ranks differ in size or dtype, or a rank has none.
            TypeError: `fsdp_post_all_gather` does not return a tensor and its inner tensors.
        """
        inputs: list[Tensor] = []
        failure = None
        self._arguments = self.whole.arguments(shard)
        try:
            inputs = self._inputs_of(shard)
            self._kinds = [(each.numel(), each.dtype) for each in inputs]
        except Exception as error:
            failure = error
        self._check_alike(comm, failure)
        rows = torch.empty(comm.world_size, self.nbytes, dtype=torch.uint8, device=self.device)
        columns = self.columns(rows)
        for column, each in zip(columns, inputs, strict=True):
            column[comm.rank].copy_(each)
        if rows.numel():
            comm.gather_messages(rows).wait()
        self.outputs = [column.reshape(-1).clone() for column in columns]  # each with its own storage
        with _quiet(()):
            made = getattr(self._shard, POST)(self._shaped(), self._metadata, self._dtype)
        if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], Tensor):
            raise TypeError(
                f"`{POST}` must return the whole parameter and a tuple of its inner tensors when it is called without "
                f"`out`, but for `{self.whole.fqn}` it returned {type(made).__name__}. Return both."
            )
        self.leaf = nn.Parameter(self._outer(made[0]), requires_grad=requires_grad)
        self._inner = tuple(made[1])
        for tensor in (*self.outputs, *self._inner):
            storage = tensor.untyped_storage()
            self._memory[storage._cdata] = storage, storage.nbytes()
        self._shard = self._metadata = None

    def complete(self) -> None:
        """Refill the leaf from the gathered ``outputs``."""
        self.allocate()
        with _quiet((self.leaf, *self._inner)):
            getattr(self._shard, POST)(self._shaped(), self._metadata, self._dtype, out=self.leaf)
        self._shard = self._metadata = None

    def allocate(self) -> None:
        """Give outputs and leaf their memory again."""
        for storage, nbytes in self._memory.values():
            if storage.nbytes() != nbytes:
                storage.resize_(nbytes)

    def free(self) -> None:
        """Free the memory of outputs and leaf."""
        for storage, _ in self._memory.values():
            storage.resize_(0)
        self._shard = self._metadata = None

    def _inputs_of(self, shard: Tensor) -> list[Tensor]:
        inputs: Sequence[Tensor]
        with _quiet(()):
            inputs, self._metadata = getattr(shard, PRE)(*self._arguments)
        self._shard, self._shapes = shard, [each.size() for each in inputs]
        return [each.reshape(-1) for each in inputs]

    def _check_alike(self, comm: Communicator, failure: Exception | None) -> None:
        """Check that the inputs of all ranks have the same sizes and dtypes; ``failure``: why this rank has none.

        **Collective.**
        """
        own = [f"{tuple(shape)} {dtype}" for shape, (_, dtype) in zip(self._shapes, self._kinds, strict=False)]
        text = failure and f"{type(failure).__name__}: {failure}"
        given = (self._kinds, own, text)
        every = comm.gather_objects(given) if comm.peers else [given]
        if failure is not None:
            raise failure
        for rank, (kinds, theirs, error) in enumerate(every):
            if error is not None:
                raise ValueError(
                    f"`{PRE}` must work on all ranks, but for parameter `{self.whole.fqn}`, of shape "
                    f"{tuple(self.whole.shape)} on {comm.world_size} ranks, it failed on rank {rank}: {error}"
                )
            if kinds != every[0][0]:
                raise ValueError(
                    f"`{PRE}` must return tensors of the same sizes and dtypes on all ranks, but for parameter "
                    f"`{self.whole.fqn}`, of shape {tuple(self.whole.shape)} on {comm.world_size} ranks, it returned "
                    f"{', '.join(every[0][1])} on rank 0 and {', '.join(theirs)} on rank {rank}. Pad the inputs of "
                    "ranks with fewer rows (the method is told the whole shape if it takes outer_size), or make the "
                    "first dimension divisible by the number of ranks."
                )

    def _shaped(self) -> tuple[Tensor, ...]:
        """The outputs in the shapes of the inputs, with the rows of all ranks.

        Through ``.data``, so that a refill does not count as a change of tensors that autograd has saved.
        """
        return tuple(
            output.data.view(self._num_rows(output, shape), *shape[1:])
            for output, shape in zip(self.outputs, self._shapes, strict=True)
        )

    def _num_rows(self, output: Tensor, shape: torch.Size) -> int:
        rest = torch.Size(shape[1:]).numel()
        return output.numel() // rest if rest else self.whole.shape[0]

    def _outer(self, made: Tensor) -> Tensor:
        """``made`` without the rows that were added as padding."""
        shape, stride = self.whole.shape, self.whole.stride
        if made.size() == shape and made.stride() == stride:
            return made
        with torch.no_grad():
            return torch.as_strided(made, shape, stride, 0)


@contextmanager
def _quiet(written: tuple[Tensor, ...]) -> Iterator[None]:
    """Call a subclass without autograd; its writes to ``written`` do not count as changes.

    Not in inference mode: what it makes may be used in training later.
    """
    with torch.inference_mode(False), torch.no_grad(), ExitStack() as stack:
        for tensor in written if _keep_versions is not None else ():
            stack.enter_context(_keep_versions(tensor))
        yield
