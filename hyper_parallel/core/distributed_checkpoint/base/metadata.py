"""What a checkpoint says about itself: which tensors it holds, how they are cut into chunks, and which objects.

These are descriptions without any values. How they look as a file is in ``index_file.py``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Shape = tuple[int, ...]

#: The dtypes, by name, that a checkpoint may hold.
STORABLE_DTYPES = frozenset(
    (
        *("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "hifloat8"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool", "bits16", "bits8"),
    )
)
_BYTES_OF_ODD_NAMES = {"bool": 1, "complex32": 4, "half": 2, "float": 4, "double": 8, "short": 2, "int": 4, "long": 8}


def dtype_name(dtype: Any) -> str:
    """``"float32"`` for a framework's float32, for ``"torch.float32"``, and for ``"float32"`` itself."""
    name = dtype if isinstance(dtype, str) else str(dtype)
    return name.rpartition(".")[2].lower()


@functools.lru_cache(maxsize=256)
def dtype_size(dtype: Any) -> int:
    """Bytes per element, read from the name: the bits it states, ``float8_e4m3fn`` and the like included.

    >>> [dtype_size(name) for name in ("float32", "bfloat16", "float8_e4m3fn", "bool", "complex128")]
    [4, 2, 1, 1, 16]
    """
    name = dtype_name(dtype)
    if name in _BYTES_OF_ODD_NAMES:
        return _BYTES_OF_ODD_NAMES[name]
    bits = "".join(_leading_digits(name.lstrip("abcdefghijklmnopqrstuvwxyz")))
    if not bits or int(bits) % 8:
        raise ValueError(f"dtype {name!r} has no whole number of bytes per element, so a checkpoint cannot hold it")
    return int(bits) // 8


def _leading_digits(text: str) -> str:
    return text[: len(text) - len(text.lstrip("0123456789"))]


@dataclass(frozen=True)
class TensorProperties:
    """What a tensor is, besides its shape: its dtype by name, and whether it wants a gradient."""

    dtype: str = "float32"
    requires_grad: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))


@dataclass(frozen=True)
class ChunkStorageMetadata:
    """A box of a tensor that is stored in one piece: where it starts in every dim, and how long it is there."""

    offsets: Shape
    sizes: Shape

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", tuple(self.offsets))
        object.__setattr__(self, "sizes", tuple(self.sizes))


@dataclass(frozen=True)
class MetadataIndex:
    """The name of something stored: an object, a tensor, or the chunk of a tensor that starts at ``offset``.

    ``index`` is the chunk's place in the list of chunks, a hint that does not count for equality.
    """

    fqn: str
    offset: Shape | None = None
    index: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.offset is not None:
            object.__setattr__(self, "offset", tuple(self.offset))


@dataclass
class TensorStorageMetadata:
    """A tensor in a checkpoint. ``layout`` is the one it had when it was saved (``Layout.to_dict``), or None."""

    properties: TensorProperties
    size: Shape
    chunks: Sequence[ChunkStorageMetadata] = field(default_factory=list)
    layout: Mapping[str, Any] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.size) * dtype_size(self.properties.dtype)


@dataclass
class BytesStorageMetadata:
    """An object in a checkpoint: ``encoding`` is "json" (see ``json_state.py``) or "pickle"."""

    encoding: str = "json"
    num_bytes: int | None = None


@dataclass(frozen=True)
class StoredBytes:
    """Where a chunk or an object lies: a file, the bytes in its data section, and their crc32c."""

    file: str
    start: int
    length: int
    crc32c: int


@dataclass
class Metadata:
    """Everything a checkpoint holds, by name.

    ``storage_data`` maps the :class:`MetadataIndex` of a chunk or object to its :class:`StoredBytes`.
    """

    state_dict_metadata: Mapping[str, TensorStorageMetadata | BytesStorageMetadata] = field(default_factory=dict)
    planner_data: Any = None
    storage_data: Mapping[MetadataIndex, StoredBytes] | None = None
    world_size: int | None = None
    version: int | None = None
