"""Random states, saved by one world under random layouts, loaded by another under others: equal bits, no byte more."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch

from hyper_parallel import DTensor, Layout, checkpoint, init_device_mesh
from hyper_parallel.core.distributed_checkpoint.planning import chunks
from hyper_parallel.platform import get_platform
from tests.frameworks import from_local, known_dtypes, on_mindspore, ours, same_bits

WORLD_SIZES = (2, 4) if on_mindspore else (1, 2, 4, 8)  # processes of MindSpore start slowly
NUM_STATES = 4 if on_mindspore else 12  # saved by each world
MESHES = {1: [(1,), (1, 1)], 2: [(2,), (1, 2)], 4: [(4,), (2, 2)], 8: [(8,), (2, 4), (2, 2, 2)]}
SIZES = (0, 1, 2, 3, 5, 7, 8, 13)
DTYPES = known_dtypes(
    [
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
        *(torch.complex128, torch.int64, torch.int8, torch.uint8, torch.bool, torch.uint16),
    ]
)
OBJECTS = (
    None,
    {"step": 3, "lr": [0.1, float("inf"), -0.0], 4: (1, 2)},
    {"generator": np.arange(7, dtype=np.uint16), "seen": {1, 2}},
    [b"\0\1", "text", {"a": {}}],
    2**80,
)


def make_state(seed):
    """(name, whole value) of every tensor, and objects: the same in every process."""
    pick = random.Random(seed)
    tensors = {}
    for number in range(6):
        shape = tuple(pick.choice(SIZES) for _ in range(pick.randint(0, 3)))
        dtype = pick.choice(DTYPES)
        width = torch.empty((), dtype=dtype).element_size()
        data = np.frombuffer(pick.randbytes(math.prod(shape) * width), np.uint8).copy()
        if dtype is torch.bool:
            data &= 1
        tensors[f"block.{number}" if pick.random() < 0.5 else f"n{number}"] = (
            torch.from_numpy(data).view(dtype).reshape(shape) if data.size else torch.empty(shape, dtype=dtype)
        )
    return tensors, {f"object{number}": value for number, value in enumerate(pick.sample(OBJECTS, 2))}


def lay_out(whole, pick, world_size, empty):
    """The tensor under a random layout on a random mesh, or plain; None on ranks outside of its mesh."""
    if pick.random() < 0.2:
        return ours(torch.zeros_like(whole) if empty else whole.clone())
    ranks = list(range(world_size))
    if world_size > 1 and pick.random() < 0.3:
        ranks = pick.sample(ranks, world_size // 2)
    mesh = init_device_mesh("cpu", pick.choice(MESHES[len(ranks)]), rank_list=ranks)
    cuts = [[] for _ in range(whole.ndim)]
    for axis in pick.sample(range(mesh.ndim), mesh.ndim):
        if whole.ndim and pick.random() < 0.75:
            cuts[pick.randrange(whole.ndim)].append(axis)
    layout = Layout.of(mesh, cuts)
    if mesh.get_coordinate() is None:
        return None
    offsets, sizes = layout.local_region(tuple(whole.shape))
    block = whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))].clone()
    return from_local(torch.zeros_like(block) if empty else block, mesh, layout, shape=tuple(whole.shape))


def save_states(directory, seeds):
    for seed in seeds:
        chunks.SPLIT_BYTES = 64 if seed % 2 else 4 << 20
        tensors, objects = make_state(seed)
        pick = random.Random(seed + 1)
        state = {name: lay_out(whole, pick, get_platform().get_world_size(), False) for name, whole in tensors.items()}
        state = {name: value for name, value in state.items() if value is not None}
        writer = checkpoint.FileSystemWriter(max_shard_bytes=200 if seed % 3 == 0 else 1 << 30, sync=seed % 4 == 0)
        checkpoint.save(state | objects, checkpoint_id=f"{directory}/{seed}", storage_writer=writer)
    chunks.SPLIT_BYTES = 4 << 20


def load_states(directory, seeds):
    world_size = get_platform().get_world_size()
    for seed in seeds:
        tensors, objects = make_state(seed)
        pick = random.Random(seed * 31 + world_size)
        state = {name: lay_out(whole, pick, world_size, True) for name, whole in tensors.items()}
        state = {name: value for name, value in state.items() if value is not None} | dict.fromkeys(objects)
        reader = checkpoint.FileSystemReader()
        reader.page_bytes *= seed % 2  # Small chunks are read whole, or as large ones are.
        checkpoint.load(state, checkpoint_id=f"{directory}/{seed}", storage_reader=reader)
        needed = 0
        for name, value in state.items():
            if name in objects:
                np.testing.assert_equal(value, objects[name])
                assert type(value) is type(objects[name])
                continue
            whole, block = tensors[name], value
            if isinstance(value, DTensor):
                offsets, sizes = value.layout.local_region(tuple(whole.shape))
                whole = whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
                block = value.to_local()
            assert same_bits(block, whole), (seed, name, value)
            needed += whole.numel() * whole.element_size()
        assert reader.bytes_read <= 1.05 * needed


@pytest.fixture(scope="module")
def saved(worlds, tmp_path_factory):
    """A directory of checkpoints of all worlds, and the number of each."""
    directory = tmp_path_factory.mktemp("states")
    seeds = {}
    for number, world_size in enumerate(WORLD_SIZES):
        seeds[world_size] = [1000 * number + i for i in range(NUM_STATES)]
        worlds(world_size, timeout=300).run(save_states, str(directory), seeds[world_size])
    return str(directory), list(itertools.chain(*seeds.values()))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_world_loads_what_every_world_saved(saved, worlds, world_size):
    directory, seeds = saved
    worlds(world_size, timeout=300).run(load_states, directory, seeds)


def test_every_checkpoint_is_sound(saved):
    directory, seeds = saved
    for seed in seeds:
        assert checkpoint.verify(f"{directory}/{seed}") == []
