"""Parameters as one flat line, of which this rank owns a shard.

What exists when, for ``W`` ranks and ``S`` elements a rank::

    shard    [S]     param dtype     always: the truth; what the optimizer steps; in host memory with offload
    buffer   [W*S]   compute dtype   while gathered; the collective writes it, the leaves are views of it
    leaves   shaped  compute dtype   views of buffer while gathered, else empty; autograd fills their .grad
    grad     [S]     param dtype     after backward: the mean over ranks, added to what was there
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fairshard.errors import FairshardError, PartialGradientError
from fairshard.params.gathered import Gathered
from fairshard.params.kept_part import KeptPart
from fairshard.params.route import Route
from fairshard.params.shard_grad import GradTransfers
from fairshard.params.shown import ShownShard
from fairshard.params.slot import ParamSlot
from fairshard.settings.config import GradHome, UnitConfig, check_param_dtype
from fairshard.utils.autograd import accumulate_node, reaches
from fairshard.utils.collectives import Communicator, Communicators, exchange_tag
from fairshard.utils.layout import FlatLayout
from fairshard.utils.pinned import host_empty_like
from fairshard.utils.reduce_scatter_bucketer import Division, Hook


class FlatParam:
    """Parameters of one dtype and one ``requires_grad``, laid end to end and cut among the ranks of a group.

    Attributes:
        shows: the shard, and what is registered of it.
        line: where parameters lie, and how the gathered buffer becomes whole parameters.
        route: how gathers and gradients travel, as far as the user has a say in it.
    """

    gathered: Gathered  # from `materialize` on

    def __init__(self, shows: ShownShard, name: str, route: Route | None = None) -> None:
        self.shows, self.slots, self.line = shows, shows.slots, shows.line
        self.shard_numel = self.line.shard_numel
        self.name = name
        self.route = Route() if route is None else route
        self._own_division: Division | None = None
        self.requires_grad = shows.shard.requires_grad
        self._trained = [self.requires_grad] * len(self.slots)  # which parameters want a gradient
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
        self.lands_at_once = False
        self.contributed = bytearray(len(self.slots))  # of which parameters this rank had gradients
        self._num_landed = 0  # sums that the running backward has added to the gradient
        self._kept = bytearray(len(self.slots))  # parameters of which `no_sync` has kept gradients
        self._partial: Any = None  # the gradient's mark when an exception left it incomplete
        self._hooks: list[Any] = []
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
        kept = ("shows", "slots", "line", "shard_numel", "name", "route", "requires_grad", "_own_division", "_trained")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_runtime()

    def rename(self, renamed: Callable[[str], str]) -> None:
        """Give the line and its parameters the names that ``renamed`` makes of theirs."""
        self.name = renamed(self.name)
        for slot in self.slots:
            slot.rename(renamed(slot.fqn))

    # ---- what is shown

    @property
    def shard(self) -> nn.Parameter:
        """This rank's part of the line, ``[S]``."""
        return self.shows.shard

    @property
    def registered(self) -> tuple[nn.Parameter, ...]:
        """What users see, and attach hooks to."""
        return self.shows.registered

    @property
    def versioned(self) -> tuple[nn.Parameter, ...]:
        """A change of the shard is counted by one of these."""
        return self.shows.versioned

    @property
    def stepped(self) -> Sequence[Any]:
        """What optimizers see: this flat param, whose shard they step, or its `OrigParam` each."""
        return self.shows.stepped_by(self)

    @property
    def on_cpu(self) -> bool:
        """Whether the shard is kept in host memory."""
        return self.shows.on_cpu

    def settle(self) -> None:
        """Follow what the user has assigned to ``.data`` of what is registered."""
        if self.shows.settle(is_fixed=self.comm is not None) and self.grad is not None:
            self.grad.settle()

    def register_on(self, module: nn.Module) -> None:
        """Register the shard as a parameter of ``module``, under this flat param's name."""
        self.shows.register_on(module, self.name)

    def unregister(self) -> Callable[[], None]:
        """Undo `register_on`, if it was done; the function returned does it again."""
        return self.shows.unregister()

    def split(self, indexes: Sequence[int]) -> FlatParam:
        """The parameters ``indexes``, of one dtype and device by now, as a flat param of their own.

        What is registered, and what optimizers know it by, stay. The other parameters must be split off too.
        """
        shows: Any = self.shows  # DTensors
        part = FlatParam(shows.split(indexes), f"{self.name}_{indexes[0]}", replace(self.route))
        part._own_division = self._own_division
        part._trained = [self._trained[index] for index in indexes]
        part.requires_grad = any(part._trained)
        for index, stepped in enumerate(part.stepped):
            stepped.move_to(part, index)
        part.settle()
        part.shows.link()
        return part

    # ---- the line

    @property
    def layout(self) -> FlatLayout:
        """Where parameters lie."""
        return self.line.layout

    @property
    def rank(self) -> int:
        """The row that this rank owns."""
        return self.line.rank

    def cut(self, values: list[Tensor]) -> Tensor:
        """See `FlatLine.cut`."""
        return self.line.cut(values)

    def shaped(self, index: int, flat: Tensor) -> Tensor:
        """See `FlatLine.shaped`."""
        return self.line.shaped(index, flat)

    def params_of(self, line: Tensor) -> list[Tensor]:
        """See `FlatLine.params_of`."""
        return self.line.params_of(line)

    def lay_out(self, values: list[Tensor]) -> Tensor:
        """See `FlatLine.lay_out`."""
        return self.line.lay_out(values)

    def runs_of(self, values: Tensor) -> list[tuple[int, Tensor]]:
        """See `FlatLine.runs_of`."""
        return self.line.runs_of(values)

    def bucket_views(self, columns: Tensor) -> list[list[Tensor]]:
        """See `FlatLine.bucket_views`."""
        return self.line.bucket_views(columns)

    # ---- setting up

    def compute_dtype_under(self, config: UnitConfig) -> torch.dtype:
        """The dtype in which these parameters are gathered: BatchNorm's keep their own, as its buffers do."""
        return config.compute_dtype_of(self.shard.dtype, self.slots[0].keeps_dtype)

    def materialize(self, comms: Communicators, config: UnitConfig, transfers: GradTransfers, on_grad: Any) -> None:
        """Make the buffer and the leaves, with the dtype and device that the shard has by now.

        ``on_grad(leaf)`` is called when autograd has accumulated a leaf's gradient. It must not hold this object:
        leaves hold their hooks where the garbage collector does not see it.
        """
        self.settle()
        check_param_dtype(config, self.shard.dtype, self.name)  # `.half()` may have come since wrapping
        self._check_leaves()
        self._follow_requires_grad()
        self.comms = comms
        comm = self.comm = comms.shard
        self.tag_id = comm.new_id()
        self.reduce_id = self.tag_id if comms.reduce is comm else comms.reduce.new_id()
        self.replica_id = 0 if comms.replicas is None else comms.replicas.new_id()
        self._division = self._own_division or config.division_among(comms.num_ranks)
        self.compute_dtype = self.compute_dtype_under(config)
        self.reduce_dtype = config.reduce_dtype_of(self.compute_dtype)
        self.compute_device = transfers.device
        home = config.grad_home if self.on_cpu else GradHome.SHARD
        held = None if self.grad is None else self.grad.value  # from when this unit was a model of its own
        grad_dtype = config.grad_dtype_of(self.shard.dtype, self.reduce_dtype)
        self._on_grad = on_grad
        # With one rank and one dtype the shard is the whole line: compute on it, gather nothing.
        self.computes_on_shard = comm.world_size == 1 and self.compute_dtype == self.shard.dtype and not self.on_cpu
        with torch.inference_mode(False), torch.no_grad():
            if self.on_cpu:
                self._settle_on_cpu(keep_on_device=not config.cpu_offload)
            elif self.shard.device != self.compute_device:
                self.shard.data = self.shard.data.to(self.compute_device)
            if self.computes_on_shard:
                self.gathered = self.line.gathered_in(self.shard.data.view(1, -1), comm)
            else:
                self.gathered = self.line.gathered_in(self._empty_line(self.compute_dtype), comm)
                self.gathered.free()
        self._hook_leaves()
        self.shows.link()
        self.grad = self.shows.make_grad(grad_dtype, home, transfers, held)
        self.route.start_from(comms)
        self.follow_route()

    def gather_into(self, gathered: Gathered) -> None:
        """Gather into that memory from now on."""
        self.gathered = gathered
        gathered.custom = self.route.gather
        self._hook_leaves()

    def divide_by(self, division: Division) -> None:
        """Divide gradients by this from now on, instead of by the number of ranks."""
        self._own_division = self.division = division

    @property
    def division(self) -> Division:
        """By what gradients are divided: not at all, as long as they wait for the sum over replicas."""
        return _UNDIVIDED if self.route.keeps_sums else self._division

    @division.setter
    def division(self, division: Division) -> None:
        self._division = division

    def follow_route(self) -> None:
        """Travel as `route` says from now on; to be called after each change of it, between passes."""
        self.lands_at_once = self.route.hook is not None
        comms = self.route.follow()
        if comms is not None:
            self.comms = comms
            self.gathered.custom = self.route.gather

    def reduce_in(self, reduce: Communicator) -> None:
        """Sum over the ranks of the shard in this group, which has the same ranks."""
        if self.route.reduce_in(reduce):
            self.reduce_id = reduce.new_id()
            self.follow_route()

    def move_to(self, device: torch.device) -> None:
        """Move the shard to ``device``."""
        self.shows.move_to(device)

    def keep_on_device(self) -> None:
        """Keep the shard and its gradient on the compute device, whatever the unit was asked for."""
        self.shows.keep_on_device()

    def _settle_on_cpu(self, keep_on_device: bool) -> None:
        """Move the shard to host memory that the GPU can read, after whatever `.cuda()` or `.half()` did to it."""
        settled = host_empty_like(self.shard, self.compute_device)
        settled.copy_(self.shard)
        self.shard.data = settled
        if keep_on_device:
            self._device_shard = settled.new_empty(settled.shape, dtype=self.compute_dtype, device=self.compute_device)

    def _empty_line(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.comm.world_size, self.shard_numel, dtype=dtype, device=self.compute_device)

    def begin_pass(self) -> None:
        """Follow what the user may have done since the last pass: values, ``requires_grad``, gradients."""
        self._is_updated = True
        if self.shows.has_moved:
            self.settle()
        self._check_leaves()  # before what it compares with follows what is registered
        if self.shows.wanted() != self._trained:
            self._follow_requires_grad()
            self._hook_leaves()
        self.grad.forget_dropped()
        self.route.kept.begin_pass()

    def _follow_requires_grad(self) -> None:
        self._trained = self.shows.wanted()
        self.requires_grad = any(self._trained)
        for index in self.shows.follow(self._trained):
            self._drop_accumulated(index)

    def _drop_accumulated(self, index: int) -> None:
        self.slots[index].leaf.grad = None
        self._kept[index] = 0
        if self._accumulated is not None:
            span = self.line.layout.param_span(index)
            self._accumulated[span.start : span.stop].zero_()

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
            if self.gathered.buffer.data_ptr() != self.shard.data_ptr():  # someone assigned `shard.data`
                self.gathered = self.line.gathered_in(self.shard.data.view(1, -1), self.comm)
        elif self.shard_numel:
            self._uses += 1
            own = self._newest() if part is None else None
            self.gathered.start(own, part, exchange_tag("all_gather", self.tag_id, self._uses))

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
    def buffer(self) -> Tensor:
        """What rows are gathered into, ``[W, S]``."""
        return self.gathered.buffer

    @property
    def kept_line(self) -> Tensor:
        """The memory of the whole parameters, of which a part can be kept between forward and backward."""
        return self.gathered.kept_line

    @property
    def is_under_way(self) -> bool:
        """Whether a gather has not been waited for."""
        return self.comm is not None and self.gathered.transfer is not None

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in the memory of the whole parameters."""
        if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
            return False
        return bool(tensor.untyped_storage()._cdata == self.kept_line.untyped_storage()._cdata)

    def wait_unshard(self) -> None:
        """Wait for the gather under way, if any, and attach the leaves to their modules."""
        gathered = self.gathered
        gathered.wait()
        for slot, view in zip(self.slots, gathered.views):  # noqa: B905 (host time)
            slot.attach(view)

    def reshard(self) -> None:
        """Give the buffer's memory back and take the leaves off their modules."""
        for slot in self.slots:
            slot.detach()
        if not self.computes_on_shard:
            self.gathered.free()
        self.is_gathered = False

    def write_grads(self, views: list[list[Tensor]]) -> None:
        """Copy every leaf's gradient into ``views``, cast on the way: the only time a gradient is written whole.

        The leaves' gradients are then dropped. Leaves without one count as zeros.
        """
        cut_as = self.line.cut_as
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        empty = list(views[-1])
        for index, slot in enumerate(self.slots):
            runs, grad = views[index], self._take_grad(index, slot)
            if grad is None:
                empty += runs
                continue
            self.contributed[index] = 1
            targets += runs
            if runs and runs[0].shape == grad.shape:  # one run: the first of several has fewer elements
                sources.append(grad)
            else:
                sources += cut_as(runs, index, grad)
        for run in empty:
            run.zero_()
        if targets:
            torch._foreach_copy_(targets, sources)
        self._marker = self._accumulated = None
        self._kept = bytearray(len(self.slots))
        if not self.route.keeps_sums:
            self.route.kept.leave()

    def take_kept(self) -> Tensor | None:
        """What earlier backwards have summed over the ranks of the shard only."""
        return self.route.kept.take()

    def accept_grad(self, reduced: Tensor) -> None:
        """Set or add the mean over ranks, ``[S]``, to the shard's gradient, and notify who waits for it.

        A sum that waits for that over replicas is kept. The shard then gets a gradient of zeros, as in `accumulate`,
        which tells whether the user has zeroed it meanwhile.
        """
        route = self.route
        if route.keeps_sums:
            with torch.no_grad():
                route.kept.add(reduced)
                route.kept.mark = self.grad.mark()
            self.num_sent -= 1
            return
        route.kept.arrive()
        if route.hook is not None:
            route.change(reduced)
        self.grad.add(reduced, self.reached)
        self._num_landed += 1
        for param in self.registered:
            hooks = param._post_accumulate_grad_hooks
            if hooks:
                self.grad.land()
                for hook in tuple(hooks.values()) if param.grad is not None else ():
                    hook(param)
        self.num_sent -= 1
        listener = self.grad.transfers.listener
        if listener is not None and not self.num_sent:
            listener(self)

    def reach(self) -> bytearray:
        """For each parameter whether the running backward gives it a gradient here, or `no_sync` has kept one."""
        if self.route.has_waiting:  # of all parameters
            return bytearray(self._trained)
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
                self._accumulated = torch.zeros(self.line.layout.numel, dtype=dtype, device=self.compute_device)
            for index, slot in enumerate(self.slots):
                self._take_grad(index, slot)
        self._marker = self.grad.mark()

    @property
    def has_accumulated(self) -> bool:
        """Whether gradients of ``no_sync`` passes wait here to be reduced."""
        return self._marker is not None or self.route.has_waiting

    def forget_zeroed(self) -> None:
        """Drop what waits for each parameter whose gradient the user has zeroed since; before a pass adds to it."""
        names, kept = self._names, self.route.kept
        if self._marker is not None:
            zeroed = self.grad.zeroed_since(self._marker, names)
            if len(zeroed) == len(names):
                self._marker = None
                self.drop_grads()
            else:
                for index in zeroed:
                    self._drop_accumulated(index)
        if kept.waiting is not None:
            zeroed = self.grad.zeroed_since(kept.mark, names)
            if len(zeroed) == len(names):
                kept.drop()
            else:
                spans = self.shows.own_spans()
                for index in zeroed:
                    kept.waiting[spans[index].start : spans[index].stop].zero_()

    @property
    def _names(self) -> list[str]:
        """Those of what has a gradient of its own."""
        return [one.name for one in self.stepped]

    def drop_grads(self) -> None:
        """Forget the gradients of an interrupted backward, but not those that ``no_sync`` accumulated."""
        self.num_sent = 0
        if self._marker is None:
            self._accumulated = None
            self._kept = bytearray(len(self.slots))
            for slot in self.slots:
                slot.leaf.grad = None
        self.route.kept.come_back()

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
        names = self._names
        try:
            zeroed = self.grad.zeroed_since(self._partial, names)
        except FairshardError:  # they were scaled, say
            return True
        return len(zeroed) < len(names)

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
        span = self.line.layout.param_span(index)
        kept = self._accumulated[span.start : span.stop].view(slot.shape)
        return kept if grad is None else kept.add_(grad)

    def state_tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """What is kept between steps on the compute device, and in host memory: shard and gradient."""
        device = [tensor for tensor in (self._device_shard, self.route.kept.waiting) if tensor is not None]
        host: list[Tensor] = []
        (host if self.on_cpu else device).append(self.shard.detach())
        if self.grad is not None:
            (host if self.grad.is_on_host else device).extend(self.grad.tensors())
        return device, host

    def _hook_leaves(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.nodes = [], []
        for slot, view, trains in zip(self.slots, self.gathered.views, self._trained, strict=True):
            slot.leaf.requires_grad_(trains)
            slot.leaf.data = view  # a leaf's graph node remembers the shape and dtype that it was made with
            self.nodes.append(accumulate_node(slot.leaf) if trains else None)
            if trains:
                self._hooks.append(slot.leaf.register_post_accumulate_grad_hook(self._on_grad))
            if not self.is_gathered:
                slot.detach()


_UNDIVIDED = Division(1.0, 1.0)
