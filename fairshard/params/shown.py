"""The parameters that a flat param registers, and the changes that users make to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fairshard.errors import FairshardError
from fairshard.params.line import FlatLine
from fairshard.params.rule import GradHome
from fairshard.params.shard_grad import GradTransfers, ShardGrad
from fairshard.params.slot import ParamSlot
from fairshard.utils.storage import set_data


class ShownShard:
    """Registers the shard itself: this rank's part of ``line``, which holds the parameters of ``slots``.

    Attributes:
        shard: ``[S]``, the authoritative values.
        registered: the parameters that users see and attach hooks to.
        versioned: tensors whose version counters together count every write to the shard.
        on_cpu: whether the shard is kept in host memory.
        place: the module on which the shard itself is registered, and its name there; None: it is not registered.
        keeps_shapes: whether registered parameters are whole, in the shapes of the originals.
    """

    keeps_shapes = False

    def __init__(self, slots: list[ParamSlot], line: FlatLine, on_cpu: bool = False) -> None:
        self.slots, self.line, self.on_cpu = slots, line, on_cpu
        shard = line.cut([slot.values for slot in slots])
        shard = shard.cpu() if on_cpu and not shard.is_meta else shard
        self.shard = nn.Parameter(shard, requires_grad=slots[0].leaf.requires_grad)
        self.registered: tuple[nn.Parameter, ...] = (self.shard,)
        self.versioned: tuple[nn.Parameter, ...] = (self.shard,)
        self.place: tuple[nn.Module, str] | None = None

    def stepped_by(self, flat_param: Any) -> Sequence[Any]:
        """The objects through which optimizers see ``flat_param``, which owns this one."""
        return (flat_param,)

    def make_grad(self, dtype: torch.dtype, home: GradHome, transfers: GradTransfers, held: Tensor | None) -> ShardGrad:
        """The gradient of the shard, shown on the registered parameters."""
        return ShardGrad(self.shard, dtype, home, transfers, held)

    def describe(self, index: int) -> str:
        """How parameter ``index`` is cut, in words; equal on all ranks."""
        return self.line.layout.describe(index)

    # ---- following

    def wanted(self) -> bytes:
        """For each parameter 1 if the user wants its gradient."""
        return bytes([self.shard.requires_grad]) * len(self.slots)

    def adopt_requires_grad(self, before: bytes, name: str) -> None:
        """Adopt ``requires_grad`` of leaves that differ from ``before``; ``name``: the name of the flat param.

        Raises:
            FairshardError: only some leaves have changed, and no parameter is registered for such a leaf alone.
        """
        wanted = {slot.leaf.requires_grad for slot in self.slots}
        if len(wanted) == 1:  # the second run of a checkpoint has frozen the module whose leaves it saw
            self.shard.requires_grad_(wanted.pop())
            return
        trained = bool(before[0])
        slot = next(slot for slot in self.slots if slot.leaf.requires_grad != trained)
        for each in self.slots:
            each.leaf.requires_grad_(trained)
        raise FairshardError(
            f"`requires_grad` of parameter `{slot.fqn}` must not be changed on the original parameter after wrapping, "
            f"but was set to {not trained}, which is undone. Set it on the flat parameter (`{name}` in "
            "named_parameters()), or before wrapping, or wrap with `use_orig_params=True` and set it on that parameter "
            "of the wrapped model."
        )

    @property
    def addressed(self) -> tuple[nn.Parameter, ...]:
        """Tensors whose addresses together show whether a tensor was assigned to ``.data`` of one."""
        return (self.shard,)

    @property
    def has_moved(self) -> bool:
        """Whether a registered parameter no longer lies in the shard."""
        return False

    def adopt_assigned(self, is_fixed: bool) -> bool:
        """Adopt tensors assigned to ``.data`` of registered parameters; returns whether there were any.

        ``is_fixed``: dtype and device may no longer change.
        """
        return False

    def link(self) -> None:
        """Make the registered parameters views of the shard's current memory."""

    # ---- moving

    def move_to(self, device: torch.device) -> None:
        """Move the shard to ``device``."""
        set_data(self.shard, self.shard.data.to(device))
        self.link()

    # ---- copies

    def __getstate__(self) -> dict[str, Any]:
        kept = ("slots", "line", "on_cpu", "shard", "registered", "versioned", "place")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.shard.is_shared():
            self.shard.data = self.shard.data.clone()  # otherwise the sending process would still change it
