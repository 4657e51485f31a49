"""What torch.distributed.checkpoint writes is read: all dtypes and orders of elements, objects, tensors on meshes."""

from __future__ import annotations

import collections
import datetime
import pathlib

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as dcp

from hyper_parallel import checkpoint as ckpt
from hyper_parallel.core.distributed_checkpoint.base.errors import CorruptCheckpointError
from hyper_parallel.core.distributed_checkpoint.foreign.torch_dcp import TorchCheckpoint

only_on = "torch"  # its own checkpoints, which PyTorch writes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.complex128, torch.complex64, torch.complex32, torch.bool),
)


def _save(folder, state) -> TorchCheckpoint:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return TorchCheckpoint(folder)


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def _tensors() -> dict[str, torch.Tensor]:
    plain = torch.arange(24.0)
    by_dtype = {str(dtype): torch.arange(6).to(dtype).reshape(2, 3) for dtype in _DTYPES}
    return by_dtype | {
        "turned": plain.reshape(4, 6).t(),
        "permuted": plain.reshape(2, 3, 4).permute(2, 0, 1),
        "channels last": torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "ones between": plain.reshape(1, 6, 1, 4).transpose(0, 3),
        "a part": plain.reshape(4, 6)[1:3, 2:5],
        "every second": plain[::2],
        "repeated": plain[:1].expand(5),
        "repeated in a storage of its size": plain[:1].expand(24),
        "windows in a storage of their size": torch.arange(4.0).as_strided((2, 2), (1, 1)),
        "one number": torch.tensor(3.0),
        "nothing": torch.zeros(0, 4),
        "parameter": torch.nn.Parameter(torch.ones(3)),
    }


def test_every_dtype_and_order_of_elements(tmp_path):
    tensors = _tensors()
    source = _save(tmp_path / "c", tensors)
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        assert source.known()[name] == (shape, str(tensor.dtype).removeprefix("torch.")), name
        assert source.view(name, (0,) * len(shape), shape).tobytes() == _bits(tensor), name
        if tensor.numel() > 1:
            offsets = tuple(min(1, size - 1) for size in shape)
            sizes = tuple(size - at for size, at in zip(shape, offsets, strict=True))
            part = tensor[tuple(slice(at, None) for at in offsets)]
            assert source.view(name, offsets, sizes).tobytes() == _bits(part), name
    state = {name: torch.full_like(tensor, 1) for name, tensor in tensors.items() if tensor.is_contiguous()}
    ckpt.load_torch(state, tmp_path / "c")
    assert all(_bits(tensor) == _bits(tensors[name]) for name, tensor in state.items())


def test_a_conjugated_tensor_is_refused_and_not_read_wrong(tmp_path):
    source = _save(tmp_path, {"z": torch.tensor([1 + 2j]).conj()})
    with pytest.raises(
        CorruptCheckpointError, match=r"'z' at \[0\] in '.*__0_0.distcp' cannot be read without torch.*conj"
    ):
        source.view("z", (0,), (1,))


_OBJECTS = {
    "plain": (None, True, False, -5, 300, 1 << 100, -(1 << 70), 1.5, float("inf"), "text", "\u00fc\ud800", [1, [2]]),
    "bytes": (b"x\xff", b"", bytearray(b"y")),
    "sets": ({1, 2}, set(), frozenset("ab"), frozenset()),
    "numbers": (1 + 2j, range(1, 9, 2), slice(1, None, 2)),
    "dicts": ({(1, "a"): 2, 1.5: 3, None: 4, 1 << 100: 5}, collections.OrderedDict(a=1), collections.Counter("aab")),
    "defaults": tuple(collections.defaultdict(kind, a=kind()) for kind in (list, dict, set, int, float, str, tuple)),
    "deques": (collections.deque([1, 2], maxlen=5), collections.deque([1])),
    "torch's": (torch.Size([1, 2]), torch.Size([])),
    "long": (list(range(5000)), {place: str(place) for place in range(3000)}, [[1, 2]] * 3),
    "nested": ({"a": [1, (2, {3})]},),
}


