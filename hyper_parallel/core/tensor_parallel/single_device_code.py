"""Styles for code that nobody wrote for many devices: the model's own forward, on distributed or on whole tensors.

Note [Distributed all the way]
Under a ready plan activations are distributed tensors from the embedding to the head, also between modules. Whatever
the model's own code does with them, the operators' rules and the one law of gradients make it right: a plan only
decides what is cheap. Heads that do not divide, norms over each head, a forgotten module cost communication and never
a wrong number. Tensors that the model makes for itself (masks, positions, tables of angles) are the same on every rank,
for all ranks run the same code on the same inputs; they are taken as whole.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh_axes import replicated_on
from hyper_parallel.core.dtensor.placement_types import Placement, Replicate
from hyper_parallel.core.dtensor.skip_dispatch import SkipDTensorDispatch
from hyper_parallel.core.modules.module_parameters import compute_mesh, distribute_parameter
from hyper_parallel.core.shard.dispatching.mixing import implicit_replication
from hyper_parallel.core.shard.dispatching.random_ops import same_draws
from hyper_parallel.core.tensor_parallel.gather_inputs import mover
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
        places = [
            (inner, name)
            for _, inner in _platform.get_cells_and_names(module)
            for name in _platform.own_parameters(inner)
        ]
        for inner, name in places:
            distribute_parameter(inner, name, device_mesh, replicated, self.src_data_rank, where)
        skip = SkipDTensorDispatch()
        move = mover(device_mesh, self.output or Replicate())
        plain_mesh = compute_mesh(device_mesh)
        first_inputs: list[DTensor | None] = []
        shadowed: list[list[tuple[Any, str, Any]]] = []

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            distributed = (value for value in (*args, *kwargs.values()) if isinstance(value, DTensor))
            first_inputs.append(next(distributed, None))
            plain = map_tensors(to_full_plain, (args, kwargs))
            shadowed.append(_with_gradients_by_the_law(places))
            skip.__enter__()
            return plain

        def after(_: Any, inputs: Any, outputs: Any) -> Any:
            skip.__exit__(None, None, None)
            for inner, name, value in shadowed.pop():
                _platform.shadow(inner, name, value)
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


def _with_gradients_by_the_law(places: list[tuple[Any, str]]) -> list[tuple[Any, str, Any]]:
    """Let values whose gradients are reduced later be plain ones: all ranks compute all of a gradient, and one counts.

    What was shadowed, with its value.
    """
    found = []
    for inner, name in places:
        value = vars(inner).get(name)
        if isinstance(value, DTensor) and value._layout.reduced_later:
            found.append((inner, name, value))
            _platform.shadow(inner, name, value.to_local())
    return found


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


def _as_replicated(value: Any, mesh: DeviceMesh) -> Any:
    if isinstance(value, DTensor):
        return value
    return _platform.as_dtensor(DTensor, _platform.alias(value), Layout.of(mesh, ((),) * value.ndim), value.shape)
