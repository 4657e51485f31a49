"""The names that pickles in torch's checkpoints may hold, and what is made of each: plain data, or a record of ours.

Python 3 writes older names for its own types into pickles of protocol 2, which ``torch.save`` uses: both are known.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from hyper_parallel.core.distributed_checkpoint.base.metadata import STORABLE_DTYPES
from hyper_parallel.core.distributed_checkpoint.base.shown_text import shown
from hyper_parallel.core.distributed_checkpoint.foreign.torch_pickles.torch_pickle_cost import (
    ITEM,
    LARGE,
    MEMBER,
    PAIR,
    SET,
    PickleCost,
)
from hyper_parallel.core.distributed_checkpoint.foreign.torch_pickles.torch_records import (
    Dtype,
    Named,
    Record,
    UnsafePickle,
    described,
)

_STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
_RECORDS = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "TensorProperties",
    "ChunkStorageMetadata",
    "MetadataIndex",
    "StorageMeta",
    "_StorageInfo",
    "_MEM_FORMAT_ENCODING",
)
_PATHS = ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")
_OLDER_NAMES = {"xrange": "range", "unicode": "str", "long": "int"}


class StoragePart(NamedTuple):
    """The memory of a tensor, in a member of the archive."""

    key: str
    dtype: str


class TensorPart(NamedTuple):
    """A tensor, as its pickle describes it: a view of its storage."""

    storage: StoragePart
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


def known_global(module: str, name: str) -> Any:
    """What a name stands for; see ``torch_pickle.py``."""
    if module == "__builtin__":
        module, name = "builtins", _OLDER_NAMES.get(name, name)
    if module == "pathlib._local":  # Python 3.13
        module = "pathlib"
    found = _GLOBALS.get((module, name))
    if found is None and module.startswith("torch.distributed.checkpoint.") and name in _RECORDS:
        found = _RECORD_GLOBALS[name]
    if found is None and module == "torch":
        dtype = _STORAGE_DTYPES.get(name, name)
        found = Dtype(dtype) if dtype in STORABLE_DTYPES else None
    if found is None:
        raise UnsafePickle(shown(f"{module}.{name}"))
    return found


def stored_part(pid: Any) -> StoragePart:
    """The storage that a persistent id names."""
    if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage":
        raise UnsafePickle("a persistent id that is no storage")
    _, dtype, key, _, _ = pid
    if type(dtype) is not Dtype or type(key) is not str:
        raise UnsafePickle(f"a storage of {described(dtype)} at {described(key)}")
    return StoragePart(key, dtype.name)


# ---------------------------------------------------------------- what is made of arguments


def _wrong(name: str, args: tuple[Any, ...]) -> UnsafePickle:
    return UnsafePickle(f"{name} of {', '.join(map(described, args[:5])) or 'nothing'}")


def _types(args: tuple[Any, ...]) -> tuple[type, ...]:
    return tuple(map(type, args[:5])) if len(args) <= 5 else (Record,)


def _ordered_dict(cost: PickleCost, args: tuple[Any, ...]) -> Any:
    if args:
        raise _wrong("OrderedDict", args)
    cost.charge(LARGE)
    return collections.OrderedDict()


def _default_dict(cost: PickleCost, args: tuple[Any, ...]) -> Any:
    cost.charge(LARGE)
    if not args or args == (None,):
        return collections.defaultdict(None)
    if len(args) == 1 and type(args[0]) is Named and args[0].name in _FACTORIES:
        return collections.defaultdict(_FACTORIES[args[0].name])
    raise _wrong("defaultdict", args)


def _counter(cost: PickleCost, args: tuple[Any, ...]) -> Any:
    if _types(args) != (dict,):
        raise _wrong("Counter", args)
    cost.charge(LARGE + PAIR * len(args[0]))
    return collections.Counter(args[0])


def _deque(cost: PickleCost, args: tuple[Any, ...]) -> Any:
    cost.charge(LARGE)
    if _types(args) not in ((), (tuple,), (list,), (tuple, int), (list, int)) or (args and args[0]):
        raise _wrong("deque", args)
    if len(args) == 2 and not 0 <= args[1] < 1 << 31:
        raise _wrong("deque", args)
    return collections.deque(maxlen=args[1] if len(args) == 2 else None)


def _set(cost: PickleCost, args: tuple[Any, ...]) -> Any:
    return set(_members(cost, "set", args))


def _frozen_set(cost: PickleCost, args: tuple[Any, ...]) -> Any:
    return frozenset(_members(cost, "frozenset", args))


def _members(cost: PickleCost, name: str, args: tuple[Any, ...]) -> list[Any]:
    if not args:
        return []
    if _types(args) != (list,):
        raise _wrong(name, args)
    cost.charge(SET + MEMBER * len(args[0]))
    return cost.check_keys(args[0])


def _complex(_: PickleCost, args: tuple[Any, ...]) -> Any:
    if _types(args) != (float, float):
        raise _wrong("complex", args)
    return complex(*args)


def _encoded(cost: PickleCost, args: tuple[Any, ...]) -> Any:
    if _types(args) != (str, str) or args[1] not in ("latin1", "latin-1"):
        raise _wrong("_codecs.encode", args)
    cost.charge(len(args[0]))
    return args[0].encode("latin1")


def _bytes(_: PickleCost, args: tuple[Any, ...]) -> Any:
    if args:
        raise _wrong("bytes", args)
    return b""


def _byte_array(cost: PickleCost, args: tuple[Any, ...]) -> Any:
    if _types(args) == (str, str):
        return bytearray(_encoded(cost, args))
    if _types(args) not in ((), (bytes,)):
        raise _wrong("bytearray", args)
    cost.charge(len(args[0]) if args else 0)
    return bytearray(*args)


def _range(_: PickleCost, args: tuple[Any, ...]) -> Any:
    if _types(args) != (int, int, int) or args[2] == 0:
        raise _wrong("range", args)
    return range(*args)


def _slice(_: PickleCost, args: tuple[Any, ...]) -> Any:
    if len(args) != 3 or not all(part is None or type(part) is int for part in args):
        raise _wrong("slice", args)
    return slice(*args)


def _size(_: PickleCost, args: tuple[Any, ...]) -> Any:
    if len(args) != 1 or type(args[0]) is not tuple:
        raise _wrong("torch.Size", args)
    return args[0]


def _path(cost: PickleCost, args: tuple[Any, ...]) -> Any:
    cost.charge(LARGE + ITEM * len(args))
    if not all(type(part) is str for part in args):
        raise _wrong("a path", args)
    cost.charge(PAIR * sum(map(len, args)))  # Each of its characters may be a folder.
    return PurePosixPath(*args)


def _layout(_: PickleCost, args: tuple[Any, ...]) -> Any:
    if _types(args) != (str,):
        raise _wrong("a layout", args)
    return args[0]


def _tensor_v2(cost: PickleCost, args: tuple[Any, ...]) -> TensorPart:
    dtype = args[0].dtype if args and type(args[0]) is StoragePart else None
    return _tensor(cost, args, 6, dtype)


def _tensor_v3(cost: PickleCost, args: tuple[Any, ...]) -> TensorPart:
    dtype = args[6].name if len(args) > 6 and type(args[6]) is Dtype else None
    return _tensor(cost, args, 7, dtype)


def _tensor(cost: PickleCost, args: tuple[Any, ...], num_usual: int, dtype: str | None) -> TensorPart:
    """``num_usual`` arguments say all about a tensor but that it is conjugated or negated when it is read."""
    view = args[:4]
    if _types(view) != (StoragePart, int, tuple, tuple) or dtype is None or len(args) > num_usual + 1:
        raise _wrong("a tensor", view)
    if len(args) > num_usual and args[num_usual]:
        raise UnsafePickle("a tensor that is conjugated or negated when it is read")
    storage, offset, shape, strides = view
    cost.charge(ITEM * (len(shape) + len(strides)))
    numbers = (offset, *shape, *strides)
    if len(shape) != len(strides) or not all(type(number) is int and number >= 0 for number in numbers):
        raise _wrong("a tensor", view)
    return TensorPart(storage, offset, shape, strides, dtype)


def _parameter(_: PickleCost, args: tuple[Any, ...]) -> TensorPart:
    if not args or type(args[0]) is not TensorPart:
        raise _wrong("a parameter", args)
    return args[0]


def _record(name: str) -> Named:
    return Named(name, lambda _, args: Record(name, args), is_record=True)


_FACTORIES: dict[str, Callable[[], Any]] = {kind.__name__: kind for kind in (dict, list, set, int, float, str, tuple)}
_MAKERS: dict[tuple[str, str], Callable[[PickleCost, tuple[Any, ...]], Any]] = {
    ("collections", "OrderedDict"): _ordered_dict,
    ("collections", "defaultdict"): _default_dict,
    ("collections", "Counter"): _counter,
    ("collections", "deque"): _deque,
    ("builtins", "set"): _set,
    ("builtins", "frozenset"): _frozen_set,
    ("builtins", "complex"): _complex,
    ("builtins", "bytes"): _bytes,
    ("builtins", "bytearray"): _byte_array,
    ("builtins", "range"): _range,
    ("builtins", "slice"): _slice,
    ("_codecs", "encode"): _encoded,
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _layout,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    **{("pathlib", name): _path for name in _PATHS},
}
_GLOBALS: dict[tuple[str, str], Any] = {
    **{("builtins", name): Named(name) for name in _FACTORIES},
    **{(module, name): Named(name, make) for (module, name), make in _MAKERS.items()},
    ("torch.storage", "UntypedStorage"): Dtype("uint8"),
}
_RECORD_GLOBALS = {name: _record(name) for name in _RECORDS}
