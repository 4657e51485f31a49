"""``parallelize_module``: apply styles to the modules that a plan names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.distributed_tensor import resolve_mesh
from hyper_parallel.core.modules.module_parameters import keeping_ties
from hyper_parallel.core.modules.module_paths import match_paths
from hyper_parallel.core.modules.plain_parameters import name_parameters
from hyper_parallel.core.tensor_parallel.style_base import ParallelStyle
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.framework_of import require_module

Plan = ParallelStyle | Mapping[str, ParallelStyle | Sequence[ParallelStyle]]


def parallelize_module(
    module: Any,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: Plan | None = None,
    *,
    axes: str | Sequence[str] | None = None,
    src_data_rank: int | None = 0,
) -> Any:
    """Make a module parallel over a mesh, in place; the module.

    ``parallelize_plan`` is a style for the module itself, or a dict from paths of modules inside it to styles.
    ``*`` in a path stands for any one name (``"layers.*.mlp.w1"``), ``**`` for any number of names, ``""`` for the
    module itself; a path without wildcards goes before those with. A path that matches nothing is an error. Several
    styles for one module are given as a list. ``device_mesh`` is a mesh, or one cut out of a larger (``mesh["tp"]``);
    the default is that of the enclosing ``with mesh:``. With ``axes`` the styles act on these axes of it and leave what
    the layout of an activation says about the others alone; parameters and plain inputs are replicated on those. The
    parameters' values are those of the rank at position
    ``src_data_rank`` of the mesh, which sends the others their parts; with None every rank cuts what it has.

    >>> import torch, hyper_parallel as hp
    >>> mesh = hp.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",), rank_list=(0,), init_backend=False)
    >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> mlp = hp.parallelize_module(mlp, mesh, {"0": hp.ColwiseParallel(), "2": hp.RowwiseParallel()})
    >>> mlp[0].weight.placements
    (Shard(0),)
    >>> mesh = hp.init_device_mesh("cpu", (1, 1), mesh_dim_names=("cp", "tp"), rank_list=(0,), init_backend=False)
    >>> linear = hp.parallelize_module(torch.nn.Linear(4, 8), mesh, hp.ColwiseParallel(), axes="tp")
    >>> linear.weight.placements
    (Replicate(), Shard(0))
    """
    platform = get_platform()
    require_module("parallelize_module", module)
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
    acted_on = mesh if axes is None else mesh[axes]
    name_parameters(module)
    with keeping_ties(module, mesh):
        for path, styles in chosen.items():
            for style in styles:
                style.src_data_rank = src_data_rank
                replaced = style.apply(modules[path], acted_on)
                if replaced is not modules[path] and path == "":
                    module = replaced
    return module


def match_plan(modules: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, list[ParallelStyle]]:
    """The styles for each module path, in the order of the modules; an error for a pattern that matches none."""
    chosen = match_paths(modules, plan, "parallelize_module", "module")
    return {path: _as_styles(given, f"the plan's {pattern!r}") for path, (pattern, given) in chosen.items()}


def _as_styles(given: Any, where: str) -> list[ParallelStyle]:
    styles = list(given) if isinstance(given, (list, tuple)) else [given]
    for style in styles:
        if not isinstance(style, ParallelStyle):
            hint = f"; did you mean {style.__name__}()?" if isinstance(style, type) else ""
            raise TypeError(f"parallelize_module: {where} must be a ParallelStyle, got {style!r}{hint}")
    return styles
