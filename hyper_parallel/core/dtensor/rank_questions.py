"""Which ranks of a program do alike: those that give the same answers to the questions that it asks about its rank.

Note [Questions about the rank]
-------------------------------
The library reads the place of a rank in a few functions only (``tests/core/test_rank_questions.py`` has the list), and
what they pass on, as far as shapes and communication go, is: the lengths of its block of a tensor under a layout, and
whether it leads along an axis, as the one rank that adds a bias. Where a block begins changes values, and shapes only
where code says so (``Layout.deciding_region``). Code that asks for its place itself may do anything with it: no two
ranks are then taken for alike. Groups differ by name only: a line along the same axes. So two ranks whose answers to
all questions of one of them are the same run the same program, up to the names of the lines.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.layout import Layout, Shape, _interned


class RankQuestions:
    """What was asked, by now, on ``mesh`` and the meshes cut out of it."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._lengths: dict[DeviceMesh, dict[tuple[Layout, Shape], None]] = {}
        self._placed: dict[DeviceMesh, list[tuple[Layout, Shape]]] = {}
        for layout in list(_interned.values()):
            if layout.mesh.root is mesh.root and layout.dim_axes is not None:
                own = layout.mesh.get_coordinate()
                asked = self._lengths.setdefault(layout.mesh, {})
                asked.update(((layout, shape), None) for shape, where in list(layout._regions) if where == own)
                self._placed.setdefault(layout.mesh, []).extend((layout, shape) for shape in layout._placed)
        self._asked = {asked_on: list(asked_on._asked) for asked_on in self._lengths}
        self._known: dict[Any, Any] = {}

    def answers_of(self, rank: int) -> Any:
        """What ``rank`` would answer; equal for ranks that do alike."""
        place = dict(zip(self._mesh.mesh_dim_names or (), self._mesh.coordinate_of(rank), strict=True))
        return tuple(self._on(mesh, place, rank) for mesh in self._lengths)

    def classes(self, ranks: Iterable[int]) -> list[list[int]]:
        """The ranks in groups that do alike, in the order of their first members."""
        found: dict[Any, list[int]] = {}
        for rank in ranks:
            found.setdefault(self.answers_of(rank), []).append(rank)
        return list(found.values())

    def _on(self, mesh: DeviceMesh, place: dict[str, int], rank: int) -> Any:
        names = mesh.mesh_dim_names
        if names is None or any(name not in place for name in names):
            return (
                rank  # a mesh whose axes cannot be told from the names of the whole: no two ranks are taken for alike
            )
        coordinate = tuple(place[name] for name in names)
        if (mesh, coordinate) not in self._known:
            lengths = tuple(layout.local_shape(shape, coordinate) for layout, shape in self._lengths[mesh])
            starts = tuple(layout.local_offset(shape, coordinate) for layout, shape in self._placed[mesh])
            leads = tuple(
                coordinate if axes is None else not any(coordinate[axis] for axis in axes) for axes in self._asked[mesh]
            )
            self._known[mesh, coordinate] = (lengths, starts, leads)
        return self._known[mesh, coordinate]
