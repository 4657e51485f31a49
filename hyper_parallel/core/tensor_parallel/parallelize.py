"""``parallelize_module``: apply styles to the modules that a plan names."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.distributed_tensor import resolve_mesh
from hyper_parallel.core.tensor_parallel.module_parameters import keeping_ties
from hyper_parallel.core.tensor_parallel.plain_parameters import name_parameters
from hyper_parallel.core.tensor_parallel.style_base import ParallelStyle
from hyper_parallel.platform import get_platform

Plan = ParallelStyle | Mapping[str, ParallelStyle | Sequence[ParallelStyle]]


def parallelize_module(
    module: Any,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: Plan | None = None,
    *,
    src_data_rank: int | None = 0,
) -> Any:
    """Make a module parallel over a mesh, in place; the module.

    ``parallelize_plan`` is a style for the module itself, or a dict from paths of modules inside it to styles.
    ``*`` in a path stands for any one name (``"layers.*.mlp.w1"``), ``**`` for any number of names, ``""`` for the
    module itself; a path without wildcards goes before those with. A path that matches nothing is an error. Several
    styles for one module are given as a list. ``device_mesh`` is a mesh, or one cut out of a larger (``mesh["tp"]``);
    the default is that of the enclosing ``with mesh:``. The parameters' values are those of the rank at position
    ``src_data_rank`` of the mesh, which sends the others their parts; with None every rank cuts what it has.

    >>> import torch, hyper_parallel as hp
    >>> mesh = hp.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",), rank_list=(0,), init_backend=False)
    >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> mlp = hp.parallelize_module(mlp, mesh, {"0": hp.ColwiseParallel(), "2": hp.RowwiseParallel()})
    >>> mlp[0].weight.placements
    (Shard(0),)
    """
    platform = get_platform()
    mesh = resolve_mesh(device_mesh, "parallelize_module")
    if parallelize_plan is None:
        raise ValueError(
            "parallelize_module needs a plan: a style such as ColwiseParallel(), or a dict from module paths to styles"
        )
    if isinstance(parallelize_plan, Mapping):
        chosen = match_plan(dict(platform.get_cells_and_names(module)), parallelize_plan)
    else:
        chosen = {"": _as_styles(parallelize_plan, "the plan")}
    modules = dict(platform.get_cells_and_names(module))
    name_parameters(module)
    with keeping_ties(module):
        for path, styles in chosen.items():
            for style in styles:
                style.src_data_rank = src_data_rank
                replaced = style.apply(modules[path], mesh)
                if replaced is not modules[path] and path == "":
                    module = replaced
    return module


def match_plan(modules: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, list[ParallelStyle]]:
    """The styles for each module path, in the order of the modules; an error for a pattern that matches none."""
    by_pattern: dict[str, str] = {}  # module path -> the pattern that gave its styles
    styles: dict[str, list[ParallelStyle]] = {}
    for pattern, given in plan.items():
        if not isinstance(pattern, str):
            raise TypeError(f"parallelize_module: the plan's keys are paths of modules, got {pattern!r}")
        wanted = _as_styles(given, f"the plan's {pattern!r}")
        matched = [path for path in modules if _matches(path, pattern)]
        if not matched:
            raise ValueError(
                f"parallelize_module: no module matches the path {pattern!r}; {_near_misses(pattern, modules)}"
            )
        for path in matched:
            other = by_pattern.get(path)
            if other is not None and _is_wildcard(other) == _is_wildcard(pattern):
                raise ValueError(
                    f"parallelize_module: the module {path!r} matches {other!r} and {pattern!r} of the plan; make one "
                    "of them narrower, or give one path a list of styles"
                )
            if other is None or not _is_wildcard(pattern):
                by_pattern[path], styles[path] = pattern, wanted
    return {path: styles[path] for path in modules if path in styles}


def _as_styles(given: Any, where: str) -> list[ParallelStyle]:
    styles = list(given) if isinstance(given, (list, tuple)) else [given]
    for style in styles:
        if not isinstance(style, ParallelStyle):
            hint = f"; did you mean {style.__name__}()?" if isinstance(style, type) else ""
            raise TypeError(f"parallelize_module: {where} must be a ParallelStyle, got {style!r}{hint}")
    return styles


def _is_wildcard(pattern: str) -> bool:
    return any(sign in pattern for sign in "*?[")


def _matches(path: str, pattern: str) -> bool:
    return _names_match(path.split(".") if path else [], pattern.split(".") if pattern else [])


def _names_match(names: list[str], patterns: list[str]) -> bool:
    if not patterns:
        return not names
    if patterns[0] == "**":
        return any(_names_match(names[start:], patterns[1:]) for start in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatchcase(names[0], patterns[0]) and _names_match(names[1:], patterns[1:])


def _near_misses(pattern: str, modules: Mapping[str, Any]) -> str:
    """What the user may have meant: similar paths, and how far the pattern leads."""
    paths = [path for path in modules if path]
    if not paths:
        return "the module has none inside"
    close = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.5)
    last = pattern.rsplit(".", 1)[-1]
    close += [path for path in paths if path not in close and path.rsplit(".", 1)[-1] == last][: 3 - len(close)]
    names = pattern.split(".")
    reached = 0
    while reached < len(names) and any(_matches(path, ".".join(names[: reached + 1])) for path in paths):
        reached += 1
    start = ".".join(names[:reached])
    inside = sorted({path.split(".")[reached] for path in paths if _leads_through(path, names[:reached])})
    text = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    where = f"{start!r} has" if start else "the module has"
    return f"{text}{where} {', '.join(inside[:12]) or 'nothing'}{', ...' if len(inside) > 12 else ''} inside"


def _leads_through(path: str, patterns: list[str]) -> bool:
    names = path.split(".")
    return len(names) > len(patterns) and _names_match(names[: len(patterns)], patterns)
