"""Descriptions, names, and what can be saved and loaded."""

from __future__ import annotations

import os

import pytest
import torch

from hyper_parallel import Partial, Shard, checkpoint, init_device_mesh
from hyper_parallel.core.distributed_checkpoint.base.metadata import ChunkStorageMetadata, TensorProperties, dtype_size
from hyper_parallel.core.distributed_checkpoint.planning.flatten import flatten
from hyper_parallel.core.distributed_checkpoint.planning.planner import WriteItemType
from tests.frameworks import distribute_tensor, from_local, ours, theirs
from tests.world import run_on_ranks

# ---------------------------------------------------------------- descriptions


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        *(
            (torch.float32, 4),
            (torch.bfloat16, 2),
            (torch.float8_e4m3fn, 1),
            (torch.float8_e8m0fnu, 1),
            (torch.bool, 1),
        ),
        *((torch.int8, 1), (torch.uint16, 2), (torch.complex64, 8), (torch.complex128, 16), ("torch.float64", 8)),
    ],
)
def test_the_size_of_a_write_item_is_that_of_its_chunk(dtype, size):
    chunk, properties = ChunkStorageMetadata((2, 0), (3, 5)), TensorProperties(dtype)
    index = checkpoint.MetadataIndex("w", (2, 0))
    for data in ({"chunk": chunk, "properties": properties, "size": (10, 5)}, None):
        item = checkpoint.WriteItem(index, WriteItemType.TENSOR, data)
        assert item.tensor_storage_size() == (None if data is None else 15 * size)
    assert dtype_size(dtype) == size


def test_a_dtype_of_less_than_a_byte_is_refused():
    with pytest.raises(ValueError, match="'float4_e2m1fn_x2' has no whole number of bytes"):
        dtype_size("float4_e2m1fn_x2")


def test_the_hint_of_an_index_does_not_count():
    index = checkpoint.MetadataIndex
    assert index("a", [1], 3) == index("a", (1,), 4)
    assert hash(index("a", [1], 3)) == hash(index("a", (1,)))
    assert index("a", (1,)) != index("a", (2,))


# ---------------------------------------------------------------- names


def test_names_of_a_nested_state():
    tensor = ours(torch.zeros(1))
    leaves = flatten(
        {"m": {"w": tensor, "meta": {"a": 1}}, "o": [{"s": tensor}, 3], "free": {"x": [1]}, "t": (tensor,)}
    )
    assert {name: leaf.is_tensor for name, leaf in leaves.items()} == {
        "m.w": True,
        "m.meta": False,
        "o.0.s": True,
        "o.1": False,
        "free": False,
        "t": False,
    }
    assert leaves["o.1"].container[leaves["o.1"].place] == 3
    with pytest.raises(ValueError, match=r"two entries of the state dict are both called 'a\.b'"):
        flatten({"a": {"b": tensor}, "a.b": 1})
    with pytest.raises(TypeError, match="the names in a state dict are strings, got 3"):
        flatten({3: tensor})
    with pytest.raises(TypeError, match="a state dict is a dict by name, got a list"):
        flatten([tensor])


# ---------------------------------------------------------------- what can be saved and loaded


