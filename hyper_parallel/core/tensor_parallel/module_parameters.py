"""Making the parameters of one module distributed; a parameter that several modules share stays one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.distribute import distribute_tensor
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Placement, Replicate
from hyper_parallel.core.shard.constant_parameters import carry_constant
from hyper_parallel.platform import get_platform

_platform = get_platform()


class _Ties(threading.local):
    """What became of the parameters that were replaced under :func:`keeping_ties`, by their old identity."""

    def __init__(self) -> None:
        self.replaced: dict[int, tuple[Any, Any, str]] | None = None


_ties = _Ties()


@contextmanager
def keeping_ties(root: Any) -> Iterator[None]:
    """Inside, a parameter of ``root`` that is replaced in one module is replaced in every module that has it."""
    before = _ties.replaced
    _ties.replaced = replaced = {}
    try:
        yield
        for _, module in _platform.get_cells_and_names(root):
            for name, parameter in _platform.own_parameters(module).items():
                if id(parameter) in replaced:
                    _platform.install_parameter(module, name, replaced[id(parameter)][1])
    finally:
        _ties.replaced = before


def distribute_parameter(
    module: Any, name: str, mesh: DeviceMesh, placements: tuple[Placement, ...], src_data_rank: int | None, where: str
) -> None:
    """Replace the parameter ``name`` of ``module`` by a distributed one; nothing happens where there is none.

    The values are those of the rank at position ``src_data_rank`` of the mesh, or with None what every rank has.
    """
    parameter = _platform.own_parameters(module).get(name)
    if parameter is None:
        return
    layout = Layout.from_placements(mesh, placements, parameter.ndim)
    if _ties.replaced is not None and id(parameter) in _ties.replaced:
        _, new, first = _ties.replaced[id(parameter)]
        if new._layout is not layout:
            raise ValueError(
                f"{where}: its parameter {name!r} is shared with {first}, where it lies under {new._layout}; this "
                f"style wants {layout}. One parameter has one layout: choose styles that agree (RowwiseParallel for an "
                "embedding and ColwiseParallel for a linear layer both cut the vocabulary)"
            )
        _platform.install_parameter(module, name, new)
        return
    if isinstance(parameter, DTensor):
        if parameter._layout is not layout:
            raise ValueError(
                f"{where}: its parameter {name!r} lies under {parameter._layout} already and this style wants "
                f"{layout}; a module can be parallelized once"
            )
        return
    new = distribute_tensor(parameter, mesh, layout, src_data_rank=_source(mesh, src_data_rank, parameter))
    carry_constant(parameter, new)
    if _ties.replaced is not None:
        _ties.replaced[id(parameter)] = (parameter, new, where)
    _platform.install_parameter(module, name, new)


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
            f"from 0 to {mesh.size() - 1}, or None to let every rank cut what it has"
        )
    return mesh.rank_list[src_data_rank]
