"""Reading a pickle as data: a small interpreter of opcodes, in which a file can call nothing but what a table allows.

Neither of the ready-made readers is safe for a file that an attacker wrote. The C ``pickle.Unpickler`` runs opcodes
before anyone can look at them: one index of the memo makes it allocate 64 GB, the hash of a nested tuple overflows the
C stack (a segmentation fault, not an error), keys of one hash make a dict quadratic. torch's ``weights_only`` unpickler
allows ``bytearray(10**12)``. A check *before* one of them would have to know the types of all values on their stacks,
and so be an interpreter itself. A second process with limits takes a second to import torch, and the objects must still
be read in this one. So there is one interpreter, in which this holds:

- **Every opcode takes constant time, and memory that is counted** against a budget, which grows with the bytes read
  (`Limits`). The file pays for what it makes: 10 MB of ``EMPTY_LIST`` end after 1 MB.
- **The memo is a list** with at most an entry for every second byte.
- **Keys** are strings, numbers, flat tuples and the index of metadata: their hashes are fast and mostly differ
  (`Keys`).
- **Nothing is changed once it is used.** A list or dict that came out of the memo cannot be extended, and an object is
  built once. So values have no cycles, and what was checked stays as it was.
- **Calls and objects** are those of a table, `Names`, whose functions check their arguments. Opcodes that no writer of
  checkpoints uses (protocol 0, ``POP``, ``DUP``, ``INST``, extensions) are refused, as by torch's own reader.

At the end `measure` bounds the depth of the value, and the number of parts that a walk over it meets: 40 tuples, each
with the previous one twice, would have 2**40. The price is time: honest metadata of 100 MB take 15 s, where the C
unpickler takes 3 s.

Source: the opcodes are those of Python's ``pickletools``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pickle import UnpicklingError
from typing import Any, NoReturn

from fairshard.checkpoint.pickle_limits import LIMITS, MAPPINGS, MUTABLE, Call, Keys, Limits, Names, Pickled, measure
from fairshard.utils.collector import collector_paused

# Memory of each, in bytes, a little rounded up; lists, the memo and dicts grow in steps.
_LIST, _DICT, _TUPLE, _SLOT, _ITEM, _PAIR = 80, 64, 56, 8, 12, 44
_APPEND = 56  # more than two bytes allow: lists of one item have more around it, and others come in batches
_TEXT, _INT, _BYTES, _CALL, _OBJECT, _SHARED, _BATCH = 56, 32, 40, 64, 64, 192, 64
_CHECKED_EVERY = 4096  # bytes
_MAX_INT_NBYTES = 1024
_MAX_NAME_NBYTES = 512
_MISSING = object()
_CONSTANTS = {0x29: (), 0x4E: None, 0x88: True, 0x89: False}
_MARK, _STOP, _REDUCE, _BUILD, _MEMOIZE = 0x28, 0x2E, 0x52, 0x62, 0x94
_SHAREABLE = MUTABLE | {tuple, type(_MISSING)}

_U16, _I32, _U32, _U64, _F64 = (struct.Struct(form).unpack_from for form in ("<H", "<i", "<I", "<Q", ">d"))


@collector_paused()  # with millions of new containers it takes longer than reading
def read_pickle(data: Any, names: Names, limits: Limits = LIMITS, start: int = 0) -> Pickled:
    """Read the pickle that begins at byte ``start`` of ``data``, which is bytes or a memoryview of bytes.

    Raises:
        UnpicklingError: it is damaged, names what it must not, or exceeds ``limits``.
    """
    try:
        run = _Run(data, names, limits, start)
        found = run.read(start)
        measure(found.value, limits, run.shared, found.end - start)
    except UnpicklingError:
        raise
    except (IndexError, struct.error):
        raise UnpicklingError("it ends too early, or is damaged") from None
    except Exception as error:  # damaged bytes can raise anything
        raise UnpicklingError(f"{type(error).__name__}: {error}") from error
    return found


class _Run:
    """A pickle that is being read; ``shared`` has the ids of containers that came out of the memo.

    Each method runs one opcode, or several alike, and returns the place of the next; ``place`` is that of its argument.
    """

    def __init__(self, data: Any, names: Names, limits: Limits, start: int) -> None:
        self.shared: set[int] = set()
        self._data = data
        self._names = names
        self._limits = limits
        self._start = start
        self._max_marks = 4 * limits.depth + 16
        self._budget = limits.budget(start)
        self._keys = Keys(names)
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._num_charged = 0  # entries of the memo, which cost a slot each
        self._unbuilt: dict[int, Any] = {}

    def read(self, place: int) -> Pickled:
        """Run the opcodes from ``place`` on; frequent ones are inline, with the MEMOIZE that follows most of them."""
        data, stack, marks, memo, budget = self._data, self._stack, self._marks, self._memo, self._budget
        push, pop, put, checked_at = stack.append, stack.pop, memo.append, place
        others: list[Any] = [None] * 256
        for number, run in _OTHERS.items():
            others[number] = run
        value: Any
        while True:
            op = data[place]
            place += 1
            if op == 0x6A or op == 0x68:  # LONG_BINGET, BINGET
                if op == 0x68:
                    value = memo[data[place]]
                    place += 1
                else:
                    value = memo[_U32(data, place)[0]]
                    place += 4
                if type(value) in _SHAREABLE:
                    self._share(value)
                push(value)
            elif op == 0x4D:  # BININT2
                push(_U16(data, place)[0])
                place += 2
                budget.left -= _INT
            elif op == _MARK:
                if len(marks) > self._max_marks:
                    raise UnpicklingError("its marks are too deep")
                marks.append(len(stack))
            elif (run := others[op]) is not None:
                place = run(self, place)
            elif op == 0x86:  # TUPLE2
                value = pop()
                value = pop(), value
                push(value)
                budget.left -= _TUPLE + 2 * _SLOT
                if data[place] == _MEMOIZE:
                    put(value)
                    place += 1
            elif op == 0x85:  # TUPLE1
                value = (pop(),)
                push(value)
                budget.left -= _TUPLE + _SLOT
                if data[place] == _MEMOIZE:
                    put(value)
                    place += 1
                    if data[place] == _REDUCE:
                        place = self._call(place + 1)
            elif op == 0x7D:  # EMPTY_DICT
                value = {}
                push(value)
                budget.left -= _DICT
                if data[place] == _MEMOIZE:
                    put(value)
                    place += 1
                    if data[place] == _MARK and len(marks) <= self._max_marks:
                        marks.append(len(stack))
                        place += 1
            elif op in _CONSTANTS:
                push(_CONSTANTS[op])
            elif op == 0x4B:  # BININT1
                push(data[place])
                place += 1
            elif op == 0x4A:  # BININT
                push(_I32(data, place)[0])
                place += 4
                budget.left -= _INT
            elif op == _MEMOIZE:
                put(stack[-1])
            elif op == 0x5D:  # EMPTY_LIST
                push([])
                budget.left -= _LIST
            elif op == 0x61:  # APPEND
                item = pop()
                target = stack[-1]
                if type(target) is not list or id(target) in self.shared:
                    self._refuse_change(target)
                target.append(item)
                budget.left -= _APPEND
            elif op == _STOP:
                return self._stop(place)
            else:
                name = chr(op) if op < 0x80 else hex(op)
                raise UnpicklingError(f"it has the opcode {name!r}, which {self._names.what} never need")
            if place >= checked_at:
                checked_at = place + _CHECKED_EVERY
                self._check(place)

    def _check(self, place: int) -> None:
        budget = self._budget
        budget.place = place
        budget.left -= _SLOT * (len(self._memo) - self._num_charged)
        self._num_charged = len(self._memo)
        budget.grant()
        max_stack = self._limits.stack + (place - self._start) // self._limits.bytes_per_slot
        if len(self._stack) > max_stack:
            raise UnpicklingError(f"its stack has more than {max_stack:,} values")
        if len(self._memo) > _CHECKED_EVERY + (place - self._start) // 2:
            raise UnpicklingError("its memo has more entries than it can have values")

    def _stop(self, place: int) -> Pickled:
        self._check(place)
        (value,) = self._stack
        if self._marks or any(type(made) in self._names.stateful for made in self._unbuilt.values()):
            raise UnpicklingError("it ends inside a value")
        return Pickled(value, place)

    def _share(self, value: Any) -> None:
        if value is _MISSING:
            raise IndexError
        if id(value) not in self.shared:
            self.shared.add(id(value))
            self._budget.left -= _SHARED

    def _pop_items(self) -> list[Any]:
        """The objects pushed since the last mark."""
        begin = self._marks.pop()
        items = self._stack[begin:]
        del self._stack[begin:]
        return items

    def _refuse_change(self, target: Any) -> NoReturn:
        raise UnpicklingError(f"it changes a {type(target).__name__} that is not a new container")

    def _proto(self, place: int) -> int:
        if place != self._start + 1:
            raise UnpicklingError("it begins twice")
        return place + 1

    def _skip(self, place: int, nbytes: int) -> int:
        """The end of ``nbytes`` bytes.

        Raises:
            IndexError: the pickle ends before.
        """
        end = place + nbytes
        if end > len(self._data):
            raise IndexError
        return end

    # ---- strings and numbers

    def _text(self, place: int, nbytes: int) -> int:
        end = self._skip(place, nbytes)
        self._stack.append(str(self._data[place:end], "utf-8", "surrogatepass"))
        self._budget.left -= _TEXT
        return end

    def _bytes(self, place: int, nbytes: int) -> int:
        end = self._skip(place, nbytes)
        self._stack.append(bytes(self._data[place:end]))
        self._budget.left -= _BYTES
        return end

    def _int(self, place: int, nbytes: int) -> int:
        if nbytes > _MAX_INT_NBYTES:
            raise UnpicklingError(f"it has an integer of {nbytes:,} bytes")
        end = self._skip(place, nbytes)
        self._stack.append(int.from_bytes(self._data[place:end], "little", signed=True))
        self._budget.left -= _BYTES
        return end

    def _float(self, place: int) -> int:
        self._stack.append(_F64(self._data, place)[0])
        self._budget.left -= _INT
        return place + 8

    # ---- containers

    def _tuple(self, place: int) -> int:
        items = self._pop_items()
        self._stack.append(tuple(items))
        self._budget.left -= _TUPLE + _SLOT * len(items)
        return place

    def _tuple3(self, place: int) -> int:
        last, middle, first = self._stack.pop(), self._stack.pop(), self._stack.pop()
        self._stack.append((first, middle, last))
        self._budget.left -= _TUPLE + 3 * _SLOT
        return place

    def _appends(self, place: int) -> int:
        items = self._pop_items()
        target = self._stack[-1]
        if type(target) is not list or id(target) in self.shared:
            self._refuse_change(target)
        target.extend(items)
        self._budget.left -= _BATCH + _ITEM * len(items)
        return place

    def _set_item(self, place: int) -> int:
        self._marks.append(len(self._stack) - 2)
        return self._set_items(place)

    def _set_items(self, place: int) -> int:
        stack, begin = self._stack, self._marks.pop()
        items = iter(stack[begin:])
        self._budget.left -= _BATCH + _PAIR * (len(stack) - begin) // 2
        del stack[begin:]
        target = stack[-1]
        if type(target) not in MAPPINGS or id(target) in self.shared:
            self._refuse_change(target)
        for key, value in zip(items, items, strict=True):
            if type(key) is not str:
                self._keys.check(key, target)
            target[key] = value
        return self._build(place + 1) if self._data[place] == _BUILD else place

    # ---- the memo, names, calls

    def _put(self, index: int, place: int) -> int:
        memo = self._memo
        if index > _CHECKED_EVERY + (place - self._start) // 2:
            raise UnpicklingError(f"its memo has the index {index:,}, more than it can have values before")
        if index >= len(memo):
            memo.extend([_MISSING] * (index + 1 - len(memo)))
        elif memo[index] is not _MISSING:
            self._budget.left -= _APPEND
        memo[index] = self._stack[-1]
        return place

    def _global(self, place: int) -> int:
        text = bytes(self._data[place : place + _MAX_NAME_NBYTES])
        module, name = text.split(b"\n")[:2]
        self._push_name(module.decode(), name.decode(), place)
        return place + len(module) + len(name) + 2

    def _stack_global(self, place: int) -> int:
        name, module = self._stack.pop(), self._stack.pop()
        self._push_name(module, name, place)
        return place

    def _push_name(self, module: Any, name: Any, place: int) -> None:
        self._stack.append(self._names.find(module, name))
        self._budget.left -= _CALL

    def _call(self, place: int) -> int:
        args, call = self._stack.pop(), self._stack.pop()
        if type(call) is not Call or type(args) is not tuple:
            raise UnpicklingError(f"it calls a {type(call).__name__}")
        budget = self._budget
        budget.left -= _CALL
        budget.place = place
        made = call.make(args, budget)
        if type(made) in self._names.builds:
            self._unbuilt[id(made)] = made
        self._stack.append(made)
        if self._data[place] == _MEMOIZE:
            self._memo.append(made)
            return place + 1
        return place

    def _build(self, place: int) -> int:
        value = self._stack.pop()
        made = self._stack[-1]
        if self._unbuilt.pop(id(made), None) is None or id(made) in self.shared:
            raise UnpicklingError(f"it sets attributes of a {type(made).__name__}")
        self._budget.left -= _OBJECT
        self._budget.place = place
        self._names.builds[type(made)](made, value, self._budget)
        return place

    def _stored(self, place: int) -> int:
        pid = self._stack.pop()
        if self._names.stored is None or type(pid) is not tuple:
            raise UnpicklingError("it names a storage where there is none")
        self._budget.left -= _CALL
        self._budget.place = place
        self._stack.append(self._names.stored(pid, self._budget))
        return place


_OTHERS: dict[int, Callable[[_Run, int], int]] = {
    0x42: lambda run, place: run._bytes(place + 4, _U32(run._data, place)[0]),  # BINBYTES
    0x43: lambda run, place: run._bytes(place + 1, run._data[place]),  # SHORT_BINBYTES
    0x47: _Run._float,  # BINFLOAT
    0x51: _Run._stored,  # BINPERSID
    _REDUCE: _Run._call,
    0x58: lambda run, place: run._text(place + 4, _U32(run._data, place)[0]),  # BINUNICODE
    _BUILD: _Run._build,
    0x63: _Run._global,  # GLOBAL
    0x65: _Run._appends,  # APPENDS
    0x71: lambda run, place: run._put(run._data[place], place + 1),  # BINPUT
    0x72: lambda run, place: run._put(_U32(run._data, place)[0], place + 4),  # LONG_BINPUT
    0x73: _Run._set_item,  # SETITEM
    0x74: _Run._tuple,  # TUPLE
    0x75: _Run._set_items,  # SETITEMS
    0x80: _Run._proto,  # PROTO
    0x81: _Run._call,  # NEWOBJ
    0x87: _Run._tuple3,  # TUPLE3
    0x8A: lambda run, place: run._int(place + 1, run._data[place]),  # LONG1
    0x8B: lambda run, place: run._int(place + 4, _U32(run._data, place)[0]),  # LONG4
    0x8C: lambda run, place: run._text(place + 1, run._data[place]),  # SHORT_BINUNICODE
    0x8D: lambda run, place: run._text(place + 8, _U64(run._data, place)[0]),  # BINUNICODE8
    0x8E: lambda run, place: run._bytes(place + 8, _U64(run._data, place)[0]),  # BINBYTES8
    0x93: _Run._stack_global,  # STACK_GLOBAL
    0x95: lambda run, place: place + 8,  # FRAME
}
