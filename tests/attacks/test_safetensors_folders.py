"""Hugging Face folders that a stranger made: clear errors, nothing outside of the folder, nothing waited for."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from hyper_parallel.core.distributed_checkpoint.base.errors import CorruptCheckpointError
from hyper_parallel.core.distributed_checkpoint.foreign import folder_files
from hyper_parallel.core.distributed_checkpoint.foreign.folder_files import FolderPlan, create_file
from hyper_parallel.core.distributed_checkpoint.foreign.safetensors_folder import SafetensorsFolder
from hyper_parallel.core.distributed_checkpoint.storage.aside_folder import AsideFolder
from hyper_parallel.core.distributed_checkpoint.storage.file_names import new_save_name
from hyper_parallel.core.distributed_checkpoint.tools import rewrite
from hyper_parallel.core.distributed_checkpoint.tools.rewrite import Selection, write_folder
from hyper_parallel.core.distributed_checkpoint.tools.tensor_source import SafetensorsSource
from tests.attacks.confined import run_confined
from tests.attacks.mutations import damaged_bytes, damaged_data, try_all
from tests.attacks.test_metadata import SampleSource

only_on = "torch"  # reads files, no framework takes part

_INDEX = "model.safetensors.index.json"
_LIMIT = 100 << 20


def content_of(header, data=b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def sound_folder(folder: Path) -> Path:
    """Two files and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in (1, 2):
        header = {"__metadata__": {"format": "pt"}, f"a{number}": entry([2, 3], 0, 24), f"b{number}": entry([], 24, 28)}
        (folder / f"model-{number}.safetensors").write_bytes(content_of(header, bytes(range(28))))
    weights = {f"{name}{number}": f"model-{number}.safetensors" for name in "ab" for number in (1, 2)}
    (folder / _INDEX).write_text(json.dumps({"metadata": {"total_size": 56}, "weight_map": weights}))
    return folder


# ---------------------------------------------------------------- headers


