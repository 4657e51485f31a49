"""The cheapest way from one layout to another of the same mesh.

States are layouts, edges are steps: reduce, reduce-scatter, gather, slice, all-to-all and the general exchange, each
over one axis or several merged ones. An edge costs latency plus bytes over bandwidth; the path is found once and
remembered. Costs are those of the rank with the largest blocks, so that every rank finds the same plan without asking.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.layout import DimAxes, Layout, Partials, Shape

# Note [What a step may do]
# A rank's block is one interval per dim: the axes of a dim cut one after the other, so only the last axes of a dim can
# be gathered or moved and still leave an interval, and an axis can only be added at the end. Anything else (another
# order of cutting, an axis that must go below one that stays) is an exchange: every rank computes which boxes of its
# block the others need, and one all-to-all over the axes that change carries them, each byte once.
#
# Note [A plan never undoes what is right]
# The search only takes off axes behind the prefix that a dim shares with its goal, and only puts an axis where the goal
# wants it. That keeps the graph small (four axes: tens of states) and loses nothing: the exchange reaches the goal from
# every state without pending reductions.
#
# Note [Pending reductions of different kinds]
# A sum over one axis of a maximum over another is not the maximum of the sums. The value of a layout with several
# pending reductions is defined as: the last axis is reduced first. So a reduction may only be done, or made pending, on
# an axis when no later axis has a pending reduction that does not commute with it (equal ones do, and sum and avg do).

GATHER, SLICE, ALL_TO_ALL, EXCHANGE = "all_gather", "slice", "all_to_all", "exchange"
ALL_REDUCE, REDUCE_SCATTER, SPREAD, EMBED = "all_reduce", "reduce_scatter", "spread", "embed"
COMMUNICATING = frozenset({GATHER, ALL_TO_ALL, EXCHANGE, ALL_REDUCE, REDUCE_SCATTER})


@dataclass(frozen=True)
class AxisCost:
    """What communication along a mesh axis costs: microseconds per call and bytes per microsecond.

    By default a call is worth no more than 200 bytes, so that plans send as little as possible. Where calls are dear,
    tell the planner with :func:`set_axis_cost`, and it trades bytes for calls.
    """

    latency: float = 0.2
    bandwidth: float = 1000.0


_axis_costs: dict[tuple[str, str], AxisCost] = {}
_COPY_BANDWIDTH = 5000.0  # bytes per microsecond of a local copy
_NOMINAL_ITEM_SIZE = 4


def set_axis_cost(device_type: str, axis_name: str, cost: AxisCost) -> None:
    """Tell the planner how fast axis ``axis_name`` is on ``device_type`` meshes; call it on every rank, before
    planning.
    """
    _axis_costs[device_type, axis_name] = cost


def axis_cost(mesh: DeviceMesh, axis: int) -> AxisCost:
    """What the planner knows of an axis."""
    return _axis_costs.get((mesh.device_type, mesh.axis_label(axis)), AxisCost())


@dataclass(frozen=True)
class Step:
    """One step of a plan: ``kind`` over the merged ``axes``, from ``source`` to ``target``."""

    kind: str
    axes: tuple[int, ...]
    source: Layout
    target: Layout
    dim: int | None = None  # the dim that is gathered, cut or left
    to_dim: int | None = None  # the dim that an all-to-all cuts instead
    op: str | None = None  # the reduction


@dataclass
class Plan:
    """Steps from ``source`` to ``target`` for a tensor of ``shape``, with the modelled cost in microseconds."""

    source: Layout
    target: Layout
    shape: Shape
    steps: tuple[Step, ...]
    cost: float
    bound: tuple[int, tuple[Callable[[Any], Any], ...]] | None = None  # the steps bound to this rank, in which world


def plan_redistribution(source: Layout, target: Layout, shape: Shape) -> Plan:
    """The cheapest plan, remembered per pair of layouts and shape."""
    key = (target, shape)
    plan = source.plans.get(key)
    if plan is None:
        if source.mesh != target.mesh:
            raise ValueError(f"a plan needs one mesh, got {source} and {target}")
        if len(shape) != source.ndim or len(shape) != target.ndim:
            raise ValueError(f"{source} and {target} do not both describe a tensor of shape {shape}")
        plan = _search(source, target, shape)
        remember(source, key, plan)
    return plan


def remember(layout: Layout, key: Any, value: Any) -> None:
    """Keep what was found out about ``layout`` in its ``plans``, of which there are not too many."""
    if len(layout.plans) >= 1024:
        layout.plans.clear()
    layout.plans[key] = value


def sent_elements(step: Step, shape: Shape) -> float:
    """Elements that a rank sends in a step, by the planner's model."""
    edge = _Edge(step.kind, step.axes, (step.target.shard_axes, step.target.partials), step.dim, step.to_dim, step.op)
    return _Graph(step.target, shape).sent(step.source.shard_axes, edge)


