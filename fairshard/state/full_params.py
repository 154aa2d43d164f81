"""Show the parameters of units under their own names, whole or as spans, inside a ``with`` block."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fairshard.checks.leaf_writes import unpin
from fairshard.engine.training_state import TrainingState
from fairshard.engine.unit import Unit
from fairshard.errors import FairshardError
from fairshard.params.dtensor_slot import DTensorSlot
from fairshard.params.flat_param import FlatParam
from fairshard.params.shown import ShownShard
from fairshard.params.slot import ParamSlot
from fairshard.state.shown import shown_on_first
from fairshard.utils.messages import broadcast, receive_on_first, scatter_rows, send_to_first
from fairshard.utils.ragged_tensor import RaggedTensor
from fairshard.utils.span_tensor import SpanTensor
from fairshard.utils.storage import set_grad
from fairshard.utils.user_line import level_of_user
from fairshard.views.extended_param import ShownExtended
from fairshard.views.orig_param import OrigParam, Stepped, gather_rows


@dataclass(frozen=True)
class Showing:
    """How parameters are shown.

    ``writeback``: at the end, each rank writes its own span of the values into its shard; writes to other ranks'
    spans are lost unless those ranks write the same. ``from_first``: only rank 0 has whole values, and with
    ``writeback`` they go into the shards of all ranks; the other ranks show shards, or with ``meta_elsewhere`` meta
    tensors of the whole shapes. ``offload_to_cpu``: the values are in host memory. ``with_grads``: gradients are
    shown in the same way.
    """

    writeback: bool = False
    from_first: bool = False
    meta_elsewhere: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False


@contextmanager
def summon(units: list[Unit], how: Showing) -> Iterator[None]:
    """`show` all ``units``. **Collective.**

    Units with one rank are always written back.
    """
    with ExitStack() as stack:
        for unit in dict.fromkeys(units):
            is_whole = unit.group.world_size == 1
            stack.enter_context(show(unit, replace(how, writeback=how.writeback or is_whole)))
        yield


@contextmanager
def show(unit: Unit, how: Showing) -> Iterator[None]:
    """Register the whole parameters of ``unit``, in the dtype of its shards, under their own names.

    An exception skips the write-back. **Collective.**

    Raises:
        TypeError: a parameter is a tensor subclass.
    """
    for flat_param in unit.flat_params:
        if isinstance(flat_param.shows, ShownExtended):
            raise TypeError(
                f"Parameters must be plain tensors to be shown whole, but `{flat_param.slots[0].fqn}` is a "
                f"{flat_param.shows.class_name}, a tensor subclass. Use the DTensors of `fully_shard`, or gather the "
                "parameters with `unshard()`."
            )
    with _summoned(unit), ExitStack() as stack:
        if how.from_first:
            shown_on_first.add(unit)
            stack.callback(shown_on_first.discard, unit)
        for flat_param in unit.flat_params:
            stack.enter_context(_Whole(flat_param, how).shown())
        yield


@contextmanager
def show_spans(unit: Unit) -> Iterator[None]:
    """Register this rank's span of each parameter of ``unit`` as a `SpanTensor`, a view of the shard."""
    with _summoned(unit), ExitStack() as stack:
        for flat_param in unit.flat_params:
            stack.enter_context(_registered(flat_param, [as_parameter(flat_param, s) for s in spans_of(flat_param)]))
        yield


def spans_of(flat_param: Stepped, values: Tensor | None = None) -> list[SpanTensor] | list[DTensor]:
    """This rank's run of each parameter as views of ``values`` (default: the shard); DTensors stay as is."""
    values = flat_param.shard.detach() if values is None else values
    if isinstance(values, DTensor):
        return [values]
    runs = flat_param.line.runs_of(values)
    return [SpanTensor(run, start, slot.shape) for slot, (start, run) in zip(flat_param.slots, runs, strict=True)]


def gather_params(flat_param: Stepped, values: Tensor, first_only: bool, offload_to_cpu: bool) -> list[Tensor]:
    """Gather ``values``, shaped like the shard, of every rank into whole parameters in new memory. **Collective.**

    With ``first_only``, only on rank 0; other ranks return an empty list.
    """
    device = torch.device("cpu") if offload_to_cpu else flat_param.compute_device
    if isinstance(values, DTensor):
        on_device: Any = values.to(flat_param.compute_device)
        whole = on_device.full_tensor()
        return [] if first_only and flat_param.line.rank else [whole.to(device, copy=True)]
    values = values.reshape(-1)
    if not first_only:
        return [part.to(device, copy=True) for part in flat_param.line.params_of(gather_line(flat_param, values))]
    comm, layout = flat_param.comm, flat_param.line.layout
    values = values.to(flat_param.compute_device).contiguous()
    runs = [values[piece.target.start : piece.target.stop] for piece in layout.pieces_of(comm.rank)]
    if comm.rank != 0:
        send_to_first(runs, comm.group)
        return []
    lines = [values.new_empty(slot.numel) for slot in flat_param.slots]
    receive_on_first(
        runs,
        [
            [lines[piece.index][piece.source.start : piece.source.stop] for piece in layout.pieces_of(rank)]
            for rank in range(comm.world_size)
        ],
        comm.group,
    )
    return [flat_param.line.shaped(index, line).to(device) for index, line in enumerate(lines)]


