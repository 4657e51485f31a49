"""Making the parameters of one module distributed; a parameter that several modules share stays one.

A style acts on the axes of the mesh that it is given, and its parameters lie there; under ``parallelize_module`` with
``axes=`` they lie on the whole of the wider mesh, replicated on its other axes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.distribute import distribute_tensor
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh_axes import axes_within, widened
from hyper_parallel.core.dtensor.placement_types import Placement, Replicate
from hyper_parallel.core.modules.initial_values import carry_initial_values
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.region import Region

_platform = get_platform()


class _Ties(threading.local):
    """What became of the parameters that were replaced under :func:`keeping_ties`, by their old identity."""

    def __init__(self) -> None:
        self.replaced: dict[int, tuple[Any, Any, str]] | None = None
        self.split: dict[int, tuple[Any, dict[str, Any], str]] = {}
        self.mesh: DeviceMesh | None = None


_ties = _Ties()


@contextmanager
def keeping_ties(root: Any, mesh: DeviceMesh | None = None) -> Iterator[None]:
    """Inside, a parameter of ``root`` that is replaced in one module is replaced in every module that has it.

    Parameters that a style lays on some axes of ``mesh`` lie on all of them.
    """
    before = _ties.replaced, _ties.split, _ties.mesh
    replaced: dict[int, tuple[Any, Any, str]] = {}
    split: dict[int, tuple[Any, dict[str, Any], str]] = {}
    _ties.replaced, _ties.split, _ties.mesh = replaced, split, mesh
    try:
        yield
        for path, module in _platform.get_cells_and_names(root):
            for name, parameter in _platform.own_parameters(module).items():
                if id(parameter) in split:
                    raise ValueError(
                        f"parallelize_module: the parameter {name!r} of {path!r} is shared with "
                        f"{split[id(parameter)][2]}, where it was split into parts; give both modules the same style"
                    )
                if id(parameter) in replaced:
                    _platform.install_parameter(module, name, replaced[id(parameter)][1])
    finally:
        _ties.replaced, _ties.split, _ties.mesh = before


def compute_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Where the parameters and plain inputs of a style that acts on ``mesh`` lie: there, or on a wider mesh."""
    wider = _ties.mesh
    return mesh if wider is None or axes_within(mesh, wider) is None else wider


def distribute_parameter(
    module: Any, name: str, mesh: DeviceMesh, placements: tuple[Placement, ...], src_data_rank: int | None, where: str
) -> None:
    """Replace the parameter ``name`` of ``module`` by a distributed one; nothing happens where there is none.

    The values are those of the rank at position ``src_data_rank`` of the mesh, or with None what every rank has.
    """
    parameter = _platform.own_parameters(module).get(name)
    if parameter is None:
        return
    layout = _layout_of(parameter, mesh, placements)
    mesh = layout.mesh
    if _ties.replaced is not None and id(parameter) in _ties.replaced:
        _, new, first = _ties.replaced[id(parameter)]
        if new._layout is not layout:
            raise ValueError(
                f"{where}: its parameter {name!r} is shared with {first}, where it has {new._layout}; this "
                f"style wants {layout}. One parameter has one layout: choose styles that agree (RowwiseParallel for an "
                "embedding and ColwiseParallel for a linear layer both shard the vocabulary)"
            )
        _platform.install_parameter(module, name, new)
        return
    if isinstance(parameter, DTensor):
        if parameter._layout is not layout:
            raise ValueError(
                f"{where}: its parameter {name!r} has {parameter._layout} already and this style wants "
                f"{layout}; a module can be parallelized once"
            )
        return
    new = distribute_tensor(parameter, mesh, layout, src_data_rank=_source(mesh, src_data_rank, parameter))
    carry_initial_values(parameter, new)
    if _ties.replaced is not None:
        _ties.replaced[id(parameter)] = (parameter, new, where)
    _platform.install_parameter(module, name, new)


def split_parameter(
    module: Any,
    name: str,
    dim: int,
    parts: Mapping[str, tuple[int, tuple[Placement, ...]]],
    mesh: DeviceMesh,
    src_data_rank: int | None,
    where: str,
) -> None:
    """Replace the parameter ``name`` of ``module`` by its parts along ``dim``, distributed parameters of their own.

    ``parts`` gives the width and the placements of each by its new name. Where several modules share the parameter they
    share its parts.
    """
    parameter = _platform.own_parameters(module).get(name)
    if parameter is None:
        return
    if id(parameter) in _ties.split:
        _, made, first = _ties.split[id(parameter)]
        if made.keys() != parts.keys() or any(
            one.shape[dim] != parts[part][0] or one._layout is not _layout_of(one, mesh, parts[part][1])
            for part, one in made.items()
        ):
            raise ValueError(f"{where}: its parameter {name!r} is shared with {first}, which splits it otherwise")
        for part, one in made.items():
            _platform.install_parameter(module, part, one)
    else:
        _refuse_deferred(parameter, name, where)
        start = 0
        for part, (width, placements) in parts.items():
            offsets = tuple(start if d == dim else 0 for d in range(parameter.ndim))
            sizes = tuple(width if d == dim else size for d, size in enumerate(parameter.shape))
            piece = _platform.slice_block(_platform.detached(parameter), Region(offsets, sizes))
            _platform.install_parameter(module, part, _platform.Parameter(piece, requires_grad=parameter.requires_grad))
            distribute_parameter(module, part, mesh, placements, src_data_rank, where)
            start += width
        own = _platform.own_parameters(module)
        if _ties.replaced is not None:
            _ties.split[id(parameter)] = (parameter, {part: own[part] for part in parts}, where)
    _platform.install_parameter(module, name, None)


def _layout_of(parameter: Any, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Layout:
    return widened(Layout.from_placements(mesh, placements, parameter.ndim), compute_mesh(mesh))


def _refuse_deferred(parameter: Any, name: str, where: str) -> None:
    if _platform.has_no_memory(parameter):
        raise ValueError(
            f"{where}: its parameter {name!r} has no memory yet, and its initial values are made for the unsplit "
            "tensor; call materialize before parallelize_module, or use ColwiseParallel, which does not split it"
        )


def replicate_parameters(module: Any, mesh: DeviceMesh, src_data_rank: int | None, where: str) -> None:
    """Every plain parameter of ``module`` and the modules inside becomes a distributed one, whole on every rank."""
    whole = (Replicate(),) * mesh.ndim
    for _, inner in _platform.get_cells_and_names(module):
        for name, parameter in _platform.own_parameters(inner).items():
            if not isinstance(parameter, DTensor):
                distribute_parameter(inner, name, mesh, whole, src_data_rank, where)


def _source(mesh: DeviceMesh, src_data_rank: int | None, parameter: Any) -> int | None:
    if src_data_rank is None or mesh.size() == 1 or _platform.has_no_memory(parameter):
        return None
    if not 0 <= src_data_rank < mesh.size():
        raise ValueError(
            f"src_data_rank={src_data_rank} is not a position in {mesh}, which has {mesh.size()} ranks; give a number "
            f"from 0 to {mesh.size() - 1}, or None to let every rank shard what it has"
        )
    return mesh.rank_list[src_data_rank]
