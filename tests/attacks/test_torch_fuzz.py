"""Thousands of damaged checkpoints of torch's: each is read or refused, in little time and memory; none writes."""

from __future__ import annotations

import collections
import math
import pathlib
import pickle
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.core.distributed_checkpoint.base.errors import CorruptCheckpointError
from hyper_parallel.core.distributed_checkpoint.foreign.torch_pickles.torch_globals import known_global, stored_part
from hyper_parallel.core.distributed_checkpoint.foreign.torch_pickles.torch_metadata import read_metadata
from hyper_parallel.core.distributed_checkpoint.foreign.torch_pickles.torch_pickle import read_pickle
from hyper_parallel.core.distributed_checkpoint.foreign.torch_pickles.torch_plain import check_plain
from tests.attacks.confined import run_confined
from tests.attacks.mutations import damaged_bytes, damaged_data, try_all
from tests.attacks.torch_samples import (
    DATA_FILE,
    MEMOIZE,
    a_pickle,
    an_archive,
    called,
    named,
    number,
    read_all,
    recalled,
    tensor_pickle,
    text,
)

only_on = "torch"  # reads files; PyTorch writes some of them

_HERE = "tests.attacks.test_torch_fuzz"
_LIMIT = 100 << 20
_TWO = struct.pack("<Q", 2)
_MODULE = "torch.distributed.checkpoint.metadata"


