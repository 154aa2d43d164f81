"""One wrapped module, or several, whose parameters are gathered and freed together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fairshard.engine.leaf_hook import leaf_hook
from fairshard.engine.members import Members
from fairshard.engine.notices import check_owed
from fairshard.engine.origin import Origin
from fairshard.engine.prefetch import Prefetch
from fairshard.engine.shared import Shared
from fairshard.engine.training_state import TrainingState
from fairshard.params.buffers import ComputeBuffers
from fairshard.params.flat_param import FlatParam
from fairshard.params.grads import grads_of
from fairshard.params.kept_part import KeptParts
from fairshard.params.listing import Listing
from fairshard.params.rule import Rule
from fairshard.params.versions import ShardVersions
from fairshard.utils.buckets import Bucketer
from fairshard.utils.collectives import Communicator, Communicators
from fairshard.utils.steps import num_steps


class Unit:
    """The flat params cut from the parameters of one module, or of several that are gathered together.

    Attributes:
        groups, config: the process groups and options, of which the engine knows the ``rule`` only.
        root: the `Root` of its model; None before the first forward. The unit itself never reads it.
        comm: the ranks that the parameters are cut among; like ``parts``, ``listing``, ``versions`` and ``buffers`` set
            together with ``root``.
        parts: parts of the parameters that stay gathered among a few ranks; None if not configured.
        listing: registers the leaves, which `parameters()` then yields, while modules compute (without a wrapper: also
            while the unit stays gathered).
        buffers: the modules' buffers in ``buffer_dtype``, if that is set.
        is_gathered: whether all ranks count it as gathered.
        is_held: whether this rank keeps the memory when the others free theirs, because a backward could reach the
            unit without a hook noticing; until the end of the backward, or (``is_pinned``) permanently.
    """

    root: Any = None
    comm: Communicator | None = None
    parts: KeptParts | None = None
    listing, versions = Listing(), ShardVersions()
    buffers: ComputeBuffers | None = None

    def __init__(
        self, groups: Any, flat_params: Sequence[FlatParam], config: Any, origin: Origin,
        members: Members | None = None,
    ) -> None:  # fmt: skip
        self.groups, self.origin, self.members = groups, origin, members
        self.flat_params, self.config = flat_params, config
        self.rule: Rule = config.rule
        self.fqn = "" if members is None else members.fqn
        self.is_inner = False  # inside another unit
        self.reshard_after_forward = self.rule.reshard_after_forward
        self.reshard_after_backward = self.unshard_in_backward = True
        self.state_dict_settings = config.state_dict_settings()
        self.prefetch: Prefetch[Unit] = Prefetch(self.rule)
        self._forget_runtime()

    def _forget_runtime(self) -> None:
        self.sync = True
        self.state = TrainingState.IDLE
        self.is_gathered = self.is_held = self.is_pinned = False
        # When it was gathered: the number of optimizer steps, and the version counter of each shard.
        self.stamp: tuple[int, list[int]] | None = None  # None: no other forward may use what is gathered
        self.seen: list[int] = []  # the counters when the pass began, or a call adopted later writes
        self.is_kept = False  # the user has asked to keep it gathered between passes

    def __getstate__(self) -> dict[str, Any]:
        kept = ("groups", "flat_params", "config", "fqn", "is_inner", "state_dict_settings", "origin", "prefetch")
        how = ("rule", "members", "reshard_after_forward", "reshard_after_backward", "unshard_in_backward")
        return {name: getattr(self, name) for name in (*kept, *how)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_runtime()

    @property
    def group(self) -> Any:
        """The ranks that the parameters are cut among."""
        return self.groups.shard

    def materialize(self, root: Any, shared: Shared, comms: Communicators, modules: list[nn.Module]) -> None:
        """Create what the first forward needs; ``modules`` are those that no inner unit owns."""
        self.root, self.shared = root, shared
        self.comm = comms.shard
        self.device = shared.device
        for flat_param in self.flat_params:
            flat_param.materialize(comms, self.rule, shared.transfers, leaf_hook(root, self))
            flat_param.gathered.copies = shared.copies
        self.listing, self.versions = Listing(self.flat_params), ShardVersions(self.flat_params)
        self.input_dtype = self.rule.root_input_dtype if self is root.units[0] else self.rule.input_dtype
        if self.rule.buffer_dtype is not None:
            self.buffers = ComputeBuffers(self.origin.without_ignored(modules), self.rule.buffer_dtype)

    def keep_parts(self, among: Communicator) -> None:
        """Keep ``parts`` among these ranks from now on; the buffers to gather into must exist already."""
        self.parts = KeptParts([flat_param.kept_line for flat_param in self.flat_params], among)

    # ---- parameters

    @property
    def nodes(self) -> list[Any]:
        """The graph nodes of the leaves that are trained."""
        return [node for flat_param in self.flat_params for node in flat_param.nodes if node is not None]

    def copied_out(self, tensor: Tensor) -> Tensor:
        """``tensor``, or a copy of it if it lies in memory that is freed with the parameters."""
        if type(tensor) is Tensor or type(tensor) is nn.Parameter:
            memory = tensor.untyped_storage()._cdata
            for flat_param in self.flat_params:
                if flat_param.gathered.line_id == memory:
                    return tensor.clone()
        return tensor

    def unshard(self, in_backward: bool = False, from_part: bool = True, force: bool = False) -> None:
        """Start gathering, unless gathered in this pass already; with ``force`` in any case. **Collective.**

        ``from_part``: in a backward, gather from the parts that the forward has kept, if any.
        """
        if self.is_gathered and self.stamp is not None and not force:
            return
        parts = self.parts if in_backward and from_part else None
        stream = self.shared.unshard_stream
        if stream.is_asynchronous:
            self.shared.copies.keeps = not in_backward
            with stream.use():
                stream.wait(self.shared.free)
                self._start_gathers(parts)
        else:
            self._start_gathers(parts)
        self.is_gathered = True
        self.stamp = num_steps(), self.versions.read()

    def _start_gathers(self, parts: KeptParts | None) -> None:
        if parts is None:
            for flat_param in self.flat_params:
                flat_param.unshard()
        else:
            parts.unshard(self.flat_params)

    def wait_unshard(self, attach: bool = True) -> None:
        """Wait until the parameters are whole; ``attach`` them to the modules if `listing` does not register them."""
        if self.shared.is_split and self.is_under_way:
            self.shared.await_gathers([flat_param.gathered for flat_param in self.flat_params])
        for flat_param in self.flat_params:
            flat_param.wait_unshard(attach)

    def reshard(self) -> None:
        """Free the whole parameters and keep the shards, unless this rank holds the unit (``is_held``)."""
        listing = self.listing
        listing.warn_if_written(is_pass=False)
        if self.is_held:
            listing.hide()
        else:
            is_attached = not listing.is_on
            if listing.is_on:
                listing.show_placeholders()
            for flat_param in self.flat_params:
                flat_param.reshard(is_attached)
        self.is_gathered = self.is_kept = False
        self.shared.note_free()

    @property
    def is_whole(self) -> bool:
        """Whether this rank has the whole parameters in memory, or is gathering them."""
        return self.is_gathered or self.is_held

    @property
    def is_resident(self) -> bool:
        """Whether this rank has whole parameters that a backward can use."""
        return self.is_whole and self.stamp is not None

    @property
    def is_stale(self) -> bool:
        """Whether the gathered parameters must be gathered again before a forward uses them."""
        return self.is_gathered and self.stamp is None

    @property
    def is_under_way(self) -> bool:
        """Whether a gather has started and has not been waited for yet."""
        return any(flat_param.is_under_way for flat_param in self.flat_params)

    @property
    def has_parts(self) -> bool:
        """Whether parts are kept to gather from; True for units that never keep any."""
        return self.parts is None or self.parts.are_kept

    @property
    def has_shards(self) -> bool:
        """Whether any of its parameters has an element."""
        return any(flat_param.has_elements for flat_param in self.flat_params)

    @property
    def frees_in_backward(self) -> bool:
        """Whether the parameters are freed when a backward is done with them."""
        return self.reshard_after_backward and not (self.rule.keeps_in_no_sync and not self.sync)

    def hold(self, for_good: bool) -> None:
        """Keep the memory on this rank, even if others free theirs, until the end of the backward or ``for_good``."""
        self.is_held = True
        self.is_pinned = self.is_pinned or for_good

    def keep_gathered(self) -> None:
        """Stay gathered between passes, until the shards change."""
        self.is_kept = True
        self.stamp = num_steps(), self.versions.read()

    # ---- passes

    def begin_pass(self) -> None:
        """A forward through the model begins; it may use parameters gathered earlier only if nothing has changed."""
        for flat_param in self.flat_params:
            flat_param.begin_pass()
        if self.is_gathered or self.shared.is_asynchronous:
            self.seen = self.versions.read()
        if self.is_gathered:
            self.listing.warn_if_written(is_pass=True)
            if not (self.is_kept or self.rule.keeps_across_passes) or self.stamp != (num_steps(), self.seen):
                self.stamp = None
        if self.members is not None:
            self.members.begin_pass()

    def leave_forward(self, keep: bool, is_trained: bool, is_nested: bool) -> None:
        """A call is over: free the parameters, or ``keep`` them for later.

        ``is_nested``: an enclosing call of the same unit, or a backward, still computes with them.
        """
        if is_nested:
            return
        if keep:
            self.listing.hide() if self.members is None else self.listing.rest()
        else:
            if self.parts is not None:
                self.parts.end_forward(self.is_gathered and is_trained)
            self.listing.left = None  # it is freed now
            self.reshard()

    def begin_backward(self) -> None:
        """A backward computes with the parameters from now on."""
        self.state = TrainingState.BACKWARD_PRE
        if self.buffers is not None:
            self.buffers.attach()
        if self.is_whole:
            self.listing.show()  # for a checkpoint that recomputes

    def send_grads(self, bucketer: Bucketer, yields: bool = False) -> None:
        """Hand the gradients to the reduction, or keep them whole under ``no_sync``; ``yields``: a gather follows."""
        for flat_param in self.flat_params:
            if not flat_param.is_owed:
                check_owed([flat_param])
            elif self.sync:
                flat_param.num_sent += 1
                bucketer.reduce(flat_param, yields)
            else:
                flat_param.accumulate()

    def finish_pass(self) -> None:
        """A backward has finished with one forward of the unit: free the parameters."""
        if self.is_gathered:
            self.reshard()
        self._stop_computing()

    def finish_pass_whole(self) -> None:
        """Like `finish_pass`, but the parameters stay gathered."""
        self._stop_computing()
        self.keep_gathered()

    def end_backward(self, keep: bool) -> None:
        """The backward is over; ``keep`` gathered parameters for another backward."""
        self._stop_computing()
        if not keep:
            if self.parts is not None:
                self.parts.forget()
            was_held, self.is_held = self.is_held, self.is_pinned
            if (self.is_gathered or was_held) and not self.is_kept:
                self.reshard()
        self.state = TrainingState.IDLE

    def _stop_computing(self) -> None:
        """Undo `begin_backward`."""
        if self.buffers is not None:
            self.buffers.detach()
        if self.listing.is_computing:
            self.listing.hide()

    def reset(self) -> None:
        """Leave an interrupted pass: drop its gradients, reshard, and become idle."""
        for flat_param in self.flat_params:
            flat_param.drop_grads()
        self.is_kept = False
        self.end_backward(keep=False)

    # ---- gradients

    @property
    def shard_grad(self) -> dict[nn.Parameter, Tensor]:
        """The gradient of each shard that has one, wherever it is kept."""
        return grads_of(self.flat_params)

    def zero_grad(self, set_to_none: bool) -> None:
        """Drop or zero the gradients of the shards, wherever they are kept."""
        for flat_param in self.flat_params:
            if flat_param.grad is not None:
                flat_param.grad.zero(set_to_none)
