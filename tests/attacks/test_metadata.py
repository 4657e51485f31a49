"""Metadata that a stranger wrote, with right checksums: refused or taken, in bounded time and memory."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from hyper_parallel.core.distributed_checkpoint.base import strict_json
from hyper_parallel.core.distributed_checkpoint.base.checksum import crc32c
from hyper_parallel.core.distributed_checkpoint.base.errors import CorruptCheckpointError
from hyper_parallel.core.distributed_checkpoint.format.index_file import decode_index, encode_index, grid_or_boxes
from hyper_parallel.core.distributed_checkpoint.format.stored_files import read_metadata, verify
from hyper_parallel.core.distributed_checkpoint.tools.rewrite import LayoutsByName, Selection, write_checkpoint
from hyper_parallel.core.distributed_checkpoint.tools.tensor_source import OURS, kind_of, open_source
from tests.attacks.confined import run_confined
from tests.attacks.mutations import damaged_bytes, damaged_data, try_all

only_on = "torch"  # reads files, no framework takes part

_FILE = "0" * 20 + "-r00000-000.safetensors"
_LIMIT = 100 << 20
_REFUSALS = (CorruptCheckpointError, FileNotFoundError)


def framed(body) -> bytes:
    """A metadata file with this body (or its text), and the right checksum."""
    text = body if isinstance(body, str) else json.dumps(body, separators=(",", ":"))
    data = text.encode(errors="surrogatepass")
    start = b'{"format":"hyper-parallel checkpoint","version":1,"crc32c":"%08x","body":' % crc32c(data)
    return start + data + b"}\n"


def body_of(tensors=None, objects=None, data_bytes=0, layouts=()):
    files = [[_FILE, 8, data_bytes, crc32c(bytes(8))]]
    described = {"files": files, "layouts": list(layouts), "tensors": tensors or {}, "objects": objects or {}}
    return {"world_size": 1, "platform": None} | described


def boxed(boxes, shape):
    """A tensor of bytes in boxes that lie one after the other in the file."""
    starts, at = [], 0
    for _, sizes in boxes:
        starts.append(at)
        for size in sizes[1:]:
            sizes = [sizes[0] * size]
        at += sizes[0] if sizes else 1
    count = len(boxes)
    places = {"file": [0] * count, "start": starts, "crc32c": [0] * count}
    return {"dtype": "uint8", "shape": shape, "boxes": boxes} | places, at


def gridded(**changes):
    return {"dtype": "uint8", "shape": [4], "grid": [[0]], "file": [0], "start": [0], "crc32c": [0]} | changes


def layout(**changes):
    mesh = {"device_type": "cpu", "mesh_shape": [1], "mesh_dim_names": None, "rank_list": [0]}
    return mesh | {"cuts": [[]], "partials": [None]} | changes


def bombs():
    """Bodies by name, and whether they are to be refused."""
    strips = [[[0, column], [4000, 1]] for column in range(4000)]
    yield "overlapping boxes", *with_boxes([*strips[:-1], [[0, 0], [4000, 1]]], [4000, 4000]), True
    yield "boxes that cover", *with_boxes(strips, [4000, 4000]), False
    cells = [[list(place), [1] * 12] for place in itertools.product((0, 1), repeat=12)]
    yield "cells of 12 dims", *with_boxes(cells, [2] * 12), False
    moved = [*cells[:-1], cells[0]]
    yield "cells of 12 dims, one twice", *with_boxes(moved, [2] * 12), True
    stairs = [[[row, 0], [1, row + 1]] for row in range(3000)] + [
        [[row, row + 1], [1, 2999 - row]] for row in range(2999)
    ]
    yield "stairs", *with_boxes(stairs, [3000, 3000]), False
    for name, tensor in {
        "many dims": gridded(shape=[2**62] * 100_000, grid=[[0]] * 100_000),
        "many dims of 1": gridded(shape=[1] * 100_000, grid=[[0]] * 100_000),
        "a large grid": gridded(shape=[3000] * 5, grid=[list(range(3000))] * 5),
        "a grid of a large shape": gridded(shape=[2**40, 2**40], grid=[[0], [0]]),
        "no elements, and large": gridded(shape=[0, 2**62, 2**62], grid=[[], [], []], file=[], start=[], crc32c=[]),
        "numbers that are too large": gridded(shape=[10**1000]),
        "a start that is too large": gridded(start=[2**62]),
        "a float": gridded(shape=[4.0]),
        "true": gridded(shape=[True]),
    }.items():
        yield name, body_of({"a": tensor}, data_bytes=4), True
    for name, described in {
        "a large mesh": layout(mesh_shape=[2**62] * 100_000),
        "ranks of a large mesh": layout(mesh_shape=[2**31, 2**31], partials=[None] * 2),
        "a rank twice": layout(mesh_shape=[2], rank_list=[3, 3]),
        "cuts by 100,000 axes": layout(cuts=[[0] * 100_000]),
        "100,000 cuts": layout(cuts=[[]] * 100_000),
    }.items():
        yield name, body_of({"a": gridded(layout=0)}, data_bytes=4, layouts=[described]), True
    plain = json.dumps(body_of({"a": gridded()}, data_bytes=4))
    twins = ",".join(f'"x{number}":1' for number in (*range(100_000), 99_999))
    for name, text in {
        "deep": "[" * 500_000,
        "deep objects": '{"a":' * 200_000,
        "the same name twice": plain.replace('"a": ', '"a": 1, "a": '),
        "100,000 names, one twice": plain.replace('"objects": {}', f'"objects": {{{twins}}}'),
        "not a number": plain.replace('"world_size": 1', '"world_size": NaN'),
        "infinity": plain.replace('"world_size": 1', '"world_size": 1e999'),
        "many digits": plain.replace('"world_size": 1', f'"world_size": {"9" * 100_000}'),
        "a header of a tebibyte": plain.replace("8, 4,", f"{1 << 40}, 4,"),
        "no UTF-8": '"\udcff"',
        "nothing": "",
    }.items():
        yield name, text, True
    yield "names that are no text", plain.replace('"a"', '"\\ud800\\n\\u001b[2J"'), False


def with_boxes(boxes, shape):
    tensor, size = boxed(boxes, shape)
    return (body_of({"a": tensor}, data_bytes=size),)


def read_bombs() -> list[str]:
    """What is wrong with how they are read."""
    problems = []
    for name, body, is_refused in bombs():
        data = framed(body)
        start = time.monotonic()
        try:
            index = decode_index(data, "x")
            list(index.metadata().state_dict_metadata.items())
            refused = False
        except CorruptCheckpointError as error:
            refused = True
            if len(str(error)) > 2000 or not str(error).isprintable():
                problems.append(f"{name}: a message of {len(str(error))} characters")
        took = time.monotonic() - start
        if refused != is_refused or took > 2:
            problems.append(f"{name}: refused {refused} after {took:.1f} s")
    return problems


def test_bodies_that_are_bombs():
    outcome = run_confined(f"{__name__}:read_bombs", seconds=60, mebibytes=100)
    assert outcome.error is None and outcome.value == []


def test_boxes_are_no_grid_of_more_cells_than_there_are_boxes():
    boxes = [((number,) * 6, (1,) * 6) for number in range(1000)]  # a grid of 10**18 cells
    assert grid_or_boxes((1000,) * 6, boxes)[0] is None


def test_what_stands_where_the_metadata_should(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    place = tmp_path / "metadata.json"
    for make, said in (
        (lambda: os.mkfifo(place), "is a FIFO where a file is expected"),
        (lambda: place.symlink_to("/dev/zero"), "is a device where a file is expected"),
        (lambda: place.symlink_to(place), "cannot be a file: Too many levels of symbolic links"),
        (lambda: place.mkdir(), "is a folder where a file is expected"),
        (lambda: (place.touch(), os.truncate(place, 1 << 40)), "and such a file has no more than"),
    ):
        make()
        assert kind_of(tmp_path) == OURS, "and not Hugging Face's"
        with pytest.raises(CorruptCheckpointError, match=said):
            read_metadata(tmp_path)
        with pytest.raises(CorruptCheckpointError, match=said):
            open_source(tmp_path)
        assert said in verify(tmp_path)[0]
        place.rmdir() if place.is_dir() and not place.is_symlink() else place.unlink()
    place.symlink_to("nowhere")
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at"):
        read_metadata(tmp_path)


def test_data_files_that_are_none(tmp_path):
    (tmp_path / "metadata.json").write_bytes(framed(body_of({"a": gridded()}, data_bytes=4)))
    data = tmp_path / _FILE
    for make, said in (
        (lambda: os.mkfifo(data), "has 0 bytes where 12 were written"),
        (lambda: data.symlink_to("/dev/zero"), "has 0 bytes where 12 were written"),
        (lambda: data.mkdir(), "bytes where 12 were written"),
        (lambda: data.symlink_to("nowhere"), "is missing"),
    ):
        make()
        assert any(said in problem for problem in verify(tmp_path))
        data.rmdir() if data.is_dir() and not data.is_symlink() else data.unlink()
    for name in (f"{_FILE}\n", f"../{_FILE}", f"{'0' * 20}-r{'0' * 300}-000.safetensors", "/etc/passwd", "\0"):
        body = body_of({"a": gridded()}, data_bytes=4)
        body["files"][0][0] = name
        with pytest.raises(CorruptCheckpointError, match="is not the name of a data file in the checkpoint"):
            decode_index(framed(body), "x")


def load_large_object(folder: str) -> None:
    """An object of a tebibyte, in a file of that size that takes no room on the disk."""
    path, length = Path(folder), 1 << 40
    stored = {"file": 0, "start": 0, "length": length, "crc32c": 0, "encoding": "json"}
    (path / "metadata.json").write_bytes(framed(body_of(objects={"a": stored}, data_bytes=length)))
    (path / _FILE).touch()
    os.truncate(path / _FILE, length + 8)
    open_source(folder).object_bytes("a")


def test_an_object_that_no_memory_holds(tmp_path):
    outcome = run_confined(f"{__name__}:load_large_object", str(tmp_path))
    assert outcome.error is not None and outcome.error[0] == "MemoryError", outcome
    assert f"has {1 << 40} bytes, and this host has" in outcome.error[1]


def test_a_text_that_no_memory_holds(monkeypatch):
    text = "[" + "[]," * 6_000_000 + "[]]"
    monkeypatch.setattr(strict_json, "available_memory", lambda: 100 << 20)
    with pytest.raises(MemoryError, match=rf"text of {len(text)} bytes may take {40 * len(text)} bytes of memory"):
        strict_json.parse_json(text)
    assert strict_json.parse_json("[]" + " " * 1_000_000) == []


# ---------------------------------------------------------------- by chance


class SampleSource:
    """A few tensors and an object, to be written without a framework."""

    path, index = "sample", None

    def __init__(self):
        self.tensors = {"a": np.arange(12.0).reshape(4, 3), "b": np.arange(10, dtype="u2"), "e": np.empty((0, 3))}

    def known(self):
        names = {"float64": "float64", "uint16": "bfloat16"}
        return {name: (value.shape, names[str(value.dtype)]) for name, value in self.tensors.items()}

    def boxes(self, name):
        return [((0,) * self.tensors[name].ndim, self.tensors[name].shape)]

    def view(self, name, offsets, sizes):
        box = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
        value = self.tensors[name]
        return value.view(f"u{value.itemsize}")[box]

    def objects(self):
        return {"note": ("json", 7)}

    def object_bytes(self, name):
        return b'{"s":3}'


def sample_folder(folder: str) -> Path:
    """A checkpoint with tensors that are cut, an empty one and an object."""
    root = Path(folder) / "sample"
    layouts = LayoutsByName({"dp": 2, "tp": 2}, {"a": ["tp", "None"], "b": ["dp+tp"]})
    write_checkpoint(Selection(SampleSource()), root, layouts_by_name=layouts, max_file_bytes=40)
    return root


def sample_bodies(root: Path) -> list:
    """The body as it is, and with a tensor in boxes that are no grid."""
    body = json.loads((root / "metadata.json").read_bytes())["body"]
    boxes = [[[0, 0], [1, 3]], [[1, 0], [3, 1]], [[1, 1], [3, 2]]]
    tensor, size = boxed(boxes, [4, 3])
    return [body, body_of({"a": tensor}, {}, size, body["layouts"])]


def look_into(data: bytes, root: Path) -> None:
    """Read metadata, and all that is said in it."""
    (root / "metadata.json").write_bytes(data)
    problems = verify(root)
    assert all(problem.isprintable() and len(problem) < 3000 for problem in problems)
    source = open_source(root)
    try:
        encode_index(source.index)
        list(source.index.metadata().storage_data.items())
        for name, (shape, _) in source.known().items():
            source.boxes(name), source.layout(name)
            if not problems and 0 not in shape:
                source.view(name, (0,) * len(shape), shape)
    finally:
        source.close()


def fuzz_content(num: int, folder: str) -> dict[str, int]:
    root = sample_folder(folder)
    bodies = (framed(body) for body in damaged_data(sample_bodies(root), num))
    return try_all(
        bodies, lambda data: look_into(data, root), (CorruptCheckpointError, FileNotFoundError), folder, _LIMIT
    )


def fuzz_bytes(num: int, folder: str) -> dict[str, int]:
    """Half of them with the right checksum of the damaged body."""
    root = sample_folder(folder)
    samples = [framed(body) for body in sample_bodies(root)]
    raw = damaged_bytes(samples, num // 2)
    bodies = [sample[sample.index(b'"body":') + 7 : -2] for sample in samples]
    changed = (framed(body.decode(errors="surrogateescape")) for body in damaged_bytes(bodies, num - num // 2, seed=1))
    inputs = itertools.chain(raw, changed)
    return try_all(
        inputs, lambda data: look_into(data, root), (CorruptCheckpointError, FileNotFoundError), folder, _LIMIT
    )


@pytest.mark.parametrize("fuzz", [fuzz_content, fuzz_bytes])
def test_any_damage_is_harmless_or_found(fuzz, tmp_path, sweep):
    folder = tmp_path / "work"
    folder.mkdir()
    num = 10_000 if sweep else 600
    outcome = run_confined(f"{__name__}:{fuzz.__name__}", num, str(folder), seconds=900 if sweep else 60)
    assert outcome.error is None, outcome.error
    assert outcome.value["taken"] + outcome.value["refused"] == num
    assert outcome.value["refused"] > num // 3
    print(f"{fuzz.__name__}: {outcome.value}, {outcome.grown:.1f} MiB")
