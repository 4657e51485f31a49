"""Carrying out a plan: each step bound to this rank's blocks and groups once, then run on local tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor.layout import Layout, Shape
from hyper_parallel.core.dtensor.redistribution_plan import (
    ALL_REDUCE,
    COMMUNICATING,
    EMBED,
    GATHER,
    REDUCE_SCATTER,
    SLICE,
    SPREAD,
    Step,
    plan_redistribution,
)
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.region import Region


def redistribute_local(tensor: Any, source: Layout, target: Layout, shape: Shape) -> Any:
    """This rank's block under ``target`` of the tensor whose block under ``source`` is ``tensor``; no gradients."""
    for launch in bound_steps(source, target, shape):
        tensor = launch(tensor).wait()
    return tensor


def launch_redistribution(tensor: Any, source: Layout, target: Layout, shape: Shape) -> Any:
    """As :func:`redistribute_local`, but the last step is only launched: a handle whose ``wait()`` gives the block."""
    steps = bound_steps(source, target, shape)
    for launch in steps[:-1]:
        tensor = launch(tensor).wait()
    return steps[-1](tensor) if steps else Done(tensor)


def bound_steps(source: Layout, target: Layout, shape: Shape) -> tuple[Callable[[Any], Any], ...]:
    """The plan's steps as functions of the local tensor that launch the step, bound to this rank."""
    plan = plan_redistribution(source, target, shape)
    world = get_platform().world_generation()
    if plan.bound is None or plan.bound[0] != world:
        following = (*plan.steps[1:], None)
        plan.bound = (
            world,
            tuple(_bind(step, shape, after) for step, after in zip(plan.steps, following, strict=False)),
        )
    return plan.bound[1]


class Done:
    """A step that needed no communication."""

    __slots__ = ("_result",)

    def __init__(self, result: Any) -> None:
        self._result = result

    def wait(self) -> Any:
        return self._result


def _bind(step: Step, shape: Shape, following: Step | None = None) -> Callable[[Any], Any]:
    platform = get_platform()
    mesh = step.source.mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise RuntimeError(f"rank {mesh.get_rank()} is not part of {mesh} and cannot redistribute on it")
    before, after = step.source.local_region(shape), step.target.local_region(shape)
    if step.kind == SLICE:
        box = after.inside(before)
        if following is not None and following.kind in COMMUNICATING and mesh.size(following.axes) > 1:
            index = box.slices
            return lambda tensor: Done(tensor[index])  # the next step copies what it sends
        return lambda tensor: Done(platform.slice_block(tensor, box))
    if step.kind == EMBED:
        box = before.inside(after)
        return lambda tensor: Done(platform.embed_block(tensor, box, after.sizes))
    if step.kind == SPREAD:
        assert step.op is not None
        op = step.op
        if coordinate[step.axes[0]] == 0:
            return lambda tensor: Done(platform.identity_like(tensor, "keep"))
        return lambda tensor: Done(platform.identity_like(tensor, op))
    if mesh.size(step.axes) == 1:
        return Done
    group = mesh.get_group(step.axes)
    if step.kind == ALL_REDUCE:
        return lambda tensor: platform.all_reduce_blocks(tensor, group, step.op)
    line_order = mesh.group_positions(step.axes)
    positions = None if line_order == tuple(range(len(line_order))) else line_order
    if step.kind in (GATHER, REDUCE_SCATTER):
        assert step.dim is not None
        dim = step.dim
        cut = step.source if step.kind == GATHER else step.target
        sizes = [cut.local_shape(shape, place)[dim] for place in ranks_of_step(step, coordinate)]
        if step.kind == GATHER:
            return lambda tensor: platform.gather_blocks(tensor, dim, sizes, positions, group)
        mine = mesh.line(step.axes).index(mesh.get_rank())
        return lambda tensor: platform.reduce_blocks(tensor, dim, sizes, positions, group, step.op, mine)
    return _bind_exchange(step, shape, coordinate, group, positions)


def _bind_exchange(
    step: Step, shape: Shape, coordinate: Shape, group: Any, positions: tuple[int, ...] | None
) -> Callable[[Any], Any]:
    platform = get_platform()
    sends, receives, kept = exchange_boxes(step, shape, coordinate)
    if positions is not None:
        sends, receives = (_in_group_order(boxes, positions) for boxes in (sends, receives))
    local_shape = step.target.local_shape(shape, coordinate)
    return lambda tensor: platform.exchange_blocks(tensor, sends, receives, kept, local_shape, group)


def _in_group_order(boxes: list[Region | None], positions: tuple[int, ...]) -> list[Region | None]:
    ordered: list[Region | None] = [None] * len(boxes)
    for place, box in zip(positions, boxes, strict=True):
        ordered[place] = box
    return ordered


def exchange_boxes(
    step: Step, shape: Shape, coordinate: Shape
) -> tuple[list[Region | None], list[Region | None], tuple[Region, Region] | None]:
    """What the rank at ``coordinate`` sends to, and gets from, the ranks of its line, and what it keeps (from, to)."""
    line = ranks_of_step(step, coordinate)
    sharded_before = {axis for axes in step.source.shard_axes for axis in axes}
    before, after = step.source.local_region(shape, coordinate), step.target.local_region(shape, coordinate)
    sends: list[Region | None] = [None] * len(line)
    receives: list[Region | None] = [None] * len(line)
    kept = None
    for index, other in enumerate(line):
        if other == coordinate:
            both = before.overlap(after)
            if both is not None:
                kept = (both.inside(before), both.inside(after))
            continue
        if _serves(coordinate, other, step.axes, sharded_before):
            both = before.overlap(step.target.local_region(shape, other))
            if both is not None:
                sends[index] = both.inside(before)
        if _serves(other, coordinate, step.axes, sharded_before):
            both = step.source.local_region(shape, other).overlap(after)
            if both is not None:
                receives[index] = both.inside(after)
    return sends, receives, kept


def _serves(sender: Shape, receiver: Shape, axes: tuple[int, ...], sharded_before: set[int]) -> bool:
    """Of several ranks with the same block, the one that shares the receiver's place on the copying axes sends it."""
    return all(sender[axis] == receiver[axis] for axis in axes if axis not in sharded_before)


def ranks_of_step(step: Step, coordinate: Shape) -> list[Shape]:
    """The coordinates of the ranks that take part, in line order."""
    mesh = step.source.mesh
    line = []
    for place in itertools.product(*(range(mesh.shape[axis]) for axis in step.axes)):
        moved = list(coordinate)
        for axis, index in zip(step.axes, place, strict=True):
            moved[axis] = index
        line.append(tuple(moved))
    return line
