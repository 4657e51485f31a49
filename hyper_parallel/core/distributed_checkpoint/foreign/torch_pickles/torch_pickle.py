"""Pickles as torch writes them, read by an interpreter of our own that makes plain data and records, and runs nothing.

Note [Why the pickle module does not read]
pickle's own unpickler applies its opcodes to whatever a name stands for: with nothing but harmless classes at hand a
pickle could set attributes of these classes (BUILD), so that every ``str(path)`` of the process was the attacker's; it
could make ``bytearray`` of any size, and a table of any length for its memo. Here a name stands for an entry of
``torch_globals.py`` that says what is made of which arguments, and never for a class or a function of the process.
Attributes can be given to a record, once, and to nothing else.
"""

from __future__ import annotations

import collections
import pickle
import struct
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.distributed_checkpoint.foreign.torch_pickles.torch_pickle_cost import (
    DICT,
    ITEM,
    LIST,
    MEMBER,
    PAIR,
    RECORD,
    SET,
    TUPLE,
    PickleCost,
)
from hyper_parallel.core.distributed_checkpoint.foreign.torch_pickles.torch_records import (
    DamagedPickle,
    Named,
    Record,
    TensorInside,
    UnsafePickle,
    described,
)

Globals = Callable[[str, str], Any]  # of a module and a name: a Named, or a value; else UnsafePickle

_MAX_INT_BYTES = 1024
_MAX_MARKS = 1000
_DICTS = (dict, collections.OrderedDict, collections.defaultdict)

_two = struct.Struct("<H").unpack_from
_four = struct.Struct("<I").unpack_from
_four_signed = struct.Struct("<i").unpack_from
_eight = struct.Struct("<Q").unpack_from
_double = struct.Struct(">d").unpack_from


def read_pickle(data: bytes, find: Globals, stored: Callable[[Any], Any] | None = None) -> Any:
    """What a pickle holds. ``stored`` gives what a persistent id stands for; without it there may be none.

    Raises :class:`DamagedPickle`, :class:`UnsafePickle` or :class:`TensorInside`, and nothing else.
    """
    return PickleReader(data, find, stored).read()


