"""One parameter of a tensor subclass that defines what is gathered from its shards, as a flat param of its own.

::

    shard      the subclass, this rank's rows
    inputs     plain tensors, which `fsdp_pre_all_gather` makes of the shard; any dtype
    outputs    [W * n] each    the inputs of all ranks, one after the other
    leaf       whatever `fsdp_post_all_gather` makes of the outputs; often it shares their memory

Gradients take the same path as those of other parameters; only the gather differs.

*Invariant*: outputs and leaf stay the same objects; their memory is freed and refilled.

Source: PyTorch's FSDP2, for the names of the extension points, their arguments, and when they are called.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fairshard.errors import FairshardError
from fairshard.params.extended_slot import ExtendedSlot
from fairshard.params.flat_param import FlatParam
from fairshard.params.gathered import Gather, Gathered
from fairshard.params.rule import Rule
from fairshard.params.shard_grad import GradTransfers
from fairshard.settings.mesh import SavedMesh
from fairshard.utils.collectives import Communicator, Communicators, RowGather
from fairshard.utils.subclasses import POST, PRE, rows_of
from fairshard.views.copied_out import Beside, CopiedOut, byte_columns, row_nbytes
from fairshard.views.rows import Cut, Rows
from fairshard.views.shown_dtensors import ShownDTensors

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
        kinds: of each input its number of elements, and its dtype.
        leaf: the whole parameter; its memory is freed between gathers.
        outputs: the gathered inputs, ``[W * n]`` each.
    """

    leaf: nn.Parameter
    outputs: list[Tensor]

    def __init__(self, whole: Whole, dtype: torch.dtype, device: torch.device) -> None:
        self.whole, self.device = whole, device
        self._dtype = dtype
        self.kinds: list[tuple[int, torch.dtype]] = []
        self._shapes: list[torch.Size] = []
        self._arguments: tuple[Any, ...] = ()
        self._shard: Any = None  # during a gather: the shard and the metadata
        self._metadata: Any = None
        self._memory: dict[int, tuple[Any, int]] = {}  # storages of outputs and leaf, and their sizes

    @property
    def nbytes(self) -> int:
        """The size of one rank's row: its inputs one after the other, aligned."""
        return row_nbytes(self.kinds)

    def prepare(self, shard: Tensor) -> list[Tensor]:
        """The flat tensors to gather of ``shard``. The subclass may communicate: **collective**.

        Raises:
            FairshardError: their sizes or dtypes are not those of the first gather.
        """
        inputs = self._inputs_of(shard)
        kinds = [(each.numel(), each.dtype) for each in inputs]
        if kinds != self.kinds:
            raise FairshardError(
                f"`{PRE}` must return tensors of the same sizes and dtypes each time, but for parameter "
                f"`{self.whole.fqn}` it first returned (elements, dtype) {self.kinds}, and now {kinds}. Return fixed "
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
            self.kinds = [(each.numel(), each.dtype) for each in inputs]
        except Exception as error:
            failure = error
        self._check_alike(comm, failure)
        rows = torch.empty(comm.world_size, self.nbytes, dtype=torch.uint8, device=self.device)
        columns = byte_columns(rows, self.kinds)
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
        own = [f"{tuple(shape)} {dtype}" for shape, (_, dtype) in zip(self._shapes, self.kinds, strict=False)]
        text = failure and f"{type(failure).__name__}: {failure}"
        given = (self.kinds, own, text)
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


class ExtendedGathered(CopiedOut):
    """Gathers the inputs of ``extension`` in ``rows``, ``[W, nbytes]`` of uint8, and copies them to its outputs."""

    def __init__(
        self,
        extension: Extension,
        comm: Communicator,
        gather: Gather,
        rows: Tensor,
        together: list[CopiedOut] | None = None,
    ) -> None:
        self.extension, self.comm = extension, comm
        columns = byte_columns(rows, extension.kinds)
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


class ExtendedLine(Rows):
    """See `Rows`; the whole parameter is made by its class."""

    def joined(self, before: Any, gather: Gather, columns: Tensor, together: list[CopiedOut]) -> Gathered:
        """See `Rows.joined`; ``before`` is an `ExtendedGathered`."""
        return ExtendedGathered(before.extension, before.comm, gather, columns, together)


class ShownExtended(ShownDTensors):
    """The DTensor of one parameter. Its local tensor has the values, and optimizers step it.

    ``shard`` ``[S]`` only has the shape, dtype and device of the local tensor's elements, and the gradient; all its
    elements are one NaN.
    """

    def __init__(self, slot: ExtendedSlot, mesh: DeviceMesh, on_cpu: bool, device: torch.device) -> None:
        rank, world_size = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
        self.placed, self.dims = SavedMesh(mesh), [0]
        self.slots, self.line = [slot], ExtendedLine([Cut(slot.shape, 0, world_size)], rank, world_size)
        self.on_cpu, self.place = on_cpu, None
        rows = rows_of(slot.leaf, slot.fqn, rank, world_size)
        target = torch.device("cpu") if on_cpu else device
        rows = rows if rows.is_meta or rows.device == target else rows.to(target)
        self._make_specs(rows.dtype)
        shown = DTensor(rows, self._specs[0], requires_grad=False)
        self.registered = (nn.Parameter(shown, requires_grad=slot.leaf.requires_grad),)
        self._stepped = []
        self._renew_stand_in()
        slot.register(self.registered[0])

    @property
    def local(self) -> Tensor:
        """This rank's rows."""
        local: Tensor = self.registered[0]._local_tensor  # type: ignore[attr-defined]
        return local

    @property
    def class_name(self) -> str:
        """The name of the subclass."""
        return type(self.local).__name__

    def describe(self, index: int) -> str:
        """See `ShownDTensors.describe`."""
        return f"a {self.class_name}, {super().describe(index)}"

    def _renew_stand_in(self) -> None:
        local = self.local
        line = torch.full((1,), torch.nan, dtype=local.dtype, device=local.device).expand(self.line.shard_numel)
        self.shard = nn.Parameter(line, requires_grad=self.registered[0].requires_grad)
        self._make_specs(local.dtype)
        self.versioned = (self.shard, *self.registered)
        self._watch()

    def own_of(self, index: int) -> Tensor:
        """As many elements as this rank owns; not their values, which only the subclass can read."""
        return self.line.runs_of(self.shard.detach())[index][1]

    # ---- changes by users

    @property
    def has_moved(self) -> bool:
        """Whether the local tensor has another dtype or device than before, or ``.data`` was assigned."""
        return self._is_converted or self._watched[0].is_assigned(self.registered[0])

    @property
    def _is_converted(self) -> bool:
        local, shard = self.local, self.shard
        return local.dtype != shard.dtype or local.device != shard.device

    def adopt_assigned(self, is_fixed: bool) -> bool:
        """Adopt another dtype or device; returns whether there was one.

        Raises:
            TypeError: ``is_fixed``, and one has changed.
            FairshardError: see `check_not_assigned`.
        """
        self.check_not_assigned()
        if not self._is_converted:
            return False
        local, shard = self.local, self.shard
        if is_fixed:
            raise TypeError(
                f"Dtype and device must be fixed before the first forward, but parameter `{self.slots[0].fqn}` (rank "
                f"{self.rank}) went from {shard.dtype} on {shard.device} to {local.dtype} on {local.device}. Convert "
                "the model before its first forward."
            )
        if shard.is_meta and not self.on_cpu:
            self.slots[0].renew_leaf(local.device)
        self._renew_stand_in()
        return True

    def link(self) -> None:
        """Use the current mesh; the local tensor keeps its own memory."""
        own: Any = self.registered[0]
        if own._spec.mesh is not self.mesh:
            own._spec = self._specs[0]

    # ---- moving

    def move_to(self, device: torch.device) -> None:
        """Move the local tensor to ``device``."""
        own: Any = self.registered[0]
        if own._local_tensor.device != device:
            with torch.no_grad():
                own._local_tensor = own._local_tensor.to(device)
            self._renew_stand_in()

    # ---- copies

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._stepped = []
        self._renew_stand_in()


class ExtendedParam(FlatParam):
    """See `FlatParam`. ``policy`` is the user's mixed precision policy, which the subclass is given."""

    shows: ShownExtended
    slots: list[ExtendedSlot]  # type: ignore[assignment]
    _extension: Extension | None = None

    def __init__(self, shows: ShownExtended, name: str, policy: Any) -> None:
        self._policy = policy
        super().__init__(shows, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_policy": self._policy}

    def compute_dtype_under(self, rule: Rule) -> torch.dtype:
        """The dtype that the leaf has; before the first gather, that for which the subclass is asked."""
        if self._extension is not None:
            return self._extension.leaf.dtype
        return super().compute_dtype_under(rule)

    def materialize(self, comms: Communicators, rule: Rule, transfers: GradTransfers, on_grad: Any) -> None:
        """See `FlatParam.materialize`. Gathers once, because the subclass makes the leaf: **collective**."""
        if not self.shows.on_cpu:
            self.shows.move_to(transfers.device)
        slot = self.slots[0]
        self._extension = None
        whole = Whole(slot.fqn, _last_dim_of(self.shows.mesh), slot.shape, slot.owners[0][0], self._policy)
        extension = Extension(whole, self.compute_dtype_under(rule), transfers.device)
        with torch.inference_mode(False), torch.no_grad():
            extension.first(self._newest_on(transfers.device), comms.shard, slot.leaf.requires_grad)
        slot.compute_with(extension.leaf)
        self._extension = extension
        super().materialize(comms, rule, transfers, on_grad)

    def _make_gathered(self, comm: Communicator) -> Gathered:
        assert self._extension is not None
        self.computes_on_shard = False
        gathered = ExtendedGathered.alone(self._extension, comm)
        gathered.free()
        return gathered

    def _place_on_cpu(self, keep_on_device: bool) -> None:
        self.shows.move_to(torch.device("cpu"))

    def _newest(self) -> Tensor:
        """The current shard, a tensor subclass, on the compute device."""
        return self._newest_on(self.compute_device)

    def _newest_on(self, device: torch.device) -> Tensor:
        local = self.shows.local
        if local.device == device:
            return local
        with torch.inference_mode(False), torch.no_grad():
            return local.to(device, non_blocking=True)


def _last_dim_of(mesh: DeviceMesh) -> DeviceMesh:
    """The 1-D mesh of the ranks that parameters are cut among."""
    if mesh.ndim == 1:
        return mesh
    if mesh.mesh_dim_names is not None:
        return mesh[mesh.mesh_dim_names[-1]]
    return DeviceMesh.from_group(mesh.get_group(mesh.ndim - 1), mesh.device_type)


@contextmanager
def _quiet(written: tuple[Tensor, ...]) -> Iterator[None]:
    """Call a subclass without autograd; its writes to ``written`` do not count as changes.

    Not in inference mode: what it makes may be used in training later.
    """
    with torch.inference_mode(False), torch.no_grad(), ExitStack() as stack:
        for tensor in written if _keep_versions is not None else ():
            stack.enter_context(_keep_versions(tensor))
        yield
