"""Gives memory and values to parameters and buffers on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fairshard.engine.tree import unit_of
from fairshard.setup.origin import Ignored
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
    """The parameters and buffers of ``module`` that are neither in an inner unit nor in ``ignored``.

    Invariant: a parameter with several owners is one object, before and after `materialize`.
    """

    def __init__(self, module: nn.Module, ignored: Ignored) -> None:
        self.module = module
        self.ignored = ignored
        self._modules = list(_tree(module, "", {id(part) for part in ignored.modules}))  # children first
        self._ignored = ignored.ids

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Each parameter and buffer once, under its first name."""
        found: dict[int, _Held] = {}
        for held in self._held():
            if id(held.value) not in self._ignored:
                found.setdefault(id(held.value), held)
        return {held.fqn: held.value for held in found.values()}

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
        self._check_not_shared()
        waiting = [(fqn, part) for fqn, part in self._modules if any(map(self._is_due, _values(part)))]
        if not waiting:
            return
        owners: dict[int, list[_Held]] = {}
        for held in self._held():
            owners.setdefault(id(held.value), []).append(held)
        with torch.no_grad():
            if init is not None:
                for _, part in sorted(waiting, key=lambda pair: _depth(pair[0])):  # a parent may empty its children
                    init(part)
            else:
                if has_values:
                    self._check_resets(waiting)
                for _, part in waiting:
                    self._empty(part, device)
            self._tie(owners.values())
            if init is None and has_values:
                for _, part in waiting:
                    part.reset_parameters()  # type: ignore[operator]
                self._check_written(waiting)
        if left := self.on_meta:
            raise ValueError(
                f"`param_init_fn` must give memory to all parameters and buffers of the module it is called with, but "
                f"`{left[0]}` is still on the meta device. Let it begin with "
                "`module.to_empty(device=..., recurse=False)`."
            )

    # ---- private

    def _held(self) -> list[_Held]:
        """Every parameter and buffer of every module, ignored ones too."""
        every = [(fqn, part, *item) for fqn, part in self._modules for item in _named(part).items()]
        return [_Held(join(fqn, name), part, name, value) for fqn, part, name, value in every]

    def _is_due(self, value: Tensor) -> bool:
        return value.is_meta and id(value) not in self._ignored

    def _check_not_shared(self) -> None:
        for held in self._held():
            if held.value in _gone:
                raise ValueError(
                    f"A parameter must belong to one unit, but `{held.fqn}` is shared with `{_gone[held.value]}` of a "
                    "unit that is sharded already. Make the two modules one unit, or make neither a unit of its own."
                )

    def _check_resets(self, waiting: list[tuple[str, nn.Module]]) -> None:
        for fqn, part in waiting:
            if not callable(getattr(part, "reset_parameters", None)):
                raise ValueError(
                    f"A module on the meta device must have `reset_parameters()` to be initialised, but "
                    f"`{fqn or 'the module that is wrapped'}` ({type(part).__name__}) has none. Pass `param_init_fn`, "
                    "or wrap a module that has values."
                )

    def _check_written(self, waiting: list[tuple[str, nn.Module]]) -> None:
        for fqn, part in waiting:
            for name, value in _named(part).items():
                if not value.is_meta and _is_unwritten(value):
                    raise ValueError(
                        "`reset_parameters()` must give values to all parameters and buffers of a module on the meta "
                        f"device, but that of `{fqn or 'the module that is wrapped'}` ({type(part).__name__}) has not "
                        f"written `{name}`. Initialize it there as well, or pass `param_init_fn`."
                    )

    def _empty(self, part: nn.Module, device: torch.device) -> None:
        """Like ``part.to_empty``, but skips tensors that are ignored or have values; marks new memory as unwritten."""
        kept = {name: value for name, value in _named(part).items() if not self._is_due(value)}
        for name in kept:
            setattr(part, name, None)
        part.to_empty(device=device, recurse=False)
        for value in _values(part):
            _bytes_of(value).fill_(_UNWRITTEN)
        for name, value in kept.items():
            setattr(part, name, value)

    def _tie(self, owners: Iterable[list[_Held]]) -> None:
        """Share tensors among modules as before, and record the tensors that were replaced."""
        new: dict[int, nn.Parameter] = {}
        for first, *others in owners:
            old, value = first.value, getattr(first.part, first.name)
            for other in others:
                if getattr(other.part, other.name) is not value:
                    setattr(other.part, other.name, value)
            if value is not old and isinstance(old, nn.Parameter):
                new[id(old)] = value
                _gone[old] = first.fqn
        self.ignored = self.ignored.replaced(new)
        self._ignored = self.ignored.ids


def _named(part: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of ``part`` itself."""
    every = {**part._parameters, **part._buffers}
    return {name: value for name, value in every.items() if value is not None}


def _values(part: nn.Module) -> list[Tensor]:
    return list(_named(part).values())


def _bytes_of(value: Tensor) -> Tensor:
    """The memory of ``value`` as 1-D uint8; empty for tensors that are not strided."""
    line = torch.empty(0, dtype=torch.uint8, device=value.device)
    return line.set_(value.untyped_storage()) if value.layout is torch.strided else line


def _is_unwritten(value: Tensor) -> bool:
    line = _bytes_of(value)
    return all(len(run) and bool((run == _UNWRITTEN).all()) for run in (line[:64], line))


def _depth(fqn: str) -> int:
    return len(fqn.split(".")) if fqn else 0


def _tree(module: nn.Module, fqn: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """The modules of ``module`` that are in no inner unit, children first, in the order of construction."""
    if id(module) in seen or unit_of(module) is not None:
        return
    seen.add(id(module))
    for name, child in module._modules.items():
        if child is not None:
            yield from _tree(child, join(fqn, name), seen)
    yield fqn, module
