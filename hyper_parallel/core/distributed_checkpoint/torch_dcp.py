"""Checkpoints that torch.distributed.checkpoint wrote, read without PyTorch and without running what is in pickles.

Such a checkpoint is a pickle of its metadata and files of tensors as ``torch.save`` writes them. Both are read by an
unpickler that knows the few classes that belong there and refuses all others, so a file cannot make this program run
code of its own. Objects that are more than plain data are loaded only when asked, by the pickle module itself.
"""

from __future__ import annotations

import collections
import io
import mmap
import os
import pathlib
import pickle
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hyper_parallel.core.distributed_checkpoint.chunks import Box, overlap
from hyper_parallel.core.distributed_checkpoint.errors import CorruptCheckpointError
from hyper_parallel.core.distributed_checkpoint.metadata import dtype_name, dtype_size
from hyper_parallel.core.distributed_checkpoint.stored_files import RAW_DTYPES

METADATA_FILE = ".metadata"

_PLAIN = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("collections", "Counter"): collections.Counter,
    ("collections", "deque"): collections.deque,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "complex"): complex,
    ("builtins", "bytearray"): bytearray,
    ("builtins", "range"): range,
    ("builtins", "slice"): slice,
    ("builtins", "dict"): dict,
    ("builtins", "list"): list,
    ("builtins", "int"): int,
    ("torch", "Size"): tuple,
}
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


class UnsafePickle(ValueError):
    """A pickle holds something that is not plain data."""


