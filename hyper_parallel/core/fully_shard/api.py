"""``fully_shard`` and ``replicate``: a module's parameters become shards, in place, and its calls see whole ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh, init_device_mesh
from hyper_parallel.core.dtensor.meshes.mesh_context import get_current_mesh
from hyper_parallel.core.dtensor.placement_types import Shard
from hyper_parallel.core.fully_shard.automatic_units import find_units
from hyper_parallel.core.fully_shard.data_axes import DataAxes
from hyper_parallel.core.fully_shard.hsdp_module import make_sharded, unit_of, units_in
from hyper_parallel.core.fully_shard.policies import MixedPrecisionPolicy, OffloadPolicy
from hyper_parallel.core.fully_shard.root import Root
from hyper_parallel.core.fully_shard.sharded_parameter import Place, ShardedParameter
from hyper_parallel.core.fully_shard.unit import Unit
from hyper_parallel.core.fully_shard.unit_gradients import UnitGradients
from hyper_parallel.core.modules.plain_parameters import name_parameters
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.framework_of import require_module

_platform = get_platform()

ShardPlacement = Callable[[Any], Any]

# Note on a parameter that was replaced by a sharded one, for modules that still have it: which unit, and which one.
_SHARDED_AS = "_hyper_parallel_sharded_as"


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacement | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[Any] | None = None,
    replicate_params: Iterable[Any] | None = None,
    units: str | None = None,
    shard_axes: Sequence[Any] | None = None,
    compute_mesh: DeviceMesh | None = None,
    comm_fusion: Any = None,
    comm_fusion_zero_copy: Any = None,
) -> Any:
    """Shard the parameters of ``module`` that are in no unit yet over the ranks of ``mesh``, in place; the module.

    The module, or the modules of a list, become one unit: when it runs, its parameters are gathered; behind it they are
    given back; in backward they are gathered again and their gradients are reduced to shards. Call it from the inside
    out, on the blocks of a model and then on the model; or on the model with ``units="auto"``, which takes the items of
    lists of modules. Between steps every parameter is a DTensor, for optimizers, clipping and checkpoints like any
    other, and names do not change. Gradients are averaged over the ranks.

    forward: all-gather of a unit's parameters; backward: all-gather again, reduce-scatter of the gradients.

    ``mesh``: one axis shards; of several the first replicates and the others shard (``shard_axes`` names those that
    shard). Default: the current mesh, or all ranks. Parameters that are distributed already (tensor parallelism) must
    lie on other axes of the same mesh; these cut first.
    ``compute_mesh``: the mesh on which activations are distributed, if it has axes of ``mesh`` (context parallelism
    over ``mesh["cp", "tp"]``, with parameters sharded over ``mesh["dp", "cp"]``).
    ``reshard_after_forward``: give the whole parameters back between forward and backward; False keeps them; a number
    keeps a part on each of so many neighbours.
    ``shard_placement_fn(parameter)``: ``Shard(dim)`` to cut that dim in place of the first, ``(Shard(dim), mesh)`` for
    another mesh, or None.
    ``mp_policy``, ``offload_policy``: precision, and host memory. ``ignored_params``: left as they are.
    ``replicate_params``: whole on every rank, their gradients reduced. ``comm_fusion``, ``comm_fusion_zero_copy``:
    taken for HyperParallel 1.0's programs; communication of a unit is always fused.
    """
    del comm_fusion, comm_fusion_zero_copy
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    _check("fully_shard", modules)
    axes = DataAxes(_mesh_for("fully_shard", mesh), shard_axes, "fully_shard", compute_mesh)
    options = _Options(axes, shard_placement_fn, mp_policy, offload_policy, ignored_params, replicate_params)
    options.reshard_after_forward = _checked_reshard(reshard_after_forward, axes)
    _shard(modules, options, units, "fully_shard")
    return module


def replicate(
    module: Any,
    mesh: DeviceMesh | None = None,
    *,
    units: str | None = "auto",
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: Iterable[Any] | None = None,
    compute_mesh: DeviceMesh | None = None,
) -> Any:
    """Average the gradients of ``module`` over the ranks of ``mesh``, in place; the module.

    Every rank has all parameters, which must be equal at the start. ``units="auto"`` reduces the gradients of items of
    lists of modules while backward goes on; without it those of the whole module at once. ``compute_mesh`` as in
    :func:`fully_shard`.

    forward: nothing; backward: all-reduce of a unit's gradients.
    """
    _check("replicate", [module])
    mesh = _mesh_for("replicate", mesh)
    options = _Options(DataAxes(mesh, (), "replicate", compute_mesh), None, mp_policy, None, ignored_params, None)
    _shard([module], options, units, "replicate")
    return module


class _Options:
    """What is asked for the units that one call makes."""

    reshard_after_forward: bool | int = True

    def __init__(
        self,
        axes: DataAxes,
        shard_placement_fn: ShardPlacement | None,
        mp_policy: MixedPrecisionPolicy | None,
        offload_policy: OffloadPolicy | None,
        ignored_params: Iterable[Any] | None,
        replicate_params: Iterable[Any] | None,
    ) -> None:
        self.axes = axes
        self._shard_placement_fn = shard_placement_fn
        self.mp_policy = _own_policy(mp_policy)
        self.offload_policy = offload_policy or OffloadPolicy()
        self.ignored = {id(parameter) for parameter in ignored_params or ()}
        self._whole = {id(parameter) for parameter in replicate_params or ()}

    def sharded(self, name: str, places: list[Place], parameter: Any) -> ShardedParameter:
        axes, dim = self.axes, 0 if parameter.ndim else None
        if self._shard_placement_fn is not None and parameter.ndim:
            axes, dim = self._chosen(name, parameter)
        if id(parameter) in self._whole or not axes.shard_axes:
            dim = None
        return ShardedParameter(name, places, parameter, axes, dim)

    def _chosen(self, name: str, parameter: Any) -> tuple[DataAxes, int]:
        chosen = self._shard_placement_fn(parameter) if self._shard_placement_fn is not None else None
        axes = self.axes
        if isinstance(chosen, tuple) and len(chosen) == 2 and isinstance(chosen[1], (DeviceMesh, DataAxes)):
            given = chosen[1]
            where = f"shard_placement_fn of {name!r}"
            axes = given if isinstance(given, DataAxes) else DataAxes(given, None, where)
            chosen = chosen[0]
        if chosen is None:
            return axes, 0
        if not isinstance(chosen, Shard):
            raise TypeError(
                f"shard_placement_fn gave {chosen!r} for {name!r}; it gives Shard(dim), (Shard(dim), mesh) or None"
            )
        return axes, chosen.dim


def _own_policy(policy: Any) -> MixedPrecisionPolicy:
    """The policy, also of torch FSDP2, in our words."""
    refused = _platform.why_no_computation_in(getattr(policy, "param_dtype", None))
    if refused is not None:
        raise ValueError(f"MixedPrecisionPolicy: param_dtype={policy.param_dtype}: {refused}")
    if policy is None or isinstance(policy, MixedPrecisionPolicy):
        return policy or MixedPrecisionPolicy()
    given = {name: getattr(policy, name) for name in ("param_dtype", "reduce_dtype", "output_dtype")}
    return MixedPrecisionPolicy(**given, cast_forward_inputs=getattr(policy, "cast_forward_inputs", True))


def _check(where: str, modules: list[Any]) -> None:
    if not modules:
        raise ValueError(f"{where}: the list of modules is empty")
    for module in modules:
        require_module(where, module)
        if unit_of(module) is not None:
            raise ValueError(f"{where}: this {type(module).__name__} was sharded already; call it once on a module")
        if _platform.is_container(module):
            raise ValueError(
                f"{where}: a {type(module).__name__} has no forward that could bring its parameters; shard its items, "
                'or the module that holds it with units="auto"'
            )


def _checked_reshard(wanted: Any, axes: DataAxes) -> bool | int:
    if wanted is None or isinstance(wanted, bool):
        return True if wanted is None else wanted
    if not isinstance(wanted, int) or wanted < 1:
        raise ValueError(f"fully_shard: reshard_after_forward is True, False or a number of ranks, got {wanted!r}")
    if wanted in (1, axes.num_shards):
        return wanted != 1  # all on one rank: nothing is given back; a part on each of all ranks: everything is
    axes.check_inner(wanted, "fully_shard")
    return wanted


def _mesh_for(where: str, mesh: DeviceMesh | None) -> DeviceMesh:
    mesh = mesh if mesh is not None else get_current_mesh()
    if mesh is None:
        device_type = _platform.get_device_type()
        mesh = init_device_mesh(device_type, (_platform.get_world_size(),), mesh_dim_names=("dp",))
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{where}: mesh must be a hyper_parallel DeviceMesh, got {type(mesh).__name__}")
    return mesh


def _shard(modules: list[Any], options: _Options, units: str | None, where: str) -> None:
    if units not in (None, "auto"):
        raise ValueError(f'{where}: units is None, which makes one unit, or "auto", got {units!r}')
    if units == "auto":
        for module in modules:
            for inner in find_units(module, options.ignored):
                _make_unit(inner, options)
    _make_unit(modules, options)
    _make_root(modules, options.axes)


def _make_unit(modules: list[Any], options: _Options) -> Unit:
    """One unit of the parameters inside the modules that are in no unit yet."""
    owned: dict[int, tuple[Unit, ShardedParameter]] = {}
    inside: list[Unit] = [unit for module in modules for unit in units_in(module)]
    brought: set[tuple[int, str]] = set()  # places whose value a unit inside brings, its own or borrowed
    for unit in inside:
        owned |= {id(p.parameter): (unit, p) for p in unit.parameters}
        brought |= {(id(module), name) for p in unit.parameters for module, name in p.places}
        for lender, lent in unit.lenders.items():
            owned |= {id(p.parameter): (lender, p) for p, _ in lent}
            brought |= {(id(module), name) for _, borrowed_at in lent for module, name in borrowed_at}
    places: dict[int, tuple[str, Any, list[Place]]] = {}
    borrowed: dict[Unit, dict[ShardedParameter, list[Place]]] = {}
    for top in modules:
        for path, module in _platform.get_cells_and_names(top):
            for name, parameter in _platform.own_parameters(module).items():
                if id(parameter) in options.ignored or (id(module), name) in brought:
                    continue
                if id(parameter) not in owned and hasattr(parameter, _SHARDED_AS):
                    owned[id(parameter)] = getattr(parameter, _SHARDED_AS)  # tied, and its other place was sharded
                if id(parameter) in owned:
                    unit, p = owned[id(parameter)]
                    _platform.install_parameter(module, name, p.parameter)
                    borrowed.setdefault(unit, {}).setdefault(p, []).append((module, name))
                    continue
                full = f"{path}.{name}" if path else name
                places.setdefault(id(parameter), (full, parameter, []))[2].append((module, name))
    sharded = [options.sharded(name, where, parameter) for name, parameter, where in places.values()]
    for p in sharded:
        p.install()
    made = Unit(modules, sharded, options.mp_policy, options.offload_policy)
    for (_, parameter, _), p in zip(places.values(), sharded, strict=True):
        setattr(parameter, _SHARDED_AS, (made, p))
    made.gradients = UnitGradients(made)
    made.reshard_after_forward = options.reshard_after_forward
    made.lenders = {unit: list(lent.items()) for unit, lent in borrowed.items()}
    made.refresh()
    for module in modules:
        make_sharded(module, made)
    return made


def _make_root(modules: list[Any], axes: DataAxes) -> None:
    """The modules are the root of all units inside them."""
    root = Root(modules[0], axes)
    root.own_unit = unit_of(modules[0])
    paths: dict[int, str] = {}
    for top in modules:
        for path, module in _platform.get_cells_and_names(top):
            paths.setdefault(id(module), path)
        for unit in units_in(top):
            if unit not in root.units:
                root.units.append(unit)
                unit.root = root
                unit.set_name(paths[id(unit.modules[0])])
        name_parameters(top)
    for unit in root.units:
        for p in unit.parameters:
            module, name = p.places[0]
            p.name = f"{paths[id(module)]}.{name}" if paths.get(id(module)) else name
