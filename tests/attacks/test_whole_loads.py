"""Loads that fail half-way: the error says what the state holds then, and ``whole=True`` leaves it as it was."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from hyper_parallel import Replicate, Shard, checkpoint, init_device_mesh
from hyper_parallel.core.distributed_checkpoint.base.errors import CheckpointError, CorruptCheckpointError
from hyper_parallel.core.distributed_checkpoint.foreign.safetensors_folder import SafetensorsFolder
from hyper_parallel.core.distributed_checkpoint.planning import held_state
from hyper_parallel.platform import get_platform
from tests.frameworks import distribute_tensor, equal, on_mindspore, ours, same_bits, theirs
from tests.world import run_on_ranks

NOTE = r"The state is now part old, part new: on this rank \d+ of \d+ entries were written to \('.*\)\. Load another"


def damage(path, name):
    """Flip a bit of a tensor or object of a checkpoint."""
    body = json.loads((path / "metadata.json").read_bytes())["body"]
    if name in body["tensors"]:
        number, start = body["tensors"][name]["file"][-1], body["tensors"][name]["start"][-1]
    else:
        number, start = body["objects"][name]["file"], body["objects"][name]["start"]
    file, header, *_ = body["files"][number]
    data = bytearray((path / file).read_bytes())
    data[header + start] ^= 1
    (path / file).write_bytes(data)


class Counter:
    """A value that keeps its own state."""

    def __init__(self):
        self.tensor, self.count, self.num_loads = ours(torch.zeros(3)), 0, 0

    def state_dict(self):
        return {"tensor": self.tensor, "count": self.count}

    def load_state_dict(self, state):
        self.count, self.num_loads = state["count"], self.num_loads + 1


def state_of(value):
    counter = Counter()
    counter.count = value
    return {
        "a": ours(torch.full((50, 3), float(value))),
        "nested": {"b": ours(torch.full((4,), float(value)).bfloat16()), "note": (value, [value])},
        "counter": counter,
        "z": ours(torch.full((7,), float(value))),
        "step": value,
    }


def is_state(state, value):
    wanted = state_of(value)
    return (
        all(equal(state[name], wanted[name]) for name in ("a", "z"))
        and equal(state["nested"]["b"], wanted["nested"]["b"])
        and (state["nested"]["note"], state["step"]) == ((value, [value]), value)
        and state["counter"].count == value
    )


@pytest.mark.parametrize("name", ["a", "nested.b", "z", "step", "nested.note", "counter.tensor", "counter.count"])
def test_a_load_that_fails_changes_nothing_if_it_is_whole(tmp_path, name):
    checkpoint.save(state_of(1), checkpoint_id=tmp_path)
    state = state_of(2)
    checkpoint.load(state, checkpoint_id=tmp_path, whole=True)
    assert is_state(state, 1) and equal(state["counter"].tensor, torch.zeros(3)) and state["counter"].num_loads == 1
    damage(tmp_path, name)
    state = state_of(2)
    with pytest.raises(CorruptCheckpointError, match=r"is damaged: .*Load another checkpoint\. Nothing was changed$"):
        checkpoint.load(state, checkpoint_id=tmp_path, whole=True)
    assert is_state(state, 2) and state["counter"].num_loads == 0
    with pytest.raises(CorruptCheckpointError, match=rf"is damaged: .*Load another checkpoint\. {NOTE}.*whole=True"):
        checkpoint.load(state, checkpoint_id=tmp_path)
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint at"):
        checkpoint.load(state, checkpoint_id=tmp_path / "none", whole=True)


def test_a_disk_that_fails_is_told_of_as_well(tmp_path):
    checkpoint.save(state_of(1), checkpoint_id=tmp_path)

    class Failing(checkpoint.FileSystemReader):
        """Its disk fails after a number of reads."""

        left = 4

        def read_into(self, name, start, target):
            self.left -= 1
            if not self.left:
                raise OSError(5, "Input/output error")
            super().read_into(name, start, target)

    state = state_of(2)
    with pytest.raises(CheckpointError, match=rf"Input/output error\. {NOTE}"):
        checkpoint.load(state, checkpoint_id=tmp_path, storage_reader=Failing())
    state = state_of(2)
    with pytest.raises(OSError, match="Input/output error"):
        checkpoint.load(state, checkpoint_id=tmp_path, storage_reader=Failing(), whole=True)
    assert is_state(state, 2)


def test_objects_that_cannot_be_decoded_or_may_not(tmp_path, monkeypatch):
    state = state_of(1) | {"pickled": np.array([{"a": 1}], object)}
    planner = checkpoint.StandardSavePlanner(allow_pickle=True)
    checkpoint.save(state, checkpoint_id=tmp_path, planner=planner)
    for whole in (False, True):  # Known before anything is read.
        target = state_of(2) | {"pickled": None}
        with pytest.raises(ValueError, match=r"'pickled' was saved as a pickle"):
            checkpoint.load(target, checkpoint_id=tmp_path, whole=whole)
        assert is_state(target, 2)
    monkeypatch.setattr(held_state, "available_memory", lambda: 100)
    with pytest.raises(MemoryError, match=r"whole=True\) needs \d+ bytes of memory on this rank, and its host has 100"):
        checkpoint.load(
            target, checkpoint_id=tmp_path, planner=checkpoint.StandardLoadPlanner(allow_pickle=True), whole=True
        )


class OwnPlanner(checkpoint.StandardLoadPlanner):
    """Takes objects in a way of its own, and plans for all ranks."""

    needs_global_plan = True

    def apply_bytes(self, read_item, value):
        super().apply_bytes(read_item, bytes(value))


def cut_state(value, mesh):
    whole = torch.arange(30.0).reshape(6, 5) + value
    layouts = {"rows": [Shard(0)], "columns": [Shard(1)], "copies": [Replicate()]}
    cut = {name: distribute_tensor(whole, mesh, layout) for name, layout in layouts.items()}
    return cut | {"plain": ours(whole.clone()), "step": value}


def is_cut_state(state, value):
    whole = torch.arange(30.0).reshape(6, 5) + value
    names = ("rows", "columns", "copies")
    return all(equal(state[name].full_tensor(), whole) for name in names) and equal(state["plain"], whole)


@pytest.mark.sweep("mindspore")
@run_on_ranks(2)
def test_no_rank_changes_anything_when_one_of_them_cannot(tmp_path):
    platform = get_platform()
    mesh = init_device_mesh("cpu", (2,))
    checkpoint.save(cut_state(1, mesh), checkpoint_id=tmp_path / "a")
    ways = [
        {},
        {"use_collectives": False},
        {"storage_reader": checkpoint.FileSystemReader(reads_are_dear=True)},  # replicas are traded
        {"planner": OwnPlanner()},
    ]
    for way in ways:
        state = cut_state(2, mesh)
        checkpoint.load(state, checkpoint_id=tmp_path / "a", whole=True, **way)
        assert is_cut_state(state, 1) and state["step"] == 1, way
    platform.barrier()
    for name in ("rows", "copies", "plain", "step"):
        if platform.get_rank() == 0:
            damage(tmp_path / "a", name)
        platform.barrier()
        for way in ways:
            state = cut_state(2, mesh)
            with pytest.raises(CorruptCheckpointError, match="Nothing was changed"):
                checkpoint.load(state, checkpoint_id=tmp_path / "a", whole=True, **way)
            assert is_cut_state(state, 2) and state["step"] == 2, (name, way)
        platform.barrier()
        if platform.get_rank() == 0:
            damage(tmp_path / "a", name)
        platform.barrier()
    state = cut_state(2, mesh)
    if platform.get_rank() == 1:
        state |= {"lacking": None}
    with pytest.raises(CheckpointError, match=r"rank 1: ValueError: the checkpoint lacks 1 .*Nothing was changed"):
        checkpoint.load(state, checkpoint_id=tmp_path / "a", whole=True)
    assert is_cut_state(state, 2)


def trained():
    """A model and its optimizer, of the framework under test; blank moments are made when asked for."""
    if on_mindspore:
        import mindspore
        from mindspore.experimental import optim

        model = mindspore.nn.Dense(4, 3)
        return model, optim.AdamW(model.trainable_params(), lr=0.1)
    model = torch.nn.Linear(4, 3)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def test_optimizers_too(tmp_path):
    saved, loaded = (checkpoint.get_state_dict(*trained()) for _ in range(2))
    checkpoint.save({"model": saved[0], "optimizer": saved[1]}, checkpoint_id=tmp_path)
    target = {"model": loaded[0], "optimizer": loaded[1]}
    names = [f"optimizer.state.{name}.{slot}" for name, slots in loaded[1]["state"].items() for slot in slots]
    before = {name: theirs(value).clone() for name, value in loaded[0].items()}
    assert names and not same_bits(saved[0]["weight"], loaded[0]["weight"])
    damage(tmp_path, names[-1])
    with pytest.raises(CorruptCheckpointError, match="Nothing was changed"):
        checkpoint.load(target, checkpoint_id=tmp_path, whole=True)
    assert all(equal(loaded[0][name], value) for name, value in before.items())
    damage(tmp_path, names[-1])
    checkpoint.load(target, checkpoint_id=tmp_path, whole=True)
    assert all(same_bits(loaded[0][name], value) for name, value in saved[0].items())


# ---------------------------------------------------------------- Hugging Face folders


@pytest.mark.parametrize("cast", [False, True])
def test_weights_of_a_hub(tmp_path, cast):
    written = {f"w{number}": torch.full((1000,), 1.0) for number in range(3)}
    checkpoint.save_hugging_face(ours(written), tmp_path, max_shard_bytes=4000)
    dtype = torch.float16 if cast else torch.float32
    state = {name: ours(torch.full((1000,), 2.0, dtype=dtype)) for name in written}
    checkpoint.load_hugging_face(state, tmp_path, cast=cast, whole=True)
    assert all(equal(value, torch.ones(1000, dtype=dtype)) for value in state.values())

    source = SafetensorsFolder(tmp_path)
    (tmp_path / "model-00003-of-00003.safetensors").write_bytes(b"")
    state = {name: ours(torch.full((1000,), 2.0, dtype=dtype)) for name in written}
    with pytest.raises(CorruptCheckpointError, match=r"model-00003.*ends at byte .*Nothing was changed"):
        checkpoint.load_hugging_face(state, source, cast=cast, whole=True)
    assert all(equal(value, torch.full((1000,), 2.0, dtype=dtype)) for value in state.values())
    with pytest.raises(CorruptCheckpointError, match=rf"model-00003.*{NOTE}.*load_hugging_face\(\.\.\., whole=True\)"):
        checkpoint.load_hugging_face(state, source, cast=cast)