class _Record:
    """Stands in for one of torch's classes: what it was made with, as attributes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.__dict__.update(kwargs)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state

    # Indices are the keys of a dict: they are put in before they have their attributes, and only looped over.


class _StoragePart(NamedTuple):
    key: str
    dtype: str | None


class _TensorPart(NamedTuple):
    storage: _StoragePart
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class _Dtype(str):
    """The name of a dtype."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module.startswith("torch.distributed.checkpoint.") and name in _RECORDS:
            return _Record
        if module == "pathlib" and name.endswith(("Path", "PosixPath", "WindowsPath")):
            return pathlib.PurePosixPath
        if module == "torch" and name in _STORAGE_DTYPES:
            return _Dtype(_STORAGE_DTYPES[name])
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return _Dtype("uint8")
        if (module, name) == ("torch.serialization", "_get_layout"):
            return str
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_v2
        if (module, name) == ("torch._utils", "_rebuild_tensor_v3"):
            return _rebuild_v3
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda data, *_: data
        if module == "torch" and _is_dtype(name):
            return _Dtype(name)
        raise UnsafePickle(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        kind, storage_type, key, _, _ = pid
        if kind != "storage":
            raise UnsafePickle(f"a persistent {kind}")
        return _StoragePart(key, str(storage_type))


def _rebuild_v2(storage: Any, offset: int, shape: Any, strides: Any, *_: Any) -> _TensorPart:
    return _TensorPart(storage, offset, tuple(shape), tuple(strides), storage.dtype)


def _rebuild_v3(
    storage: Any, offset: int, shape: Any, strides: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> Any:
    return _TensorPart(storage, offset, tuple(shape), tuple(strides), str(dtype))


def _is_dtype(name: str) -> bool:
    try:
        return dtype_size(name) > 0
    except ValueError:
        return False


class _Chunk(NamedTuple):
    box: Box
    file: str
    offset: int
    length: int


class _Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    chunks: list[_Chunk]


def _checked_place(name: str, place: Any) -> Any:
    if getattr(place, "transform_descriptors", None):
        raise ValueError(f"'{name}' is stored transformed ({place.transform_descriptors})")
    if os.path.basename(place.relative_path) != place.relative_path:
        raise ValueError(f"'{name}' is in the file '{place.relative_path}', outside of the checkpoint's folder")
    if not all(type(number) is int and number >= 0 for number in (place.offset, place.length)):
        raise ValueError(f"'{name}' is at {place.offset} with length {place.length} of its file")
    return place


class TorchCheckpoint:
    """A checkpoint of torch's, opened for reading: the same face as our own in ``tensor_source.py``."""

    kind = "torch"

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder)
        self._maps: dict[str, memoryview] = {}
        self._tensors: dict[str, _Tensor] = {}
        self._objects: dict[str, Any] = {}
        path = self.path / METADATA_FILE
        try:
            metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
            self._take(metadata)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"there is no torch checkpoint at '{self.path}': it has no {METADATA_FILE}"
            ) from None
        except UnsafePickle as error:
            raise CorruptCheckpointError(
                f"'{path}' names {error}, which does not belong into the metadata of a checkpoint; it is not loaded"
            ) from None
        except Exception as error:
            raise CorruptCheckpointError(f"'{path}' is not the metadata of a torch checkpoint: {error!r}") from error

    def _take(self, metadata: Any) -> None:
        places: dict[tuple[str, Any], Any] = {}
        for index, place in metadata.storage_data.items():
            offset = getattr(index, "offset", None)
            places[index.fqn, None if offset is None else tuple(offset)] = place
        for name, described in metadata.state_dict_metadata.items():
            if not hasattr(described, "properties"):
                self._objects[name] = _checked_place(name, places[name, None])
                continue
            chunks = []
            for chunk in described.chunks:
                box = tuple(chunk.offsets), tuple(chunk.sizes)
                place = _checked_place(name, places[name, box[0]])
                chunks.append(_Chunk(box, place.relative_path, place.offset, place.length))
            dtype = dtype_name(str(described.properties.state[0]))
            self._tensors[name] = _Tensor(dtype, tuple(described.size), chunks)

    # ---------------------------------------------------------------- what a source has

    def known(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """(shape, dtype) of each tensor."""
        return {name: (tensor.shape, tensor.dtype) for name, tensor in self._tensors.items()}

    def num_chunks(self, name: str) -> int:
        return len(self._tensors[name].chunks)

    def layout(self, name: str) -> None:
        return None

    def objects(self) -> dict[str, tuple[str, int]]:
        """(encoding, bytes) of each object."""
        return {name: ("torch pickle", place.length) for name, place in self._objects.items()}

    def boxes(self, name: str) -> list[Box]:
        """The stored chunks."""
        return [chunk.box for chunk in self._tensors[name].chunks]

    def view(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> np.ndarray[Any, Any]:
        """The bits of a box of a tensor, by reference where it lies in one chunk."""
        tensor = self._tensors[name]
        return view_of_boxes(
            RAW_DTYPES[dtype_size(tensor.dtype)],
            (tuple(offsets), tuple(sizes)),
            ((chunk.box, lambda chunk=chunk: self._chunk(name, tensor, chunk)) for chunk in tensor.chunks),
        )

    def object_value(self, name: str, allow_pickle: bool = False) -> Any:
        """An object. Plain data is decoded; for all else pickle is needed, and must be allowed."""
        place = self._objects[name]
        try:
            archive = self._archive(place.relative_path, place.offset, place.length)
            data = archive.read(_member(archive, "data.pkl"))
            return pickle.loads(data) if allow_pickle else _Unpickler(io.BytesIO(data)).load()
        except UnsafePickle as error:
            raise ValueError(
                f"'{name}' of '{self.path}' holds {error}: to load it runs whatever code the pickle contains, which "
                "must be allowed"
            ) from None
        except CorruptCheckpointError:
            raise
        except Exception as error:  # A pickle can raise anything.
            where = self.path / place.relative_path
            raise CorruptCheckpointError(f"the object '{name}' in '{where}' cannot be loaded: {error!r}") from error

    def close(self) -> None:
        self._maps.clear()

    # ---------------------------------------------------------------- files

    def _chunk(self, name: str, tensor: _Tensor, chunk: _Chunk) -> np.ndarray[Any, Any]:
        where = f"'{name}' at {list(chunk.box[0])} in '{self.path / chunk.file}'"
        try:
            archive = self._archive(chunk.file, chunk.offset, chunk.length)
            part = _Unpickler(io.BytesIO(archive.read(_member(archive, "data.pkl")))).load()
            start, length = _place_in(
                archive, _member(archive, f"data/{part.storage.key}"), self._map(chunk.file), chunk
            )
            raw = RAW_DTYPES[dtype_size(tensor.dtype)]
            if part.shape != chunk.box[1] or dtype_size(part.dtype) != raw.itemsize:
                raise ValueError(f"it has shape {part.shape} and dtype {part.dtype}, unlike the metadata")
            flat = np.frombuffer(self._map(chunk.file)[start : start + length], raw)[part.offset :]
            needed = 1 + sum((size - 1) * stride for size, stride in zip(part.shape, part.strides, strict=True))
            if min(part.offset, *part.strides, *part.shape, 0) < 0 or (0 not in part.shape and needed > len(flat)):
                raise ValueError("it is cut short")
            strides = [stride * raw.itemsize for stride in part.strides]
            return np.lib.stride_tricks.as_strided(flat, part.shape, strides, writeable=False)
        except CorruptCheckpointError:
            raise
        except Exception as error:  # Damaged archives and pickles can raise anything.
            raise CorruptCheckpointError(f"{where} is not a tensor that torch wrote: {error!r}") from error

    def _map(self, name: str) -> memoryview:
        if name not in self._maps:
            path = self.path / name
            try:
                with open(path, "rb") as file:
                    self._maps[name] = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            except FileNotFoundError:
                raise CorruptCheckpointError(f"'{path}' is missing") from None
        return self._maps[name]

    def _archive(self, file: str, offset: int, length: int) -> zipfile.ZipFile:
        view = self._map(file)[offset : offset + length]
        if len(view) != length:
            raise CorruptCheckpointError(f"'{self.path / file}' is cut short")
        return zipfile.ZipFile(_ViewFile(view))  # type: ignore[arg-type]


class _ViewFile(io.RawIOBase):
    """A file over memory, without a copy of it."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, len(self._view))[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        end = len(self._view) if size is None or size < 0 else self._at + size
        data = bytes(self._view[self._at : end])
        self._at += len(data)
        return data


def _member(archive: zipfile.ZipFile, ending: str) -> str:
    (name,) = [name for name in archive.namelist() if name.partition("/")[2] == ending]
    return name


def _place_in(archive: zipfile.ZipFile, member: str, view: memoryview, chunk: _Chunk) -> tuple[int, int]:
    """Where the bytes of a stored member lie in the file."""
    found = archive.getinfo(member)
    if found.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{member} is compressed")
    header = chunk.offset + found.header_offset
    name_length = int.from_bytes(view[header + 26 : header + 28], "little")
    extra_length = int.from_bytes(view[header + 28 : header + 30], "little")
    return header + 30 + name_length + extra_length, found.file_size


def view_of_boxes(
    dtype: np.dtype[Any], box: Box, chunks: Iterator[tuple[Box, Callable[[], np.ndarray[Any, Any]]]]
) -> np.ndarray[Any, Any]:
    """The bits of a box that is spread over chunks: a view when one chunk has it all, else a copy."""
    offsets, sizes = box
    result: np.ndarray[Any, Any] | None = None
    filled = 0
    for chunk, read in chunks:
        shared = overlap(chunk, box) if 0 not in sizes else None
        if shared is None:
            continue
        part = read()[tuple(slice(a - c, a - c + n) for a, c, n in zip(shared[0], chunk[0], shared[1], strict=True))]
        if shared == box:
            return part
        if result is None:
            result = np.empty(sizes, dtype)
        result[tuple(slice(a - o, a - o + n) for a, o, n in zip(shared[0], offsets, shared[1], strict=True))] = part
        filled += part.size
    if result is None:
        result = np.empty(sizes, dtype)
    if filled != result.size:
        raise CorruptCheckpointError(f"the chunks do not cover the box at {list(offsets)} of size {list(sizes)}")
    return result
