"""Only a few functions read the place of a rank, and what they pass on is known: so ranks that answer alike do alike.

A new reader is welcome if what it passes on is among the questions of `rank_questions.py`: local lengths, `leads`,
`deciding_region`. Then it needs no place here, for it asks these. One that reads coordinates or offsets itself is
listed with why the shapes and collectives of a rank do not depend on more than that.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import hyper_parallel as hp
from hyper_parallel import Layout
from hyper_parallel.core.dtensor.rank_questions import RankQuestions

_PACKAGE = Path(__file__).resolve().parents[2] / "hyper_parallel"
_ROOMS = ("core/dtensor", "core/shard", "core/modules", "core/tensor_parallel", "plans", "models")
_ROOMS += tuple(f"platform/torch/{room}" for room in ("base", "dtensor", "modules", "takes_over"))
_READERS = {"get_coordinate", "get_local_rank", "get_rank", "local_region", "local_offset", "get_group_local_rank"}

_THE_QUESTIONS = "asks and answers the questions"
_LINES = "a group is a line along axes, and differs by its name only"
_BOXES = "lengths of blocks and of their parts; what is sent in all is the block"
_VALUES = "changes values, not shapes"
_BUILDING = "while a model is built: afterwards blocks have the lengths of their layouts"

ALLOWED = {
    **dict.fromkeys(
        (
            "core/dtensor/layout.py Layout.local_region",
            "core/dtensor/layout.py Layout.local_shape",
            "core/dtensor/layout.py Layout.local_offset",
            "core/dtensor/layout.py Layout.deciding_region",
            "core/dtensor/meshes/rank_grid.py RankGrid.get_rank",
            "core/dtensor/meshes/rank_grid.py RankGrid.get_coordinate",
            "core/dtensor/meshes/rank_grid.py RankGrid.get_local_rank",
            "core/dtensor/meshes/rank_grid.py RankGrid.leads",
            "core/dtensor/meshes/rank_grid.py RankGrid.line",
            "core/dtensor/rank_questions.py RankQuestions.__init__",
            "core/dtensor/rank_questions.py RankQuestions._on",
            "core/tensor_parallel/fused_and_head_styles.py _position",
        ),
        _THE_QUESTIONS,
    ),
    "core/dtensor/meshes/device_mesh.py DeviceMesh._derive": _LINES,
    "core/dtensor/meshes/device_mesh.py DeviceMesh.get_group": _LINES,
    "core/dtensor/meshes/submeshes.py submesh": _LINES,
    "core/dtensor/distribute.py _local_part": _BUILDING,
    "core/dtensor/distribute.py _scatter": _BUILDING,
    "core/modules/deferred.py _Deferred.__init__": _BUILDING,
    "core/modules/lora.py _fill": _BUILDING,
    "platform/torch/modules/state.py get_model_state_dict": "outside of a step",
    "core/dtensor/mesh_transfer.py _bind": _BOXES,
    "core/dtensor/mesh_transfer.py _holders": _BOXES,
    "core/dtensor/mesh_transfer.py bytes_moved": _BOXES,
    "core/dtensor/redistribution_plan.py _Graph._exchanged": "of a coordinate that is the same for all ranks",
    "core/dtensor/tensor_redistribution.py _bind": _BOXES,
    "core/dtensor/tensor_redistribution.py exchange_boxes": _BOXES,
    "core/dtensor/random/random_fill.py random_block": _VALUES,
    "core/shard/rules/attention.py _keys_of_own_heads": "as many keys as the rank has query heads",
    "core/shard/rules/sharded_letters.py block_region": _VALUES,
    "core/shard/rules/indexing.py _read": _VALUES,
    "core/shard/rules/scatter_gather.py _read_rows": _VALUES,
    "core/shard/rules/scatter_gather.py _embed": _VALUES,
    "core/shard/rules/scatter_gather.py _write_rows": _VALUES,
    "core/shard/rules/shape.py triangle.shifted": _VALUES,
}


def _readers(text: str) -> Iterator[str]:
    """The functions that read a place, but for whether there is one (`is None`) and to name it in a message."""
    tree = ast.parse(text)
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name not in _READERS:
            continue
        around, names, in_message = node, [], False
        while (around := parents.get(around)) is not None:
            in_message = in_message or isinstance(around, ast.JoinedStr)
            if isinstance(around, (ast.FunctionDef, ast.ClassDef)):
                names.insert(0, around.name)
        parent = parents[node]
        asks_if_inside = isinstance(parent, ast.Compare) and isinstance(parent.ops[0], (ast.Is, ast.IsNot))
        if not in_message and not asks_if_inside:
            yield ".".join(names)


def test_few_functions_read_the_place_of_a_rank():
    found = {
        f"{path.relative_to(_PACKAGE).as_posix()} {reader}"
        for room in _ROOMS
        for path in sorted((_PACKAGE / room).rglob("*.py"))
        for reader in _readers(path.read_text())
    }
    assert found - set(ALLOWED) == set(), "new readers: ask leads() or deciding_region(), or say here why it is fine"
    assert set(ALLOWED) - found == set(), "readers that are gone"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("def f(mesh): return mesh.get_coordinate()[0]", ["f"]),
        ("class A:\n    def f(self): return self.layout.local_offset((3,))", ["A.f"]),
        ("def f(mesh): return mesh.get_coordinate() is None", []),
        ("def f(mesh): raise ValueError(f'on rank {mesh.get_rank()}')", []),
        ("def f(mesh): return mesh.leads((0,))", []),
    ],
)
def test_readers_are_found(line, found):
    assert list(_readers(line)) == found


def _mesh():
    return hp.init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"), init_backend=False)


def test_lengths_tell_ranks_apart():
    mesh = _mesh()
    layout = Layout.of(mesh, [(1,), ()])
    layout.local_shape((6, 4))
    assert RankQuestions(mesh).classes(range(6)) == [[0, 1, 2, 3, 4, 5]]
    layout.local_shape((7, 4))  # 3, 3, 1
    assert RankQuestions(mesh).classes(range(6)) == [[0, 1, 3, 4], [2, 5]]


def test_who_leads_is_told_apart_only_if_asked():
    mesh = _mesh()
    layout = Layout.of(mesh, [(), ()])
    assert mesh.leads((1,)) and len(RankQuestions(mesh).classes(range(6))) == 2
    assert mesh.leads((0, 1))
    assert RankQuestions(mesh).classes(range(6)) == [[0], [1, 2, 4, 5], [3]]
    del layout


def test_a_place_that_decides_shapes_and_a_place_itself():
    mesh = _mesh()
    layout = Layout.of(mesh, [(0,)])
    assert layout.deciding_region((4,)).offsets == (0,)
    assert RankQuestions(mesh).classes(range(6)) == [[0, 1, 2], [3, 4, 5]]
    assert mesh.get_local_rank("tp") == 0
    assert len(RankQuestions(mesh).classes(range(6))) == 6