def read_header_bombs(folder: str) -> list[str]:
    """Files that are not whole, or take more than they are; what is wrong with how they are read."""
    path = Path(folder) / "model.safetensors"
    twins = b",".join(b'"x%d":1' % number for number in (*range(100_000), 99_999))
    problems = []
    for name, content, size in (
        ("a header of a tebibyte", (1 << 40).to_bytes(8, "little"), 2 << 40),
        ("a header of 2 GiB", (2 << 30).to_bytes(8, "little"), 4 << 30),
        ("a header longer than the file", (100).to_bytes(8, "little") + b"{}", None),
        ("the largest number", bytes([255] * 8), None),
        ("7 bytes", b"1234567", None),
        ("nothing", b"", None),
        ("deep", content_of(b"[" * 500_000), None),
        ("deep objects", content_of(b'{"a":' * 500_000), None),
        ("100,000 names, one twice", content_of(b"{" + twins + b"}"), None),
        ("a list", content_of([1]), None),
        ("not a number", content_of(b'{"a":NaN}'), None),
        ("no UTF-8", content_of(b'{"\xff":1}'), None),
        ("many dims", content_of({"a": entry([2**62] * 100_000, 0, 0)}), None),
        ("many dims of 1", content_of({"a": entry([1] * 100_000, 0, 4)}, bytes(4)), None),
        ("a shape of text", content_of({"a": entry("", 0, 4)}, bytes(4)), None),
        ("a shape of truths", content_of({"a": entry([True], 0, 4)}, bytes(4)), None),
        ("a dtype that is none", content_of({"a": entry([1], 0, 4, "F31")}, bytes(4)), None),
        ("a dtype that is a list", content_of({"a": entry([1], 0, 4, [])}, bytes(4)), None),
        ("backwards", content_of({"a": entry([1], 4, 0)}, bytes(4)), None),
        ("bytes at the end", content_of({"a": entry([1], 0, 4)}, bytes(5)), None),
        ("a gap", content_of({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, bytes(12)), None),
        ("one in the other", content_of({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, bytes(8)), None),
        ("more than there is", content_of({"a": entry([1 << 40], 0, 4 << 40)}), None),
    ):
        path.write_bytes(content)
        if size is not None:
            os.truncate(path, size)
        start = time.monotonic()
        try:
            SafetensorsFolder(folder)
            problems.append(f"{name}: taken")
        except CorruptCheckpointError as error:
            if "is not a whole safetensors file" not in str(error) or len(str(error)) > 2000:
                problems.append(f"{name}: {str(error)[:500]}")
        if (took := time.monotonic() - start) > 1:
            problems.append(f"{name}: {took:.1f} s")
    return problems


def test_headers_that_are_bombs(tmp_path):
    outcome = run_confined(f"{__name__}:read_header_bombs", str(tmp_path), seconds=60)
    assert outcome.error is None and outcome.value == []


def test_what_stands_where_a_file_should(tmp_path):
    folder = sound_folder(tmp_path / "hub")
    assert len(SafetensorsFolder(folder).tensors) == 4
    for name in ("model-1.safetensors", _INDEX, "model.safetensors"):
        path = folder / name
        if path.exists():
            path.rename(tmp_path / "kept")
        for make, said in (
            (lambda: os.mkfifo(path), "is a FIFO where a file is expected"),  # noqa: B023 - called at once
            (lambda: path.symlink_to("/dev/zero"), "is a device where a file is expected"),  # noqa: B023
            (lambda: path.mkdir(), "is a folder where a file is expected"),  # noqa: B023
        ):
            make()
            with pytest.raises(CorruptCheckpointError, match=f"{name}' {said}"):
                SafetensorsFolder(folder)
            path.rmdir() if path.is_dir() else path.unlink()
        if (tmp_path / "kept").exists():
            path.symlink_to(shutil.move(tmp_path / "kept", tmp_path / f"blob-{name}"))  # as in the cache of the hub
            assert len(SafetensorsFolder(folder).tensors) == 4


# ---------------------------------------------------------------- indexes


@pytest.mark.parametrize(
    "name",
    ["..", ".", "", "/etc/passwd", "../x.safetensors", "a/b.safetensors", "a\0b", "\ud800", "x" * 256, 5, None, []],
)
def test_an_index_names_files_of_its_folder_only(tmp_path, name):
    folder = sound_folder(tmp_path / "hub")
    (folder / _INDEX).write_text(json.dumps({"weight_map": {"a1": "model-1.safetensors", "a2": name}}))
    with pytest.raises(CorruptCheckpointError, match="names what are no files of its folder: ") as caught:
        SafetensorsFolder(folder)
    assert str(caught.value).isprintable()


def test_indexes_that_are_none(tmp_path):
    folder = sound_folder(tmp_path / "hub")
    texts = ["", "[]", "{}", '{"weight_map":{}}', '{"weight_map":[]}', '{"weight_map":null}', "\xff", "NaN"]
    texts += ["[" * 100_000, '{"weight_map":' * 100_000, '{"weight_map":{"a1":"x","a1":"model-1.safetensors"}}']
    for text in texts:
        (folder / _INDEX).write_text(text, encoding="latin-1")
        with pytest.raises(CorruptCheckpointError, match="is not an index of safetensors files"):
            SafetensorsFolder(folder)
    os.truncate(folder / _INDEX, 1 << 40)
    with pytest.raises(CorruptCheckpointError, match="such a file has no more than 100000000"):
        SafetensorsFolder(folder)
    (folder / _INDEX).write_text(json.dumps({"weight_map": {"a\n\x1b[2J": "model-1.safetensors"}}))
    with pytest.raises(CorruptCheckpointError, match=r"not in their files: 'a\\n\\x1b\[2J'") as caught:
        SafetensorsFolder(folder)
    assert str(caught.value).isprintable()


# ---------------------------------------------------------------- writing


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_full_disk_costs_no_descriptor(tmp_path, monkeypatch):
    plan = FolderPlan({"a": (4,)}, {"a": "float32"}, 1000)

    def full(*args):
        raise OSError(28, "No space left on device")

    before = num_open()
    for name in ("ftruncate", "pwrite"):
        with monkeypatch.context() as patch:
            patch.setattr(folder_files.os, name, full)
            with pytest.raises(OSError, match="No space left"):
                create_file(tmp_path / name, plan, 0)
    with monkeypatch.context() as patch:
        patch.setattr(folder_files.os, "write", full)
        aside = AsideFolder(tmp_path / "hub", new_save_name())
        with pytest.raises(OSError, match=r"cannot write the checkpoint file '.*saving': No space left"):
            aside.make()
        aside.remove()
    assert num_open() == before
    assert sorted(os.listdir(tmp_path)) == ["ftruncate", "pwrite"]


def test_a_save_touches_only_the_weights_that_it_replaces(tmp_path):
    hub = sound_folder(tmp_path / "hub")
    index = json.loads((hub / _INDEX).read_text())
    index["weight_map"]["config"] = "config.json"  # A stranger's index says that this is a file of weights.
    (hub / _INDEX).write_text(json.dumps(index))
    for name in ("config.json", "adapter.safetensors"):
        (hub / name).write_text("mine")
    mine = tmp_path / ".hub.saving"  # the name that saves had before
    mine.mkdir()
    (mine / "0").write_text("mine")
    write_folder(Selection(SampleSource()), hub, max_file_bytes=10_000)
    assert sorted(os.listdir(hub)) == ["adapter.safetensors", "config.json", "model.safetensors"]
    (hub / "other.safetensors").write_text("mine")
    write_folder(Selection(SampleSource()), hub, max_file_bytes=50)
    assert len(SafetensorsFolder(hub).tensors) == 3
    assert not (hub / "model.safetensors").exists(), "readers would take it"
    assert {"adapter.safetensors", "config.json", "other.safetensors"} < set(os.listdir(hub))
    assert (mine / "0").read_text() == "mine"


def test_what_a_killed_save_has_left_goes_with_the_next_one(tmp_path):
    from tests.attacks.test_cleanup import in_a_killed_process  # here: it brings the framework along

    target = tmp_path / "hub"
    for _ in range(2):
        in_a_killed_process(rewrite, "commit_folder", write_folder, Selection(SampleSource()), target)
    (left,) = [name for name in os.listdir(tmp_path) if name != "hub"]  # the second one has removed what the first left
    assert left.startswith(".hub.")
    write_folder(Selection(SampleSource()), target)
    assert os.listdir(tmp_path) == ["hub"]


# ---------------------------------------------------------------- by chance


def look_into(folder: Path) -> None:
    source = SafetensorsSource(folder)
    try:
        for name, (shape, _) in source.known().items():
            for offsets, sizes in source.boxes(name):
                source.view(name, offsets, sizes).tobytes()
                source.read(name, offsets, np.empty(sizes, source.view(name, offsets, sizes).dtype))
            assert 0 in shape or source.view(name, (0,) * len(shape), shape).shape == shape
    finally:
        source.close()


def fuzz_headers(num: int, folder: str) -> dict[str, int]:
    hub = sound_folder(Path(folder) / "hub")
    path = hub / "model-1.safetensors"
    sample = path.read_bytes()
    length = int.from_bytes(sample[:8], "little")
    headers = damaged_data([json.loads(sample[8 : 8 + length])], num // 2)
    contents = (content_of(header, sample[8 + length :]) for header in headers)

    def read(data):
        path.write_bytes(data)
        look_into(hub)

    inputs = itertools.chain(contents, damaged_bytes([sample], num - num // 2))
    return try_all(inputs, read, (CorruptCheckpointError,), folder, _LIMIT)


def fuzz_indexes(num: int, folder: str) -> dict[str, int]:
    hub = sound_folder(Path(folder) / "hub")
    sample = (hub / _INDEX).read_bytes()
    indexes = (json.dumps(index).encode() for index in damaged_data([json.loads(sample)], num // 2))

    def read(data):
        (hub / _INDEX).write_bytes(data)
        look_into(hub)

    inputs = itertools.chain(indexes, damaged_bytes([sample], num - num // 2))
    return try_all(inputs, read, (CorruptCheckpointError, FileNotFoundError), folder, _LIMIT)


@pytest.mark.parametrize("fuzz", [fuzz_headers, fuzz_indexes])
def test_any_damage_is_harmless_or_found(fuzz, tmp_path, sweep):
    folder = tmp_path / "work"
    folder.mkdir()
    num = 10_000 if sweep else 1000
    outcome = run_confined(f"{__name__}:{fuzz.__name__}", num, str(folder), seconds=900 if sweep else 60)
    assert outcome.error is None, outcome.error
    assert outcome.value["taken"] + outcome.value["refused"] == num
    assert min(outcome.value.values()) > num // 50
    print(f"{fuzz.__name__}: {outcome.value}, {outcome.grown:.1f} MiB")
