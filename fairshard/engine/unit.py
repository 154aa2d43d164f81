"""One wrapped module, or several, whose parameters are gathered and freed together.

What `Engine` calls for each call of the unit, and `Backward` for what it computes there::

    forward             on(ENTER)  wait_unshard  open | compute | close  on(LEAVE)
    backward            on(NEEDED)  begin_backward | gradients | finish_pass: on(UNNEEDED)  send_grads
    a checkpoint again  begin_backward  open | compute | close  begin_backward
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from fairshard.engine.residency import Action, Event, Keeps, State, action
from fairshard.engine.shared import Shared
from fairshard.engine.training_state import TrainingState
from fairshard.errors import ShardChangedError
from fairshard.params.buffers import ComputeBuffers
from fairshard.params.flat_param import FlatParam
from fairshard.params.gathered import KeptPart
from fairshard.params.registered import Registered
from fairshard.params.rule import Rule
from fairshard.utils.buckets import Bucketer
from fairshard.utils.collectives import Communicator, Communicators
from fairshard.utils.dynamo import not_traced, set_tracer
from fairshard.utils.streams import now

_VERSION = attrgetter("_version")  # for `map`, which takes less host time than a loop


class Unit:
    """The flat params cut from the parameters of one module, or of several that are gathered together.

    Attributes:
        root: the `Root` of its model; None before the first forward.
        comm: the ranks that the parameters are cut among; ``replicas``: those that hold the same piece, or None; like
            ``parts``, ``registered`` and ``buffers`` set together with ``root``.
        parts: `FlatParam.part` of each flat param; empty if not configured.
        registered: what the modules have registered.
        buffers: the modules' buffers in ``buffer_dtype``, if that is set.
        memory: what this rank holds; `on` gathers and frees, `wait_unshard` makes it whole.
        groups, config: the process groups and options, of which the engine knows the ``rule`` only.
        ahead_in_forward, ahead_in_backward: units that the user has named, gathered instead of the predicted one.
        predicts_forward: whether a forward gathers the one that followed, if the user has named none.
        keeps: what the user wants to stay gathered, as of the last `settle`.
        stamp: version counters of the shards when they were last gathered; ``seen``: when they were last read.
        open_calls: calls that have begun and not ended.
        is_hidden: an output cannot be looked into, so a backward that begins there cannot be noticed in time.
        is_pinned: the user has gathered it between passes, and no call of it has ended since.
    """

    # Set from the first forward on; copies begin with these.
    root: Any = None
    comm: Any = None
    replicas: Communicator | None = None
    parts: Sequence[KeptPart] = ()
    registered = Registered()
    buffers: ComputeBuffers | None = None
    sync = True
    state = TrainingState.IDLE
    memory = State.SHARDED
    keeps = Keeps()
    stamp: Sequence[int] = ()
    seen: Sequence[int] = ()
    open_calls = 0
    is_hidden = False
    is_pinned = False

    def __init__(
        self,
        groups: Any,
        flat_params: Sequence[FlatParam],
        config: Any,
        origin: Any,
        members: Any = None,
    ) -> None:
        self.groups, self.origin, self.members = groups, origin, members
        self.flat_params, self.config = flat_params, config
        self.rule: Rule = config.rule
        self.fqn = "" if members is None else members.fqn
        self.is_inner = False  # inside another unit
        self.reshard_after_forward = self.rule.reshard_after_forward
        self.reshard_after_backward = self.unshard_in_backward = True
        self.state_dict_settings = config.state_dict_settings()
        self.ahead_in_forward: Sequence[Unit] = ()
        self.ahead_in_backward: Sequence[Unit] = ()
        self.predicts_forward = self.rule.prefetches_in_forward

    def __getstate__(self) -> dict[str, Any]:
        kept = ("groups", "flat_params", "config", "fqn", "is_inner", "state_dict_settings", "origin", "members")
        how = ("rule", "reshard_after_forward", "reshard_after_backward", "unshard_in_backward")
        ahead = ("ahead_in_forward", "ahead_in_backward", "predicts_forward")
        return {name: getattr(self, name) for name in (*kept, *how, *ahead)}

    @property
    def group(self) -> Any:
        """The ranks that the parameters are cut among."""
        return self.groups.shard

    def materialize(self, root: Any, shared: Shared, comms: Communicators, modules: list[nn.Module]) -> None:
        """Create what the first forward needs; ``modules`` are those that no inner unit owns."""
        self.root, self.shared = root, shared
        self.comm, self.replicas = comms.shard, comms.replicas
        self.device = shared.device
        for flat_param in self.flat_params:
            flat_param.materialize(comms, self.rule, shared.transfers, self._leaf_hook())
        self.registered = Registered(self.flat_params)
        shows = [flat_param.shows for flat_param in self.flat_params]
        self._versioned = [tensor for one in shows for tensor in one.versioned]
        self._addressed = [tensor for one in shows for tensor in one.addressed]
        self.input_dtype = self.rule.root_input_dtype if self is root.units[0] else self.rule.input_dtype
        if self.rule.buffer_dtype is not None:
            self.buffers = ComputeBuffers(self.origin.without_ignored(modules), self.rule.buffer_dtype)
        self.settle()

    # ---- what it is

    @property
    def nodes(self) -> list[Any]:
        """The graph nodes of the leaves that are trained."""
        return [node for flat_param in self.flat_params for node in flat_param.nodes if node is not None]

    @property
    def is_gathered(self) -> bool:
        """Whether whole parameters are in memory, or on their way."""
        return self.memory is not State.SHARDED

    @property
    def has_shards(self) -> bool:
        """Whether any of its parameters has an element."""
        return any(flat_param.line.numel for flat_param in self.flat_params)

    @property
    def awaits_members(self) -> bool:
        """Whether some of its modules have been called in this pass, and others not yet."""
        return self.members is not None and self.members.has_uncalled

    def settle(self) -> None:
        """A pass or a backward begins: read the user's settings."""
        stays = self is self.root.units[0] and not self.rule.reshard_root  # the backward reaches it first
        after_forward = bool(self.reshard_after_forward) and not stays
        after_backward = self.reshard_after_backward and not (self.rule.keeps_in_no_sync and not self.sync)
        keeps = after_forward, after_backward, self.rule.keeps_across_passes or not after_backward
        if keeps != self.keeps:  # to make one takes host time
            self.keeps = Keeps(*keeps)

    def copied_out(self, tensor: Tensor) -> Tensor:
        """``tensor``, or a copy of it if it lies in memory that is freed with the parameters."""
        if type(tensor) is Tensor or type(tensor) is nn.Parameter:
            memory = tensor.untyped_storage()._cdata
            for flat_param in self.flat_params:
                if flat_param.gathered.line_id == memory:
                    return tensor.clone()
        return tensor

    # ---- the shards

    def _versions(self) -> list[int]:
        """The version counters of shards and of their views, then the addresses of what users may assign to."""
        return [*map(_VERSION, self._versioned), *map(Tensor.data_ptr, self._addressed)]

    def check_unchanged(self, before: Sequence[int]) -> None:
        """Raise if a shard was written to since the forward, when it was gathered and `stamp` was ``before``.

        Raises:
            ShardChangedError: names the first such shard.
        """
        versions = self._versions()
        if versions == before:
            return
        owners = [flat_param for flat_param in self.flat_params for _ in flat_param.shows.versioned]
        owners += [flat_param for flat_param in self.flat_params for _ in flat_param.shows.addressed]
        changed = owners[[new != old for new, old in zip(versions, before, strict=True)].index(True)]
        raise ShardChangedError(
            "The weights of a unit must not change between its forward and its backward, but those of "
            f"`{changed.name}` (rank {changed.line.rank}) did. Run the backward before the optimizer's step, "
            "load_state_dict or any other change, or run the forward again after it."
        )

    # ---- residency

    def on(self, event: Event, recorded: bool = True) -> None:
        """Gather or free, if `action` says so, at ``event``. **Collective** if it gathers."""
        reuses = self.memory is not State.SHARDED and (event is Event.ENTER or event is Event.PASS_BEGINS)
        what = action(
            self.memory,
            event,
            self.keeps,
            stale=reuses and self._versions() != self.stamp,
            open_calls=self.open_calls,
            recorded=recorded,
            hidden=self.is_hidden,
            pinned=self.is_pinned,
        )
        if what is Action.GATHER:
            in_backward = event is Event.NEEDED
            if event is not Event.UNSHARD:
                self.root.told.gather(self, in_backward)
            self.unshard(in_backward)
        elif what is Action.FREE:
            for part in self.parts if event is Event.LEAVE else ():
                part.keep(recorded)
            self.reshard()

    def unshard(self, in_backward: bool) -> None:
        """Start gathering; called by `on` alone. **Collective.**"""
        stream = self.shared.unshard_stream
        self.stamp = self._versions()
        if self.stamp != self.seen and not in_backward:  # written to since the pass began, on this stream
            self._read_shards()
            self.stamp = self.seen
            stream.wait(now(self.device))
        if self.shared.is_asynchronous:
            with stream.use():
                stream.wait(self.shared.free)
                self._start_gathers(in_backward)
        else:
            self._start_gathers(in_backward)
        self.memory = State.GATHERING

    def _start_gathers(self, in_backward: bool) -> None:
        for flat_param in self.flat_params:
            flat_param.unshard(in_backward)

    def wait_unshard(self) -> None:
        """Wait until the parameters are whole, if a gather is running."""
        if self.memory is State.GATHERING:
            for flat_param in self.flat_params:
                flat_param.wait_unshard()
            self.memory = State.WHOLE

    def reshard(self) -> None:
        """Free the whole parameters; called by `on` alone."""
        if self.registered.are_leaves:
            self.registered.swap(to_leaves=False)
        for flat_param in self.flat_params:
            flat_param.reshard()
        self.memory, self.is_hidden, self.is_pinned = State.SHARDED, False, False
        self.shared.note_free()

    # ---- calls

    def begin_pass(self) -> None:
        """The first call of a pass through the model begins: read values, flags and settings."""
        self._read_shards()
        if self.memory is not State.SHARDED:
            self.on(Event.PASS_BEGINS)  # by the settings of the pass that has gathered
        self.settle()
        if self.members is not None:
            self.members.begin_pass()

    def _read_shards(self) -> None:
        """Adopt what the user has written and assigned."""
        for flat_param in self.flat_params:
            flat_param.begin_pass()
        self.seen = self._versions()

    def open(self) -> None:
        """A call begins to compute with the whole parameters; `close` ends it, also if this raises."""
        self.open_calls += 1
        if self.open_calls == 1:
            for flat_param in self.flat_params:
                flat_param.follow_requires_grad()
            if self.buffers is not None:
                self.buffers.attach()
            self.registered.swap(to_leaves=True)

    def close(self) -> None:
        """A call has ended, or raised."""
        self.open_calls -= 1
        if not self.open_calls:
            if self.buffers is not None:
                self.buffers.detach()
            self.is_pinned = False
            if not self.awaits_members:
                self.registered.swap(to_leaves=False)

    def show(self) -> None:
        """Show the user the whole parameters until `unpin`, the end of a call, or a change of the shards."""
        self.wait_unshard()
        self.registered.swap(to_leaves=True)

    def unpin(self) -> None:
        """Free what the user has gathered."""
        self.is_pinned = False
        self.on(Event.RESHARD)

    # ---- backward

    def read_settings(self) -> None:
        """A backward begins: read what the user has asked for, and drop pending gradients that the user has zeroed."""
        self.settle()
        for flat_param in self.flat_params:
            flat_param.follow_requires_grad()
            flat_param.grad.begin_backward()
            flat_param.drop_zeroed()

    def begin_backward(self) -> None:
        """A backward computes with the parameters from now on."""
        self.state = TrainingState.BACKWARD_PRE
        self.wait_unshard()
        if self.buffers is not None:
            self.buffers.attach()
        if self.memory is State.WHOLE:
            self.registered.swap(to_leaves=True)  # for functions that read parameters in their backward
        elif not self.unshard_in_backward:
            for flat_param in self.flat_params:
                flat_param.wait_unshard()  # gives leaves their shapes, but no memory

    def _leaf_hook(self) -> Callable[[Tensor], None]:
        """The hook on leaves: tells the engine of a gradient of a unit that no hook on an output has announced.

        Its references are weak, because the garbage collector cannot see hooks.
        """
        known, own = weakref.ref(self.root.engine), weakref.ref(self)

        @not_traced
        def on_grad(_leaf: Tensor) -> None:
            engine, unit = known(), own()
            if engine is None or unit is None:
                return
            backward = engine._backward()
            if backward is None or backward.task() is None or unit not in backward.used:
                tracer = set_tracer(None)
                try:
                    engine.reach_leaf(unit)
                finally:
                    set_tracer(tracer)

        return on_grad

    def send_grads(self, bucketer: Bucketer, yields: bool = False) -> None:
        """Hand the gradients to the reduction, or keep them whole under ``no_sync``; ``yields``: a gather follows."""
        for flat_param in self.flat_params:
            if 1 not in flat_param.reached:
                continue
            if self.sync:
                flat_param.grad.note_sent(flat_param.reached)
                bucketer.reduce(flat_param, yields)
            else:
                flat_param.accumulate()

    def finish_pass(self) -> None:
        """A backward needs the unit no more for one of its forwards."""
        self.on(Event.UNNEEDED)
        self.stop_computing()

    def stop_computing(self) -> None:
        """Undo `begin_backward`."""
        if self.open_calls:
            return
        if self.buffers is not None:
            self.buffers.detach()
        if self.registered.are_leaves and not self.is_pinned:
            self.registered.swap(to_leaves=False)
        if not (self.unshard_in_backward or self.is_gathered):
            for flat_param in self.flat_params:
                flat_param.reshard()

    def end_backward(self, awaited: bool) -> None:
        """The backward is over; ``awaited``: another backward of the same forwards follows, and needs the unit."""
        self.stop_computing()
        if not awaited:
            for part in self.parts:
                part.keep(False)
            if self.memory is not State.SHARDED:
                self.on(Event.BACKWARD_ENDS)
        self.state = TrainingState.FORWARD if self.open_calls else TrainingState.IDLE

    def reset(self) -> None:
        """Leave an interrupted pass: drop its gradients, reshard, and become idle."""
        for flat_param in self.flat_params:
            flat_param.drop_grads()
        self.open_calls = 0
        self.on(Event.INTERRUPTED)
        self.end_backward(awaited=False)
