"""Parallel styles: how one module is cut, what its inputs must look like, and how its outputs leave it.

On a mesh of several axes one placement is meant for all of them; a tuple gives one for each. ``weight_layouts`` of
:class:`ColwiseParallel` and :class:`RowwiseParallel` cuts a weight on both dims, one per axis (2-D tensor parallelism).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.placement_types import Placement, Replicate, Shard
from hyper_parallel.core.modules.boundary import InputBoundary, OutputBoundary
from hyper_parallel.core.modules.linear_layers import linear_function
from hyper_parallel.core.modules.lora import adapter_of
from hyper_parallel.core.modules.module_parameters import distribute_parameter, replicate_parameters
from hyper_parallel.core.modules.placements import Placements, check_placements, per_axis
from hyper_parallel.core.tensor_parallel.prepare import (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
)
from hyper_parallel.core.tensor_parallel.projection import Projection
from hyper_parallel.core.tensor_parallel.style_base import ParallelStyle, described
from hyper_parallel.platform import get_platform

__all__ = [
    "ColwiseParallel",
    "NoParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
]

_platform = get_platform()


class _ShardedWeight(ParallelStyle):
    """A linear layer or an embedding whose weight is cut."""

    _input: Placement
    _output: Placement

    def __init__(
        self,
        *,
        input_layouts: Placements | None = None,
        output_layouts: Placements | None = None,
        use_local_output: bool = True,
        weight_layouts: Placements | None = None,
    ) -> None:
        name = type(self).__name__
        self.input_layouts = check_placements(self._input if input_layouts is None else input_layouts, name)
        self.output_layouts = check_placements(self._output if output_layouts is None else output_layouts, name)
        self.weight_layouts = None if weight_layouts is None else check_placements(weight_layouts, name)
        self.use_local_output = use_local_output

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        where = f"{type(self).__name__} on {type(module).__name__}"
        dims = _platform.linear_weight_dims(module)
        if dims is None and not _platform.is_embedding_module(module):
            raise NotImplementedError(
                f"{type(self).__name__} shards linear layers and embeddings, not a {type(module).__name__}; write a "
                "ParallelStyle for it, or use shard_module with a ShardingPlan"
            )
        weight, bias, wanted = self._placements(dims, device_mesh)
        lengths = {} if dims is None else {-1: _platform.own_parameters(module)["weight"].shape[dims[1]]}
        distribute_parameter(module, _platform.weight_name(module), device_mesh, weight, self.src_data_rank, where)
        distribute_parameter(module, "bias", device_mesh, bias, self.src_data_rank, where)
        adapter = adapter_of(module)
        beside = {} if adapter is None or dims is None else adapter.placements(weight, dims)
        for name, placements in beside.items():
            distribute_parameter(module, name, device_mesh, placements, self.src_data_rank, where)
        on_input = InputBoundary(device_mesh, per_axis(self.input_layouts, device_mesh), wanted, where, lengths)
        on_output = OutputBoundary(
            device_mesh, per_axis(self.output_layouts, device_mesh), self.use_local_output, where
        )
        linear = linear_function(module) if adapter is None else adapter.linear
        if linear is None:
            hook_values(module, on_input, on_output)
        else:
            is_partial = any(placement.is_shard() for placement in wanted)
            bias_behind = is_partial and not on_output.keeps_partial and not any(one.is_shard() for one in bias)
            _platform.replace_forward(module, Projection(linear, on_input, on_output, bias_behind, adapter))
        return module

    @abstractmethod
    def _placements(self, dims: tuple[int, int] | None, mesh: DeviceMesh) -> Any:
        """The placements of weight, bias and input; ``dims`` are a linear weight's, output and input."""

    def _linear_placements(self, dims: tuple[int, int], weight: tuple[Placement, ...]) -> Any:
        """Of a linear layer whose weight lies under ``weight``: the bias follows its outputs, the input its inputs."""
        outputs, inputs = dims
        bias = tuple(Shard(0) if one.is_shard() and one.dim % 2 == outputs else Replicate() for one in weight)  # type: ignore[attr-defined]
        wanted = tuple(Shard(-1) if one.is_shard() and one.dim % 2 == inputs else Replicate() for one in weight)  # type: ignore[attr-defined]
        return weight, bias, wanted

    def __repr__(self) -> str:
        arguments = {
            "input_layouts": self.input_layouts,
            "output_layouts": self.output_layouts,
            "use_local_output": self.use_local_output,
        }
        if self.weight_layouts is not None:
            arguments["weight_layouts"] = self.weight_layouts
        return described(self, **arguments)


class ColwiseParallel(_ShardedWeight):
    """Every rank computes a part of the outputs.

    Linear: weight and bias ``Shard(0)``; Embedding: weight ``Shard(1)``. A plain input is taken to lie under
    ``input_layouts``, whole by default; the output leaves under ``output_layouts``, ``Shard(-1)`` by default.
    forward: an all-gather if the input is cut; backward: one all-reduce (or reduce-scatter) of the input's gradient.

    >>> ColwiseParallel()
    ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=True)
    """

    _input, _output = Replicate(), Shard(-1)

    def _placements(self, dims: tuple[int, int] | None, mesh: DeviceMesh) -> Any:
        if dims is None:
            weight = per_axis(self.weight_layouts or Shard(1), mesh)
            return weight, weight, tuple(Replicate() for _ in weight)
        return self._linear_placements(dims, per_axis(self.weight_layouts or Shard(dims[0]), mesh))


