"""The files of a checkpoint: boxes in them, their sizes, other names of checkpoints, files of others."""

from __future__ import annotations

import contextlib
import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hyper_parallel import checkpoint
from hyper_parallel.core.distributed_checkpoint.storage import file_boxes
from tests.frameworks import ours


@pytest.mark.parametrize(("scratch", "page"), [(1 << 20, 1 << 12), (256, 16), (64, 1)])
def test_boxes_are_read_to_where_they_belong(tmp_path, monkeypatch, scratch, page):
    monkeypatch.setattr(file_boxes, "_SCRATCH", scratch)
    monkeypatch.setattr(file_boxes, "PAGE", page)
    random = np.random.default_rng(0)
    with contextlib.closing(file_boxes.FileBoxes(tmp_path)) as files:
        for number in range(100):
            shape = tuple(random.choice([1, 2, 5, 17], random.integers(0, 5)).tolist())
            values = random.integers(0, 2**16, shape, np.uint16)
            (tmp_path / str(number)).write_bytes(b"head" + values.tobytes())
            offsets = tuple(int(random.integers(size)) for size in shape)
            sizes = tuple(int(random.integers(size - at)) + 1 for at, size in zip(offsets, shape, strict=True))
            expected = values[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
            wide = np.zeros([2 * size for size in sizes], np.uint16)[tuple(slice(None, None, 2) for _ in sizes) or ...]
            for out in (np.zeros(sizes, np.uint16), np.zeros(sizes[::-1], np.uint16).T, wide):
                files.read_box(str(number), 4, shape, offsets, sizes, out)
                assert np.array_equal(out, expected)


def test_the_files_are_safetensors_of_a_limited_size(tmp_path):
    state = {f"w{i}": torch.arange(100.0) + i for i in range(10)} | {"half": torch.ones(3).bfloat16()}
    writer = checkpoint.FileSystemWriter(max_shard_bytes=1000)
    metadata = checkpoint.save(ours(state), checkpoint_id=tmp_path, storage_writer=writer)
    found = {}
    for path in tmp_path.glob("*.safetensors"):
        assert path.stat().st_size < 1000 + 500
        found |= load_file(path)
    assert found.keys() == state.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, state[name])
        assert tensor.dtype == state[name].dtype
    described = metadata.state_dict_metadata["half"]
    assert (described.size, described.properties.dtype, described.num_bytes) == ((3,), "bfloat16", 6)
    (place,) = [place for index, place in metadata.storage_data.items() if index.fqn == "half"]
    assert place.length == 6
    assert checkpoint.read_metadata(tmp_path).state_dict_metadata["half"] == described
    assert json.loads((tmp_path / "metadata.json").read_text())["version"] == 1
    with pytest.raises(ValueError, match="max_shard_bytes must be at least 1"):
        checkpoint.FileSystemWriter(max_shard_bytes=0)


def test_latest_and_keep_last(tmp_path):
    assert checkpoint.latest(tmp_path / "nothing") is None
    for step in (9, 10, 100):
        checkpoint.save({"step": step}, checkpoint_id=tmp_path / f"step-{step}")
    (tmp_path / "step-1000").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert checkpoint.latest(tmp_path) == tmp_path / "step-100"
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-9", "step-10", "step-100"]
    with pytest.raises(ValueError, match="at least 1 checkpoint must be kept"):
        checkpoint.keep_last(tmp_path, 0)
    assert checkpoint.keep_last(tmp_path, 2) == [tmp_path / "step-9"]
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", "step-10", "step-100", "step-1000"]


def test_links_are_other_names_of_checkpoints(tmp_path):
    runs, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    for step in (2, 3, 4):
        checkpoint.save({"s": step}, checkpoint_id=runs / f"step-{step}")
    checkpoint.save({"s": 1}, checkpoint_id=elsewhere)
    (runs / "newest").symlink_to("step-4")
    (runs / "step-1").symlink_to(elsewhere)
    (runs / "loop").symlink_to("loop")
    assert [path.name for path in checkpoint.checkpoints(runs)] == [f"step-{step}" for step in (1, 2, 3, 4)]
    assert [path.name for path in checkpoint.keep_last(runs, 2)] == ["step-1", "step-2"]
    assert sorted(path.name for path in runs.iterdir()) == ["loop", "newest", "step-3", "step-4"]
    assert checkpoint.verify(runs / "newest") == checkpoint.verify(elsewhere) == []


def test_files_of_others_are_left_alone(tmp_path):
    root = tmp_path / "step-1"
    root.mkdir()
    (root / "mine.safetensors").write_text("x")
    sister = tmp_path / "step-0"
    sister.mkdir()
    (sister / "0123456789abcdef0123-r00000-000.safetensors").write_text("copied, the metadata has not come yet")
    (sister / "mine.txt").write_text("x")
    checkpoint.save({"a": 1}, checkpoint_id=root)
    checkpoint.save({"a": 2}, checkpoint_id=root)
    assert (root / "mine.safetensors").exists()
    assert sorted(os.listdir(sister)) == ["0123456789abcdef0123-r00000-000.safetensors", "mine.txt"]
    assert len(list(root.iterdir())) == 3
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="a checkpoint is a directory"):
        checkpoint.save({"a": 1}, checkpoint_id=tmp_path / "file")
