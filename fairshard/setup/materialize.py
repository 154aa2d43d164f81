"""Gives memory and values to parameters and buffers on the meta device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

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


class OwnTensors:
    """The parameters and buffers of ``module`` that are neither in an inner unit nor in ``ignored``.

    Invariant: a parameter with several owners is one object, before and after `materialize`.
    """

    def __init__(self, module: nn.Module, ignored: Ignored) -> None:
        self.module = module
        self.ignored = ignored
        self._modules = list(_tree(module, "", {id(part) for part in ignored.modules}))  # children first
        self._fqns = {id(part): fqn for fqn, part in self._modules}
        self._ignored = ignored.ids

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """Each parameter once, under its first name."""
        return {fqn: value for fqn, value in self._unique() if isinstance(value, nn.Parameter)}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Each parameter and buffer once, under its first name."""
        return dict(self._unique())

    @property
    def on_meta(self) -> list[str]:
        """The names of tensors without memory."""
        return [fqn for fqn, value in self._unique() if value.is_meta]

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
        self._check()
        waiting = self._owners_on_meta()
        if not waiting:
            return
        owners = self._owners()
        with torch.no_grad():
            if init is not None:
                for _, part in sorted(waiting, key=lambda pair: _depth(pair[0])):  # a parent may empty its children
                    init(part)
            else:
                if has_values:
                    self._check_resets(waiting)
                for _, part in waiting:
                    self._empty(part, device)
            self._tie(owners)
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

    def _unique(self, with_ignored: bool = False) -> Iterator[tuple[str, Tensor]]:
        seen = set() if with_ignored else set(self._ignored)
        for fqn, part in self._modules:
            for name, value in [*part._parameters.items(), *part._buffers.items()]:
                if value is not None and id(value) not in seen:
                    seen.add(id(value))
                    yield join(fqn, name), value

    def _owners_on_meta(self) -> list[tuple[str, nn.Module]]:
        return [(fqn, part) for fqn, part in self._modules if any(map(self._is_due, _values(part)))]

    def _is_due(self, value: Tensor) -> bool:
        return value.is_meta and id(value) not in self._ignored

    def _check(self) -> None:
        fake = getattr(sys.modules.get("torchdistx"), "fake", None)
        for fqn, value in self._unique():
            if fake is not None and fake.is_fake(value):
                raise ValueError(
                    f"Modules deferred by torchdistX are not supported, but `{fqn}` is one of its tensors. Build the "
                    'module under `with torch.device("meta"):` instead.'
                )
        for fqn, value in self._unique(with_ignored=True):
            if value in _gone:
                raise ValueError(
                    f"A parameter must belong to one unit, but `{fqn}` is shared with `{_gone[value]}` of a unit that "
                    "is sharded already. Make the two modules one unit, or make neither a unit of its own."
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
            for name, value in [*part._parameters.items(), *part._buffers.items()]:
                if value is not None and not value.is_meta and _is_unwritten(value):
                    raise ValueError(
                        "`reset_parameters()` must give values to all parameters and buffers of a module on the meta "
                        f"device, but that of `{fqn or 'the module that is wrapped'}` ({type(part).__name__}) has not "
                        f"written `{name}`. Initialize it there as well, or pass `param_init_fn`."
                    )

    def _empty(self, part: nn.Module, device: torch.device) -> None:
        """Like ``part.to_empty``, but skips tensors that are ignored or have values; marks new memory as unwritten."""
        kept_params = {n: (p, p.data) for n, p in part._parameters.items() if p is not None and not self._is_due(p)}
        kept_buffers = {n: b for n, b in part._buffers.items() if b is not None and not self._is_due(b)}
        part.to_empty(device=device, recurse=False)
        for name, (param, data) in kept_params.items():
            if part._parameters[name] is not param:
                setattr(part, name, param)
            param.data = data
        for name, value in [*part._parameters.items(), *part._buffers.items()]:
            if value is not None and name not in kept_params and name not in kept_buffers:
                _bytes_of(value).fill_(_UNWRITTEN)
        part._buffers.update(kept_buffers)

    def _owners(self) -> list[tuple[Tensor, list[tuple[nn.Module, str]]]]:
        """Each tensor, ignored ones included, and the modules and names that hold it."""
        owners: dict[int, tuple[Tensor, list[tuple[nn.Module, str]]]] = {}
        for _, part in self._modules:
            for name, value in [*part._parameters.items(), *part._buffers.items()]:
                if value is not None:
                    owners.setdefault(id(value), (value, []))[1].append((part, name))
        return list(owners.values())

    def _tie(self, owners: list[tuple[Tensor, list[tuple[nn.Module, str]]]]) -> None:
        """Share tensors among modules as before, and record the tensors that were replaced."""
        new: dict[int, nn.Parameter] = {}
        for old, places in owners:
            part, name = places[0]
            value = getattr(part, name)
            for other, alias in places[1:]:
                if getattr(other, alias) is not value:
                    setattr(other, alias, value)
            if value is not old and isinstance(old, nn.Parameter):
                new[id(old)] = value
                _gone[old] = join(self._fqns[id(part)], name)
        self.ignored = self.ignored.replaced(new)
        self._ignored = self.ignored.ids


def _values(part: nn.Module) -> list[Tensor]:
    return [value for value in (*part._parameters.values(), *part._buffers.values()) if value is not None]


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
