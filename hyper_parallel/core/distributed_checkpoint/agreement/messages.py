"""Messages between ranks that do not go through a process group: JSON with tags, which runs no code when it is read.

Note [What a message may hold]
Plain data (None, bool, int, float, str, bytes, list, tuple, set, dict) and the records below, which are all that ranks
and their writer processes say to each other. A value that JSON lacks is an object whose ``"$"`` names its kind. What
has another tag, other fields than the record, or fields of other types is refused as a whole. A planner's own objects
cannot be sent: where they must be, the ranks have to agree by collectives.

Numpy's numbers arrive as Python's, and a tuple of a kind of its own, such as a framework's shape, as a tuple.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import importlib
import json
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np

from hyper_parallel.core.distributed_checkpoint.base.errors import CheckpointError

MAX_MESSAGE_BYTES = 1 << 28

_TAG, _CONTENT = "$", "is"
_PACKAGE = __name__.rpartition(".")[0].rpartition(".")[0]
_LAYOUT = "hyper_parallel.core.dtensor.layout"
# The records, by the module that they are in.
_RECORDS = {
    f"{_PACKAGE}.agreement.agreement": ("Report",),
    f"{_PACKAGE}.agreement.file_agreement": ("Hello", "Opening"),
    f"{_PACKAGE}.background.writer_links": ("Door",),
    f"{_PACKAGE}.format.shard_file": ("RankReport", "WrittenFile", "WrittenItem"),
    f"{_PACKAGE}.planning.chunks": ("ObjectSpec", "TensorSpec"),
    f"{_PACKAGE}.load": ("Share", "_ReadReport"),
    f"{_PACKAGE}.planning.planner": (
        *("LoadItemType", "LoadPlan", "ReadItem"),
        *("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    ),
    f"{_PACKAGE}.base.metadata": (
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
        *("StoredBytes", "TensorProperties", "TensorStorageMetadata"),
    ),
    _LAYOUT: ("Layout",),
    "hyper_parallel.platform.shared.region": ("Region",),
}
_MODULE_OF = {name: module for module, names in _RECORDS.items() for name in names}
_COLLECTIONS: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}


class MessageError(CheckpointError):
    """A message that no rank has written: damaged, or of something else."""


# ---------------------------------------------------------------- writing


def encode_message(value: Any) -> bytes:
    """The bytes of a message; TypeError for what none may hold, see Note [What a message may hold]."""
    try:
        data = json.dumps(_tagged(value), separators=(",", ":")).encode()
    except RecursionError:
        raise TypeError(
            "a value that contains itself, or is nested too deeply, cannot be sent to other ranks"
        ) from None
    except ValueError as error:  # a number of thousands of digits
        raise TypeError(f"a value cannot be sent to other ranks: {error}") from None
    if len(data) > MAX_MESSAGE_BYTES:
        raise TypeError(
            f"a message of {len(data)} bytes cannot be sent to other ranks: {MAX_MESSAGE_BYTES} are the most"
        )
    return data


def _tagged(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_tagged(item) for item in value]
    if kind is dict:
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: _tagged(item) for key, item in value.items()}
        return {_TAG: "dict", _CONTENT: [[_tagged(key), _tagged(item)] for key, item in value.items()]}
    if _is_record(kind):
        return {_TAG: kind.__name__, _CONTENT: [_tagged(part) for part in _parts(value, kind)]}
    if kind.__name__ in _COLLECTIONS and _COLLECTIONS[kind.__name__] is kind:
        return {_TAG: kind.__name__, _CONTENT: [_tagged(item) for item in value]}
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return _tagged(tuple(value))
    if kind is bytes:
        return {_TAG: "bytes", _CONTENT: base64.b64encode(value).decode()}
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        return value.item()
    raise TypeError(
        f"a {kind.__module__}.{kind.__qualname__} cannot be sent to other ranks without a process group: only plain "
        "data and this library's own records can; leave use_collectives at True, or let the planner use plain data"
    )


def _is_record(kind: type) -> bool:
    module = _MODULE_OF.get(kind.__name__)
    return module is not None and kind.__module__ == module and getattr(sys.modules[module], kind.__name__) is kind


def _parts(value: Any, kind: type) -> Sequence[Any]:
    if issubclass(kind, tuple):
        return tuple(value)
    if issubclass(kind, Enum):
        return (value.value,)
    if dataclasses.is_dataclass(kind):
        return [getattr(value, name) for name in _fields(kind)]
    return (value.to_dict(),)  # a layout


# ---------------------------------------------------------------- reading


def decode_message(data: bytes | bytearray) -> Any:
    """What :func:`encode_message` was given; MessageError for bytes that it has not made."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(f"a message of {len(data)} bytes is refused: {MAX_MESSAGE_BYTES} are the most")
    try:
        return _untagged(json.loads(data))
    except Exception as error:  # Whatever a constructor says to nonsense.
        raise MessageError(
            f"what was read is no message of a rank: {type(error).__name__}: {str(error)[:200]}"
        ) from error


def _untagged(value: Any) -> Any:
    if type(value) is list:
        return [_untagged(item) for item in value]
    if type(value) is not dict:
        return value
    if _TAG not in value:
        return {key: _untagged(item) for key, item in value.items()}
    name, content = value[_TAG], value[_CONTENT]
    if len(value) != 2 or type(name) is not str:
        raise ValueError("a tag without its content")
    if name == "bytes":
        return base64.b64decode(content, validate=True)
    if type(content) is not list:
        raise ValueError(f"no content of a {name}")
    if name == "dict":
        return {_untagged(key): _untagged(item) for key, item in content}
    parts = [_untagged(part) for part in content]
    if name in _COLLECTIONS:
        return _COLLECTIONS[name](parts)
    return _record(name, parts)


def _record(name: str, parts: list[Any]) -> Any:
    if name not in _MODULE_OF:
        raise ValueError(f"unknown tag {name!r}")
    kind: Any = getattr(importlib.import_module(_MODULE_OF[name]), name)
    if _MODULE_OF[name] == _LAYOUT:
        (described,) = parts
        return kind.from_dict(described)
    if issubclass(kind, Enum):
        return kind(*parts)
    hints = _hints(kind)
    if len(parts) != len(hints):
        raise ValueError(f"{len(parts)} fields of a {name}, which has {len(hints)}")
    for (field, hint), part in zip(hints.items(), parts, strict=True):
        if not _fits(part, hint):
            raise ValueError(f"{name}.{field} is a {type(part).__name__}")
    return kind(*parts)


@functools.cache
def _fields(kind: Any) -> tuple[str, ...]:
    return kind._fields if issubclass(kind, tuple) else tuple(field.name for field in dataclasses.fields(kind))


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {name: hints[name] for name in _fields(kind)}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is what a field is annotated with; a list stands for a tuple, and the other way round."""
    if hint is Any:
        return True
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if origin in (list, tuple, Sequence):
        return type(value) in (list, tuple) and all(_fits(item, inner[0]) for item in value)
    if origin in (dict, Mapping):
        return type(value) is dict and all(_fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items())
    return type(value) is hint
