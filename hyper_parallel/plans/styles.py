"""Styles that ready plans need beside those of `core/tensor_parallel`: for code that nobody wrote for many devices.

Note [Distributed all the way]
Under a ready plan activations are distributed tensors from the embedding to the head, also between modules. Whatever
the model's own code does with them, the operators' rules and the one law of gradients make it right: a plan only
decides what is cheap. Heads that do not divide, norms over each head, a forgotten module cost communication and never
a wrong number. Tensors that the model makes for itself (masks, positions, tables of angles) are the same on every rank,
for all ranks run the same code on the same inputs; they are taken as whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh_axes import on_axes, replicated_on
from hyper_parallel.core.dtensor.placement_types import Placement, Replicate, Shard
from hyper_parallel.core.dtensor.skip_dispatch import SkipDTensorDispatch
from hyper_parallel.core.modules.module_parameters import compute_mesh, distribute_parameter, split_parameter
from hyper_parallel.core.modules.placements import per_axis
from hyper_parallel.core.shard.dispatching.mixing import implicit_replication
from hyper_parallel.core.shard.dispatching.random_ops import same_draws
from hyper_parallel.core.tensor_parallel.style_base import ParallelStyle, described
from hyper_parallel.platform import get_platform

_platform = get_platform()


class SingleDeviceCode(ParallelStyle):
    """The module's forward may mix distributed tensors with plain ones, which are whole on every rank.

    With ``plain_outputs`` the tensors it returns are gathered and plain, as on one device; their gradients are whole.
    See Note [Distributed all the way].
    """

    def __init__(self, *, plain_outputs: bool = False) -> None:
        self.plain_outputs = plain_outputs

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        promise = implicit_replication()

        def before(_: Any, args: Any) -> None:
            promise.__enter__()

        def after(_: Any, inputs: Any, outputs: Any) -> Any:
            promise.__exit__(None, None, None)
            return map_tensors(to_full_plain, outputs) if self.plain_outputs else None

        _platform.register_forward_pre_hook(module, before, prepend=True)
        _platform.register_forward_hook(module, after, always_call=True)
        return module

    def __repr__(self) -> str:
        return described(self, plain_outputs=self.plain_outputs)


class SingleDeviceModel(SingleDeviceCode):
    """:class:`SingleDeviceCode` for a whole model: plain tensors that it draws while training are whole on every rank.

    Stochastic depth, layers that are left out by chance and noise on a router come from the framework's own generator,
    whose state may differ between the ranks. In each call of the model it starts from the library's instead.
    """

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        open_draws: list[Any] = []

        def before(called: Any, args: Any) -> None:
            open_draws.append(same_draws() if called.training else nullcontext())
            open_draws[-1].__enter__()

        def after(_: Any, inputs: Any, outputs: Any) -> None:
            open_draws.pop().__exit__(None, None, None)

        super().apply(module, device_mesh)
        _platform.register_forward_pre_hook(module, before, prepend=True)
        _platform.register_forward_hook(module, after, always_call=True)
        return module


class ReplicateParameters(ParallelStyle):
    """The module's own parameters, or those with these ``names``, are whole on every rank; it computes on whatever part
    of the activations comes.

    forward: nothing; backward: one all-reduce of a parameter's gradient where the activations are cut.
    """

    def __init__(self, names: Iterable[str] | None = None) -> None:
        self.names = None if names is None else tuple(names)

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        where = f"ReplicateParameters on {type(module).__name__}"
        for name in _platform.own_parameters(module) if self.names is None else self.names:
            distribute_parameter(
                module, name, device_mesh, (Replicate(),) * device_mesh.ndim, self.src_data_rank, where
            )
        return module

    def __repr__(self) -> str:
        return "ReplicateParameters()" if self.names is None else f"ReplicateParameters({list(self.names)})"


class ShardParameters(ParallelStyle):
    """The module's own parameters lie as ``layouts`` says by name; others are whole.

    For modules that use each other's weights without calling each other, as ``nn.MultiheadAttention`` does.
    """

    def __init__(self, layouts: Mapping[str, Placement]) -> None:
        self.layouts = dict(layouts)

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        where = f"ShardParameters on {type(module).__name__}"
        for name in _platform.own_parameters(module):
            placements = per_axis(self.layouts.get(name, Replicate()), device_mesh)
            distribute_parameter(module, name, device_mesh, placements, self.src_data_rank, where)
        return module

    def __repr__(self) -> str:
        return f"ShardParameters({self.layouts!r})"


class ShardAttention(ParallelStyle):
    """The framework's own attention module, cut by heads: its one weight for query, key and value becomes three.

    Biases are whole. Like a module of PyTorch's with keys of another width it then has ``q_proj_weight``,
    ``k_proj_weight`` and ``v_proj_weight``.
    forward: nothing; backward: one all-reduce of the gradient of each input, one gather of that of each bias.
    """

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        where = f"ShardAttention on {type(module).__name__}"
        packed = _platform.own_parameters(module).get("in_proj_weight")
        cut = per_axis(Shard(0), device_mesh)
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        if packed is not None and not _platform.has_no_memory(packed):
            parts = dict.fromkeys(names, (packed.shape[0] // 3, cut))
            split_parameter(module, "in_proj_weight", 0, parts, device_mesh, self.src_data_rank, where)
            _platform.use_separate_projections(module)
        rest = ShardParameters(dict.fromkeys((*names, "in_proj_weight"), Shard(0)))
        rest.src_data_rank = self.src_data_rank
        return rest.apply(module, device_mesh)


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
            move = _mover(device_mesh, self.output)
            _platform.register_forward_hook(module, lambda _, inputs, outputs: _on_first(move, outputs))
        return module

    def __repr__(self) -> str:
        return described(self, output=self.output) if self.output is not None else "GatherInputs()"


class ComputeReplicated(ParallelStyle):
    """Every rank runs the module's own code on whole plain tensors; the outputs leave under ``output``.

    For code whose steps depend on values, such as a mixture of experts that asks how many tokens an expert got. The
    parameters are whole on every rank, and so are their gradients.
    forward: one all-gather per input that is cut; backward: what the gather's gradient needs.
    """

    def __init__(self, *, output: Placement | None = None) -> None:
        self.output = output

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        where = f"ComputeReplicated on {type(module).__name__}"
        replicated = (Replicate(),) * device_mesh.ndim
        for _, inner in _platform.get_cells_and_names(module):
            for name in _platform.own_parameters(inner):
                distribute_parameter(inner, name, device_mesh, replicated, self.src_data_rank, where)
        skip = SkipDTensorDispatch()
        move = _mover(device_mesh, self.output or Replicate())
        plain_mesh = compute_mesh(device_mesh)
        first_inputs: list[DTensor | None] = []

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            distributed = (value for value in (*args, *kwargs.values()) if isinstance(value, DTensor))
            first_inputs.append(next(distributed, None))
            plain = map_tensors(to_full_plain, (args, kwargs))
            skip.__enter__()
            return plain

        def after(_: Any, inputs: Any, outputs: Any) -> Any:
            skip.__exit__(None, None, None)
            like = first_inputs.pop()
            mesh = plain_mesh if like is None else like.device_mesh

            def leave(value: Any) -> Any:
                value = _as_replicated(value, mesh)
                if like is not None and tuple(value._global_shape) == tuple(like._global_shape):
                    # on the axes that are not the style's, as the input came
                    value = value.redistribute(mesh, replicated_on(like._layout.reduced(), device_mesh))
                return move(value)

            return map_tensors(leave, outputs)

        _platform.register_forward_pre_hook(module, before, with_kwargs=True)
        _platform.register_forward_hook(module, after, always_call=True)
        return module

    def __repr__(self) -> str:
        return described(self, output=self.output)


def to_full_plain(value: Any) -> Any:
    """A distributed tensor's whole value as a plain tensor; its gradient is taken as whole."""
    if not isinstance(value, DTensor):
        return value
    if not value._layout.is_replicated:
        value = value.redistribute(value.device_mesh, value._layout.replicated())
    return value.to_local()


