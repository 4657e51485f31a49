"""Checkpoints in torch's form made by hand: pickles opcode by opcode, archives member by member, metadata that lies."""

from __future__ import annotations

import io
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hyper_parallel.core.distributed_checkpoint.base.errors import CorruptCheckpointError
from hyper_parallel.core.distributed_checkpoint.foreign.torch_dcp import TorchCheckpoint

DATA_FILE = "__0_0.distcp"

# ---------------------------------------------------------------- pickles


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return (b"\x8a" + bytes([len(data)]) if len(data) < 256 else b"\x8b" + struct.pack("<I", len(data))) + data


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def called(module: str, name: str, *args: bytes) -> bytes:
    return named(module, name) + b"(" + b"".join(args) + b"tR"


def a_pickle(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


MEMOIZE = b"\x94"


def recalled(place: int) -> bytes:
    return b"j" + struct.pack("<I", place)


# ---------------------------------------------------------------- archives and folders


def an_archive(members: Mapping[str, bytes], method: int = zipfile.ZIP_STORED, comment: bytes = b"") -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", method) as archive:
        warnings.simplefilter("ignore")
        for name, data in members.items():
            archive.writestr(f"archive/{name.rstrip('!')}", data)  # "!": the same name once more
        archive.comment = comment
    return file.getvalue()


def tensor_pickle(shape: Sequence[int], strides: Sequence[int], offset: int = 0, kind: str = "FloatStorage") -> bytes:
    """The data.pkl of a tensor over the storage "0"."""
    sizes, steps = (b"(" + b"".join(map(number, numbers)) + b"t" for numbers in (shape, strides))
    storage = b"(" + text("storage") + named("torch", kind) + text("0") + text("cpu") + number(1) + b"tQ"
    hooks = called("collections", "OrderedDict")
    return a_pickle(called("torch._utils", "_rebuild_tensor_v2", storage, number(offset), sizes, steps, b"\x89", hooks))


def write_checkpoint(
    folder: Path,
    data: bytes = b"",
    *,
    objects: Mapping[str, Any] | None = None,
    tensors: Mapping[str, tuple[Any, Sequence[tuple[Any, Any, Any]]]] | None = None,
) -> None:
    """Write metadata as it is given, by torch's own classes, and a file of data.

    ``objects``: place by name; ``tensors``: (shape, [(offsets, sizes, place)]) by name; a place: (file, start, length).
    """
    import torch
    from torch.distributed.checkpoint import filesystem, metadata

    described: dict[str, Any] = {}
    places = {}
    for name, place in (objects or {}).items():
        described[name] = metadata.BytesStorageMetadata()
        places[metadata.MetadataIndex(name)] = filesystem._StorageInfo(*place)
    for name, (shape, chunks) in (tensors or {}).items():
        properties = metadata.TensorProperties(dtype=torch.float32)
        boxes = [metadata.ChunkStorageMetadata(offsets, sizes) for offsets, sizes, _ in chunks]
        described[name] = metadata.TensorStorageMetadata(properties, shape, boxes)
        for offsets, _, place in chunks:
            index = metadata.MetadataIndex(name)
            object.__setattr__(index, "offset", offsets)
            if place is not None:
                places[index] = filesystem._StorageInfo(*place)
    folder.mkdir(exist_ok=True)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata.Metadata(described, None, places)))
    (folder / DATA_FILE).write_bytes(data)


def write_object(folder: Path, data_pkl: bytes, method: int = zipfile.ZIP_STORED) -> None:
    """A checkpoint with one object, "thing"."""
    data = an_archive({"data.pkl": data_pkl}, method)
    write_checkpoint(folder, data, objects={"thing": (DATA_FILE, 0, len(data))})


def write_tensor(folder: Path, shape: Sequence[int], archive: bytes) -> None:
    """A checkpoint with one tensor of float32 in one chunk, "w"."""
    place = (DATA_FILE, 0, max(len(archive), 4))
    write_checkpoint(folder, archive, tensors={"w": (tuple(shape), [((0,) * len(shape), tuple(shape), place)])})


# ---------------------------------------------------------------- readers, to be run confined


def read_metadata(folder: str) -> list[str]:
    """The names in a checkpoint."""
    source = TorchCheckpoint(folder)
    return [*source.known(), *source.objects()]


def read_object(folder: str, allow_pickle: bool = False) -> str:
    return type(TorchCheckpoint(folder).object_value("thing", allow_pickle)).__name__


def read_as_both(folder: str, other_folder: str) -> list[str]:
    """How two checkpoints are refused: one for its object, one for its metadata."""
    refusals = []
    for read, where in ((read_object, folder), (read_metadata, other_folder)):
        try:
            read(where)
            refusals.append("taken")
        except (ValueError, CorruptCheckpointError) as error:
            refusals.append(f"{type(error).__name__}: {error}")
    return refusals


def read_tensor(folder: str) -> int:
    """The number of elements of "w", all of them read."""
    source = TorchCheckpoint(folder)
    shape, _ = source.known()["w"]
    return source.view("w", (0,) * len(shape), shape).size


def read_all(folder: str) -> None:
    """Everything in a checkpoint: whole tensors and their boxes, and objects. The first error, after all are tried."""
    errors: list[Exception] = []
    source = TorchCheckpoint(folder)
    try:
        for name, (shape, _) in source.known().items():
            _try(errors, lambda name=name, shape=shape: source.view(name, (0,) * len(shape), shape).tobytes())
            for box in source.boxes(name)[:10]:
                _try(errors, lambda name=name, box=box: source.view(name, *box).tobytes())
        for name in source.objects():
            _try(errors, lambda name=name: source.object_value(name))
    finally:
        source.close()
    if errors:
        raise errors[0]


def _try(errors: list[Exception], read: Callable[[], Any]) -> None:
    try:
        read()
    except (ValueError, CorruptCheckpointError) as error:
        errors.append(error)
