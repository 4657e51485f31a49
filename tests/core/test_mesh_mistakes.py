"""Device meshes: what a mistake is told."""

from __future__ import annotations

import pytest

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from tests.core.test_device_mesh import describe


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: describe((2, 2), rank_list=(0, 1, 2)), ValueError, r"shape \(2, 2\) takes 4 ranks, .* \[0, 1, 2\]"),
        (lambda: describe((2, 0)), ValueError, r"at least one rank on each, not \(2, 0\)"),
        (lambda: describe(()), ValueError, "at least one axis"),
        (lambda: describe(4), TypeError, r"a sequence of ints like \(2, 4\), not 4"),
        (
            lambda: DeviceMesh("cpu", [[0, 1], [2]], init_backend=False),
            ValueError,
            r"equal lengths: \[\[0, 1\], \[2\]\]",
        ),
        (lambda: DeviceMesh("cpu", [], init_backend=False), ValueError, "at least one axis and one rank"),
        (lambda: DeviceMesh("cpu", [0.0, 1.0], init_backend=False), TypeError, "ranks, which are ints"),
        (
            lambda: DeviceMesh("cpu", [0, 1, 0, 2, 2], init_backend=False),
            ValueError,
            r"\(5,\).* repeats ranks \[0, 2\]",
        ),
        (
            lambda: DeviceMesh("cpu", [0, -1], init_backend=False),
            ValueError,
            r"ranks=\[0, -1\]\) has negative ranks \[-1\]",
        ),
        (lambda: DeviceMesh(None, [0], init_backend=False), TypeError, "a string like 'cpu' or 'cuda', not None"),
        (lambda: DeviceMesh("cuda:0", [0], init_backend=False), ValueError, "without an index, not 'cuda:0'"),
        (lambda: describe((2, 2), ("dp",)), ValueError, r"DeviceMesh\(.*\) has 2 axes, but 1 names: \('dp',\)"),
        (lambda: describe((2, 2), ("dp", "dp")), ValueError, r"\('dp', 'dp'\) of DeviceMesh\(.*\) repeat"),
        (lambda: describe((2, 2), ("dp", 1)), TypeError, r"strings like .*, not \('dp', 1\)"),
        (lambda: describe((2,), "x"), TypeError, "strings like .*, not 'x'"),
        (lambda: describe((2,), 3), TypeError, "strings like .*, not 3"),
        (lambda: describe((2,), ("None",)), ValueError, r'DeviceMesh\(.*"None" \(not sharded\)'),
        (lambda: DeviceMesh("cpu", [0], rank=0), ValueError, "takes init_backend=False"),
    ],
)
def test_mistakes_in_building(build, error, message):
    with pytest.raises(error, match=message):
        build()


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda mesh: mesh["pp"], ValueError, "{mesh} has no axis 'pp'"),
        (lambda mesh: mesh["tp", "tp"], ValueError, r"\('tp', 'tp'\) names an axis of {mesh} twice"),
        (lambda mesh: mesh[0], TypeError, r"takes axis names, .* not 0: {mesh}"),
        (lambda mesh: mesh[()], TypeError, r"takes axis names, .* not \(\): {mesh}"),
        (lambda mesh: describe((2, 2))["axis0"], ValueError, "has no axis names, .* give mesh_dim_names"),
        (lambda mesh: mesh.size(2), ValueError, "{mesh} has no axis 2; its axes are 0 to 1"),
        (lambda mesh: mesh.size(-3), ValueError, "{mesh} has no axis -3"),
        (lambda mesh: mesh.size(1.0), TypeError, "an axis of {mesh} is a name or an index, not 1.0"),
        (lambda mesh: mesh.size(True), TypeError, "not True"),
        (lambda mesh: mesh.line(("tp", 1)), ValueError, r"\('tp', 1\) names an axis of {mesh} twice"),
        (lambda mesh: mesh.line(()), ValueError, "no axis of {mesh} was given"),
        (
            lambda mesh: mesh.get_group(),
            ValueError,
            r"{mesh} has 2 axes: say which, get_group\('dp'\), or get_group\(\('dp', 'tp'\)\)",
        ),
        (lambda mesh: mesh.get_local_rank(), ValueError, r"say which, get_local_rank\('dp'\)"),
        (lambda mesh: mesh.coordinate_of(8), ValueError, "rank 8 is not part of {mesh}"),
        (lambda mesh: mesh.line("tp", rank=8), ValueError, "rank 8 is not part of {mesh}"),
        (
            lambda mesh: mesh.unflatten("tp", (3, 2), ("a", "b")),
            ValueError,
            r"axis 'tp' of {mesh} has 4 ranks .* \(3, 2\)",
        ),
        (
            lambda mesh: mesh.unflatten("tp", (2, 2), ("a",)),
            ValueError,
            r"{mesh} split into \(2, 2\) takes 2 names, not \('a',\)",
        ),
        (lambda mesh: mesh.unflatten("tp", (2, 2)), ValueError, "takes 2 names, not None"),
        (
            lambda mesh: mesh.unflatten("tp", (2, 2), ("dp", "b")),
            ValueError,
            r"\('dp', 'dp', 'b'\) of DeviceMesh\(.*repeat",
        ),
        (lambda mesh: mesh.flatten("None"), ValueError, "cannot name an axis"),
        (lambda mesh: DeviceMesh.concatenate([]), ValueError, "at least one mesh"),
        (lambda mesh: DeviceMesh.concatenate([mesh["dp"], "tp"]), TypeError, "concatenate takes meshes, .*, not 'tp'"),
        (lambda mesh: DeviceMesh.concatenate([describe((2,)), describe((2,))]), ValueError, "are not independent"),
        (lambda mesh: DeviceMesh.concatenate([mesh["dp"], mesh]), ValueError, "{mesh} are not independent"),
        (
            lambda mesh: DeviceMesh.concatenate([mesh["dp"], describe((2,), ("x",))]),
            ValueError,
            r"one root; .*dp=2.* out of {mesh}, but .*x=2",
        ),
        (
            lambda mesh: mesh.get_group("tp"),
            RuntimeError,
            "{mesh} was asked for a group, but this process has joined no world",
        ),
        (
            lambda mesh: describe((2,), rank=1).get_group(),
            RuntimeError,
            "describes what rank 1 sees; rank 0 has no group",
        ),
    ],
)
def test_mistakes_in_using(use, error, message):
    mesh = describe((2, 4), ("dp", "tp"))
    shown = r"DeviceMesh\('cpu', \(dp=2, tp=4\), ranks=\[\[0, 1, 2, 3\], \[4, 5, 6, 7\]\]\)"
    with pytest.raises(error, match=message.replace("{mesh}", shown)):
        use(mesh)
