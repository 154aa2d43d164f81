"""Parameters that are registered as DTensors, which users may move, cast, replace and unpickle.

The shard ``[S]`` holds the local tensors of all DTensors, one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fairshard.errors import FairshardError
from fairshard.params.dtensor_slot import DTensorSlot
from fairshard.params.slot import ParamSlot
from fairshard.settings.mesh import DataMesh, SavedMesh
from fairshard.utils.device import current_device
from fairshard.utils.dtensors import own_storage, part_of
from fairshard.utils.placed_layout import RaggedLayout
from fairshard.utils.ragged_tensor import RaggedTensor
from fairshard.utils.storage import set_data
from fairshard.views.ragged import Ragged, ragged_line
from fairshard.views.rows import Cut, Rows
from fairshard.views.shown_runs import ShownRuns
from fairshard.views.viewed_grad import ViewedGrad

_LOCAL = attrgetter("_local_tensor")  # `map` with it costs less host time than a loop


class ShownDTensors(ShownRuns):
    """A DTensor for each parameter, cut on ``dims`` among the ranks of the last dimension of ``mesh``."""

    line: Rows

    kind: type[DTensor] = DTensor

    def __init__(self, slots: list[ParamSlot], mesh: DeviceMesh, dims: Sequence[int | None], on_cpu: bool) -> None:
        self.placed = SavedMesh(mesh)
        self.dims = list(dims)
        super().__init__(slots, self._line_of(slots, *self._seat(mesh)), on_cpu)
        self.versioned = (self.shard, *self.registered)  # only a DTensor counts writes through it
        self._watch()

    _next = 0

    per_param: tuple[str, ...] = ("slots", "dims", "_stepped", "_watched")
    """Attributes that are lists with one entry for each parameter."""
    kept: tuple[str, ...] = ()
    """More attributes that copies keep."""

    def _line_of(self, slots: Sequence[ParamSlot], rank: int, world_size: int) -> Any:
        # One rank has all rows: cut in memory order.
        dims = [dim and 0 for dim in self.dims] if world_size == 1 else self.dims
        cuts = [Cut(slot.shape, dim, world_size) for slot, dim in zip(slots, dims, strict=True)]
        return Rows(cuts, rank, world_size)

    def _seat(self, mesh: DeviceMesh) -> tuple[int, int]:
        """This rank's number among the ranks that a parameter is cut among, and their number."""
        return mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)

    @property
    def rank(self) -> int:
        """This rank's index in the last dimension of the mesh."""
        return self.line.rank

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the DTensors; its last dimension shards."""
        return self.placed.mesh

    def connect(self, *groups: ProcessGroup) -> None:
        """Set the DTensors' ``groups``, one for each dimension of the mesh, if they are missing after unpickling."""
        if not self.placed.is_connected:
            self.placed.connect(groups)
        if any(param._spec.mesh is not self.mesh for param in self.registered):  # type: ignore[attr-defined]
            self._make_specs(self.shard.dtype)
            self.link()

    def follow_mesh(self, mesh: DeviceMesh) -> None:
        """Use ``mesh`` from now on."""
        self.placed = SavedMesh(mesh)
        self.connect()

    # ---- DTensors and this rank's elements of them

    def _make_specs(self, dtype: torch.dtype) -> None:
        """Build the specs of DTensors of ``dtype`` once, because that is slower than building the DTensors."""
        self._dtype, self._specs = dtype, []
        for index, slot in enumerate(self.slots):
            placements = (*[Replicate()] * (self.mesh.ndim - 1), self.placement(index))
            stride = torch.empty(slot.shape, device="meta").stride()
            meta = TensorMeta(slot.shape, stride, dtype)
            self._specs.append(DTensorSpec(self.mesh, placements, tensor_meta=meta))
        self._local_shapes = [self.line.own_shape(index) for index in range(len(self.slots))]

    def placement(self, index: int) -> Placement:
        """How parameter ``index`` is cut along the last dimension of the mesh."""
        dim = self.dims[index]
        return Replicate() if dim is None else Shard(dim)

    def describe(self, index: int) -> str:
        """The cut of parameter ``index``, in words; equal on all ranks."""
        slot: Any = self.slots[index]
        cut = f"sharded on dim {self.dims[index]}" if self.kind is DTensor else f"sharded by {self.placement(index)}"
        return f"{cut}, a DTensor of {slot.spec.placements}" if slot.has_mesh else cut

    def _make_views(self) -> tuple[nn.Parameter, ...]:
        """DTensors whose local tensors are views of the shard."""
        self._make_specs(self.shard.dtype)
        return super()._make_views()

    def shown_as(self, index: int, run: Tensor) -> DTensor:
        """``run``, this rank's elements of parameter ``index``, as a DTensor; no copy, no communication."""
        if self._dtype != run.dtype:
            self._make_specs(run.dtype)
        local = own_storage(run.view(self._local_shapes[index]))
        return self.kind.__new__(self.kind, local, self._specs[index], requires_grad=False)  # __init__ only takes time

    def all_shown_as(self, runs: Sequence[Tensor]) -> list[DTensor]:
        """`shown_as` of every parameter's run."""
        if self._dtype != runs[0].dtype:
            self._make_specs(runs[0].dtype)
        return [
            self.kind.__new__(
                self.kind, own_storage(run if run.shape == shape else run.view(shape)), spec, requires_grad=False
            )
            for run, shape, spec in zip(runs, self._local_shapes, self._specs, strict=True)
        ]

    def elements_of(self, index: int, value: Tensor) -> Tensor:
        """This rank's elements of ``value``: a DTensor, or a whole tensor in the shape of parameter ``index``."""
        if isinstance(value, DTensor):
            return value._local_tensor.detach().reshape(-1)
        start, run = self.line.runs_of(self.shard.detach())[index]
        return self.line.flattened(index, value.detach())[start : start + run.numel()]

    def set_view(self, index: int, run: Tensor) -> None:
        """Make ``registered[index]`` the DTensor of ``run``."""
        view, shown = self.registered[index], self.shown_as(index, run)
        assert isinstance(view, DTensor)
        if view.device != shown.device:
            set_data(view, shown)
        view._local_tensor, view._spec = shown._local_tensor, shown._spec

    def link(self) -> None:
        """Make the registered parameters DTensors of the shard's current memory."""
        super().link()
        self._watch()

    @property
    def addressed(self) -> tuple[nn.Parameter, ...]:
        """See `ShownShard.addressed`; DTensors refuse assignments."""
        return (self.shard,)

    @property
    def has_moved(self) -> bool:
        """Whether a DTensor no longer lies in the shard, or its ``.data`` was assigned.

        Looks at the ``.data`` of one parameter, and of the next one in the next call, to save host time.
        """
        self._next = index = (self._next + 1) % len(self.registered)
        return self._own_addresses() != self._addresses or self._watched[index].is_assigned(self.registered[index])

    def _watch(self) -> None:
        self._watched = [_Wrapper(param) for param in self.registered]

    def adopt_assigned(self, is_fixed: bool) -> bool:
        """See `ShownRuns.adopt_assigned`; only modules assign tensors that can be adopted, when they are converted.

        Raises:
            FairshardError: a tensor was assigned to ``.data`` of a DTensor, which changes nothing.
        """
        self.check_not_assigned()
        return super().adopt_assigned(is_fixed)

    def check_not_assigned(self, which: Sequence[int] | None = None) -> None:
        """Raise if a tensor was assigned to ``.data`` of a DTensor, which keeps its local tensor then; raises once.

        ``which``: the indexes of the parameters to look at; None: all.

        Raises:
            FairshardError: names the first such parameter.
        """
        indexes = range(len(self.registered)) if which is None else which
        assigned = [index for index in indexes if self._watched[index].is_assigned(self.registered[index])]
        if not assigned:
            return
        self._watch()
        raise FairshardError(
            f"A tensor must not be assigned to `.data` of a DTensor, because that does not change its values, but was "
            f"for parameter `{self.slots[assigned[0]].fqn}`. Copy the values (`with torch.no_grad(): "
            "param.copy_(tensor)`; keep the old ones with `param.detach().clone()`), or load a state dict."
        )

    def _own_addresses(self) -> list[int]:
        return list(map(Tensor.data_ptr, map(_LOCAL, self.registered)))

    def _new_grad(self, *args: Any) -> ViewedGrad:
        return RowsGrad(self, *args)

    # ---- changes by users

    def _renew_shard(self, shard: Tensor) -> None:
        """Use ``shard`` as the shard; a parameter on the meta device is replaced, because it cannot get memory."""
        if not self.shard.is_meta:
            super()._renew_shard(shard)
            return
        self.shard = nn.Parameter(shard.cpu() if self.on_cpu else shard, requires_grad=self.shard.requires_grad)
        self.versioned = (self.shard, *self.registered)
        computes_elsewhere = self.on_cpu and self.mesh.device_type != "cpu"
        for slot in self.slots:
            slot.renew_leaf(current_device() if computes_elsewhere else shard.device)

    def split(self, indexes: Sequence[int]) -> ShownDTensors:
        """The parameters ``indexes``, now of one dtype and device, with a separate shard.

        The registered parameters and their `OrigParam` objects stay the same. Split off all other parameters too.
        """
        part = type(self).__new__(type(self))
        part.__dict__.update(self.__dict__)
        for name in self.per_param:
            setattr(part, name, [getattr(self, name)[index] for index in indexes])
        part.registered = tuple(self.registered[index] for index in indexes)
        part.line = self.line.of(indexes)
        shard = self.shard.detach().new_zeros(part.line.shard_numel)
        part.shard = nn.Parameter(shard, requires_grad=any(view.requires_grad for view in part.registered))
        part.versioned = (part.shard, *part.registered)
        part._make_specs(part.shard.dtype)
        return part

    # ---- copies

    def __getstate__(self) -> dict[str, Any]:
        # Leave out the shard: the modules copy the registered parameters, which have all elements.
        shard = nn.Parameter(self.shard.detach().new_empty(0), requires_grad=self.shard.requires_grad)
        own = {name: getattr(self, name) for name in ("dims", "placed", *self.kept)}
        return {**super().__getstate__(), **own, "shard": shard, "versioned": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        shard = self.shard.detach().new_zeros(self.line.shard_numel)
        for index, (_, run) in enumerate(self.line.runs_of(shard)):
            run.copy_(self.own_of(index))
        self.shard = nn.Parameter(shard, requires_grad=self.shard.requires_grad)
        self._make_specs(shard.dtype)
        super().__setstate__({"shard": self.shard})


class RowsGrad(ViewedGrad):
    """The gradient of a shard that is registered as the DTensors of ``shown``."""

    def __init__(self, shown: ShownDTensors, *args: Any) -> None:
        super().__init__(*args)
        self._shown_params = shown

    def shows_of(self, whole: Tensor) -> Sequence[Tensor]:
        """A DTensor of each run."""
        return self._shown_params.all_shown_as(self.parts_of(whole.data))

    def form_of(self, index: int, run: Tensor) -> Tensor:
        """A DTensor of ``run``."""
        return self._shown_params.shown_as(index, run)

    def own_of(self, index: int, grad: Tensor) -> Tensor:
        """This rank's elements of ``grad``, which may be a tensor that the user has assigned.

        Raises:
            ValueError: it is a DTensor placed differently than the parameter.
        """
        param: Any = self._views[index]
        if isinstance(grad, DTensor) and (grad.placements, grad.device_mesh) != (param.placements, param.device_mesh):
            raise ValueError(
                f"A gradient must be placed like its parameter, but that of "
                f"`{self._shown_params.slots[index].fqn}` (rank {self._shown_params.rank}) is {grad.placements}, not "
                f"{param.placements}. Put `grad.redistribute(param.device_mesh, param.placements)` there."
            )
        return self._shown_params.elements_of(index, grad)

    def zeroed_uncounted(self, placeholders: Mapping[int, Tensor], counted: set[int]) -> set[int]:
        """See `ShardGrad.zeroed_uncounted`; all faces, if none with elements is left."""
        found = [(face, self.own_of(face, placeholder)) for face, placeholder in sorted(placeholders.items())]
        heads = {face: own.reshape(-1)[:1] for face, own in found if own.numel()}
        left = [face for face in heads if face not in counted]
        signs = torch.cat([heads[face] for face in left]).signbit().tolist() if left else []
        zeroed = {face for face, is_untouched in zip(left, signs, strict=True) if not is_untouched}
        return set(placeholders) if heads and len(zeroed) == len(left) else zeroed


class ShownRagged(ShownDTensors):
    """A `RaggedTensor` for each parameter, on the ranks of the last dimension of ``mesh``."""

    line: Ragged  # type: ignore[assignment]
    kind = RaggedTensor

    def __init__(self, slots: list[ParamSlot], mesh: DeviceMesh, layout: RaggedLayout, on_cpu: bool) -> None:
        self._layout = layout
        super().__init__(slots, mesh, [0] * len(slots), on_cpu)

    def _line_of(self, slots: Sequence[ParamSlot], rank: int, world_size: int) -> Ragged:
        return ragged_line([slot.shape for slot in slots], rank, self._layout)

    def placement(self, index: int) -> Placement:
        """The rows of parameter ``index`` on each rank."""
        return self.line.placement(index)


class ShownPlaced(ShownDTensors):
    """A DTensor for each parameter, on a mesh of the ranks of ``data`` and those of the parameter's own mesh.

    The lines hold local tensors: this rank's part of them among the ranks of ``data`` is its part of the parameter.
    """

    slots: list[DTensorSlot]  # type: ignore[assignment]

    def __init__(self, slots: list[DTensorSlot], data: DataMesh, dims: Sequence[int | None], on_cpu: bool) -> None:
        for slot in slots:
            slot.dp_dims = data.dp_dims_of(slot.spec)
        self._is_cut = data.shards
        self._whole_as = [data.placed(slot.spec, dim) for slot, dim in zip(slots, dims, strict=True)]
        super().__init__(list(slots), data.mesh, dims, on_cpu)

    per_param = (*ShownDTensors.per_param, "_whole_as")
    kept = ("_is_cut", "_whole_as")

    def _seat(self, mesh: DeviceMesh) -> tuple[int, int]:
        return super()._seat(mesh) if self._is_cut else (0, 1)

    def _make_specs(self, dtype: torch.dtype) -> None:
        self._dtype, self._specs = dtype, []
        for slot, placed in zip(self.slots, self._whole_as, strict=True):
            own = slot.spec.tensor_meta
            assert own is not None
            meta = TensorMeta(own.shape, own.stride, dtype)
            self._specs.append(DTensorSpec(placed.mesh, placed.placements, tensor_meta=meta))
        self._local_shapes = [self.line.own_shape(index) for index in range(len(self.slots))]

    def connect(self, *groups: ProcessGroup) -> None:
        """Restore the DTensors' meshes after a deepcopy."""
        self._make_specs(self.shard.dtype)
        if any(own._spec.mesh is not spec.mesh for own, spec in zip(self.registered, self._specs, strict=True)):  # type: ignore[attr-defined]
            self.link()

    def follow_mesh(self, mesh: DeviceMesh) -> None:
        """Refuse another mesh."""
        raise FairshardError(
            f"The mesh of a model with parameters that were DTensors must not change, but `{self.slots[0].fqn}` would "
            f"go from {self.mesh} to {mesh}. Build the model on the new mesh, and load its state dict."
        )

    def elements_of(self, index: int, value: Tensor) -> Tensor:
        """This rank's elements of ``value``: a DTensor, or a whole tensor in the shape of the whole parameter."""
        if not isinstance(value, DTensor):
            like: Any = self.registered[index]
            value = part_of(value, like)
        return value._local_tensor.detach().reshape(-1)


class _Wrapper:
    """The parts of a DTensor from which one can see that a tensor was assigned to its ``.data``.

    That gives it the other's storage, which is empty, and nothing else. `torch.utils.swap_tensors`, with which modules
    convert DTensors, swaps the local tensors and attributes too.
    """

    __slots__ = ("_attributes", "_local", "_storage")

    def __init__(self, param: Any) -> None:
        self._look_at(param)

    def _look_at(self, param: Any) -> None:
        self._storage, self._local, self._attributes = param.untyped_storage(), param._local_tensor, param.__dict__

    def is_assigned(self, param: Any) -> bool:
        """Whether a tensor was assigned to ``param.data``."""
        is_same = param._local_tensor is self._local and param.__dict__ is self._attributes
        if not is_same:
            self._look_at(param)
        return is_same and param.untyped_storage() is not self._storage
