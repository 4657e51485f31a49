"""Objects as bytes without pickle: JSON with tags for what JSON lacks, and the raw memory of arrays behind it.

The bytes are a JSON text, then, where there are arrays or byte strings, a zero byte and their memory in one piece. A
value that JSON lacks is an object whose ``"$"`` names its kind; ``"at"`` is the start and length of its memory. Reading
them back runs no code of the file's choosing, unlike a pickle.

Note [Objects of strangers]
What is read takes memory in proportion to its bytes: each byte of the memory belongs to one value, so the lengths may
not add up to more than there is, however often the text speaks of the same bytes. Keys of dicts and sets that have one
hash would be compared each with each; numbers can be made so, and are refused.
"""

from __future__ import annotations

import collections
import json
import math
import pathlib
import pickle
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from hyper_parallel.core.distributed_checkpoint.base.errors import CorruptCheckpointError
from hyper_parallel.core.distributed_checkpoint.base.metadata import STORABLE_DTYPES, dtype_name, dtype_size
from hyper_parallel.core.distributed_checkpoint.base.shown_text import shown, shown_value
from hyper_parallel.core.distributed_checkpoint.base.strict_json import parse_json
from hyper_parallel.core.distributed_checkpoint.format.index_check import MAX_DIMS
from hyper_parallel.platform import get_platform

_TAG = "$"
_FACTORIES: dict[str, Callable[[], Any]] = {kind.__name__: kind for kind in (dict, list, set, int, float, str, tuple)}
_MAX_BITS = 1 << 13  # of a number in digits: Python reads and writes no more than 4,300 of these
_DEPTH = 20  # to which a part that cannot be written is looked for
_ARRAYS = (np.ndarray, np.memmap)
_SEQUENCES: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_DTYPE = re.compile(r"[<>|=][biufcmMSUV][0-9]{1,9}(\[[0-9]{0,9}[A-Za-z]{1,2}\])?")  # as numpy writes those of arrays
_MAX_ALIKE = 100  # keys of one hash
_MAX_EMPTY = 1 << 20  # elements of an array that take no bytes


def encode_object(value: Any, name: str, allow_pickle: bool = False) -> tuple[bytes, str]:
    """The bytes of an object and their encoding: "json", or "pickle" where JSON cannot and pickle is allowed."""
    encoder = _Encoder(name)
    try:
        text = json.dumps(encoder.tagged(value), ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()
    except RecursionError:
        raise ValueError(
            f"'{name}' contains itself or is nested too deeply, so it cannot be written to a checkpoint"
        ) from None
    except _CannotEncode as error:
        if allow_pickle:
            return _pickled(value, name), "pickle"
        where = f"'{name}'{_place_of(error.value, value, _DEPTH) or ''}"
        raise TypeError(
            f"{where} holds {error}, which cannot be written to a checkpoint without pickle. Save plain data (numbers,"
            " strings, bytes, lists, tuples, dicts, sets, numpy arrays, tensors), for instance its state_dict(); or "
            "pass planner=StandardSavePlanner(allow_pickle=True) and load with StandardLoadPlanner(allow_pickle=True)"
        ) from None
    return (b"\0".join((text, b"".join(encoder.blobs))) if encoder.blobs else text), "json"


def decode_object(data: bytes | memoryview, encoding: str, name: str, allow_pickle: bool = False) -> Any:
    """The object that :func:`encode_object` wrote."""
    check_encoding(encoding, name, allow_pickle)
    if encoding == "pickle":
        return pickle.loads(data)
    text, _, blobs = bytes(data).partition(b"\0")
    try:
        return _Decoder(blobs).plain(parse_json(text))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, struct.error) as error:
        what = f"{type(error).__name__}: {shown(str(error))}"
        raise CorruptCheckpointError(f"the object '{shown(name)}' cannot be decoded: {what}") from error


def check_encoding(encoding: str, name: str, allow_pickle: bool) -> None:
    """Raise unless objects of this encoding may be decoded."""
    if encoding == "pickle" and not allow_pickle:
        raise ValueError(
            f"'{shown(name)}' was saved as a pickle, and loading a pickle runs whatever code it contains. If you trust "
            "where the checkpoint comes from, pass planner=StandardLoadPlanner(allow_pickle=True)"
        )
    if encoding not in ("json", "pickle"):
        raise CorruptCheckpointError(
            f"'{shown(name)}' has the unknown encoding '{shown(encoding)}'; a newer version may read it"
        )