@torch.no_grad()
def gather_line(flat_param: Stepped, values: Tensor) -> Tensor:
    """``values``, shaped like the shard, of every rank as a line on the compute device. **Collective.**"""
    if isinstance(flat_param, OrigParam):
        return flat_param.gather_line(values)
    line = flat_param.line.empty(values.dtype, flat_param.compute_device)
    flat_param.line.row_of(line).copy_(values)
    return gather_rows(flat_param, line, flat_param.line.gather_of(line, flat_param.comm))


def lay_out(flat_param: Stepped, values: list[Tensor]) -> Tensor:
    """The whole parameters ``values`` as rows ``[W, S]`` in new memory, padded with zeros to the longest row."""
    if isinstance(flat_param, OrigParam):
        return flat_param.line.lay_out(values)
    line, layout = flat_param.line, flat_param.line.layout
    rows = values[0].new_zeros(layout.world_size, layout.shard_numel)
    for index, (blocks, value) in enumerate(zip(layout.blocks, values, strict=True)):
        for block in blocks:
            block.of(rows).copy_(block.like(line.flattened(index, value)))
    return rows


def scatter_params(flat_param: Stepped, values: list[Tensor], dtype: torch.dtype) -> Tensor:
    """This rank's shard of rank 0's whole parameters; other ranks pass an empty list. **Collective.**"""
    slot = flat_param.slots[0]
    if isinstance(slot, DTensorSlot):
        raise ValueError(
            f"Optimizer state must be given on every rank for parameters on a larger mesh, but that of `{slot.fqn}` is "
            "given on one rank only. Use torch.distributed.checkpoint.state_dict.set_optimizer_state_dict."
        )
    is_ragged = isinstance(flat_param.shard, RaggedTensor)
    if isinstance(flat_param.shard, DTensor) and not is_ragged:
        device, like = flat_param.compute_device, flat_param.shard
        whole = values[0].to(device) if values else torch.empty(like.shape, dtype=dtype, device=device)
        return distribute_tensor(whole, like.device_mesh, like.placements)
    row = torch.empty(flat_param.line.layout.shard_numel, dtype=dtype, device=flat_param.compute_device)
    if isinstance(flat_param, OrigParam) and flat_param.line.owner is not None:
        if values:
            row.copy_(values[0].reshape(-1))
        broadcast(row, 0, flat_param.comm.group)  # rows of all ranks would be as many times its size
    else:
        line = lay_out(flat_param, values).to(flat_param.compute_device) if values else None
        scatter_rows(row, line, flat_param.comm.group)
    own = row[: flat_param.shard_numel]
    if is_ragged:
        assert isinstance(flat_param, OrigParam)
        return flat_param.shown(own)
    return own.view(flat_param.shard.shape)


def as_parameter(flat_param: FlatParam, value: Tensor) -> nn.Parameter:
    """``value`` as a parameter to register in a module."""
    return nn.Parameter(value, requires_grad=flat_param.requires_grad)


@contextmanager
def _summoned(unit: Unit) -> Iterator[None]:
    unpin(unit)
    before, unit.state = unit.state, TrainingState.SUMMON_FULL_PARAMS
    try:
        for flat_param in unit.flat_params:
            flat_param.adopt_assigned()
        yield
    finally:
        unit.state = before


@contextmanager
def _registered(flat_param: FlatParam, params: Sequence[nn.Parameter]) -> Iterator[None]:
    with ExitStack() as stack:  # undoes everything, even if undoing one parameter raises
        stack.callback(_unregister(flat_param.shows))
        for slot, param in zip(flat_param.slots, params, strict=True):
            stack.callback(_expose(slot, param))
        yield


def _unregister(shows: ShownShard) -> Callable[[], None]:
    """Register the shard nowhere, if it is; the returned function registers it again."""
    if shows.place is None:
        return lambda: None
    holder, key = shows.place
    holder._parameters[key] = None  # keeps its position in the module
    return lambda: holder._parameters.update({key: shows.shard})


