"""DTensors of which ranks have unequal numbers of rows, some none; torch (to 2.13) has no placement for them.

They answer themselves what torch would compute from even chunks: `full_tensor`, `redistribute`, and the chunks that
`torch.distributed.checkpoint` saves and loads. Operators that work element by element, optimizers' fused and foreach
ones among them, run on this rank's rows. All others raise: nothing is gathered, or cut evenly, without being asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._foreach_utils import _foreach_supported_types as _of_clipping
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map

from fairshard.errors import ParameterShardedError, RanksDisagreeError
from fairshard.utils.agree import agree
from fairshard.utils.collectives import Communicator
from fairshard.utils.groups import communicator, on_host
from fairshard.utils.messages import broadcast
from fairshard.utils.rank_norms import joint_norms
from fairshard.utils.span import Span, overlap
from fairshard.utils.span_tensor import SpanTensor
from fairshard.utils.tensors import form_of


@dataclass(init=False, unsafe_hash=True)
class RaggedShard(Placement):
    """Rows of a tensor on consecutive ranks: ``head`` on rank ``first``, ``each`` on the next ones, until none is left.

    It is sharded, but has no ``dim``, with which torch would compute even chunks.

    Source: veScale-FSDP, for the name.
    """

    first: int
    head: int
    each: int

    def __init__(self, first: int, head: int, each: int) -> None:
        super().__init__()
        self.first, self.head, self.each = first, head, each

    def rows_on(self, rank: int, num_rows: int) -> Span:
        """The rows that ``rank`` has of a tensor of ``num_rows``."""
        start = self.head + (rank - self.first - 1) * self.each
        own = Span(start, start + self.each) if rank > self.first else Span(0, self.head if rank == self.first else 0)
        return overlap(own, Span(0, num_rows))

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether it cuts dimension ``dim``; None: any."""
        return dim in (None, 0)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{self!r} has no `{name}`: ranks have unequal numbers of rows, which torch's functions do not know. "
            "Use the parameter's `full_tensor()`, its `to_local()`, or a state dict."
        )

    def __str__(self) -> str:
        return repr(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return RaggedShard, (self.first, self.head, self.each)


class RaggedTensor(DTensor):
    """A DTensor with a `RaggedShard` on the last dimension of its mesh, replicated over the others."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run operators that work element by element on this rank's rows.

        Raises:
            ParameterShardedError: the operator needs other elements, or operands are placed differently.
        """
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name in ("linalg_vector_norm", "_foreach_norm"):
            return _norms(func, args, kwargs)
        if name == "equal":
            return _is_equal(func, args)
        if name == "_has_compatible_shallow_copy_type":  # dispatched on devices that are not part of torch
            return func(*_locals(func, args, (args[0],) * len(args)))
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            func(_locals(func, args[0], args[0]), *args[1:])
            _ragged_in(args)._comm.all_reduce(args[1], "max").wait()
            return None
        if isinstance(args[0], (list, tuple)):
            is_known = name.startswith(("_foreach_", "_fused_")) and name not in _NOT_BY_ELEMENT
            return _by_element_of_lists(func, args, kwargs) if is_known else _refuse(func, (args, kwargs))
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        is_alike = name in _SAME_SHAPE or (torch.Tag.pointwise in func.tags and not is_random)
        size = args[1] if name in _NEW_SIZE else None  # or the dtype of a view
        if not is_alike and (not isinstance(size, (list, tuple)) or tuple(size) != tuple(args[0].shape)):
            _refuse(func, (args, kwargs))
        return _by_element(func, args, kwargs)

    @staticmethod
    def __tensor_unflatten__(inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any) -> Any:
        plain: Any = DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride)
        return _made(RaggedTensor, plain._local_tensor, plain._spec, plain.requires_grad)

    def _stable_hash_for_caching(self) -> str:
        """See DTensor; also of this rank's rows, of which ranks that share a cache of compiled code have others."""
        spec: Any = self._spec
        return f"{spec._stable_hash()} {self.requires_grad} {form_of(self._local_tensor)}"

    @property
    def _placement(self) -> RaggedShard:
        return cast(RaggedShard, self._spec.placements[-1])

    @property
    def _comm(self) -> Communicator:
        """The ranks of the mesh's last dimension, for tensors where the rows are. **Collective** the first time."""
        mesh: DeviceMesh = self._spec.mesh
        comm = communicator(mesh.get_group(mesh.ndim - 1))
        return on_host(comm) if self._local_tensor.is_cpu else comm

    def redistribute(
        self, device_mesh: Any = None, placements: Any = None, forward_dtype: torch.dtype | None = None, **_: Any
    ) -> DTensor:
        """This tensor, in ``forward_dtype``, whole on every rank (all ``placements`` Replicate), or as it is placed.

        **Collective** if it is gathered. Gradients have this tensor's dtype.

        Raises:
            ParameterShardedError: other placements, or another mesh.
        """
        if forward_dtype not in (None, self.dtype):
            return cast(DTensor, self.to(forward_dtype)).redistribute(device_mesh, placements)
        mesh, wanted = self._spec.mesh, tuple(placements or ())
        if device_mesh in (None, mesh) and wanted == self._spec.placements:
            return self
        if device_mesh not in (None, mesh) or not wanted or not all(each.is_replicate() for each in wanted):
            raise ParameterShardedError(
                f"A tensor placed by {self._spec.placements} on {mesh} can be gathered (`full_tensor()`, Replicate()), "
                f"but not redistributed to {wanted} on {mesh if device_mesh is None else device_mesh}. Gather it, and "
                "distribute the result."
            )
        return DTensor.from_local(self.full_tensor(), mesh, wanted, run_check=False)

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The whole tensor, in new memory. **Collective** over the ranks of the mesh's last dimension."""
        if grad_placements is not None:  # its gradient may be partial sums
            every = [Replicate()] * self._spec.mesh.ndim
            return self.redistribute(placements=every).to_local(grad_placements=grad_placements)
        return cast(Tensor, _Read.apply(self, True))  # type: ignore[no-untyped-call]

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """This rank's rows; their gradient is that of the same rows of this tensor."""
        if grad_placements is not None or not (self.requires_grad and torch.is_grad_enabled()):
            return super().to_local(grad_placements=grad_placements)
        return cast(Tensor, _Read.apply(self, False))  # type: ignore[no-untyped-call]

    # ---- torch.distributed.checkpoint

    def _own_span(self) -> SpanTensor:
        """This rank's rows as a span tensor, which describes itself to torch.distributed.checkpoint."""
        mesh = self._spec.mesh
        rows = self._placement.rows_on(mesh.get_local_rank(mesh.ndim - 1), self.shape[0])
        local = self._local_tensor.detach()
        return SpanTensor(local.reshape(-1), rows.start * self.shape[1:].numel(), self.shape)

    def __create_write_items__(self, fqn: str, object: Any) -> Any:
        """Write items of this rank: one, or none without rows."""
        return self._own_span().__create_write_items__(fqn, object)

    def __create_chunk_list__(self) -> Any:
        """The chunk that this rank reads, or none without rows."""
        return self._own_span().__create_chunk_list__()

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """This rank's rows."""
        return self._own_span().__get_tensor_shard__(index)


