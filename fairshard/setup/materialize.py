"""Gives memory and values to parameters and buffers on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fairshard.settings.check import require
from fairshard.setup.origin import Ignored
from fairshard.setup.survey import Survey
from fairshard.utils.names import join

# Meta tensors that have been replaced, and the names of their replacements: another module that shares the parameter
# may still hold the meta tensor.
_gone: WeakIdKeyDictionary = WeakIdKeyDictionary()

_UNWRITTEN = 0xA5  # value of each byte that `reset_parameters` has not written


class _Held(NamedTuple):
    """A parameter or buffer ``value``: ``name`` of module ``part``, called ``fqn`` in the model."""

    fqn: str
    part: nn.Module
    name: str
    value: Tensor


class OwnTensors:
    """The parameters and buffers of a surveyed module that are neither in a unit nor in ``ignored``.

    Invariant: a parameter with several owners is one object, before and after `materialize`.
    """

    def __init__(self, survey: Survey, ignored: Ignored) -> None:
        self.survey, self.ignored = survey, ignored
        self._modules = survey.own({id(part) for part in ignored.modules})

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Each parameter and buffer once, under its first name."""
        found: dict[int, _Held] = {}
        for held in self._held():
            found.setdefault(id(held.value), held)
        ignored = self.ignored.ids
        return {held.fqn: held.value for key, held in found.items() if key not in ignored}

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """Each parameter once, under its first name."""
        return {fqn: value for fqn, value in self.tensors.items() if isinstance(value, nn.Parameter)}

    @property
    def on_meta(self) -> list[str]:
        """The names of tensors without memory."""
        return [fqn for fqn, value in self.tensors.items() if value.is_meta]

    def move_buffers(self, device: torch.device) -> None:
        """Move buffers to ``device``; a buffer that several modules share stays one object."""
        moved: dict[int, Tensor] = {}
        for _, part in self._modules:
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.device != device:
                    part._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))

    def materialize(self, init: Callable[[nn.Module], Any] | None, device: torch.device, has_values: bool) -> None:
        """Allocate meta tensors on ``device``, and initialise them with ``init`` or ``reset_parameters``.

        Without ``has_values`` the values arrive later, from another rank.

        Raises:
            ValueError: a module has no ``reset_parameters``, or it left a tensor unwritten; ``init`` left a tensor on
                the meta device; or a module shares a parameter with a unit that was also on the meta device.
        """
        ignored, every = self.ignored.ids, self._held()
        for held in every:
            if held.value.is_meta and held.value in _gone:
                raise ValueError(
                    f"A parameter must belong to one unit, but `{held.fqn}` is shared with `{_gone[held.value]}` of a "
                    "unit that is sharded already. Make the two modules one unit, or make neither a unit of its own."
                )
        due = {id(held.value) for held in every if held.value.is_meta and id(held.value) not in ignored}
        if not due:
            return
        owners: dict[int, list[_Held]] = {}
        for held in every:
            owners.setdefault(id(held.value), []).append(held)
        waiting = [(fqn, part) for fqn, part in self._modules if not due.isdisjoint(map(id, _values(part)))]
        with torch.no_grad():
            if init is not None:
                for _, part in sorted(waiting, key=_depth):  # outer ones first: they may empty their children
                    init(part)
                self._tie(owners)
            else:
                self._reset(waiting, due, device, owners, has_values)
        left = self.on_meta
        require(
            not left,
            "`param_init_fn` must give memory to all parameters and buffers of the module it is called with, but "
            f"`{next(iter(left), '')}` is still on the meta device. Let it begin with "
            "`module.to_empty(device=..., recurse=False)`.",
        )

    # ---- private

    def _held(self) -> list[_Held]:
        """Every parameter and buffer of every module, ignored ones too."""
        every = [(fqn, part, *item) for fqn, part in self._modules for item in _named(part).items()]
        return [_Held(join(fqn, name), part, name, value) for fqn, part, name, value in every]

    def _reset(
        self,
        waiting: list[tuple[str, nn.Module]],
        due: set[int],
        device: torch.device,
        owners: dict[int, list[_Held]],
        has_values: bool,
    ) -> None:
        """Empty the modules ``waiting``, and call their ``reset_parameters`` if their values do not arrive later."""
        names = {id(part): f"`{fqn or 'the module that is wrapped'}` ({type(part).__name__})" for fqn, part in waiting}
        for _, part in waiting if has_values else ():
            require(
                callable(getattr(part, "reset_parameters", None)),
                f"A module on the meta device must have `reset_parameters()` to be initialised, but {names[id(part)]} "
                "has none. Pass `param_init_fn`, or wrap a module that has values.",
            )
        for _, part in waiting:
            _empty(part, due, device)
        self._tie(owners)
        for _, part in waiting if has_values else ():
            part.reset_parameters()  # type: ignore[operator]
        for _, part in waiting if has_values else ():
            left = next((name for name, value in _named(part).items() if _is_unwritten(value)), None)
            require(
                left is None,
                "`reset_parameters()` must give values to all parameters and buffers of a module on the meta device, "
                f"but that of {names[id(part)]} has not written `{left}`. Initialize it there as well, or pass "
                "`param_init_fn`.",
            )

    def _tie(self, owners: dict[int, list[_Held]]) -> None:
        """Share tensors among modules as before, and record the tensors that were replaced."""
        new: dict[int, nn.Parameter] = {}
        for key, (first, *others) in owners.items():
            value = getattr(first.part, first.name)
            for other in others:
                if getattr(other.part, other.name) is not value:
                    setattr(other.part, other.name, value)
            if value is not first.value and isinstance(first.value, nn.Parameter):
                new[key] = value
                _gone[first.value] = first.fqn
        self.ignored = self.ignored.replaced(new)


def _named(part: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of ``part`` itself."""
    every = {**part._parameters, **part._buffers}
    return {name: value for name, value in every.items() if value is not None}


def _values(part: nn.Module) -> list[Tensor]:
    return list(_named(part).values())


def _empty(part: nn.Module, due: set[int], device: torch.device) -> None:
    """Like ``part.to_empty``, but only for the tensors ``due``; marks the new memory as unwritten."""
    kept = {name: value for name, value in _named(part).items() if id(value) not in due}
    for name in kept:
        setattr(part, name, None)
    part.to_empty(device=device, recurse=False)
    for value in _values(part):
        _bytes_of(value).fill_(_UNWRITTEN)
    for name, value in kept.items():
        setattr(part, name, value)


def _bytes_of(value: Tensor) -> Tensor:
    """The memory of ``value`` as 1-D uint8; empty for tensors that are not strided."""
    line = torch.empty(0, dtype=torch.uint8, device=value.device)
    return line.set_(value.untyped_storage()) if value.layout is torch.strided else line


def _is_unwritten(value: Tensor) -> bool:
    line = None if value.is_meta else _bytes_of(value)
    return line is not None and all(len(run) and bool((run == _UNWRITTEN).all()) for run in (line[:64], line))


def _depth(named: tuple[str, nn.Module]) -> int:
    return len(named[0].split(".")) if named[0] else 0
