"""A module whose inputs are gathered once, for all the layers inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh_axes import on_axes, replicated_on
from hyper_parallel.core.dtensor.placement_types import Placement
from hyper_parallel.core.modules.placements import per_axis
from hyper_parallel.core.tensor_parallel.style_base import ParallelStyle, described
from hyper_parallel.platform import get_platform

_platform = get_platform()


class GatherInputs(ParallelStyle):
    """Inputs that are cut or pending are made whole once, for all the layers inside; outputs leave under ``output``.

    forward: one all-gather per input that is cut; backward: one reduce-scatter of its gradient.
    """

    def __init__(self, *, output: Placement | None = None) -> None:
        self.output = output

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            done: dict[int, Any] = {}  # one input given as query, key and value stays one

            def gather(value: Any) -> Any:
                if not isinstance(value, DTensor) or value._layout.is_replicated:
                    return value
                if id(value) not in done:
                    whole = replicated_on(value._layout, device_mesh)
                    done[id(value)] = value.redistribute(value.device_mesh, whole)
                return done[id(value)]

            return tuple(map(gather, args)), {name: gather(value) for name, value in kwargs.items()}

        _platform.register_forward_pre_hook(module, before, with_kwargs=True)
        if self.output is not None:
            move = mover(device_mesh, self.output)
            _platform.register_forward_hook(module, lambda _, inputs, outputs: _on_first(move, outputs))
        return module

    def __repr__(self) -> str:
        return described(self, output=self.output) if self.output is not None else "GatherInputs()"


def mover(mesh: DeviceMesh, placement: Placement) -> Callable[[Any], Any]:
    """What brings a distributed tensor to ``placement`` on the axes of ``mesh``."""
    placements = per_axis(placement, mesh)

    def move(value: Any) -> Any:
        if not isinstance(value, DTensor) or value.ndim == 0:
            return value
        layout = on_axes(value._layout, Layout.from_placements(mesh, placements, value.ndim))
        return value if value._layout is layout else value.redistribute(layout.mesh, layout)

    return move


def _on_first(function: Callable[[Any], Any], outputs: Any) -> Any:
    if isinstance(outputs, tuple):
        return (function(outputs[0]), *outputs[1:])
    return function(outputs)
