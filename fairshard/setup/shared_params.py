"""Parameters of one unit that modules of another unit also use: fairscale's ``append_shared_param``.

Such a parameter lies in the flat param of one unit, its owner. A call of a unit that shares it is also a call of the
owner, so that the owner is gathered, waits for gradients and counts calls like a unit whose module runs twice. Autograd
adds the gradients of all uses, because they share one leaf::

    owner        | gather  forward  free |               | gather  forward  free |
    sharer                                | gather .............. forward  free |
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fairshard.engine.training_state import TrainingState
from fairshard.engine.unit import Unit
from fairshard.params.slot import ParamSlot, slot_of
from fairshard.setup.added_parameters import holds
from fairshard.utils.names import join


@dataclass(frozen=True)
class _Use:
    """``module.name`` is the parameter of ``slot``, which another unit has sharded."""

    slot: ParamSlot
    module: nn.Module
    name: str
    fqn: str

    @property
    def is_due(self) -> bool:
        """Whether the parameter must still be appended; an inner unit may have appended it."""
        param = self.module._parameters.get(self.name)
        return param is not None and slot_of(param) is self.slot

    def share(self) -> None:
        """Make the module refer to the parameter as its owners do."""
        self.slot.owners.append((self.module, self.name))
        self.module._parameters[self.name] = self.slot.registered
        if self.slot.placeholder is not None:
            self.module.__dict__[self.name] = self.slot.placeholder


@dataclass
class SharedParams:
    """Parameters of other units that one unit uses; ``owners`` are those units, once the model is set up."""

    owners: tuple[Unit, ...] = ()
    _found: list[_Use] = field(default_factory=list)
    _appended: list[ParamSlot] = field(default_factory=list)

    def note(self, slot: ParamSlot, module: nn.Module, name: str, fqn: str) -> None:
        """Record that ``module.name`` is a parameter of another unit; it must be appended before the first forward."""
        self._found.append(_Use(slot, module, name, fqn))

    def append(self, param: Any) -> None:
        """Share ``param``, as it is registered in any of the modules that use it.

        Raises:
            ValueError: it is not a parameter of another unit, or no module of this unit uses it.
        """
        if any(holds(slot, param) for slot in self._appended):
            return
        uses = [use for use in self._found if holds(use.slot, param) and use.is_due]
        if not uses:
            raise ValueError(
                "`append_shared_param` must be called with a parameter that another unit has sharded and that a module "
                f"of this one uses, but this {type(param).__name__} is not. Tie the modules first "
                "(`b.weight = a.weight`), wrap both, then pass the parameter of either."
            )
        for use in uses:
            use.share()
        self._appended.append(uses[0].slot)

    def check_all_appended(self, unit_fqn: str) -> None:
        """Raise unless every shared parameter has been appended.

        Raises:
            ValueError: one has not been appended; the message names the first.
        """
        for use in self._found:
            if use.is_due:
                raise ValueError(refusal(join(unit_fqn, use.fqn), use.slot))

    def find_owners(self, unit: Unit, units: Sequence[Unit]) -> None:
        """Find, among ``units`` of one model, the owners of the parameters that ``unit`` shares.

        Raises:
            ValueError: an owner is not among them, or computes in another dtype.
        """
        self.check_all_appended(unit.fqn)
        owners: dict[Unit, None] = {}
        for slot in self._appended:
            pairs = [(other, flat) for other in units for flat in other.flat_params if slot in flat.slots]
            if not pairs:
                raise ValueError(
                    f"A unit that shares a parameter must be in one model with the unit that owns it, but `{slot.fqn}` "
                    f"is outside the wrapper through which unit `{unit.fqn or 'root'}` was called. Wrap a module "
                    "around both, and call that."
                )
            owner, flat_param = pairs[0]
            theirs = flat_param.compute_dtype_under(owner.rule), owner.rule.input_dtype
            ours = (
                unit.rule.compute_dtype_of(flat_param.shard.dtype, slot.keeps_dtype),
                unit.rule.input_dtype,
            )
            if ours != theirs:
                raise ValueError(
                    f"Units that share a parameter must compute in one dtype and cast inputs to one dtype, but for "
                    f"`{slot.fqn}` it is {ours[0]}, inputs to {ours[1]}, in unit `{unit.fqn}`, and {theirs[0]}, inputs "
                    f"to {theirs[1]}, in `{owner.fqn}`. Wrap both with the same `mixed_precision`."
                )
            owners[owner] = None
        self.owners = tuple(owners)

    def computing_with(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, wrapped so that it counts as a call of each owner."""
        for owner in self.owners:
            function = functools.partial(_call_in, owner, function)
        return function

    def __getstate__(self) -> dict[str, Any]:
        return {"owners": (), "_found": self._found, "_appended": self._appended}


def refusal(fqn: str, owner: ParamSlot) -> str:
    """The error message for parameter ``fqn``, which a second unit would shard, and of which ``owner`` is the slot."""
    how = (
        "Make the two modules one unit (`fully_shard([first, second])`), or call fully_shard on neither of them, so "
        "that the unit around both has the parameter."
        if isinstance(owner.registered, DTensor)
        else "Put one wrapper around both modules, or wrap neither of them, so that the wrapper around both has the "
        "parameter; or, if neither is inside the other, wrap both with FullyShardedDataParallel and call "
        "`append_shared_param(parameter)` on the second."
    )
    return (
        f"A parameter must belong to one unit, but `{fqn}` is shared with `{owner.fqn}` of a unit that is sharded "
        f"already. {how}"
    )


def _call_in(unit: Unit, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if unit.state is TrainingState.FORWARD:  # called inside a call of `unit`, which gathers and frees
        return function(*args, **kwargs)
    return unit.root.engine.call(unit, function, args, kwargs)