class _Read(torch.autograd.Function):
    """The whole of a ragged tensor, or this rank's rows; its gradient has this rank's rows of theirs."""

    @staticmethod
    def forward(ctx: Any, ragged: Any, is_whole: bool) -> Tensor:
        ctx.like, ctx.is_whole = ragged._spec, is_whole
        return _gathered(ragged) if is_whole else ragged._local_tensor.view_as(ragged._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (ragged_part_of(grad, ctx.like) if ctx.is_whole else _shown(grad, ctx.like)), None


def ragged_part_of(whole: Tensor, spec: DTensorSpec) -> RaggedTensor:
    """This rank's rows of ``whole`` as a tensor of ``spec``, in the dtype of ``whole``; a view, no communication."""
    placement: Any = spec.placements[-1]
    rows = placement.rows_on(spec.mesh.get_local_rank(spec.mesh.ndim - 1), whole.shape[0])
    return cast(RaggedTensor, _shown(whole.detach()[rows.start : rows.stop], spec))


def ragged_of(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> RaggedTensor:
    """This rank's rows of ``whole``, copied, as a tensor placed by ``placements``; no communication."""
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(whole.shape, whole.stride(), whole.dtype))
    return cast(RaggedTensor, ragged_part_of(whole, spec).clone())


def ragged_like(local: Tensor, like: RaggedTensor) -> RaggedTensor:
    """``local``, values for this rank's rows, as a tensor placed like ``like``, in the dtype of ``local``."""
    return cast(RaggedTensor, _shown(local, like._spec))


def _gathered(ragged: Any) -> Tensor:
    """The whole tensor, in new memory. **Collective.**

    Quantised optimizer state, which some ranks may have and others not, is dequantised.
    """
    comm, local = ragged._comm, ragged._local_tensor.detach()
    if is_traceable_wrapper_subclass(local):
        local = local.dequantize()  # type: ignore[attr-defined]
    spans = [ragged._placement.rows_on(rank, ragged.shape[0]) for rank in range(comm.world_size)]
    return gather_rows(local, spans, ragged.shape, comm)


def gather_rows(local: Tensor, spans: Sequence[Span], shape: torch.Size, comm: Communicator) -> Tensor:
    """A new tensor of ``shape``; rank ``r`` has its rows ``spans[r]``, which are ``local`` on this one. **Collective.**

    If few ranks have rows, each of them broadcasts its own; otherwise all ranks exchange as many as the largest has.

    Raises:
        RanksDisagreeError: on all ranks, if they have other spans or shapes.
    """
    place = (*shape, *(number for span in spans for number in (span.start, span.stop)))
    if not agree(comm, hash(place) & (1 << 62) - 1, local.device):
        raise RanksDisagreeError(
            f"All ranks must place a tensor alike to gather it, but one of {tuple(shape)} has rows "
            f"{spans[comm.rank].start} to {spans[comm.rank].stop} here (rank {comm.rank}), and other ranks count "
            "otherwise. Shard the same model on every rank, with a placement function that depends on the parameter "
            "alone."
        )
    width = shape[1:].numel()
    whole: Tensor = local.new_empty(shape)
    flat = whole.view(-1)
    runs = [flat[span.start * width : span.stop * width] for span in spans]
    runs[comm.rank].copy_(local.reshape(-1))
    holders = [rank for rank, run in enumerate(runs) if run.numel()]
    if 2 * len(holders) <= comm.world_size:
        for rank in holders:
            broadcast(runs[rank], rank, comm.group)
    elif comm.world_size > 1:
        rows = local.new_empty(comm.world_size, max(run.numel() for run in runs))
        rows[comm.rank, : local.numel()] = local.reshape(-1)
        comm.gather_messages(rows).wait()
        torch._foreach_copy_(runs, [row[: run.numel()] for row, run in zip(rows, runs, strict=True)])
    return whole


# ---- operators

_SAME_SHAPE = {"clone", "detach", "alias", "_to_copy", "copy_", "zero_", "fill_", "_pin_memory", "is_pinned"}
_SAME_SHAPE |= {"masked_fill_", *(f"{kind}_like" for kind in ("zeros", "ones", "empty", "full"))}
_NEW_SIZE = {"view", "_unsafe_view", *(f"new_{kind}" for kind in ("zeros", "ones", "empty", "full"))}
_NOT_BY_ELEMENT = {"_foreach_norm", "_foreach_max", "_foreach_powsum"}


def _by_element(func: Any, args: Any, kwargs: Any) -> Any:
    """``func`` on this rank's rows of all operands, which are placed alike or have no dimensions."""
    like = _ragged_in((args, kwargs))
    name = func.overloadpacket.__name__
    args = args[:1] if name in ("view", "_unsafe_view") else args
    if func._schema.is_mutable and not isinstance(args[0], RaggedTensor):
        _refuse(func, args)
    own_args, own_kwargs = tree_map(lambda each: _local_like(func, each, like), (args, kwargs))
    if name in _NEW_SIZE:
        local = own_args[0]
        made = local.view(local.shape) if len(args) == 1 else func(local, local.shape, *own_args[2:], **own_kwargs)
    else:
        made = func(*own_args, **own_kwargs)
    if func._schema.is_mutable:
        return kwargs.get("out", args[0])
    return tree_map(lambda each: _shown(each, like._spec) if isinstance(each, Tensor) else each, made)


def _by_element_of_lists(func: Any, args: Any, kwargs: Any) -> Any:
    """``func``, which takes lists of tensors, on this rank's elements of all of them."""
    likes = args[0]

    def own(each: Any) -> Any:
        if isinstance(each, (list, tuple)) and each and isinstance(each[0], Tensor):
            return _locals(func, each, likes)
        return _local_like(func, each, None)

    made = func(*[own(each) for each in args], **{name: own(each) for name, each in kwargs.items()})
    if not isinstance(made, (list, tuple)):
        return made
    pairs = zip(made, likes, strict=True)
    return [_shown(one, like._spec) if isinstance(like, DTensor) else one for one, like in pairs]


def _locals(func: Any, tensors: Sequence[Any], likes: Sequence[Any]) -> list[Any]:
    return [_local_like(func, each, like) for each, like in zip(tensors, likes, strict=True)]


def _local_like(func: Any, each: Any, like: Any) -> Any:
    """This rank's elements of ``each``, placed like ``like``; a value without dimensions is gathered."""
    if not isinstance(each, Tensor):
        return each
    if isinstance(each, DTensor):
        if isinstance(like, DTensor) and _is_alike(each, like):
            return each._local_tensor
        if not each.dim():
            return each.full_tensor()
    elif not each.dim() or not isinstance(like, DTensor):
        return each
    _refuse(func, (like, each))


def _is_alike(a: DTensor, b: DTensor) -> bool:
    if a is b or a.shape != b.shape or a._local_tensor.shape != b._local_tensor.shape:
        return a is b
    return a._spec.placements == b._spec.placements and a._spec.mesh == b._spec.mesh


def _is_equal(func: Any, args: Any) -> bool:
    """Whether two tensors have the same values, one answer for all ranks. **Collective.**"""
    own, other = (_local_like(func, each, _ragged_in(args)) for each in args)
    differs = torch.tensor(not torch.equal(own, other), dtype=torch.uint8, device=own.device)
    _ragged_in(args)._comm.all_reduce(differs, "max").wait()
    return not differs


def _norms(func: Any, args: Any, kwargs: Any) -> Any:
    """Norms of whole tensors, whole on every rank. **Collective**: one for all ragged tensors of a list."""
    name, (given, *rest) = func.overloadpacket.__name__, args
    tensors = given if name == "_foreach_norm" else [given]
    order = rest[0] if rest else kwargs.get("ord", 2)
    if order <= 0:
        raise ParameterShardedError(
            f"The norm of a tensor placed by {_ragged_in(args)._spec.placements} must have a positive order or "
            f"math.inf, but has {order}. Gather it first (`full_tensor()`), or pass 2.0 for the usual norm."
        )
    if rest[1:] not in ([], [None]) or kwargs.get("dim") is not None or kwargs.get("keepdim"):
        _refuse(func, args)
    ragged = [each for each in tensors if isinstance(each, RaggedTensor)]
    if any(each._spec.mesh != ragged[0]._spec.mesh for each in ragged):
        _refuse(func, args)
    dtype = kwargs.get("dtype") or ragged[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    rows = [each._local_tensor for each in ragged]
    rows = [own if own.numel() else own.new_zeros(1) for own in rows]  # infinite norms of no elements raise
    values = torch.stack([torch.linalg.vector_norm(own, order, dtype=wide) for own in rows])
    values = joint_norms(values, order, ragged[0]._comm)
    found = iter([_whole_number(each, value.to(dtype)) for each, value in zip(ragged, values.unbind(), strict=True)])
    others = [each for each in tensors if not isinstance(each, RaggedTensor)]
    rest_found = iter(func(others, *rest, **kwargs) if others else [])
    result = [next(found if isinstance(each, RaggedTensor) else rest_found) for each in tensors]
    return result if name == "_foreach_norm" else result[0]


def _whole_number(like: RaggedTensor, value: Tensor) -> DTensor:
    every, meta = (Replicate(),) * like._spec.mesh.ndim, TensorMeta(value.shape, value.stride(), value.dtype)
    return cast(DTensor, _made(DTensor, value, DTensorSpec(like._spec.mesh, every, tensor_meta=meta)))


def _shown(local: Tensor, spec: DTensorSpec) -> Any:
    """``local`` as this rank's part of a tensor like that of ``spec``, in its own dtype."""
    meta = spec.tensor_meta
    assert meta is not None
    if meta.dtype != local.dtype:
        spec = replace(spec, tensor_meta=TensorMeta(meta.shape, meta.stride, local.dtype))
    kind = RaggedTensor if isinstance(spec.placements[-1], RaggedShard) else DTensor
    return _made(kind, local, spec)


def _made(kind: Any, local: Tensor, spec: DTensorSpec, requires_grad: bool = False) -> Any:
    return kind(local, spec, requires_grad=requires_grad)


def _ragged_in(args: Any) -> Any:
    """The first ragged tensor in ``args``."""
    found: list[RaggedTensor] = []
    tree_map(lambda each: found.append(each) if isinstance(each, RaggedTensor) else None, args)
    return found[0]


def _refuse(func: Any, args: Any) -> Any:
    if torch.Tag.nondeterministic_seeded in func.tags:
        raise ParameterShardedError(
            f"Random values of a parameter placed by RowBlocks would depend on the number of ranks, but `{func}` was "
            f"called on {_describe(_ragged_in(args))}. Initialise before sharding; or draw whole values, shaped like "
            "`full_tensor()`, which gathers them, and load these with `load_state_dict`."
        )
    placed: list[str] = []
    tree_map(lambda each: placed.append(_describe(each)) if isinstance(each, Tensor) else None, args)
    raise ParameterShardedError(  # TypeError would become "unsupported operand" in arithmetic
        "An operator on a parameter placed by RowBlocks or Owned must work element by element, on tensors placed "
        f"alike, but `{func}` was called on {'; '.join(placed[:3])}. Gather whole values first (`full_tensor()`), or "
        "work on this rank's rows (`to_local()`)."
    )


def _describe(tensor: Tensor) -> str:
    how = f" by {tensor._spec.placements}" if isinstance(tensor, DTensor) else ""
    return f"a {type(tensor).__name__} of {tuple(tensor.shape)}{how}"


def _register() -> None:
    """Let torch pickle these classes, and use its foreach functions for them where it does for DTensors."""
    from torch.optim.optimizer import _foreach_supported_types as of_optimizers

    torch.serialization.add_safe_globals([RaggedShard, RaggedTensor])
    for supported in (of_optimizers, _of_clipping):
        if RaggedTensor not in supported:
            supported.append(RaggedTensor)


_register()
