"""Chunks of tensors and the ranks that write them, and the checksums of boxes."""

from __future__ import annotations

import collections
import math

import numpy as np
import pytest

from hyper_parallel import Layout, Replicate, Shard, init_device_mesh
from hyper_parallel.core.distributed_checkpoint.base import checksum
from hyper_parallel.core.distributed_checkpoint.base.checksum import crc32c, share_of_box, share_of_whole
from hyper_parallel.core.distributed_checkpoint.base.grids import cells_touching
from hyper_parallel.core.distributed_checkpoint.base.metadata import dtype_size
from hyper_parallel.core.distributed_checkpoint.planning.chunks import (
    ObjectSpec,
    TensorSpec,
    all_cells,
    cells_of_rank,
    grid_of,
    plan_chunks,
)
from hyper_parallel.core.distributed_checkpoint.planning.merge_specs import merge_specs


def specs_on(num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks // 2, 2), rank_list=range(num_ranks), init_backend=False)
    rows = [(Shard(0), Shard(0)), (Shard(0), Replicate()), (Replicate(), Shard(1)), (Replicate(), Replicate())]
    specs = {}
    for number in range(60):
        layout = Layout.from_placements(mesh, rows[number % 4], 2)
        shape = ((1 + number * 37 % 11) * (1 if number % 5 else 3000), 1 + number % 7 * 40)
        specs[f"w{number}"] = TensorSpec(shape, "float32", (layout,))
    return specs | {"plain": TensorSpec((5000, 300), "float64"), "small": TensorSpec((), "int64"), "o": ObjectSpec()}


@pytest.mark.parametrize("num_ranks", [2, 6, 8])
def test_every_rank_finds_its_part_of_one_plan(num_ranks):
    specs = specs_on(num_ranks)
    together = list(plan_chunks(specs, num_ranks))
    for rank in range(num_ranks):
        assert list(plan_chunks(specs, num_ranks, rank)) == [chunk for chunk in together if chunk.owner == rank]
    written = collections.Counter()
    for key, spec in specs.items():
        if isinstance(spec, ObjectSpec):
            continue
        covered = np.zeros(spec.shape, np.int8)
        for chunk in (chunk for chunk in together if chunk.key == key):
            covered[tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))] += 1
            written[chunk.owner] += math.prod(chunk.sizes) * dtype_size(spec.dtype)
        assert (covered == 1).all(), key
        assert len(
            list(cells_touching(grid_of(spec, num_ranks), spec.shape, ((0,) * covered.ndim, spec.shape)))
        ) == len(all_cells(spec, dtype_size(spec.dtype), num_ranks))
    assert max(written.values()) < 1.25 * sum(written.values()) / num_ranks


def test_replicas_are_spread_evenly_by_bytes():
    specs = {f"w{i}": TensorSpec((1000 + i, 17), "float32") for i in range(101)}
    specs["big"] = TensorSpec((4, 1 << 20), "float32")
    written = collections.Counter()
    for chunk in plan_chunks(specs, 4):
        written[chunk.owner] += math.prod(chunk.sizes)
    assert max(written.values()) < 1.01 * sum(written.values()) / 4


def test_meshes_of_parts_of_the_world_share_the_work():
    def layout(ranks):
        mesh = init_device_mesh("cpu", (2,), rank_list=ranks, init_backend=False)
        return Layout.from_placements(mesh, [Shard(0)], 1)

    by_rank = [{"w": TensorSpec((8,), "float32", (layout([rank // 2 * 2, rank // 2 * 2 + 1]),))} for rank in range(4)]
    merged = merge_specs(by_rank)
    assert [cell.holders for cell in all_cells(merged["w"], 4, 4)] == [(0, 2), (1, 3)]
    assert [len(cells_of_rank(merged["w"], 4, 4, rank)) for rank in range(4)] == [1] * 4
    assert sorted(chunk.offsets for chunk in plan_chunks(merged, 4)) == [(0,), (4,)]
    by_rank[3] = {"w": TensorSpec((9,), "float32", (layout([2, 3]),))}
    with pytest.raises(ValueError, match=r"'w' is .*shape \(8,\).* on rank 0 and .*shape \(9,\).* on rank 3"):
        merge_specs(by_rank)
    by_rank[0] = {}
    by_rank[2:] = [{}, {}]
    with pytest.raises(ValueError, match=r"'w' has .*, but it is missing on ranks \[0\] of that mesh"):
        merge_specs(by_rank)


@pytest.mark.parametrize("block", [8, 24, 64, 1 << 20])
def test_the_shares_of_boxes_add_up_to_the_checksum(block, monkeypatch):
    monkeypatch.setattr(checksum, "_BLOCK", block)
    monkeypatch.setattr(checksum, "_ZEROS", memoryview(bytes(block)))
    values = np.random.default_rng(0).integers(0, 2**16, (7, 5, 3), np.uint16)
    total = 0
    for rows, columns in ((slice(0, 4), slice(0, 2)), (slice(0, 4), slice(2, 5)), (slice(4, 7), slice(0, 5))):
        total ^= share_of_box(values[rows, columns], (rows.start, columns.start, 0), values.shape)
    assert total == share_of_whole(crc32c(values.reshape(-1).view(np.uint8)), values.nbytes)
    assert checksum.crc32c_of(values.T) == crc32c(values.T.tobytes())
