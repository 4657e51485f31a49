"""One parameter of a unit: the modules that have it, where it lies, and its place in the unit's memory."""

from __future__ import annotations

import math
from typing import Any

from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.fully_shard.data_axes import DataAxes, ParameterLayouts
from hyper_parallel.core.modules.initial_values import carry_initial_values
from hyper_parallel.platform import get_platform

_platform = get_platform()

Place = tuple[Any, str]  # a module and the name by which it has the parameter


class ShardedParameter:
    """A parameter that is sharded between steps and whole while its unit runs.

    ``dim`` is the tensor dim that the shard axes cut; None: every rank has the whole value, as of a number.
    """

    def __init__(self, name: str, places: list[Place], parameter: Any, axes: DataAxes, dim: int | None) -> None:
        where = f"fully_shard: the parameter {name!r} of shape {tuple(parameter.shape)}"
        if dim is not None:
            if not -parameter.ndim <= dim < parameter.ndim:
                raise ValueError(f"{where} has {parameter.ndim} dims and cannot be sharded on dim {dim}")
            dim %= parameter.ndim
        self.name, self.places, self.axes, self.dim = name, places, axes, dim
        self.shape = tuple(parameter.shape)
        self.layouts = ParameterLayouts(axes, parameter, dim, where)
        self.parameter = self._sharded(parameter)
        self.whole_shape = self.layouts.whole.sizes
        boxes = self.layouts.boxes
        self.is_sharded = dim is not None and axes.num_shards > 1
        #: Elements that each rank sends: those of the largest part, so that all send as many.
        self.segment = max(box.num_elements for box in boxes)
        self.block_shape = self.layouts.between.local_shape(self.shape)
        self.block_size = math.prod(self.block_shape)
        #: Whether the parts, as they are gathered, are the whole value with padding behind it and nowhere else.
        self.lies_straight = dim == 0 and all(
            box.offsets[0] == min(index * boxes[0].sizes[0], self.whole_shape[0]) for index, box in enumerate(boxes)
        )

        #: Whether some rank's part is smaller than the others'.
        self.is_padded = self.segment * len(boxes) != self.layouts.whole.num_elements

    def _sharded(self, parameter: Any) -> Any:
        """The parameter as a distributed one with this rank's part of it, in memory of its own."""
        block = _platform.detached(parameter)
        if isinstance(parameter, DTensor) and parameter._layout is self.layouts.between:
            return parameter
        if self.dim is not None:
            block = self._mine(block)
        made = _platform.as_dtensor(DTensor, block, self.layouts.between, self.shape)
        sharded = _platform.as_parameter(made, parameter.requires_grad)
        carry_initial_values(parameter, sharded)
        return sharded

    def _mine(self, block: Any) -> Any:
        box = self.layouts.between.local_region(self.shape).inside(self.layouts.whole)
        return _platform.slice_block(block, box)

    def install(self) -> None:
        for module, name in self.places:
            _platform.install_parameter(module, name, self.parameter)

    def take(self, found: Any) -> None:
        """Let a parameter that a program has put in the place of the old one be this one's."""
        if not isinstance(found, DTensor):
            raise TypeError(
                f"fully_shard: the parameter {self.name!r} was replaced by a plain tensor of shape "
                f"{tuple(found.shape)}; replace it by a distributed one under {self.layouts.between}, or load values "
                "with set_model_state_dict"
            )
        if tuple(found.shape) != self.shape:
            raise ValueError(
                f"fully_shard: the parameter {self.name!r} of shape {self.shape} was replaced by one of shape "
                f"{tuple(found.shape)}"
            )
        if found._layout is not self.layouts.between:
            moved = found.detach().redistribute(self.layouts.between.mesh, self.layouts.between)
            found.data = moved
        self.parameter = found
        self.install()

    def value(self, block: Any) -> Any:
        """What forward sees of the whole value: a plain tensor, or distributed over the model axes."""
        inside = self.layouts.inside
        return block if inside is None else _platform.as_dtensor(DTensor, block, inside, self.shape)