def _search(source: Layout, target: Layout, shape: Shape) -> Plan:
    graph = _Graph(target, shape)
    start = (source.shard_axes, source.partials)
    goal = (target.shard_axes, target.partials)
    tie = itertools.count()
    queue: list[tuple[float, int, _State]] = [(0.0, next(tie), start)]
    best: dict[_State, float] = {start: 0.0}
    came: dict[_State, tuple[_State, _Edge]] = {}
    while queue:
        cost, _, state = heapq.heappop(queue)
        if state == goal:
            break
        if cost > best[state]:
            continue
        for edge in graph.edges(state):
            total = cost + graph.cost(state, edge)
            if total < best.get(edge.state, float("inf")):
                best[edge.state] = total
                came[edge.state] = (state, edge)
                heapq.heappush(queue, (total, next(tie), edge.state))
    assert goal in best, f"no way from {source} to {target}"
    steps: list[Step] = []
    state = goal
    while state != start:
        before, edge = came[state]
        mesh = source.mesh
        steps.append(
            Step(
                edge.kind, edge.axes, Layout.of(mesh, *before), Layout.of(mesh, *state), edge.dim, edge.to_dim, edge.op
            )
        )
        state = before
    return Plan(source, target, shape, tuple(reversed(steps)), best[goal])


_State = tuple[DimAxes, Partials]


class _Edge(NamedTuple):
    kind: str
    axes: tuple[int, ...]
    state: _State
    dim: int | None = None
    to_dim: int | None = None
    op: str | None = None