class RowwiseParallel(_ShardedWeight):
    """Every rank computes a summand of the outputs from a part of the inputs.

    Linear: weight ``Shard(1)``, bias whole and added once; input ``Shard(-1)``. Embedding: weight ``Shard(0)``, ids
    that another rank holds give zero rows. The pending sum leaves under ``output_layouts``, whole by default.
    forward: one all-reduce (a reduce-scatter for ``Shard``); backward: nothing (an all-gather).

    >>> RowwiseParallel(output_layouts=Shard(1))
    RowwiseParallel(input_layouts=Shard(-1), output_layouts=Shard(1), use_local_output=True)
    """

    _input, _output = Shard(-1), Replicate()

    def __init__(
        self,
        *,
        input_layouts: Placements | None = None,
        output_layouts: Placements | None = None,
        use_local_output: bool = True,
        weight_layouts: Placements | None = None,
    ) -> None:
        self._is_default_input = input_layouts is None
        super().__init__(
            input_layouts=input_layouts,
            output_layouts=output_layouts,
            use_local_output=use_local_output,
            weight_layouts=weight_layouts,
        )

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        if _platform.is_embedding_module(module) and self._is_default_input:
            whole_ids = RowwiseParallel(
                input_layouts=Replicate(),
                output_layouts=self.output_layouts,
                use_local_output=self.use_local_output,
                weight_layouts=self.weight_layouts,
            )
            whole_ids.src_data_rank = self.src_data_rank
            return whole_ids.apply(module, device_mesh)
        return super().apply(module, device_mesh)

    def _placements(self, dims: tuple[int, int] | None, mesh: DeviceMesh) -> Any:
        if dims is None:
            weight = per_axis(self.weight_layouts or Shard(0), mesh)
            return weight, weight, tuple(Replicate() for _ in weight)
        return self._linear_placements(dims, per_axis(self.weight_layouts or Shard(dims[1]), mesh))


class NoParallel(ParallelStyle):
    """Parameters whole on every rank; the module computes on whatever part of the activations comes.

    A plain input is taken to lie under ``input_layouts``, whole by default; a distributed one stays where it lies,
    unless ``input_layouts`` is given. The output leaves under ``output_layouts``, by default as it is. The parameters'
    gradients are summed over the ranks where the activations are cut: this is the style for a norm over each head.
    forward: nothing; backward: one all-reduce of each parameter's gradient where the activations are cut.

    >>> NoParallel(input_layouts=Shard(2), output_layouts=Shard(2))
    NoParallel(input_layouts=Shard(2), output_layouts=Shard(2), use_local_output=True)
    """

    def __init__(
        self,
        *,
        input_layouts: Placements | None = None,
        output_layouts: Placements | None = None,
        use_local_output: bool = True,
    ) -> None:
        name = type(self).__name__
        self.input_layouts = None if input_layouts is None else check_placements(input_layouts, name)
        self.output_layouts = None if output_layouts is None else check_placements(output_layouts, name)
        self.use_local_output = use_local_output

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        where = f"{type(self).__name__} on {type(module).__name__}"
        replicate_parameters(module, device_mesh, self.src_data_rank, where)
        given = per_axis(self.input_layouts or Replicate(), device_mesh)
        wanted = None if self.input_layouts is None else given
        wanted_after = None if self.output_layouts is None else per_axis(self.output_layouts, device_mesh)
        on_input = InputBoundary(device_mesh, given, wanted, where)
        hook_values(module, on_input, OutputBoundary(device_mesh, wanted_after, self.use_local_output, where))
        return module

    def __repr__(self) -> str:
        return described(
            self,
            input_layouts=self.input_layouts,
            output_layouts=self.output_layouts,
            use_local_output=self.use_local_output,
        )


class SequenceParallel(ParallelStyle):
    """Parameters whole on every rank, activations cut on the sequence: for norms, dropout and the like.

    A plain input is taken to be cut on ``sequence_dim``; a distributed one is moved there. The output stays cut.
    forward: nothing; backward: one all-reduce of each parameter's gradient.

    >>> SequenceParallel(sequence_dim=0)
    SequenceParallel(sequence_dim=0, use_local_output=False)
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        if isinstance(sequence_dim, bool) or not isinstance(sequence_dim, int):
            raise TypeError(f"SequenceParallel: sequence_dim must be an int, got {sequence_dim!r}")
        self.sequence_dim = sequence_dim
        self.use_local_output = use_local_output

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        where = f"{type(self).__name__} on {type(module).__name__}"
        replicate_parameters(module, device_mesh, self.src_data_rank, where)
        cut = per_axis(Shard(self.sequence_dim), device_mesh)
        hook_values(
            module,
            InputBoundary(device_mesh, cut, cut, where),
            OutputBoundary(device_mesh, cut, self.use_local_output, where),
        )
        return module

    def __repr__(self) -> str:
        return described(self, sequence_dim=self.sequence_dim, use_local_output=self.use_local_output)


def hook_values(module: Any, on_input: InputBoundary, on_output: OutputBoundary) -> None:
    """Let the first input of ``module`` pass through ``on_input`` and its output through ``on_output``."""

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (on_input(args[0]), *args[1:]), kwargs
        for name, value in kwargs.items():
            if _platform.is_tensor(value):
                return args, {**kwargs, name: on_input(value)}
        return args, kwargs

    def after(_: Any, inputs: Any, outputs: Any) -> Any:
        del inputs
        if isinstance(outputs, tuple):
            return tuple(on_output(value) for value in outputs)
        return on_output(outputs)

    _platform.register_forward_pre_hook(module, before, with_kwargs=True)
    _platform.register_forward_hook(module, after)
