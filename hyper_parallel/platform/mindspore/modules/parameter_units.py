"""Whole parameters in a cell's construct and their gradients in backward, on MindSpore.

Shadowing works as on PyTorch: Python finds ``cell.weight`` in ``vars(cell)`` before the cell looks into its parameters.
Gradients always go through the tape, and are never added behind its back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspore import nn

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.base.tensors import tensor_type_cast
from hyper_parallel.platform.mindspore.dtensor.dtensor_gradients import get_grad, set_grad
from hyper_parallel.platform.mindspore.dtensor.tensor_type import as_dtensor, local_alias, plain_kind

__all__ = [
    "accumulate",
    "add_to_grad",
    "adds_to_leaves",
    "after_backward",
    "before_backward",
    "is_container",
    "is_recording",
    "items_of",
    "leave_gradients_missing",
    "mark_not_differentiable",
    "parameter_at",
    "runs_in_backward",
    "scale",
    "shadow",
    "unshadow",
    "which_need_grad",
    "writes_into",
]

# ---------------------------------------------------------------- forward


def is_container(module: Any) -> bool:
    return isinstance(module, (nn.CellList, nn.CellDict))


def items_of(module: Any) -> list[Any]:
    return list(private_api.cells_of(module).values())


def parameter_at(module: Any, name: str) -> Any:
    """The registered parameter, whatever shadows it."""
    return private_api.parameters_of(module).get(name)


def shadow(module: Any, name: str, tensor: Any) -> None:
    vars(module)[name] = tensor


def unshadow(module: Any, name: str) -> None:
    vars(module).pop(name, None)


def which_need_grad(parameters: Sequence[Any]) -> tuple[bool, ...]:
    return tuple(bool(parameter.requires_grad) for parameter in parameters)


def is_recording() -> bool:
    return private_api.is_recording()


def runs_in_backward() -> bool:
    return private_api.runs_in_backward()


def mark_not_differentiable(ctx: Any, tensors: Sequence[Any]) -> None:
    ctx.mark_non_differentiable(*tensors)


def leave_gradients_missing(ctx: Any) -> None:
    """The tape gives zeros for what nothing was computed from."""
    del ctx


# ---------------------------------------------------------------- backward


def before_backward(tensors: Sequence[Any], call: Callable[[], None]) -> bool:
    found = False

    def on_gradient(gradient: Any) -> Any:
        call()
        return gradient

    for tensor in tensors:
        plain = local_alias(tensor)
        if private_api.requires_grad(plain):
            found = True
            plain.register_hook(on_gradient)
    return found


def after_backward(call: Callable[[], None]) -> None:
    private_api.executor.queue_backward_final_callback(call)


def adds_to_leaves(ctx: Any) -> bool:
    """Gradients go through the tape, for functions that return them as well as for those that add them up."""
    del ctx
    return False


def add_to_grad(parameter: Any, block: Any) -> None:
    made = as_dtensor(plain_kind(type(parameter)), block, parameter._layout.gradient(), parameter._global_shape)
    before = get_grad(parameter)
    set_grad(parameter, made if before is None else before + made)


def writes_into(parameters: Sequence[Any]) -> tuple[int, ...]:
    return tuple(parameter._version for parameter in parameters)


def accumulate(total: Any, gradient: Any, dtype: Any) -> Any:
    with private_api.no_grad():
        given = tensor_type_cast(gradient, dtype)
        return given * 1 if total is None else total + given


def scale(tensor: Any, factor: float) -> Any:
    with private_api.no_grad():
        return tensor if factor == 1 else tensor * factor
