"""Limits of a pickle: what it may name, need and hold; see ``plain_pickle.py``."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pickle import UnpicklingError
from types import NoneType
from typing import Any

import torch

MAPPINGS = frozenset({dict, OrderedDict, Counter})
MUTABLE = MAPPINGS | {list, set}

_CONTAINERS = MUTABLE | {tuple, frozenset}
_PLAIN_KEYS = frozenset({str, bytes, float, bool, NoneType, torch.dtype})
_MAX_INT = 1 << 64
_MAX_KEY_PARTS = 64
_MAX_EQUAL_HASHES = 16


@dataclass(frozen=True)
class Limits:
    """Resources that a pickle may need: a depth, and ``base + per_byte * n`` bytes of memory for its first ``n`` bytes.

    Memory is that of all values and of the memo. A walk over the value may meet ``base_parts + parts_per_byte * n``
    parts, and at most ``stack + n / bytes_per_slot`` values may wait on the stack. The defaults are a little
    more than what the densest honest metadata need, and keep a hostile file of 10 MB below 256 MB and 2 s.
    """

    depth: int = 200
    base: int = 1 << 22
    per_byte: int = 24
    stack: int = 100_000
    bytes_per_slot: int = 8
    base_parts: int = 1_000_000
    parts_per_byte: int = 4

    def budget(self, start: int) -> Budget:
        """The budget of a pickle that begins at byte ``start``."""
        return Budget(self, start)


LIMITS = Limits()


@dataclass(frozen=True)
class Pickled:
    """A value, and the byte at which its pickle ends."""

    value: Any
    end: int


class Budget:
    """Bytes of memory that a pickle may still use; every byte of the pickle up to ``place`` adds to them."""

    def __init__(self, limits: Limits, start: int) -> None:
        self.left = limits.base
        self.place = start
        self._per_byte = limits.per_byte
        self._granted = start
        self._used: set[int] = set()

    def grant(self) -> None:
        """Add what the bytes up to ``place`` allow.

        Raises:
            UnpicklingError: nothing is left.
        """
        self.left += self._per_byte * (self.place - self._granted)
        self._granted = self.place
        if self.left < 0:
            raise UnpicklingError("it needs far more memory than a file of its size should")

    def use_once(self, items: list[Any]) -> None:
        """Note that ``items`` are a part of one object, which takes the time to look at them.

        Raises:
            UnpicklingError: they are already a part of another.
        """
        if id(items) in self._used:
            raise UnpicklingError("two of its objects share a list")
        self._used.add(id(items))

    def take(self, nbytes: int) -> None:
        """Use ``nbytes``.

        Raises:
            UnpicklingError: there are fewer.
        """
        self.left -= nbytes
        if self.left < 0:
            self.grant()


Make = Callable[[tuple[Any, ...], Budget], Any]


@dataclass(frozen=True)
class Names:
    """Names that a pickle may use: constants, functions and classes by ``(module, name)``; ``what`` is for messages.

    ``calls`` take the tuple of arguments. An object made by one gets its state from the function of its class in
    ``builds``, once; objects of ``stateful`` classes must get one. ``keys`` are classes of objects that dicts may have
    as keys. ``stored`` turns the id of a tensor's storage into a value.
    """

    what: str
    values: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    calls: Mapping[tuple[str, str], Make] = field(default_factory=dict)
    builds: Mapping[type, Callable[[Any, Any, Budget], None]] = field(default_factory=dict)
    stateful: frozenset[type] = frozenset()
    keys: frozenset[type] = frozenset()
    stored: Make | None = None

    def find(self, module: Any, name: Any) -> Any:
        """The constant of that name, or the function or class as a `Call`.

        Raises:
            UnpicklingError: there is none.
        """
        if (module, name) in self.values:
            return self.values[module, name]
        make = self.calls.get((module, name))
        if make is None:
            raise UnknownName(module, name, self.what)
        return Call(make)


class UnknownName(UnpicklingError):
    """A pickle names ``module.name``, which it must not."""

    def __init__(self, module: Any, name: Any, what: str) -> None:
        super().__init__(f"it holds more than {what}: it names {module}.{name}")
        self.path = f"{module}.{name}"


class Call:
    """A function or class that a pickle has named."""

    __slots__ = ("make",)

    def __init__(self, make: Make) -> None:
        self.make = make


class Keys:
    """Checks the keys of a pickle's dicts and sets, so that no hash is slow and no dict quadratic."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._counts: dict[int, int] = {}

    def check(self, key: Any, target: Any) -> None:
        """Check a key that is not a string, before it goes into ``target``.

        Strings, bytes and 64-bit numbers have few others of their hash, which a file cannot choose. Of the other keys,
        flat tuples and objects of a class in ``Names.keys``, only a few in a dict may have the same.

        Raises:
            UnpicklingError: it must not be a key.
        """
        kind = type(key)
        if kind in _PLAIN_KEYS or (kind is int and -_MAX_INT < key < _MAX_INT):
            return
        if kind not in self._names.keys and not (kind is tuple and self._is_flat(key)):
            raise UnpicklingError(f"a key is a long or nested {kind.__name__}")
        place = hash(key) ^ id(target)
        count = self._counts[place] = self._counts.get(place, 0) + 1
        if count > _MAX_EQUAL_HASHES:
            raise UnpicklingError(f"more than {_MAX_EQUAL_HASHES} keys of a dict have one hash, which makes it slow")

    @staticmethod
    def _is_flat(key: tuple[Any, ...]) -> bool:
        plain = (type(part) in _PLAIN_KEYS or (type(part) is int and abs(part) < _MAX_INT) for part in key)
        return len(key) <= _MAX_KEY_PARTS and all(plain)


class _Part:
    """A container that `measure` walks through: the rest of what it holds, its depth and its parts so far."""

    __slots__ = ("depth", "id", "num_parts", "rest")

    def __init__(self, value: Any) -> None:
        held: Any = value
        if type(value) in MAPPINGS:
            own = getattr(value, "__dict__", None)
            held = [*value.values(), *own.values()] if own else value.values()
        kinds = set(map(type, held))
        if Call in kinds:
            raise UnpicklingError("it holds a function or a class")
        self.id = id(value)
        self.depth = 1
        self.num_parts = 1 + len(held)
        self.rest = iter(()) if kinds.isdisjoint(_CONTAINERS) else iter(held)


def measure(value: Any, limits: Limits, shared: set[int], nbytes: int) -> None:
    """Check the depth of ``value``, and its parts, of which ``shared`` ones (by id) count as often as they occur.

    ``value`` has no cycles, and was read from a pickle of ``nbytes``.

    Raises:
        UnpicklingError: it exceeds ``limits``, or holds a function.
    """
    max_parts = limits.base_parts + limits.parts_per_byte * nbytes
    known: dict[int, _Part] = {}
    path = [_Part([value])]
    while path:
        top = path[-1]
        for each in top.rest:
            if type(each) not in _CONTAINERS:
                continue
            part = known.get(id(each))
            if part is None:
                path.append(_Part(each))
                break
            top.depth = max(top.depth, 1 + part.depth)
            top.num_parts += part.num_parts
        else:
            path.pop()
            if top.id in shared:
                known[top.id] = top
            if path:
                path[-1].depth = max(path[-1].depth, 1 + top.depth)
                path[-1].num_parts += top.num_parts
        if len(path) + top.depth > limits.depth + 2:
            raise UnpicklingError(f"it has containers inside each other to a depth of more than {limits.depth}")
        if top.num_parts > max_parts:
            raise UnpicklingError(f"it has more than {max_parts:,} parts, far more than its {nbytes:,} bytes should")