class _Graph:
    """The steps that lead towards one goal, and what they cost."""

    def __init__(self, target: Layout, shape: Shape) -> None:
        self.target = target
        self.shape = shape
        self.sizes = target.mesh.shape
        self.goal_axes = target.shard_axes
        self.goal_partials = target.partials
        self.goal_dim = {axis: dim for dim, axes in enumerate(target.shard_axes) for axis in axes}
        mesh = target.mesh
        self.axis_costs = [axis_cost(mesh, axis) for axis in range(mesh.ndim)]
        self._numels: dict[DimAxes, int] = {}

    # ------------------------------------------------------------ edges

    def edges(self, state: _State) -> Iterator[_Edge]:
        shard_axes, partials = state
        used_axes = {axis for axes in shard_axes for axis in axes}
        free = [axis for axis in range(len(self.sizes)) if axis not in used_axes and partials[axis] is None]
        yield from self._slices(shard_axes, partials, set(free))
        yield from self._reductions(shard_axes, partials)
        yield from self._suffix_moves(shard_axes, partials)
        yield from self._exchange(shard_axes, partials)
        if shard_axes == self.goal_axes:
            yield from self._to_partial(shard_axes, partials, free)

    def _common_prefix(self, dim: int, axes: tuple[int, ...]) -> int:
        length = 0
        for mine, wanted in zip(axes, self.goal_axes[dim], strict=False):
            if mine != wanted:
                break
            length += 1
        return length

    def _slices(self, shard_axes: DimAxes, partials: Partials, free: set[int]) -> Iterator[_Edge]:
        for dim, axes in enumerate(shard_axes):
            wanted = self.goal_axes[dim]
            if axes != wanted[: len(axes)]:
                continue
            added = tuple(itertools.takewhile(free.__contains__, wanted[len(axes) :]))
            if added:
                yield _Edge(SLICE, added, (_with(shard_axes, dim, axes + added), partials), dim=dim)

    def _reductions(self, shard_axes: DimAxes, partials: Partials) -> Iterator[_Edge]:
        kinds = {op for op in (*partials, *self.goal_partials) if op is not None}
        for op in sorted(kinds):
            partial_axes = tuple(
                axis
                for axis, mine in enumerate(partials)
                if mine == op and (self.goal_partials[axis] != op or len(kinds) > 1) and _may_reduce(partials, axis, op)
            )
            if not partial_axes:
                continue
            subsets = {partial_axes, tuple(axis for axis in partial_axes if axis not in self.goal_dim)}
            subsets |= {(axis,) for axis in partial_axes}
            for axes in sorted(subsets - {()}):
                yield _Edge(ALL_REDUCE, axes, (shard_axes, _without(partials, axes)), op=op)
            for dim, wanted in enumerate(self.goal_axes):
                scattered = tuple(axis for axis in wanted if axis in partial_axes)
                runs = {scattered, *((axis,) for axis in scattered)} - {()}
                for axes in sorted(runs):
                    reached = _with(shard_axes, dim, shard_axes[dim] + axes)
                    yield _Edge(REDUCE_SCATTER, axes, (reached, _without(partials, axes)), dim=dim, op=op)

    def _suffix_moves(self, shard_axes: DimAxes, partials: Partials) -> Iterator[_Edge]:
        for dim, axes in enumerate(shard_axes):
            for keep in range(self._common_prefix(dim, axes), len(axes)):
                moved = axes[keep:]
                without = _with(shard_axes, dim, axes[:keep])
                yield _Edge(GATHER, moved, (without, partials), dim=dim)
                for to_dim, wanted in enumerate(self.goal_axes):
                    there = without[to_dim]
                    if to_dim != dim and wanted[: len(there) + len(moved)] == there + moved:
                        reached = _with(without, to_dim, there + moved)
                        yield _Edge(ALL_TO_ALL, moved, (reached, partials), dim=dim, to_dim=to_dim)
                if all(self.goal_partials[axis] == "sum" and _may_reduce(partials, axis, "sum") for axis in moved):
                    partials_after = tuple("sum" if axis in moved else op for axis, op in enumerate(partials))
                    yield _Edge(EMBED, moved, (without, partials_after), dim=dim)

    def _exchange(self, shard_axes: DimAxes, partials: Partials) -> Iterator[_Edge]:
        reached = tuple(tuple(axis for axis in wanted if partials[axis] is None) for wanted in self.goal_axes)
        axes = changed_axes(shard_axes, reached)
        if axes and shard_axes != reached:
            yield _Edge(EXCHANGE, axes, (reached, partials))

    def _to_partial(self, shard_axes: DimAxes, partials: Partials, free: list[int]) -> Iterator[_Edge]:
        for axis in free:
            op = self.goal_partials[axis]
            if op is not None and _may_reduce(partials, axis, op):
                partials_after = tuple(op if a == axis else mine for a, mine in enumerate(partials))
                yield _Edge(SPREAD, (axis,), (shard_axes, partials_after), op=op)

    # ------------------------------------------------------------ costs

    def _numel(self, shard_axes: DimAxes) -> int:
        numel = self._numels.get(shard_axes)
        if numel is None:
            numel = 1
            for size, axes in zip(self.shape, shard_axes, strict=True):
                for axis in axes:
                    size = -(-size // self.sizes[axis])
                numel *= size
            self._numels[shard_axes] = numel
        return numel

    def sent(self, shard_axes: DimAxes, edge: _Edge) -> float:
        """Elements that a rank sends (and receives) in this step."""
        parts = 1
        for axis in edge.axes:
            parts *= self.sizes[axis]
        share = (parts - 1) / parts
        if edge.kind == GATHER:
            return self._numel(edge.state[0]) * share
        if edge.kind in (REDUCE_SCATTER, ALL_TO_ALL):
            return self._numel(shard_axes) * share
        if edge.kind == ALL_REDUCE:
            return 2 * self._numel(shard_axes) * share
        if edge.kind == EXCHANGE:
            return self._exchanged(shard_axes, edge)
        return 0.0

    def _exchanged(self, shard_axes: DimAxes, edge: _Edge) -> float:
        # The rank at the far end of every axis shares least with its own block; it receives the most.
        coordinate = tuple(size - 1 for size in self.sizes)
        needed, shared = 1.0, 1.0
        mesh = self.target.mesh
        before = Layout.of(mesh, shard_axes).local_region(self.shape, coordinate)
        after = Layout.of(mesh, edge.state[0]).local_region(self.shape, coordinate)
        for start, have, offset, need in zip(*before, *after, strict=True):
            needed *= need
            shared *= max(0, min(start + have, offset + need) - max(start, offset))
        other = self._numel(edge.state[0])
        return max(needed - shared, other * 0.25)

    def cost(self, state: _State, edge: _Edge) -> float:
        """Modelled microseconds of the step."""
        shard_axes = state[0]
        moved = _NOMINAL_ITEM_SIZE * self.sent(shard_axes, edge)
        local = _NOMINAL_ITEM_SIZE * max(self._numel(shard_axes), self._numel(edge.state[0])) / _COPY_BANDWIDTH
        if edge.kind not in COMMUNICATING:
            return 0.01 + (0.0 if edge.kind == SLICE else local)
        if all(self.sizes[axis] == 1 for axis in edge.axes):  # nothing to call; an empty tensor still takes a call
            return 0.01 + local
        latency = max(self.axis_costs[axis].latency for axis in edge.axes)
        bandwidth = min(self.axis_costs[axis].bandwidth for axis in edge.axes)
        passes = {GATHER: 1, REDUCE_SCATTER: 1, ALL_REDUCE: 0}.get(edge.kind, 2)
        if edge.kind in (GATHER, REDUCE_SCATTER) and edge.dim == 0:
            passes = 0
        return latency + moved / bandwidth + passes * local


def changed_axes(before: DimAxes, after: DimAxes) -> tuple[int, ...]:
    """The axes along which data must move when the cuts change, in mesh order."""
    changed: set[int] = set()
    for mine, wanted in zip(before, after, strict=True):
        same = 0
        while same < min(len(mine), len(wanted)) and mine[same] == wanted[same]:
            same += 1
        changed.update(mine[same:], wanted[same:])
    return tuple(sorted(changed))


def _may_reduce(partials: Partials, axis: int, op: str) -> bool:
    """See Note [Pending reductions of different kinds]."""
    return all(later is None or later == op or {later, op} == {"sum", "avg"} for later in partials[axis + 1 :])


def _with(shard_axes: DimAxes, dim: int, axes: tuple[int, ...]) -> DimAxes:
    return (*shard_axes[:dim], axes, *shard_axes[dim + 1 :])


def _without(partials: Partials, axes: tuple[int, ...]) -> Partials:
    return tuple(None if axis in axes else op for axis, op in enumerate(partials))