class Counter:
    def __init__(self):
        self.tensor, self.count = ours(torch.zeros(2)), 0

    def state_dict(self):
        return {"tensor": self.tensor, "count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]
        self.tensor = state["tensor"]


def test_values_that_keep_their_own_state(tmp_path):
    counter, other = Counter(), Counter()
    counter.tensor = counter.tensor + 3
    counter.count = 5
    checkpoint.save({"counter": counter, "step": 1}, checkpoint_id=tmp_path / "a")
    state = {"counter": other, "step": None}
    checkpoint.load(state, checkpoint_id=tmp_path / "a")
    assert (other.count, theirs(other.tensor).tolist(), state["step"]) == (5, [3, 3], 1)
    assert state["counter"] is other


def test_what_is_no_state_and_no_place(tmp_path):
    for state in (None, 5, [ours(torch.ones(1))]):
        with pytest.raises(TypeError, match=f"a state dict is a dict by name, got a {type(state).__name__}"):
            checkpoint.save(state, checkpoint_id=tmp_path / "x")
        with pytest.raises(TypeError, match="a state dict is a dict by name"):
            checkpoint.load(state, checkpoint_id=tmp_path / "x")
    for call in (checkpoint.save, checkpoint.load):
        with pytest.raises(ValueError, match="the name of a checkpoint is empty"):
            call({"a": 1}, checkpoint_id="")
    checkpoint.save({"a": 1}, checkpoint_id=os.fsencode(tmp_path / "bytes"))
    assert checkpoint.latest(tmp_path) == tmp_path / "bytes"
    (tmp_path / "bytes" / "metadata.json").unlink()
    (tmp_path / "bytes" / "metadata.json").mkdir()
    (problem,) = checkpoint.verify(tmp_path / "bytes")
    assert "metadata.json' is a folder where a file is expected" in problem


def test_clear_errors(tmp_path):
    checkpoint.save({"w": ours(torch.zeros(2, 3)), "step": 1}, checkpoint_id=tmp_path / "a")

    def load(state, **options):
        checkpoint.load(ours(state), checkpoint_id=tmp_path / "a", **options)

    with pytest.raises(ValueError, match=r"lacks 2 of the 3 entries to load: 'v', 'u'. It has 'w', 'step'"):
        load({"w": torch.zeros(2, 3), "v": torch.zeros(1), "u": 3})
    state = ours({"w": torch.ones(2, 3), "v": torch.ones(1), "u": 3})
    load(state, planner=checkpoint.StandardLoadPlanner(allow_partial_load=True))
    assert theirs(state["w"]).sum() == 0 and state["v"].item() == 1 and state["u"] == 3
    with pytest.raises(
        ValueError, match=r"'w' has shape \(2, 3\) and dtype float32 in .*shape \(3, 2\) and dtype float32"
    ):
        load({"w": torch.zeros(3, 2)})
    with pytest.raises(ValueError, match=r"'w' has .* dtype float32 in the checkpoint, but .* dtype float64"):
        load({"w": torch.zeros(2, 3).double()})
    with pytest.raises(ValueError, match="'w' cannot be loaded into: several of its elements are one place in memory"):
        load({"w": torch.zeros(3).expand(2, 3)})
    with pytest.raises(ValueError, match="'w' is a tensor in the checkpoint, but not in"):
        load({"w": None})
    with pytest.raises(ValueError, match="'step' is an object in the checkpoint, but a tensor in"):
        load({"step": torch.zeros(1)})
    with pytest.raises(ValueError, match="'w' cannot be saved: a tensor on the meta device has no values"):
        checkpoint.save({"w": ours(torch.zeros(2, device="meta"))}, checkpoint_id=tmp_path / "b")
    with pytest.raises(ValueError, match="'w' cannot be loaded into: a tensor on the meta device"):
        load({"w": torch.zeros(2, 3, device="meta")})
    mesh = init_device_mesh("cpu", (2,), rank_list=[0, 1], init_backend=False)
    cut = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
    with pytest.raises(ValueError, match=r"'w' is sharded over several ranks .* call save on all ranks"):
        checkpoint.save({"w": cut}, checkpoint_id=tmp_path / "b", no_dist=True)
    assert not (tmp_path / "b").exists()


@run_on_ranks(2)
def test_pending_sums_are_refused(tmp_path):
    mesh = init_device_mesh("cpu", (2,))
    pending = from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(checkpoint.CheckpointError, match=r"'w' is partial .*call reduce_partial\(\)"):
        checkpoint.save({"w": pending}, checkpoint_id=tmp_path / "a")
    checkpoint.save({"w": pending.reduce_partial()}, checkpoint_id=tmp_path / "a")
    with pytest.raises(checkpoint.CheckpointError, match=r"'w' is partial .* before you load"):
        checkpoint.load({"w": pending}, checkpoint_id=tmp_path / "a")
