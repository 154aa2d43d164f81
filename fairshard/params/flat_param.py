"""Parameters as one flat line, of which this rank owns a shard.

What exists when, for ``W`` ranks and ``S`` elements a rank::

    shard    [S]     param dtype     always: the truth; what the optimizer steps; in host memory with offload
    buffer   [W*S]   compute dtype   while gathered; the collective writes it, the leaves are views of it
    leaves   shaped  compute dtype   views of buffer while gathered, else empty; autograd fills their .grad
    grad     [S]     param dtype     after backward: the mean over ranks, added to what was there
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fairshard.errors import BackwardOrderError, FairshardError, PartialGradientError
from fairshard.params.kept_part import KeptPart
from fairshard.params.line import FlatLine
from fairshard.params.listing import Listing
from fairshard.params.shard_grad import GradTransfers, ShardGrad
from fairshard.params.slot import ParamSlot
from fairshard.settings.config import GradHome, UnitConfig, check_param_dtype
from fairshard.utils.autograd import accumulate_node, reaches
from fairshard.utils.collectives import Communicators, RowGather, Transfer, exchange_tag
from fairshard.utils.pinned import host_empty_like
from fairshard.utils.reduce_scatter_bucketer import Division, Hook
from fairshard.utils.storage import free_storage_


class FlatParam(FlatLine):
    """Parameters of one dtype and one ``requires_grad``, laid end to end and cut among the ranks of a group."""

    make_grad: Callable[..., ShardGrad] = ShardGrad
    lands_at_once = False

    def __init__(self, slots: list[ParamSlot], name: str, rank: int, world_size: int, on_cpu: bool = False) -> None:
        super().__init__(slots, rank, world_size)
        self.name = name
        self._key = name
        self._holder: nn.Module | None = None
        self._own_division: Division | None = None
        self.on_cpu = on_cpu
        self.requires_grad = slots[0].leaf.requires_grad
        shard = self.cut([slot.leaf for slot in slots])
        shard = shard.cpu() if on_cpu and not shard.is_meta else shard
        self.shard = nn.Parameter(shard, requires_grad=self.requires_grad)
        self._trained = [self.requires_grad] * len(slots)  # which parameters want a gradient
        self.registered: tuple[nn.Parameter, ...] = (self.shard,)  # what users see, and hang hooks on
        self.versioned: tuple[nn.Parameter, ...] = (self.shard,)  # a change of the shard is one of theirs
        self._forget_runtime()

    def _forget_runtime(self) -> None:
        """Start without what `materialize` makes; pickle and deepcopy carry none of it."""
        self.comms: Any = None
        self.comm: Any = None
        self.hook: Hook | None = None
        self.grad: Any = None
        self.nodes: list[Any] = []  # of the leaves; None for those that are not trained
        self.is_gathered = False
        self.is_owed = False  # some rank's backward, or what `no_sync` has kept, gives a gradient ...
        self.reached: bytes | None = None  # ... of these parameters; None: of all
        self.num_sent = 0  # sums under way
        self.contributed = bytearray(len(self.slots))  # of which parameters this rank had gradients
        self._num_landed = 0  # sums that the running backward has added to the gradient
        self._kept = bytearray(len(self.slots))  # parameters of which `no_sync` has kept gradients
        self._partial: Any = None  # the gradient's mark when an exception left it incomplete
        self._hooks: list[Any] = []
        self._views: list[Tensor] = []
        self._transfer: Transfer | None = None
        self._uses = 0
        self._marker: Any = None
        self._accumulated: Tensor | None = None
        self._device_shard: Tensor | None = None
        self._is_updated = True

    def __getstate__(self) -> dict[str, Any]:
        if self.hook is not None:
            raise FairshardError(
                "A model with a communication hook must not be pickled or copied, for the copy would lose it, but "
                f"`{self.name}` has one. Save its state_dict(), or register the hook on the copy instead."
            )
        kept = ("slots", "name", "_key", "_holder", "rank", "layout", "shard_numel", "on_cpu", "requires_grad", "shard")
        return {name: getattr(self, name) for name in (*kept, "_own_division", "_trained", "registered", "versioned")}

    def rename(self, renamed: Callable[[str], str]) -> None:
        """Give the line and its parameters the names that ``renamed`` makes of theirs."""
        self.name = renamed(self.name)
        for slot in self.slots:
            slot.rename(renamed(slot.fqn))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.shard.is_shared():
            self.shard.data = self.shard.data.clone()  # or the sending process would go on changing it
        self._forget_runtime()

    @property
    def stepped(self) -> Sequence[Any]:
        """What optimizers see: this flat param, whose shard they step, or its `OrigParam` each."""
        return (self,)

    @property
    def kept_line(self) -> Tensor:
        """The memory of the whole parameters, of which a part can be kept between forward and backward."""
        return self.buffer

    def settle(self) -> None:
        """Follow what the user has assigned to ``.data`` of what is registered."""

    def compute_dtype_under(self, config: UnitConfig) -> torch.dtype:
        """The dtype in which these parameters are gathered: BatchNorm's keep their own, as its buffers do."""
        return config.compute_dtype_of(self.shard.dtype, self.slots[0].keeps_dtype)

    def materialize(self, comms: Communicators, config: UnitConfig, transfers: GradTransfers, on_grad: Any) -> None:
        """Make the buffer and the leaves, with the dtype and device that the shard has by now.

        ``on_grad(leaf)`` is called when autograd has accumulated a leaf's gradient. It must not hold this object:
        leaves hold their hooks where the garbage collector does not see it.
        """
        check_param_dtype(config, self.shard.dtype, self.name)  # `.half()` may have come since wrapping
        self._check_leaves()
        self._follow_requires_grad()
        self.comms = comms
        comm = self.comm = comms.shard
        self.tag_id = comm.new_id()
        self.reduce_id = self.tag_id if comms.reduce is comm else comms.reduce.new_id()
        self.replica_id = 0 if comms.replicas is None else comms.replicas.new_id()
        self.division = self._own_division or config.division_among(comms.num_ranks)
        self.compute_dtype = self.compute_dtype_under(config)
        self.reduce_dtype = config.reduce_dtype_of(self.compute_dtype)
        self.compute_device = transfers.device
        home = config.grad_home if self.on_cpu else GradHome.SHARD
        held = None if self.grad is None else self.grad.value  # from when this unit was a model of its own
        grad_dtype = config.grad_dtype_of(self.shard.dtype, self.reduce_dtype)
        self.grad = self.make_grad(self.shard, grad_dtype, home, transfers, held)
        self._on_grad = on_grad
        # With one rank and one dtype the shard is the whole line: compute on it, gather nothing.
        self.computes_on_shard = comm.world_size == 1 and self.compute_dtype == self.shard.dtype and not self.on_cpu
        with torch.inference_mode(False), torch.no_grad():
            if self.on_cpu:
                self._settle_on_cpu(keep_on_device=not config.cpu_offload)
            elif self.shard.device != self.compute_device:
                self.shard.data = self.shard.data.to(self.compute_device)
            if self.computes_on_shard:
                self._look_at(self.shard.data.view(1, -1))
            else:
                self._look_at(self._empty_line(self.compute_dtype))
                free_storage_(self.buffer)
        self._hook_leaves()
        self.listing = Listing(self.slots, self._holder, self._key, self.shard)

    def divide_by(self, division: Division) -> None:
        """Divide gradients by this from now on, instead of by the number of ranks."""
        self._own_division = self.division = division

    def move_to(self, device: torch.device) -> None:
        """Move the shard to ``device``."""
        self.shard.data = self.shard.data.to(device)

    def keep_on_device(self) -> None:
        """Keep the shard and its gradient on the compute device, whatever the unit was asked for."""
        self.on_cpu = False
        self.shard.data = self.shard.data.to(self.slots[0].leaf.device)

    def _settle_on_cpu(self, keep_on_device: bool) -> None:
        """Move the shard to host memory that the GPU can read, after whatever `.cuda()` or `.half()` did to it."""
        settled = host_empty_like(self.shard, self.compute_device)
        settled.copy_(self.shard)
        self.shard.data = settled
        if keep_on_device:
            self._device_shard = settled.new_empty(settled.shape, dtype=self.compute_dtype, device=self.compute_device)

    def _empty_line(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.comm.world_size, self.shard_numel, dtype=dtype, device=self.compute_device)

    def _look_at(self, buffer: Tensor) -> None:
        """Make ``buffer`` ``[W, S]`` the memory that the leaves show."""
        self.buffer = buffer
        self._storage = buffer.untyped_storage()
        self._nbytes = buffer.nbytes
        self._row = buffer[self.comm.rank]
        self._gather: Any = RowGather(self.comm, buffer)
        # .data gives each view a version counter of its own: refilling the buffer between forward and backward is
        # then no in-place edit to autograd (tests/engine/test_leaves.py).
        self._views = [view.data for view in self._whole_params(buffer)]

    def _whole_params(self, buffer: Tensor) -> list[Tensor]:
        """Where the parameters are whole when ``buffer`` has been gathered."""
        return self.params_of(buffer)

    def begin_pass(self) -> None:
        """Follow what the user may have done to the shard since the last pass: its values, its ``requires_grad``."""
        self._is_updated = True
        self._check_leaves()
        if self.shard.requires_grad != self.requires_grad:
            self._follow_requires_grad()
            self._hook_leaves()

    def _follow_requires_grad(self) -> None:
        self.requires_grad = self.shard.requires_grad
        self._trained = [self.requires_grad] * len(self.slots)

    def _check_leaves(self) -> None:
        for slot, trains in zip(self.slots, self._trained, strict=True):
            if slot.leaf.requires_grad != trains:
                raise FairshardError(
                    f"`requires_grad` of parameter `{slot.fqn}` must not be changed on the original parameter after "
                    f"wrapping, but is now {slot.leaf.requires_grad}. Set it on the flat parameter (`{self.name}` in "
                    "named_parameters()), or before wrapping."
                )

    def unshard(self, part: KeptPart | None = None) -> None:
        """Start gathering the line, anew if it is gathered, from a ``part`` of it if given. **Collective.**"""
        self.is_gathered = True
        if self.computes_on_shard:
            if self.buffer.data_ptr() != self.shard.data_ptr():  # someone assigned `shard.data`
                self._look_at(self.shard.data.view(1, -1))
            return
        if not self.shard_numel:
            return
        if self._transfer is not None:  # a gather not waited for yet; its weights have changed since
            self._transfer.wait()
        if not self._storage.size():
            self._storage.resize_(self._nbytes)
        if part is None:
            self._row.copy_(self._newest(), non_blocking=True)
        self._uses += 1
        self._transfer = self.gather_from(part).start(exchange_tag("all_gather", self.tag_id, self._uses))

    def gather_from(self, part: KeptPart | None) -> Any:
        """What fills the buffer, in which this rank's row is written; with a ``part``, after writing that."""
        return self._gather if part is None else part.write()

    def _newest(self) -> Tensor:
        """The shard as it is now, from the copy on the compute device where there is one."""
        if self._device_shard is None:
            return self.shard.detach()
        if self._is_updated:
            # In every pass: a change through ``shard.data`` leaves no trace that could be looked for.
            self._device_shard.copy_(self.shard.detach(), non_blocking=True)
            self._is_updated = False
        return self._device_shard

    @property
    def is_under_way(self) -> bool:
        """Whether a gather has not been waited for."""
        return self._transfer is not None

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in the memory of the whole parameters."""
        if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
            return False
        return bool(tensor.untyped_storage()._cdata == self.kept_line.untyped_storage()._cdata)

    def wait_unshard(self) -> None:
        """Wait for the gather under way, if any, and attach the leaves to their modules."""
        if self._transfer is not None:
            transfer, self._transfer = self._transfer, None
            transfer.wait()
        for slot, view in zip(self.slots, self._views):  # noqa: B905 (host time)
            slot.attach(view)

    def reshard(self) -> None:
        """Give the buffer's memory back and take the leaves off their modules."""
        if self._transfer is not None:
            transfer, self._transfer = self._transfer, None
            transfer.wait()
        self.listing.hide()
        for slot in self.slots:
            slot.detach()
        if not self.computes_on_shard:
            self._storage.resize_(0)
        self.is_gathered = False

    def write_grads(self, views: list[list[Tensor]]) -> None:
        """Copy every leaf's gradient into ``views``, cast on the way: the only time a gradient is written whole.

        The leaves' gradients are then dropped. Leaves without one count as zeros.
        """
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        empty = list(views[-1])
        for index, slot in enumerate(self.slots):
            runs, grad = views[index], self._take_grad(index, slot)
            if grad is None:
                empty += runs
                continue
            self.contributed[index] = 1
            if self.reached is not None and not self.reached[index]:
                raise BackwardOrderError(
                    f"The backward must reach `{slot.fqn}` through its unit's graph, but gave it a gradient through "
                    "one that was made later, by a function that recomputes. Use torch.utils.checkpoint."
                )
            targets += runs
            if runs and runs[0].shape == grad.shape:  # one run: the first of several has fewer elements
                sources.append(grad)
            else:
                sources += self.cut_as(runs, index, grad)
        for run in empty:
            run.zero_()
        if targets:
            torch._foreach_copy_(targets, sources)
        self._marker = self._accumulated = None
        self._kept = bytearray(len(self.slots))

    def take_kept(self) -> Tensor | None:
        """Nothing is kept from the sum over replicas."""
        return None

    def accept_grad(self, reduced: Tensor) -> None:
        """Set or add the mean over ranks, ``[S]``, to the shard's gradient, and notify who waits for it."""
        self.grad.add(reduced, self.reached)
        self._num_landed += 1
        for param in self.registered:
            if hooks := param._post_accumulate_grad_hooks:
                self.grad.land()
                for hook in tuple(hooks.values()) if param.grad is not None else ():
                    hook(param)
        self.num_sent -= 1
        listener = self.grad.transfers.listener
        if listener is not None and not self.num_sent:
            listener(self)

    def reach(self) -> bytearray:
        """For each parameter whether the running backward gives it a gradient here, or `no_sync` has kept one."""
        if not self.shard_numel:
            return bytearray(len(self.slots))
        kept = self._kept if self.has_accumulated else bytes(len(self.slots))
        return bytearray(
            own or (node is not None and reaches(node)) for node, own in zip(self.nodes, kept, strict=True)
        )

    def note_reached(self, which: bytearray) -> None:
        """Some rank has gradients of ``which`` parameters, 1 or 0 each; those that no rank has stay None."""
        self.is_owed = any(which)
        self.reached = None if all(which) else bytes(which)
        self.contributed = bytearray(len(self.slots))
        self._num_landed = 0

    @torch.no_grad()
    def accumulate(self) -> None:
        """Keep this pass's gradients whole, on this rank, for a later pass that reduces (``no_sync``).

        They stay on the leaves, or in ``reduce_dtype`` where that is wider. The shard gets a gradient of zeros if
        it has none: who sets it to None or zero meanwhile (``zero_grad``) means the accumulated gradients too.
        """
        has_grad = [slot.leaf.grad is not None for slot in self.slots]
        if not any(has_grad):
            return
        self._kept = bytearray(map(max, self._kept, has_grad))
        dtype = torch.promote_types(self.compute_dtype, self.reduce_dtype)
        if dtype != self.compute_dtype:
            if self._accumulated is None:
                self._accumulated = torch.zeros(self.layout.numel, dtype=dtype, device=self.compute_device)
            for index, slot in enumerate(self.slots):
                self._take_grad(index, slot)
        self._marker = self.grad.mark()

    @property
    def has_accumulated(self) -> bool:
        """Whether gradients of ``no_sync`` passes wait here to be reduced."""
        return self._marker is not None

    def forget_zeroed(self) -> None:
        """Drop accumulated gradients if the user has zeroed the shard's since; called before a pass adds to them."""
        if self._marker is None:
            return
        if self.grad.is_zeroed_since(self._marker, self.name):
            self._marker = None
            self.drop_grads()

    def drop_grads(self) -> None:
        """Forget the gradients of an interrupted backward, but not those that ``no_sync`` accumulated."""
        self.num_sent = 0
        if self._marker is None:
            self._accumulated = None
            self._kept = bytearray(len(self.slots))
            for slot in self.slots:
                slot.leaf.grad = None

    def abandon_grads(self, is_touched: bool) -> None:
        """The running backward raised, after it has given gradients to some leaves if ``is_touched``.

        What was added to earlier gradients cannot be taken away: the next step must not use them.
        """
        is_partial = bool(self._num_landed or self.num_sent) or (is_touched and self._marker is not None)
        if is_touched:
            self._marker = None
        self.drop_grads()
        if is_partial:
            self.grad.discard_flights()
            self._partial = self.grad.mark()

    def check_whole(self) -> None:
        """Raise if an exception left the gradient incomplete, unless it was dropped or zeroed since.

        Raises:
            PartialGradientError: it is incomplete.
        """
        if self._partial is None:
            return
        if self._is_partial():
            raise PartialGradientError(
                f"The gradient of `{self.name}` must be whole before a step, but an exception ended a backward after a "
                "part of it had been added, or after gradients accumulated under no_sync had been changed. Call "
                "zero_grad() and repeat the backwards of this step."
            )
        self._partial = None

    def _is_partial(self) -> bool:
        try:
            return not self.grad.is_zeroed_since(self._partial, self.name)
        except FairshardError:  # it was scaled, say
            return True

    @torch.no_grad()
    def gather_line(self, values: Tensor) -> Tensor:
        """``values`` ``[S]`` of every rank as a line ``[W, S]`` in new memory on the compute device. **Collective.**"""
        line = self._empty_line(values.dtype)
        line[self.rank] = values
        return self.gather_rows(line)

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Fill every row but this rank's of ``rows`` ``[W, n]`` with those of the other ranks. **Collective.**"""
        if rows.numel():
            self._uses += 1
            self.comm.all_gather(rows, exchange_tag("all_gather", self.tag_id, self._uses)).wait()
        return rows

    def _take_grad(self, index: int, slot: ParamSlot) -> Tensor | None:
        """A leaf's gradient with what was accumulated in a wider dtype; the leaf keeps none."""
        leaf = slot.leaf
        grad = leaf.grad
        if grad is not None:
            leaf.grad = None
            if grad.is_sparse:
                grad = grad.to_dense()
        if self._accumulated is None:
            return grad
        span = self.layout.param_span(index)
        kept = self._accumulated[span.start : span.stop].view(slot.shape)
        return kept if grad is None else kept.add_(grad)

    def state_tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """What is kept between steps on the compute device, and in host memory: shard and gradient."""
        device = [tensor for tensor in (self._device_shard,) if tensor is not None]
        host: list[Tensor] = []
        (host if self.on_cpu else device).append(self.shard.detach())
        if self.grad is not None:
            (host if self.grad.is_on_host else device).extend(self.grad.tensors())
        return device, host

    def register_on(self, module: nn.Module) -> None:
        """Register the shard as a parameter of ``module``, under this flat param's name."""
        self._holder = module
        module.register_parameter(self._key, self.shard)

    def unregister(self) -> Callable[[], None]:
        """Undo `register_on`, if it was done; the function returned does it again."""
        holder, key = self._holder, self._key
        if holder is None:
            return lambda: None
        holder._parameters[key] = None  # keeps its place among the others
        return lambda: holder._parameters.update({key: self.shard})

    def _hook_leaves(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.nodes = [], []
        for slot, view, trains in zip(self.slots, self._views, self._trained, strict=True):
            slot.leaf.requires_grad_(trains)
            slot.leaf.data = view  # a leaf's graph node remembers the shape and dtype that it was made with
            self.nodes.append(accumulate_node(slot.leaf) if trains else None)
            if trains:
                self._hooks.append(slot.leaf.register_post_accumulate_grad_hook(self._on_grad))
            if not self.is_gathered:
                slot.detach()
