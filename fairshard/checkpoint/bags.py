"""Reading a pickle as data: objects become bags, and nothing is made of them before somebody has looked inside.

A pickle names functions and classes, and says which to call with what. Here a name stays a `Name`, and a call of one a
`Bag` of its arguments: no code of the file runs, whatever it names. Who wants objects checks the bags first
(``metadata.py``, ``objects.py``).

The opcodes are read by the unpickler of Python's library that is written in Python. The one written in C runs a few of
them before anyone can look at them: the hash of a nested tuple as a key overflows its stack (a segmentation fault, not
an error) or takes for ever, and one index of its memo allocates 64 GB. It is ten times as fast: metadata of 1 MB take
0.25 s here. Opcodes that no writer of checkpoints uses are refused. A file may still fill memory: each of its bytes can
make an object.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pickle import UnpicklingError
from typing import Any

from fairshard.utils.collector import collector_paused

STORED = "storage"
"""The path of the bag of a tensor's storage; paths of names have a dot."""

PLAIN = frozenset({str, bytes, int, float, bool, type(None)})
"""Types of values that hold no others."""

_MAX_KEY_PARTS = 64
_MAX_EQUAL_HASHES = 16
_MAX_INT = 1 << 64


class Name:
    """A function, class or constant that a pickle names, by its ``path``."""

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path


class Bag:
    """An object of a pickle: the path of what was called, its arguments, its state, and the items of a mapping."""

    __slots__ = ("args", "items", "path", "state")

    def __init__(self, path: str, args: tuple[Any, ...]) -> None:
        self.path = path
        self.args = args
        self.state: Any = None
        self.items: dict[Any, Any] = {}


@collector_paused()  # with millions of new containers it takes longer than reading
def read_pickle(file: Any) -> tuple[Any, set[str]]:
    """What the pickle holds that begins at the position of ``file``, and the paths that it names.

    Raises:
        UnpicklingError: it is damaged, or has what no checkpoint needs.
    """
    reader = _Reader(file)
    try:
        return reader.load(), reader.names
    except UnpicklingError:
        raise
    except Exception as error:  # damaged bytes can raise anything
        raise UnpicklingError(f"it ends too early, or is damaged ({type(error).__name__})") from error


class _Reader(pickle._Unpickler):
    """Python's own unpickler, in Python, whose opcodes call and change nothing but bags."""

    stack: list[Any]

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.names: set[str] = set()
        self._hashes: dict[int, int] = {}

    def find_class(self, module: str, name: str) -> Any:
        """The name as data."""
        self.names.add(f"{module}.{name}")
        return Name(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        """A tensor's storage as a bag."""
        return Bag(STORED, pid)

    def load_nothing(self) -> None:
        """An opcode that is not known here.

        Raises:
            UnpicklingError: always.
        """
        raise UnpicklingError("it has an opcode that checkpoints never need")

    def load_call(self) -> None:
        """REDUCE and NEWOBJ: a bag in place of an object."""
        args, name = self.stack.pop(), self.stack.pop()
        if type(name) is not Name or type(args) is not tuple:
            raise UnpicklingError(f"it calls a {type(name).__name__}")
        self.stack.append(Bag(name.path, args))

    def load_state(self) -> None:
        """BUILD: a bag keeps its state."""
        state, bag = self.stack.pop(), self.stack[-1]
        if type(bag) is not Bag or bag.state is not None:
            raise UnpicklingError(f"it sets attributes of a {type(bag).__name__}")
        bag.state = state

    def load_item(self) -> None:
        """SETITEM."""
        self._update([self.stack.pop(-2), self.stack.pop()])

    def load_items(self) -> None:
        """SETITEMS."""
        self._update(self.pop_mark())  # type: ignore[attr-defined]

    def _update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        held = target.items if type(target) is Bag else target
        if type(held) is not dict:
            raise UnpicklingError(f"it sets items of a {type(held).__name__}")
        for key in items[::2]:
            if type(key) is not str and type(key) is not Bag:
                self._check_key(key, held)
        held.update(zip(items[::2], items[1::2], strict=True))

    def _check_key(self, key: Any, held: dict[Any, Any]) -> None:
        """Check that the hash of a key is fast, and that of few others in its dict: a file cannot choose most hashes.

        Raises:
            UnpicklingError: it must not be a key.
        """
        if is_short(key) or type(key) is Name:
            return
        if type(key) is not tuple or len(key) > _MAX_KEY_PARTS or not all(map(is_short, key)):
            raise UnpicklingError(f"a key is a long or nested {type(key).__name__}")
        place = hash(key) ^ id(held)
        self._hashes[place] = self._hashes.get(place, 0) + 1
        if self._hashes[place] > _MAX_EQUAL_HASHES:
            raise UnpicklingError(f"more than {_MAX_EQUAL_HASHES} keys of a dict have one hash, which makes it slow")


def is_short(value: Any) -> bool:
    """Whether ``value`` is a plain one, of which a file cannot write many with the same hash."""
    return type(value) in PLAIN and (type(value) is not int or -_MAX_INT < value < _MAX_INT)


_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT),
    *(pickle.BINBYTES, pickle.SHORT_BINBYTES, pickle.BINBYTES8),
    *(pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8),
    *(pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2),
    *(pickle.TUPLE3, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.BINPERSID, pickle.APPEND, pickle.APPENDS),
)
_OWN: dict[bytes, Callable[[_Reader], None]] = {
    **{pickle.REDUCE: _Reader.load_call, pickle.NEWOBJ: _Reader.load_call, pickle.BUILD: _Reader.load_state},
    **{pickle.SETITEM: _Reader.load_item, pickle.SETITEMS: _Reader.load_items},
}
_DISPATCH: dict[int, Any] = {
    **dict.fromkeys(range(256), _Reader.load_nothing),
    **{opcode[0]: pickle._Unpickler.dispatch[opcode[0]] for opcode in _OPCODES},
    **{opcode[0]: run for opcode, run in _OWN.items()},
}
_Reader.dispatch = _DISPATCH