def _pickled(value: Any, name: str) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise TypeError(f"'{name}' cannot be written to a checkpoint, not even as a pickle: {error}") from error


class _CannotEncode(Exception):
    def __init__(self, value: Any, what: str) -> None:
        super().__init__(what)
        self.value = value


def _place_of(part: Any, value: Any, depth: int) -> str | None:
    """Where in nested dicts and sequences a part of a value is: ``['a'][3]``; None if it is not found."""
    if value is part:
        return ""
    if depth == 0:
        return None
    items: Any = value.items() if isinstance(value, dict) else ()
    if isinstance(value, (list, tuple, collections.deque)):
        items = enumerate(value)
    for key, item in items:
        place = _place_of(part, item, depth - 1)
        if place is not None:
            return f"[{key!r}]{place}"
    return None


class _Encoder:
    def __init__(self, name: str) -> None:
        self.name = name
        self.blobs: list[bytes] = []
        self._num_bytes = 0
        self._platform = get_platform()

    def _store(self, data: bytes) -> list[int]:
        self.blobs.append(data)
        self._num_bytes += len(data)
        return [self._num_bytes - len(data), len(data)]

    def tagged(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if value.bit_length() <= _MAX_BITS else {_TAG: "int", "hex": f"{value:x}"}
        if kind is float:
            return value if math.isfinite(value) else {_TAG: "float", "bits": struct.pack("<d", value).hex()}
        if kind is list:
            return [self.tagged(item) for item in value]
        if kind is dict:
            if all(type(key) is str for key in value) and _TAG not in value:
                return {key: self.tagged(item) for key, item in value.items()}
            return {_TAG: "dict", "items": self._items(value)}
        if kind in (tuple, set, frozenset):
            return {_TAG: kind.__name__, "items": [self.tagged(item) for item in value]}
        if kind is complex:
            return {_TAG: "complex", "bits": struct.pack("<dd", value.real, value.imag).hex()}
        if kind in (bytes, bytearray):
            return {_TAG: kind.__name__, "at": self._store(bytes(value))}
        if kind in (range, slice):
            return {_TAG: kind.__name__, "items": [self.tagged(getattr(value, n)) for n in ("start", "stop", "step")]}
        return self._tagged_rarely(value, kind)

    def _tagged_rarely(self, value: Any, kind: type) -> Any:
        if (kind in _ARRAYS or isinstance(value, np.generic)) and not value.dtype.hasobject:
            array = np.asarray(value)
            tag = "ndarray" if isinstance(value, np.ndarray) else "scalar"
            if array.dtype.names is not None:
                raise _CannotEncode(value, f"a structured numpy array ({array.dtype})")
            return {_TAG: tag, "dtype": array.dtype.str, "shape": list(array.shape), "at": self._store(array.tobytes())}
        if kind is np.ndarray:
            raise _CannotEncode(value, "a numpy array of objects")
        if isinstance(value, self._platform.DTensorBase):
            raise _CannotEncode(
                value,
                "a DTensor inside a tuple or another object (put it into a dict or list, where it is saved sharded)",
            )
        if self._platform.is_tensor(value):
            raw = self._platform.raw_array(value)
            name = self._platform.dtype_name(value.dtype)
            return {_TAG: "tensor", "dtype": name, "shape": list(raw.shape), "at": self._store(raw.tobytes())}
        if kind is collections.OrderedDict:
            return {_TAG: "OrderedDict", "items": self._items(value)}
        if kind is collections.Counter:
            return {_TAG: "Counter", "items": self._items(value)}
        if kind is collections.deque:
            return {_TAG: "deque", "items": [self.tagged(item) for item in value], "maxlen": value.maxlen}
        if kind is collections.defaultdict:
            factory = value.default_factory
            if factory is None or _FACTORIES.get(getattr(factory, "__name__", "")) is factory:
                name = None if factory is None else factory.__name__
                return {_TAG: "defaultdict", "factory": name, "items": self._items(value)}
        if isinstance(value, pathlib.PurePath) and kind.__module__.startswith("pathlib"):
            return {_TAG: "path", "text": str(value)}
        if kind is type(self._platform.list_to_size([])):
            return {_TAG: "size", "items": [int(item) for item in value]}
        if self._platform.is_dtype(value):
            return {_TAG: "dtype", "text": dtype_name(self._platform.dtype_name(value))}
        raise _CannotEncode(value, f"a {kind.__module__}.{kind.__qualname__}")

    def _items(self, value: Any) -> list[Any]:
        return [[self.tagged(key), self.tagged(item)] for key, item in value.items()]


class _Decoder:
    def __init__(self, blobs: bytes) -> None:
        self._blobs = blobs
        self._num_left = len(blobs)  # bytes that no value has had yet
        self._platform = get_platform()

    def _memory(self, tagged: dict[str, Any]) -> bytes:
        start, length = tagged["at"]
        data = self._blobs[start : start + length] if start >= 0 <= length else b""
        if len(data) != length:
            raise ValueError(f"bytes {start} to {start + length} are not there")
        self._num_left -= length
        if self._num_left < 0:
            raise ValueError("the same bytes belong to several values")
        return data

    def plain(self, value: Any) -> Any:
        if type(value) is list:
            return [self.plain(item) for item in value]
        if type(value) is not dict:
            return value
        if _TAG not in value:
            return {key: self.plain(item) for key, item in value.items()}
        return self._of_kind(value[_TAG], value)

    def _array(self, tagged: dict[str, Any]) -> np.ndarray[Any, Any]:
        if not _DTYPE.fullmatch(tagged["dtype"]):
            raise ValueError(f"{shown_value(tagged['dtype'])} is no dtype of numpy")
        data, shape, dtype = self._memory(tagged), _shape(tagged["shape"]), np.dtype(tagged["dtype"])
        count = math.prod(shape)
        if count * dtype.itemsize != len(data) or (dtype.itemsize == 0 and count > _MAX_EMPTY):
            raise ValueError(f"{len(data)} bytes are no array of shape {shape} and dtype {dtype}")
        return np.ndarray(shape, dtype, data).copy()

    def _of_kind(self, kind: str, tagged: dict[str, Any]) -> Any:
        if kind == "int":
            return int(tagged["hex"], 16)
        if kind == "float":
            return struct.unpack("<d", bytes.fromhex(tagged["bits"]))[0]
        if kind == "complex":
            return complex(*struct.unpack("<dd", bytes.fromhex(tagged["bits"])))
        if kind in ("bytes", "bytearray"):
            return self._memory(tagged) if kind == "bytes" else bytearray(self._memory(tagged))
        if kind in ("ndarray", "scalar"):
            array = self._array(tagged)
            return array if kind == "ndarray" else array[()]
        if kind == "tensor":
            data, shape, dtype = self._memory(tagged), _shape(tagged["shape"]), tagged["dtype"]
            if dtype_name(dtype) not in STORABLE_DTYPES or math.prod(shape) * dtype_size(dtype) != len(data):
                raise ValueError(f"{len(data)} bytes are no tensor of shape {shape} and dtype {shown_value(dtype)}")
            tensor = self._platform.new_tensor(shape, tagged["dtype"], "cpu")
            raw = self._platform.raw_array(tensor)
            self._platform.set_raw(tensor, np.frombuffer(data, raw.dtype).reshape(raw.shape))
            return tensor
        if kind == "path":
            return pathlib.Path(tagged["text"])
        if kind == "dtype":
            return self._platform.str_to_dtype(tagged["text"])
        if kind == "size":
            return self._platform.list_to_size(tagged["items"])
        items = [self.plain(item) for item in tagged["items"]]
        if kind in _SEQUENCES:
            if kind != "tuple":
                _check_hashes(items)
            return _SEQUENCES[kind](items)
        if kind == "range":
            return range(*items)
        if kind == "slice":
            return slice(*items)
        if kind == "deque":
            return collections.deque(items, tagged["maxlen"])
        pairs = [(key, item) for key, item in items]
        _check_hashes([key for key, _ in pairs])
        if kind == "dict":
            return dict(pairs)
        if kind == "OrderedDict":
            return collections.OrderedDict(pairs)
        if kind == "Counter":
            return collections.Counter(dict(pairs))
        if kind == "defaultdict":
            factory = None if tagged["factory"] is None else _FACTORIES[tagged["factory"]]
            return collections.defaultdict(factory, pairs)
        raise ValueError(f"unknown tag {kind!r}")


def _shape(sizes: Any) -> tuple[int, ...]:
    if type(sizes) is not list or len(sizes) > MAX_DIMS or not all(type(n) is int and 0 <= n < 1 << 63 for n in sizes):
        raise ValueError(f"{shown_value(sizes)} is no shape")
    return tuple(sizes)


def _check_hashes(keys: list[Any]) -> None:
    if len(keys) > _MAX_ALIKE:
        most = collections.Counter(map(hash, keys)).most_common(1)[0][1]
        if most > _MAX_ALIKE:
            raise ValueError(f"{most} keys have one hash")