def map_tensors(function: Callable[[Any], Any], values: Any) -> Any:
    """``function`` on every tensor in tuples, lists, dicts and the output classes of Hugging Face."""
    if _platform.is_tensor(values):
        return function(values)
    if isinstance(values, dict):
        mapped = {name: map_tensors(function, value) for name, value in values.items()}
        if type(values) is dict:
            return mapped
        for name, value in mapped.items():  # an output class: a dict with fields of its own, changed in place
            if value is not values[name]:
                values[name] = value
        return values
    if isinstance(values, (list, tuple)):
        items = [map_tensors(function, value) for value in values]
        return type(values)(*items) if hasattr(values, "_fields") else type(values)(items)
    return values


def _mover(mesh: DeviceMesh, placement: Placement) -> Callable[[Any], Any]:
    placements = per_axis(placement, mesh)

    def move(value: Any) -> Any:
        if not isinstance(value, DTensor) or value.ndim == 0:
            return value
        layout = on_axes(value._layout, Layout.from_placements(mesh, placements, value.ndim))
        return value if value._layout is layout else value.redistribute(layout.mesh, layout)

    return move


def _as_replicated(value: Any, mesh: DeviceMesh) -> Any:
    if isinstance(value, DTensor):
        return value
    return _platform.as_dtensor(DTensor, _platform.alias(value), Layout.of(mesh, ((),) * value.ndim), value.shape)


def _on_first(function: Callable[[Any], Any], outputs: Any) -> Any:
    if isinstance(outputs, tuple):
        return (function(outputs[0]), *outputs[1:])
    return function(outputs)