def _expose(slot: ParamSlot, full: nn.Parameter) -> Callable[[], None]:
    """Register ``full`` under the names of the parameter of ``slot``; the returned function undoes this."""
    owners = [(module, name) for module, name in slot.owners if name in module._parameters]  # others: deleted
    for module, name in owners:
        module.__dict__.pop(name, None)
        module._parameters[name] = full

    def conceal() -> None:
        replaced = any(module._parameters.get(name) is not full for module, name in owners)
        for module, name in owners:
            module._parameters[name] = slot.registered
            if slot.placeholder is not None:
                module.__dict__[name] = slot.placeholder
        slot.clear()
        if replaced:
            raise FairshardError(
                f"Parameter `{slot.fqn}` was replaced while its full value was shown; only its elements may be changed "
                "there, in place (`with torch.no_grad(): param.copy_(...)`)."
            )

    return conceal


class _Whole:
    """One flat param while it is shown whole."""

    def __init__(self, flat_param: FlatParam, how: Showing) -> None:
        self._flat_param = flat_param
        self._how = how
        self._params: list[nn.Parameter] = []

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Register the parameters inside the ``with`` block."""
        flat_param, how = self._flat_param, self._how
        values = self._gather(flat_param.shard.detach())
        flat_param.follow_requires_grad()
        flags = list(map(bool, flat_param.trained))
        self._params = list(map(nn.Parameter, values, flags))
        has_grads = how.with_grads and self._gather_grads()
        with ExitStack() as stack:
            if self._params:
                stack.enter_context(_registered(flat_param, self._params))
            elif how.meta_elsewhere:
                stack.enter_context(_registered(flat_param, _without_memory(flat_param)))
            yield
            if how.writeback:
                with torch.no_grad():
                    self._write_back(has_grads)
            self._keep_flags(flags)

    def _keep_flags(self, before: list[bool]) -> None:
        """Keep ``requires_grad`` of parameters on which the user has set it; ``before``: as they were shown."""
        pairs = zip(self._flat_param.slots, self._params, before, strict=False)  # none where only rank 0 sees them
        changed = [(slot, param) for slot, param, flag in pairs if param.requires_grad != flag]
        if changed and self._how.from_first:
            warnings.warn(
                f"`requires_grad` must be set on all ranks, but that of `{changed[0][0].fqn}` was set where rank 0 "
                "alone sees it, and stays as it was. Set it outside, or without `rank0_only=True`.",
                stacklevel=level_of_user(),
            )
            return
        for slot, param in changed:
            slot.leaf.requires_grad_(param.requires_grad)
        self._flat_param.follow_requires_grad()

    def _gather(self, values: Tensor) -> list[Tensor]:
        return gather_params(self._flat_param, values, self._how.from_first, self._how.offload_to_cpu)

    def _write_back(self, had_grads: bool) -> None:
        flat_param = self._flat_param
        values = [param.detach() for param in self._params]
        for slot, value in zip(flat_param.slots, values, strict=bool(values)):
            if value.shape != slot.shape:
                raise FairshardError(
                    f"Parameter `{slot.fqn}` must keep its shape {tuple(slot.shape)} while its full value is shown, "
                    f"but has {tuple(value.shape)}. Resize parameters before sharding the model."
                )
        if self._how.from_first:
            _update(flat_param.shard, scatter_params(flat_param, values, flat_param.shard.dtype))
        else:
            _update(flat_param.shard, flat_param.line.cut(values))
        if self._how.with_grads:
            self._keep_grads(had_grads)

    def _gather_grads(self) -> bool:
        flat_param = self._flat_param
        grad = flat_param.grad.value  # also of what is frozen now
        has_grads = torch.tensor([float(grad is not None)], device=flat_param.compute_device)
        flat_param.comm.all_reduce(has_grads, "max").wait()
        if not has_grads.item():
            return False
        for param, whole in zip(self._params, self._gather(flat_param.grad.value_or_zeros()), strict=True):
            set_grad(param, whole)
        return True

    def _keep_grads(self, had_grads: bool) -> None:
        """Write gradients back; a missing one counts as zeros; if all are missing, drop the shard's gradient."""
        flat_param = self._flat_param
        if all(param.grad is None for param in self._params):
            if had_grads:
                flat_param.grad.zero(set_to_none=True)
            return
        grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in self._params]
        _update(flat_param.grad.value_or_zeros(), flat_param.line.cut(grads))


def _without_memory(flat_param: FlatParam) -> list[nn.Parameter]:
    """Parameters on the meta device: modules with custom loading then run the same code as on rank 0."""
    dtype = flat_param.shard.dtype
    return [as_parameter(flat_param, torch.empty(s.shape, dtype=dtype, device="meta")) for s in flat_param.slots]


def _update(kept: Tensor, new: Tensor) -> None:
    """Copy ``new`` to ``kept``, unless they are equal bit for bit.

    Any write would count as a change of weights between a forward and its backward, or of accumulated gradients.
    """
    if not torch.equal(kept.detach().view(torch.uint8), new.to(kept.device).view(torch.uint8)):
        kept.copy_(new)