def _state() -> dict[str, Any]:
    """Tensors and objects that make torch use every opcode and name that it has for them."""
    import torch

    plain = torch.arange(24.0)
    objects = {
        "plain": (None, True, -5, 1 << 100, 1.5, "text", b"bytes", [1, [2]], {"a": {3: (4,)}}, 300, -70000),
        "sets": ({1, "a"}, frozenset((2, (3, "b"))), collections.Counter("aab"), collections.deque([1], 5)),
        "others": (1j, bytearray(b"x"), range(3), slice(1, None, 2), torch.Size([1, 2]), pathlib.Path("a/b")),
        "dicts": (collections.OrderedDict(a=1), collections.defaultdict(list, b=[2]), torch.nn.ReLU().state_dict()),
    }
    return {
        "whole": plain.reshape(4, 6),
        "turned": plain.reshape(4, 6).t(),
        "odd": plain[:1].expand(24),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "float8": plain.to(torch.float8_e4m3fn),
        "none": torch.zeros(0, 2),
        **objects,
    }


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A checkpoint that torch wrote, and pickles of its parts in other protocols beside it."""
    from torch.distributed import checkpoint as dcp

    folder, state = tmp_path_factory.mktemp("torch") / "real", _state()
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    read_all(str(folder))
    for name, value in state.items():
        for protocol in (2, 3, 4, 5):
            (folder.parent / f"{name}-{protocol}.pkl").write_bytes(pickle.dumps(value, protocol))
    return folder


def _run(function: str, real, tmp_path, num: int) -> dict[str, int]:
    (tmp_path / "work").mkdir()
    outcome = run_confined(
        f"{_HERE}:{function}", str(real), str(tmp_path / "work"), num, seconds=60 + num / 20, mebibytes=200
    )
    assert outcome.error is None, outcome.error
    assert sum(outcome.value.values()) == num and outcome.value["refused"] > num / 10
    return outcome.value


def _try(inputs: Any, read: Any, folder: str) -> dict[str, int]:
    return try_all(inputs, read, (CorruptCheckpointError, ValueError), folder, _LIMIT)


# ---------------------------------------------------------------- bytes of the metadata


def damage_metadata(real: str, folder: str, num: int) -> dict[str, int]:
    (Path(folder) / DATA_FILE).write_bytes((Path(real) / DATA_FILE).read_bytes())
    whole = (Path(real) / ".metadata").read_bytes()

    def read(data: bytes) -> None:
        (Path(folder) / ".metadata").write_bytes(data)
        read_all(folder)

    return _try(damaged_bytes([whole, _made_by_hand()], num), read, folder)


def _made_by_hand() -> bytes:
    """A pickle with the opcodes and names that metadata does not have."""
    return a_pickle(
        b"(",
        b"]\x94(K\1M\1\1J\1\1\1\1" + number(1 << 70) + b"G" + struct.pack(">d", 1.5) + b"NN\x88\x89e",
        b"}\x94(" + text("a") + b"j\0\0\0\0" + text("b") + b"C\2xyB\2\0\0\0xy\x86u",
        b"\x8f\x94(K\1K\2\x90(K\3\x91"
        + b"\x8d"
        + struct.pack("<Q", 2)
        + b"xy"
        + b"\x8e"
        + struct.pack("<Q", 2)
        + b"xy",
        b"\x96" + struct.pack("<Q", 2) + b"xyr\3\0\0\0q\4h\4)\x85\x86\x87" + b"cbuiltins\nset\n](K\1e\x85R",
        called("collections", "OrderedDict") + b"}" + text("_metadata") + b"Nsb",
        called("collections", "deque", b")", number(3)) + b"K\1a",
        called("collections", "defaultdict", named("builtins", "list")) + b"K\1]s",
        called("collections", "Counter", b"}K\1K\2s"),
        called("pathlib", "PosixPath", text("a"), text("b")),
        called("_codecs", "encode", text("\xff"), text("latin1")),
        called("builtins", "range", b"K\1", b"K\5", b"K\1"),
        called("builtins", "complex", *(b"G" + struct.pack(">d", 1.5),) * 2),
        called(_MODULE, "_MEM_FORMAT_ENCODING", b"K\0") + named(_MODULE, "StorageMeta") + b")\x81}b",
        b"\x95" + struct.pack("<Q", 5) + b"t",
    )


def test_damaged_metadata(real, tmp_path, sweep):
    assert len(read_pickle(_made_by_hand(), known_global)) > 15
    _run("damage_metadata", real, tmp_path, 10_000 if sweep else 250)


# ---------------------------------------------------------------- bytes of archives


def damage_data(real: str, folder: str, num: int) -> dict[str, int]:
    (Path(folder) / ".metadata").write_bytes((Path(real) / ".metadata").read_bytes())
    whole = (Path(real) / DATA_FILE).read_bytes()

    def read(data: bytes) -> None:
        (Path(folder) / DATA_FILE).write_bytes(data)
        read_all(folder)

    return _try(damaged_bytes([whole], num), read, folder)


def test_damaged_archives(real, tmp_path, sweep):
    _run("damage_data", real, tmp_path, 10_000 if sweep else 250)


def damage_pickles(real: str, folder: str, num: int) -> dict[str, int]:
    """Pickles of objects and tensors, in archives that are whole."""
    samples = [path.read_bytes() for path in sorted(Path(real).parent.glob("*.pkl"))] + [_made_by_hand()]
    assert len(samples) > 30

    def read(data: bytes) -> None:
        archive = an_archive({"data.pkl": data})
        place = {"name": "thing", "at": None, "file": DATA_FILE, "start": 0, "length": len(archive)}
        (Path(folder) / ".metadata").write_bytes(_metadata({"objects": ["thing"], "places": [place]}))
        (Path(folder) / DATA_FILE).write_bytes(archive)
        read_all(folder)

    return _try(damaged_bytes(samples, num), read, folder)


def test_damaged_pickles_of_objects(real, tmp_path, sweep):
    _run("damage_pickles", real, tmp_path, 10_000 if sweep else 250)


# ---------------------------------------------------------------- what metadata says


def _emitted(value: Any) -> bytes:
    if isinstance(value, bool) or value is None:
        return {True: b"\x88", False: b"\x89", None: b"N"}[value]
    if isinstance(value, int):
        return number(value)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        return b"}(" + b"".join(_emitted(key) + _emitted(item) for key, item in value.items()) + b"u"
    return b"(" + b"".join(map(_emitted, value)) + b"t"


def _record(kind: str, fields: dict[str, bytes]) -> bytes:
    module = _MODULE.replace("metadata", "filesystem") if kind == "_StorageInfo" else _MODULE
    return named(module, kind) + b")\x81}(" + b"".join(text(key) + value for key, value in fields.items()) + b"ub"


def _of(entry: Any, key: str) -> Any:
    return entry.get(key) if isinstance(entry, dict) else entry


def _metadata(described: Any) -> bytes:
    """Metadata that says what is described, wrong as it may be."""
    tensors = b"".join(text(name) + _record("BytesStorageMetadata", {}) for name in described.get("objects", ()))
    for name, entry in described.get("tensors", {}).items() if isinstance(described.get("tensors", {}), dict) else ():
        properties = named(_MODULE, "TensorProperties") + b")\x81" + named("torch", "float32") + b"\x85b"
        boxes = _of(entry, "chunks")
        chunks = b"".join(
            _record("ChunkStorageMetadata", {"offsets": _emitted(_of(box, "at")), "sizes": _emitted(_of(box, "sizes"))})
            for box in (boxes if isinstance(boxes, list) else ())
        )
        size = _emitted(_of(entry, "shape"))
        fields = {"properties": properties, "size": size, "chunks": b"](" + chunks + b"e"}
        tensors += text(name) + _record("TensorStorageMetadata", fields)
    places = b""
    for place in described.get("places", []) if isinstance(described.get("places", []), list) else ():
        index = {"fqn": _emitted(_of(place, "name")), "offset": _emitted(_of(place, "at"))}
        keys = {"relative_path": "file", "offset": "start", "length": "length"}
        stored = {key: _emitted(_of(place, ours)) for key, ours in keys.items()}
        places += _record("MetadataIndex", index) + _record("_StorageInfo", stored)
    fields = {"state_dict_metadata": b"}(" + tensors + b"u", "storage_data": b"}(" + places + b"u"}
    return a_pickle(_record("Metadata", fields))


def damage_content(real: str, folder: str, num: int) -> dict[str, int]:
    boxes = [("w", (0, 0), (2, 6)), ("w", (2, 0), (2, 3)), ("w", (2, 3), (2, 3)), ("s", (), ())]
    tensors: dict[str, Any] = {"w": {"shape": [4, 6], "chunks": []}, "s": {"shape": [], "chunks": []}}
    places, content = [], b""
    for name, at, sizes in boxes:
        strides = (sizes[1], 1) if sizes else ()
        archive = an_archive({"data.pkl": tensor_pickle(sizes, strides), "data/0": bytes(4 * math.prod(sizes))})
        tensors[name]["chunks"].append({"at": list(at), "sizes": list(sizes)})
        place = {"name": name, "at": list(at), "file": DATA_FILE, "start": len(content), "length": len(archive)}
        places.append(place)
        content += archive
    (Path(folder) / DATA_FILE).write_bytes(content)
    sample = {"tensors": tensors, "places": places}
    (Path(folder) / ".metadata").write_bytes(_metadata(sample))
    read_all(folder)

    def read(described: Any) -> None:
        data = _metadata(described) if isinstance(described, dict) else b""
        (Path(folder) / ".metadata").write_bytes(data)
        read_all(folder)

    return _try(damaged_data([sample], num), read, folder)


def test_metadata_that_says_other_things(real, tmp_path, sweep):
    _run("damage_content", real, tmp_path, 10_000 if sweep else 250)


# ---------------------------------------------------------------- opcodes in any order

_NAMES = (
    *(("collections", name) for name in ("OrderedDict", "defaultdict", "Counter", "deque")),
    *(("builtins", name) for name in ("set", "frozenset", "complex", "bytes", "bytearray", "range", "slice", "list")),
    *(("torch", name) for name in ("Size", "float32", "FloatStorage")),
    *(("torch._utils", name) for name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")),
    *((_MODULE, name) for name in ("Metadata", "MetadataIndex", "TensorProperties", "_MEM_FORMAT_ENCODING")),
    *(("_codecs", "encode"), ("pathlib", "PosixPath"), ("torch.serialization", "_get_layout")),
)
_LEAVES = (
    *(b"N", b"\x88", b"K\1", number(-5), number(1 << 70), b"G" + struct.pack(">d", 1.5), b"C\1x", b"]", b"}", b")"),
    *(b"\x8f", *map(text, ("a", "latin1", "storage", "fqn", "offset", "chunks", "_metadata", "state_dict_metadata"))),
)
_OPCODES = tuple(bytes([code]) for code in b"RRR\x81\x81bbbt\x85\x86\x87aesu\x90\x91Q\x93((")


def run_programs(real: str, folder: str, num: int) -> dict[str, int]:
    draw = random.Random(0)

    def program() -> bytes:
        parts, num_kept = [], 0
        for _ in range(draw.randrange(1, 60)):
            kind = draw.randrange(10)
            if kind == 0:
                parts.append(MEMOIZE)
                num_kept += 1
            elif kind == 1 and num_kept:
                parts.append(recalled(draw.randrange(num_kept)))
            else:
                parts.append(named(*draw.choice(_NAMES)) if kind == 2 else draw.choice((_LEAVES, _OPCODES)[kind % 2]))
        return a_pickle(*parts)

    def read(data: bytes) -> None:
        try:
            read_metadata(data)
        except ValueError:
            value = read_pickle(data, known_global, draw.choice((None, stored_part)))
            check_plain(value, len(data))
            repr(value)

    return _try((program() for _ in range(num)), read, folder)


def test_opcodes_in_any_order(real, tmp_path, sweep):
    _run("run_programs", real, tmp_path, 10_000 if sweep else 2_000)