def _kinds(value):
    if isinstance(value, (list, tuple)):
        return (tuple if isinstance(value, tuple) else list), [_kinds(part) for part in value]
    return type(value), getattr(value, "default_factory", getattr(value, "maxlen", None))


def test_objects(tmp_path):
    source = _save(tmp_path, {**_OBJECTS, "path": pathlib.Path("a/b"), "module": (torch.nn.ReLU().state_dict(),)})
    for name, value in _OBJECTS.items():
        found = source.object_value(name)
        assert found == value and _kinds(found) == _kinds(value), name
        assert source.object_value(name, allow_pickle=True) == value
    assert source.object_value("path") == pathlib.PurePosixPath("a/b")
    assert source.object_value("module")[0]._metadata == {"": {"version": 1}}


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (torch.float32, "torch.float32"),
        ((torch.float32,), "torch.float32"),
        (torch.device("cpu"), "torch.device"),
        (datetime.datetime(2020, 1, 1), "datetime.datetime"),
        (np.float64(1), "numpy.*scalar"),
        (np.ones(3), "numpy.*_reconstruct"),
        (int, "int"),
        (1 << 10_000, "a number of 1251 bytes"),
        (({(1,) * 30: 2},), "a key of more than 20 parts"),
        (([[0] * 3000] * 3000,), "the same parts again and again"),
    ],
)
def test_objects_that_must_be_allowed(tmp_path, value, named):
    source = _save(tmp_path, {"thing": value})
    with pytest.raises(ValueError, match=rf"'thing' of '.*' holds {named}.*: .* must be allowed"):
        source.object_value("thing")
    assert np.all(source.object_value("thing", allow_pickle=True) == value)


def test_tensors_inside_of_objects_are_for_torch(tmp_path):
    source = _save(tmp_path, {"thing": (torch.ones(2), 1)})
    with pytest.raises(
        ValueError, match=r"'thing' of '.*' holds a tensor inside an object, which torch alone can load"
    ):
        source.object_value("thing")


def _save_on_mesh(folder) -> None:
    from torch.distributed import device_mesh, tensor

    mesh = device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    state = {}
    for name, (shape, placements) in _PLACED.items():
        whole = torch.arange(float(np.prod(shape))).reshape(shape)
        state[name] = tensor.distribute_tensor(whole, mesh, placements(tensor))
    dcp.save({"model": state, "step": 3}, checkpoint_id=folder)


_PLACED = {
    "rows and columns": ((7, 5), lambda t: [t.Shard(0), t.Shard(1)]),
    "rows twice": ((7, 5), lambda t: [t.Shard(0), t.Shard(0)]),
    "columns": ((6, 4), lambda t: [t.Replicate(), t.Shard(1)]),
    "whole": ((3,), lambda t: [t.Replicate(), t.Replicate()]),
    "fewer than ranks": ((1, 3), lambda t: [t.Shard(0), t.Shard(0)]),
    "three dims": ((4, 5, 6), lambda t: [t.Shard(2), t.Shard(0)]),
    "nothing": ((0, 5), lambda t: [t.Shard(0), t.Shard(1)]),
}


def test_tensors_on_a_mesh(tmp_path, worlds):
    worlds(4, 120).run(_save_on_mesh, tmp_path)
    source = TorchCheckpoint(tmp_path)
    assert source.object_value("step") == 3
    for name, (shape, _) in _PLACED.items():
        whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        full = f"model.{name}"
        assert source.known()[full] == (shape, "float32")
        found = source.view(full, (0,) * len(shape), shape).view(np.float32)
        assert np.array_equal(found, whole), name
        for offsets, sizes in source.boxes(full):
            index = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
            assert np.array_equal(source.view(full, offsets, sizes).view(np.float32), whole[index])
        if whole.size > 4:
            inner = tuple(slice(min(1, size - 1), size) for size in shape)
            box = tuple(part.start for part in inner), tuple(part.stop - part.start for part in inner)
            assert np.array_equal(source.view(full, *box).view(np.float32), whole[inner])
