"""Layouts for the tests of this folder, random and chosen, and the single-process meaning of a tensor under one."""

from __future__ import annotations

import itertools
import math
import zlib

import torch
from hypothesis import strategies as st

from hyper_parallel import Partial, Replicate, Shard, init_device_mesh
from hyper_parallel.platform import get_platform

SIZES = (0, 1, 2, 3, 5, 7, 8)
SHAPES = st.lists(st.sampled_from(SIZES), max_size=3).map(tuple).filter(lambda shape: math.prod(shape) <= 200)
FLOAT_REDUCTIONS = ("sum", "avg", "max", "min", "prod")


@st.composite
def layout_specs(draw, mesh_ndim, tensor_ndim, reductions=FLOAT_REDUCTIONS):
    """(cuts, partials) for ``Layout.of``: any axis cuts any dim, in any order, or has any reduction pending."""
    cuts = [[] for _ in range(tensor_ndim)]
    partials = [None] * mesh_ndim
    for axis in draw(st.permutations(range(mesh_ndim))):
        choices = ["whole", *range(tensor_ndim), *range(tensor_ndim)]
        choice = draw(st.sampled_from(choices + (["pending"] if reductions else [])))
        if choice == "pending":
            partials[axis] = draw(st.sampled_from(reductions))
        elif choice != "whole":
            cuts[choice].append(axis)
    return tuple(map(tuple, cuts)), tuple(partials)


@st.composite
def moves(draw, mesh_ndim, reductions=FLOAT_REDUCTIONS):
    """(shape, source, target)."""
    shape = draw(SHAPES)
    source, target = (draw(layout_specs(mesh_ndim, len(shape), reductions)) for _ in range(2))
    return shape, source, target


def every_layout(mesh_ndim, tensor_ndim, reductions=("sum",)):
    """All (cuts, partials), ordered cuts included."""
    for choice in itertools.product(["whole", *reductions, *range(tensor_ndim)], repeat=mesh_ndim):
        partials = tuple(item if item in reductions else None for item in choice)
        orders = [
            list(itertools.permutations([axis for axis, item in enumerate(choice) if item == dim]))
            for dim in range(tensor_ndim)
        ]
        for cuts in itertools.product(*orders):
            yield cuts, partials


class Summands:
    """The whole tensors that the places on the pending axes of a layout stand for, and the value they reduce to.

    ``of(coordinate)`` is a leaf; ``value()`` reduces them all, the last axis first, with gradients. Values are small
    whole numbers, so that sums and products are exact in any order.
    """

    def __init__(self, mesh_shape, partials, shape, dtype=torch.float64):
        self.mesh_shape, self.partials = mesh_shape, partials
        places = [range(size) if op else (0,) for size, op in zip(mesh_shape, partials, strict=True)]
        generator = torch.Generator().manual_seed(zlib.crc32(repr((mesh_shape, partials, shape)).encode()))
        self._leaves = {}
        for place in itertools.product(*places):
            values = torch.randint(-3, 4, shape, generator=generator)
            self._leaves[place] = (values % 2 == 0 if dtype is torch.bool else values).to(dtype)
        if dtype.is_floating_point:
            for leaf in self._leaves.values():
                leaf.requires_grad_()

    def of(self, coordinate):
        return self._leaves[tuple(at if op else 0 for at, op in zip(coordinate, self.partials, strict=True))]

    def value(self):
        values = dict(self._leaves)
        for axis in reversed(range(len(self.mesh_shape))):
            op = self.partials[axis]
            if op is None:
                continue
            lines = {}
            for place, value in values.items():
                lines.setdefault((*place[:axis], 0, *place[axis + 1 :]), []).append(value)
            values = {place: reduce_stacked(torch.stack(line), op) for place, line in lines.items()}
        (value,) = values.values()
        return value


def reduce_stacked(stacked, op):
    """What one process computes for a pending reduction of these summands."""
    if op in ("max", "min"):
        return getattr(stacked, f"a{op}")(0)
    if op in ("all", "any"):
        return getattr(stacked, op)(0)
    return {"sum": stacked.sum, "avg": stacked.mean, "prod": stacked.prod}[op](0)


def block_of(whole, layout, coordinate=None):
    """The block of a whole tensor that a layout puts at ``coordinate`` (this rank's when None)."""
    offsets, lengths = layout.local_region(tuple(whole.shape), coordinate)
    return whole[tuple(slice(start, start + length) for length, start in zip(lengths, offsets, strict=True))]


def make_mesh(*shape):
    """A mesh of this shape, or of all ranks."""
    shape = shape or (get_platform().get_world_size(),)
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])


def numbers(*shape):
    """1, 2, 3, ... in float64."""
    return torch.arange(1.0, torch.Size(shape).numel() + 1, dtype=torch.float64).reshape(shape)


# Placements on a mesh of (2, 2), and a global shape.
PLACEMENTS = {
    "even": ([Shard(0), Shard(1)], (4, 6)),
    "uneven": ([Shard(0), Shard(0)], (5, 3)),
    "empty": ([Shard(0), Shard(0)], (2, 3)),
    "ordered": ([Shard(0, order=1), Shard(0, order=0)], (7, 2)),
    "replicated": ([Replicate(), Replicate()], (3, 2)),
    "partial": ([Partial(), Shard(1)], (3, 5)),
    "scalar": ([Replicate(), Partial()], ()),
    "nothing": ([Shard(1), Replicate()], (3, 0)),
}
