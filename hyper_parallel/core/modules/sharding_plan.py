"""``shard_module``: layouts of parameters and activations, by their paths in a module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.distribute import distribute_tensor
from hyper_parallel.core.dtensor.distributed_tensor import DTensor, resolve_layout, resolve_mesh
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Placement
from hyper_parallel.core.modules.boundary import InputBoundary, OutputBoundary
from hyper_parallel.core.modules.initial_values import carry_initial_values
from hyper_parallel.core.modules.module_paths import is_wildcard, match_paths
from hyper_parallel.core.modules.plain_parameters import name_parameters
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.framework_of import require_module

_platform = get_platform()


@dataclass(frozen=True)
class ShardingPlan:
    """How the parameters and activations of a module lie.

    A layout is written in either spelling: one placement per mesh axis, ``[Shard(0), Replicate()]``, or one alias per
    tensor dim, ``("dp", "None")``. Paths may have wildcards, as for :func:`parallelize_module`.

    ``plan``: parameters by path, ``{"mlp.weight": ("tp", "None")}``. Parameters of the same module that it does not
    name are whole on every rank; other modules keep plain ones (``"**": [Replicate()]`` makes all whole).
    ``input_plan``: inputs by path, ``{"input": ..., "mlp.input": ...}``; the layout of the first input, a list with one
    or None per input, or a dict of keyword arguments. A plain tensor is this rank's block.
    ``output_plan``: outputs by path, ``{"output": ..., "relu.output": ...}``; a layout, or a list with one each.
    ``return_local_tensor``: paths of modules whose outputs leave as plain blocks (``""``: those of the whole module).
    """

    plan: Mapping[str, Any] = field(default_factory=dict)
    input_plan: Mapping[str, Any] | None = None
    output_plan: Mapping[str, Any] | None = None
    return_local_tensor: Sequence[str] | None = None


def shard_module(model: Any, device_mesh: DeviceMesh | None = None, sharding_plan: ShardingPlan | None = None) -> Any:
    """Cut a module's parameters and redistribute its activations as a :class:`ShardingPlan` says, in place; the module.

    Every rank holds the whole parameters before, and cuts its own blocks without communication. In a world of one
    process the module is returned as it is.
    forward: the redistributions between the layouts that activations have and those that are planned; backward: the
    same between the gradients' layouts.

    >>> import hyper_parallel as hp, torch
    >>> plan = hp.ShardingPlan({"weight": [hp.Shard(0)]}, {"input": [hp.Replicate()]}, {"output": [hp.Replicate()]})
    >>> mesh = hp.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",), rank_list=(0,), init_backend=False)
    >>> hp.shard_module(torch.nn.Linear(2, 2), mesh, plan)
    Linear(in_features=2, out_features=2, bias=True)
    """
    if not isinstance(sharding_plan, ShardingPlan):
        raise TypeError(f"shard_module takes a ShardingPlan, got {type(sharding_plan).__name__}")
    require_module("shard_module", model)
    mesh = resolve_mesh(device_mesh, "shard_module")
    modules = dict(_platform.get_cells_and_names(model))
    inputs = _activations(sharding_plan.input_plan, modules, "input")
    outputs = _activations(sharding_plan.output_plan, modules, "output")
    local = _local_outputs(sharding_plan.return_local_tensor, modules)
    parameters = {
        f"{path}.{name}" if path else name: (module, name, parameter)
        for path, module in modules.items()
        for name, parameter in _platform.own_parameters(module).items()
    }
    chosen = match_paths(parameters, sharding_plan.plan, "shard_module", "parameter")
    in_order = sorted(chosen.items(), key=lambda one: is_wildcard(one[1][0]))  # of a tied parameter, the exact path
    layouts = {path: _layout(mesh, spelling, parameters[path][2], path) for path, (_, spelling) in in_order}
    exact = {path for path, (pattern, _) in in_order if not is_wildcard(pattern)}
    if _platform.get_world_size() == 1:
        return model
    name_parameters(model)
    _shard_parameters(parameters, layouts, exact, mesh)
    for path in dict.fromkeys((*inputs, *outputs, *local)):
        _hook(modules[path], path, mesh, inputs.get(path), outputs.get(path), path in local)
    return model


def _layout(mesh: DeviceMesh, spelling: Any, parameter: Any, path: str) -> Layout:
    try:
        return resolve_layout(mesh, spelling, len(parameter.shape))
    except (ValueError, TypeError) as error:
        raise type(error)(f"shard_module: the parameter {path!r} of shape {tuple(parameter.shape)}: {error}") from None


def _shard_parameters(
    parameters: Mapping[str, Any], layouts: dict[str, Layout], exact: set[str], mesh: DeviceMesh
) -> None:
    """Replace the parameters with a layout, and the others of the same modules, by distributed ones; tied stay tied."""
    touched = {id(parameters[path][0]) for path in layouts}
    made: dict[int, tuple[Any, str]] = {}
    for path in (*layouts, *(path for path in parameters if path not in layouts)):
        module, name, parameter = parameters[path]
        if path not in layouts and (id(module) not in touched or isinstance(parameter, DTensor)):
            continue
        layout = layouts.get(path) or Layout.of(mesh, ((),) * len(parameter.shape))
        if id(parameter) not in made:
            made[id(parameter)] = (distribute_tensor(parameter, mesh, layout), path)
            carry_initial_values(parameter, made[id(parameter)][0])
            continue
        new, first = made[id(parameter)]
        if path in layouts and new._layout is not layout and (path in exact) == (first in exact):
            raise ValueError(
                f"shard_module: {path!r} and {first!r} are one parameter, which has {new._layout} by the one "
                f"and {layout} by the other; give both the same layout, or name one of them"
            )
    for module, name, parameter in parameters.values():
        if id(parameter) in made:
            _platform.install_parameter(module, name, made[id(parameter)][0])


def _activations(plan: Mapping[str, Any] | None, modules: Mapping[str, Any], end: str) -> dict[str, Any]:
    """Module path -> the layouts planned for its inputs or outputs."""
    stripped = {}
    for path, layouts in (plan or {}).items():
        if path != end and not str(path).endswith(f".{end}"):
            raise ValueError(
                f"shard_module: {path!r} in {end}_plan does not end in {end!r}; write {end!r} for the whole module, "
                f"'path.to.module.{end}' for one inside"
            )
        stripped[path[: -len(end)].rstrip(".")] = layouts
    return {path: layouts for path, (_, layouts) in match_paths(modules, stripped, "shard_module", "module").items()}


def _local_outputs(paths: Sequence[str] | None, modules: Mapping[str, Any]) -> set[str]:
    if isinstance(paths, str):
        paths = [paths]
    plan = {("" if path == "output" else path.removesuffix(".output")): True for path in paths or ()}
    return set(match_paths(modules, plan, "shard_module: return_local_tensor", "module"))


def _hook(module: Any, path: str, mesh: DeviceMesh, inputs: Any, outputs: Any, local: bool) -> None:
    where = f"shard_module, {path or 'the module itself'}"
    if inputs is not None:
        by_name = {
            name: _boundary(mesh, spelling, f"{where}, input {name!r}")
            for name, spelling in (inputs.items() if isinstance(inputs, Mapping) else ())
        }
        by_place = () if by_name else [_boundary(mesh, one, f"{where}, input") for one in _each(inputs)]

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            _same_number(where, "input", len(by_place), len(args), at_most=True)
            moved = [entry(value) for entry, value in zip(by_place, args, strict=False)]
            named = {name: by_name[name](value) if name in by_name else value for name, value in kwargs.items()}
            return (*moved, *args[len(moved) :]), named

        _platform.register_forward_pre_hook(module, before, with_kwargs=True)
    if outputs is None and not local:
        return
    on_outputs = None if outputs is None else [_boundary(mesh, one, f"{where}, output") for one in _each(outputs)]
    on_output = OutputBoundary(mesh, None, local, where)

    def after(_: Any, inputs: Any, outputs: Any) -> Any:
        del inputs
        if not isinstance(outputs, (tuple, list)):
            return on_output(on_outputs[0](outputs) if on_outputs else outputs)
        if on_outputs is not None:
            _same_number(where, "output", len(on_outputs), len(outputs))
        moved = [on_output(on_outputs[place](value) if on_outputs else value) for place, value in enumerate(outputs)]
        return type(outputs)(*moved) if hasattr(outputs, "_fields") else type(outputs)(moved)

    _platform.register_forward_hook(module, after)


def _each(layouts: Any) -> list[Any]:
    """The spellings in a plan's value: one, or a list of them."""
    is_many = isinstance(layouts, list) and any(
        item is None or isinstance(item, (Layout, tuple, list)) for item in layouts
    )
    return list(layouts) if is_many else [layouts]


def _boundary(mesh: DeviceMesh, spelling: Any, where: str) -> InputBoundary:
    if spelling is None:
        return InputBoundary(mesh, None, None, where)
    if isinstance(spelling, Placement):
        spelling = (spelling,) * mesh.ndim
    if not isinstance(spelling, (Layout, tuple, list)):
        raise TypeError(f"{where}: a layout is a sequence of placements or aliases, got {spelling!r}")
    if isinstance(spelling, list):
        spelling = tuple(tuple(item) if isinstance(item, list) else item for item in spelling)
    return InputBoundary(mesh, spelling, spelling, where)


def _same_number(where: str, kind: str, planned: int, given: int, at_most: bool = False) -> None:
    if planned > given if at_most else planned != given:
        raise ValueError(
            f"{where}: the plan has layouts for {planned} {kind}s, but there are {given}; give one per {kind}, None "
            "for those to leave alone"
        )
