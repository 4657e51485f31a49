"""Do the blocks that the ranks bring fit together? Found out at once, or behind the program's back.

Note [Blocks that were taken to be equal]
``from_local`` without a shape believes that all blocks are equal. If they are not, the ranks disagree about the global
shape, and the next collective would hang or mix up data. So the sizes are sent around when the tensor is made, without
waiting, and looked at before the next communication of this process: the error names every rank's size.

A rank whose block does not even fit the placements (too few dims) raises by itself at ``from_local``. It takes part in
the comparison all the same before it does: otherwise the others would wait for it.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.comm_recorder import attributed
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.checks.taps import no_line, one_line
from hyper_parallel.platform.shared.membership import list_belongs_to_rank

_MAX_DIMS = 16
_MAX_IN_FLIGHT = 32

_checks: list[tuple[Any, Any, Layout]] = []  # (sizes, handle, layout) in flight
list_belongs_to_rank(_checks)


@one_line
def check_later(local_tensor: Any, layout: Layout) -> None:
    """Start comparing the blocks' sizes, which must be equal whether they are parts or copies."""
    if _is_checked(layout.mesh):
        if len(_checks) >= _MAX_IN_FLIGHT:
            finish_checks()
        _checks.append((*_send_sizes(local_tensor, layout.mesh), layout))


def join_check(local_tensor: Any, mesh: DeviceMesh, run_check: bool) -> None:
    """Send this rank's sizes around without looking at the others': what a rank does before it raises."""
    if mesh.get_coordinate() is None:
        return
    if run_check:
        _gather_answers(local_tensor, mesh)
    elif _is_checked(mesh):
        _send_sizes(local_tensor, mesh)


def _is_checked(mesh: DeviceMesh) -> bool:
    return mesh.size() > 1 and mesh.get_coordinate() is not None


def _send_sizes(local_tensor: Any, mesh: DeviceMesh) -> tuple[Any, Any]:
    platform = get_platform()
    row = [local_tensor.ndim, *local_tensor.shape[:_MAX_DIMS]]
    mine = platform.index_tensor([row + [0] * (1 + _MAX_DIMS - len(row))], mesh.device_type)
    group = mesh.get_group(tuple(range(mesh.ndim)))
    return attributed("from_local compares sizes", platform.all_gather_into_tensor, mine, group, True)


@no_line
def finish_checks() -> None:
    """Raise if blocks that were taken to be equal are not; called before communication."""
    while _checks:
        sizes, handle, layout = _checks.pop(0)
        if handle is not None:
            handle.wait()
        shapes = [tuple(row[1 : 1 + row[0]]) for row in sizes.tolist()]
        if any(shape != shapes[0] for shape in shapes):
            _checks.clear()
            by_rank = dict(zip(sorted(layout.mesh.rank_list), shapes, strict=True))
            listed = ", ".join(f"rank {rank}: {shape}" for rank, shape in by_rank.items())
            raise RuntimeError(
                f"from_local under {layout} got local tensors of different sizes ({listed}). "
                "Pass the global shape with shape=, or let run_check=True find it"
            )


def gather_global_shape(local_tensor: Any, layout: Layout) -> tuple[int, ...]:
    """The global shape that all ranks' blocks give together, or an error that lists their sizes."""
    mesh = layout.mesh
    answers = _gather_answers(local_tensor, mesh)
    by_coordinate = {
        mesh.coordinate_of(rank): answer for rank, answer in zip(sorted(mesh.rank_list), answers, strict=True)
    }
    shapes = {coordinate: answer[0] for coordinate, answer in by_coordinate.items()}
    if any(len(shape) != layout.ndim for shape in shapes.values()) or len({a[1] for a in answers}) > 1:
        dtypes = ", ".join(sorted({answer[1] for answer in answers}))
        raise ValueError(
            f"from_local under {layout}: the ranks' blocks differ in dims or dtype "
            f"({_listed(layout, by_coordinate)}; {dtypes})"
        )
    global_shape = []
    for dim, axes in enumerate(layout.shard_axes):
        line = {c: s[dim] for c, s in shapes.items() if all(c[a] == 0 for a in range(mesh.ndim) if a not in axes)}
        global_shape.append(sum(line.values()))
    result = tuple(global_shape)
    if any(layout.local_shape(result, coordinate) != shape for coordinate, shape in shapes.items()):
        raise ValueError(
            f"from_local under {layout}: no tensor is sharded into these local tensors "
            f"({_listed(layout, by_coordinate)}). Together they give {result}, which is sharded into "
            f"{', '.join(str(layout.local_shape(result, c)) for c in shapes)}; move rows between the ranks to match"
        )
    _check_replicas(layout, by_coordinate)
    return result


def _gather_answers(local_tensor: Any, mesh: DeviceMesh) -> list[Any]:
    """Every rank's (shape, dtype, digest of the values), in the order of their ranks."""
    platform = get_platform()
    answers: list[Any] = [None] * mesh.size()
    mine = (tuple(local_tensor.shape), str(local_tensor.dtype), platform.digest(local_tensor))
    attributed(
        "from_local with run_check",
        platform.all_gather_object,
        answers,
        mine,
        mesh.get_group(tuple(range(mesh.ndim))),
    )
    return answers


def _check_replicas(layout: Layout, by_coordinate: dict[Any, Any]) -> None:
    cut = {axis for axes in layout.shard_axes for axis in axes}
    copying = [axis for axis, op in enumerate(layout.partials) if op is None and axis not in cut]
    for coordinate, answer in by_coordinate.items():
        first = tuple(0 if axis in copying else place for axis, place in enumerate(coordinate))
        if answer[2] != by_coordinate[first][2]:
            ranks = [int(layout.mesh.mesh[c]) for c in (first, coordinate)]
            raise ValueError(
                f"from_local under {layout}: ranks {ranks[0]} and {ranks[1]} should hold equal values and do not"
            )


def _listed(layout: Layout, by_coordinate: dict[Any, Any]) -> str:
    items = sorted((int(layout.mesh.mesh[c]), answer[0]) for c, answer in by_coordinate.items())
    return ", ".join(f"rank {rank}: {shape}" for rank, shape in items)