class PickleReader:
    """One pickle on its way to data; see Note [What a pickle may cost] in ``torch_pickle_cost.py``."""

    def __init__(self, data: bytes, find: Globals, stored: Callable[[Any], Any] | None) -> None:
        self._data, self._at = data, 0
        self._find, self._stored = find, stored
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks below each mark
        self._memo: list[Any] = []
        self._found: dict[tuple[str, str], Any] = {}
        self._cost = PickleCost(len(data))

    def read(self) -> Any:
        data = self._data
        if len(data) < 2 or data[0] != _PROTO or not 2 <= data[1] <= 5:
            raise DamagedPickle("it does not start like a pickle of protocol 2 to 5")
        self._at = 2
        try:
            self._run(data, self._memo, self._at, self._stack)
        except (IndexError, struct.error, UnicodeDecodeError) as error:
            raise DamagedPickle(f"at byte {self._at} or later it is cut short or damaged ({error})") from None
        if len(self._stack) != 1 or self._below:
            raise DamagedPickle("it ends before what it has begun")
        return self._stack[0]

    def _run(self, data: bytes, memo: list[Any], at: int, stack: list[Any]) -> None:
        """Follow the opcodes. Those that make up most of a checkpoint's metadata are here, the others have handlers."""
        while True:
            code = data[at]
            at += 1
            if code == _MEMOIZE:
                memo.append(stack[-1])
            elif code == _BINGET:
                stack.append(memo[data[at]])
                at += 1
            elif code == _LONG_BINGET:
                stack.append(memo[_four(data, at)[0]])
                at += 4
            elif code == _BININT1:
                stack.append(data[at])
                at += 1
            elif code == _EMPTY_TUPLE:
                stack.append(())
            else:
                handle = _HANDLERS[code]
                self._at, self._stack = at, stack
                if handle is None:
                    if code == _STOP:
                        return
                    raise self._refusal(code)
                handle(self)
                at, stack = self._at, self._stack

    def _refusal(self, code: int) -> ValueError:
        if bytes([code]) in _ALL_OPCODES:
            return UnsafePickle(f"the opcode 0x{code:02x} of pickle's, which torch does not write")
        return DamagedPickle(f"byte {self._at - 1} is 0x{code:02x}, which is no opcode")

    # ---------------------------------------------------------------- numbers and texts

    def _bytes(self, length: int) -> bytes:
        start = self._at
        self._at += length
        if self._at > len(self._data):
            raise DamagedPickle(f"{length} bytes from byte {start} on go beyond its end")
        return self._data[start : self._at]

    def _frame(self) -> None:
        self._bytes(8)

    def _none(self) -> None:
        self._stack.append(None)

    def _true(self) -> None:
        self._stack.append(True)

    def _false(self) -> None:
        self._stack.append(False)

    def _int2(self) -> None:
        self._stack.append(_two(self._data, self._at)[0])
        self._at += 2

    def _int4(self) -> None:
        self._stack.append(_four_signed(self._data, self._at)[0])
        self._at += 4

    def _long1(self) -> None:
        self._long(self._bytes(1)[0])

    def _long4(self) -> None:
        self._long(_four(self._bytes(4), 0)[0])

    def _long(self, length: int) -> None:
        if length > _MAX_INT_BYTES:
            raise UnsafePickle(f"a number of {length} bytes")
        self._stack.append(int.from_bytes(self._bytes(length), "little", signed=True))

    def _float(self) -> None:
        self._stack.append(_double(self._data, self._at)[0])
        self._at += 8

    def _short_text(self) -> None:
        start = self._at + 1
        self._at = start + self._data[self._at]
        if self._at > len(self._data):
            raise DamagedPickle(f"a text from byte {start} on goes beyond its end")
        self._stack.append(str(self._data[start : self._at], "utf-8", "surrogatepass"))

    def _text4(self) -> None:
        self._stack.append(str(self._bytes(_four(self._bytes(4), 0)[0]), "utf-8", "surrogatepass"))

    def _text8(self) -> None:
        self._stack.append(str(self._bytes(_eight(self._bytes(8), 0)[0]), "utf-8", "surrogatepass"))

    def _bytes1(self) -> None:
        self._stack.append(self._bytes(self._bytes(1)[0]))

    def _bytes4(self) -> None:
        self._stack.append(self._bytes(_four(self._bytes(4), 0)[0]))

    def _bytes8(self) -> None:
        self._stack.append(self._bytes(_eight(self._bytes(8), 0)[0]))

    def _bytearray8(self) -> None:
        self._stack.append(bytearray(self._bytes(_eight(self._bytes(8), 0)[0])))

    # ---------------------------------------------------------------- the memo and marks

    def _put1(self) -> None:
        self._put(self._bytes(1)[0])

    def _put4(self) -> None:
        self._put(_four(self._bytes(4), 0)[0])

    def _put(self, place: int) -> None:
        if place != len(self._memo):
            raise DamagedPickle(f"place {place} of its memo is taken, but {len(self._memo)} is the next")
        self._memo.append(self._stack[-1])

    def _mark(self) -> None:
        if len(self._below) == _MAX_MARKS:
            raise UnsafePickle(f"parts nested {_MAX_MARKS} deep")
        self._below.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._below.pop()
        return items

    # ---------------------------------------------------------------- containers

    def _make(self, value: Any, cost: int) -> None:
        self._cost.charge(cost)
        self._stack.append(value)

    def _tuple1(self) -> None:
        self._make((self._stack.pop(),), TUPLE)

    def _tuple2(self) -> None:
        second = self._stack.pop()
        self._make((self._stack.pop(), second), TUPLE)

    def _tuple3(self) -> None:
        third, second = self._stack.pop(), self._stack.pop()
        self._make((self._stack.pop(), second, third), TUPLE)

    def _tuple(self) -> None:
        items = self._since_mark()
        self._make(tuple(items), TUPLE + ITEM * len(items))

    def _empty_list(self) -> None:
        self._make([], LIST)

    def _append(self) -> None:
        self._extend([self._stack.pop()])

    def _appends(self) -> None:
        self._extend(self._since_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list and type(target) is not collections.deque:
            raise UnsafePickle(f"{described(target)} that is appended to")
        self._cost.charge(ITEM * len(items))
        target.extend(items)

    def _empty_dict(self) -> None:
        self._make({}, DICT)

    def _set_item(self) -> None:
        value = self._stack.pop()
        self._set([self._stack.pop(), value])

    def _set_items(self) -> None:
        self._set(self._since_mark())

    def _set(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) not in _DICTS:
            raise UnsafePickle(f"{described(target)} whose items are set")
        keys = items[::2]
        if len(items) % 2:
            raise DamagedPickle("a key of a dict has no value")
        self._cost.charge(PAIR * len(keys) * (1 if type(target) is dict else 2))
        self._cost.check_keys(keys)
        num_expected = len(target) + len(keys)
        target.update(zip(keys, items[1::2], strict=True))
        if len(target) != num_expected:
            raise DamagedPickle(f"{described(keys[-1])} or a key before it is in a dict twice")

    def _empty_set(self) -> None:
        self._make(set(), SET)

    def _add_items(self) -> None:
        items, target = self._since_mark(), self._stack[-1]
        if type(target) is not set:
            raise UnsafePickle(f"{described(target)} that is added to")
        self._cost.charge(MEMBER * len(items))
        target.update(self._cost.check_keys(items))

    def _frozenset(self) -> None:
        items = self._since_mark()
        self._make(frozenset(self._cost.check_keys(items)), SET + MEMBER * len(items))

    # ---------------------------------------------------------------- names, and what is made with them

    def _global(self) -> None:
        start = self._at
        middle = self._data.find(b"\n", start, start + 500)
        end = self._data.find(b"\n", middle + 1, middle + 500)
        if middle < 0 or end < 0:
            raise DamagedPickle(f"the name at byte {start} has no end")
        self._at = end + 1
        self._push_global(str(self._data[start:middle], "utf-8"), str(self._data[middle + 1 : end], "utf-8"))

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str or len(name) + len(module) > 1000:
            raise DamagedPickle(f"{described(module)} and {described(name)} are no names")
        self._push_global(module, name)

    def _push_global(self, module: str, name: str) -> None:
        place = module, name
        if place not in self._found:
            self._found[place] = self._find(module, name)
        self._stack.append(self._found[place])

    def _reduce(self) -> None:
        args, called = self._stack.pop(), self._stack.pop()
        if type(called) is not Named or called.make is None or type(args) is not tuple:
            raise UnsafePickle(f"a call of {described(called)}")
        self._make(called.make(self._cost, args), RECORD)

    def _new_object(self) -> None:
        args, called = self._stack.pop(), self._stack.pop()
        if type(called) is not Named or not called.is_record or type(args) is not tuple or args:
            raise UnsafePickle(f"a new object of {described(called)}")
        self._make(Record(called.name, ()), RECORD)

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if type(target) is Record and target.state is None and type(state) in (dict, tuple):
            target.state = state
        elif type(target) is collections.OrderedDict and _is_note_of_module(state):
            target._metadata = state["_metadata"]  # type: ignore[attr-defined]  # what torch notes on a module's state
        else:
            raise UnsafePickle(f"{described(target)} with attributes of its own")

    def _persistent(self) -> None:
        if self._stored is None:
            raise TensorInside("it refers to the memory of a tensor")
        self._make(self._stored(self._stack.pop()), RECORD)


def _is_note_of_module(state: Any) -> bool:
    return type(state) is dict and len(state) == 1 and "_metadata" in state


_ALL_OPCODES = {
    code for name, code in vars(pickle).items() if name.isupper() and type(code) is bytes and len(code) == 1
}
_PROTO, _STOP = pickle.PROTO[0], pickle.STOP[0]
_MEMOIZE, _BINGET, _LONG_BINGET = pickle.MEMOIZE[0], pickle.BINGET[0], pickle.LONG_BINGET[0]
_BININT1, _EMPTY_TUPLE = pickle.BININT1[0], pickle.EMPTY_TUPLE[0]
_HANDLERS: list[Callable[[PickleReader], None] | None] = [None] * 256
for _opcode, _handler in (
    (pickle.FRAME, PickleReader._frame),
    (pickle.NONE, PickleReader._none),
    (pickle.NEWTRUE, PickleReader._true),
    (pickle.NEWFALSE, PickleReader._false),
    (pickle.BININT2, PickleReader._int2),
    (pickle.BININT, PickleReader._int4),
    (pickle.LONG1, PickleReader._long1),
    (pickle.LONG4, PickleReader._long4),
    (pickle.BINFLOAT, PickleReader._float),
    (pickle.SHORT_BINUNICODE, PickleReader._short_text),
    (pickle.BINUNICODE, PickleReader._text4),
    (pickle.BINUNICODE8, PickleReader._text8),
    (pickle.SHORT_BINBYTES, PickleReader._bytes1),
    (pickle.BINBYTES, PickleReader._bytes4),
    (pickle.BINBYTES8, PickleReader._bytes8),
    (pickle.BYTEARRAY8, PickleReader._bytearray8),
    (pickle.BINPUT, PickleReader._put1),
    (pickle.LONG_BINPUT, PickleReader._put4),
    (pickle.MARK, PickleReader._mark),
    (pickle.TUPLE1, PickleReader._tuple1),
    (pickle.TUPLE2, PickleReader._tuple2),
    (pickle.TUPLE3, PickleReader._tuple3),
    (pickle.TUPLE, PickleReader._tuple),
    (pickle.EMPTY_LIST, PickleReader._empty_list),
    (pickle.APPEND, PickleReader._append),
    (pickle.APPENDS, PickleReader._appends),
    (pickle.EMPTY_DICT, PickleReader._empty_dict),
    (pickle.SETITEM, PickleReader._set_item),
    (pickle.SETITEMS, PickleReader._set_items),
    (pickle.EMPTY_SET, PickleReader._empty_set),
    (pickle.ADDITEMS, PickleReader._add_items),
    (pickle.FROZENSET, PickleReader._frozenset),
    (pickle.GLOBAL, PickleReader._global),
    (pickle.STACK_GLOBAL, PickleReader._stack_global),
    (pickle.REDUCE, PickleReader._reduce),
    (pickle.NEWOBJ, PickleReader._new_object),
    (pickle.BUILD, PickleReader._build),
    (pickle.BINPERSID, PickleReader._persistent),
):
    _HANDLERS[_opcode[0]] = _handler
