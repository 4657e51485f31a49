"""Whole parameters in a cell's construct and their gradients in backward, on MindSpore.

Shadowing works as on PyTorch: Python finds ``cell.weight`` in ``vars(cell)`` before the cell looks into its parameters.
Gradients always go through the tape, and are never added behind its back.

Note [Writes that nobody counts]
MindSpore's optimizers, ``assign`` and numpy write into a parameter on a CPU without a trace, but whole values that were
gathered before such a write are stale. So a parameter is compared by a checksum of its part on this rank, 4 GB/s.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mindspore import nn

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.base import start
from hyper_parallel.platform.mindspore.base.memory import bytes_of, memory_of
from hyper_parallel.platform.mindspore.base.tensors import from_numpy, is_meta, own_copy, tensor_type_cast
from hyper_parallel.platform.mindspore.dtensor.dtensor_gradients import get_grad, set_grad
from hyper_parallel.platform.mindspore.dtensor.tensor_type import as_dtensor, is_distributed, local_alias, plain_kind

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
    """``mindspore.value_and_grad`` leaves recording switched off, though nobody has forbidden it."""
    return private_api.has_started_recording() and private_api.is_recording()


def runs_in_backward() -> bool:
    return private_api.runs_in_backward()


def mark_not_differentiable(ctx: Any, tensors: Sequence[Any]) -> None:
    ctx.mark_non_differentiable(*tensors)


def leave_gradients_missing(ctx: Any) -> None:
    ctx.set_materialize_grads(False)


# ---------------------------------------------------------------- backward


def before_backward(tensors: Sequence[Any], call: Callable[[], None]) -> bool:
    """Hooks on the nodes that made the tensors, and not on the tensors: one that is written to gets another node."""
    nodes: dict[int, Any] = {}
    for tensor in tensors:
        plain = local_alias(tensor)
        if private_api.requires_grad(plain) and (node := private_api.grad_node(plain)) is not None:
            nodes[private_api.node_number(node)] = node

    def on_gradients(gradients: Any) -> None:
        call()

    for node in nodes.values():
        node.register_prehook(on_gradients)
    return bool(nodes)


def after_backward(call: Callable[[], None]) -> None:
    def run() -> None:
        with private_api.no_grad():  # which MindSpore has ended by then, other than in the backward itself
            call()

    private_api.executor.queue_backward_final_callback(run)


def adds_to_leaves(ctx: Any) -> bool:
    """Gradients go through the tape, for functions that return them as well as for those that add them up."""
    del ctx
    return False


def add_to_grad(parameter: Any, block: Any) -> None:
    made = block
    if is_distributed(parameter):
        made = as_dtensor(plain_kind(type(parameter)), block, parameter._layout.gradient(), parameter._global_shape)
    before = get_grad(parameter)
    set_grad(parameter, made if before is None else before + made)


def writes_into(parameters: Sequence[Any]) -> tuple[Any, ...]:
    """See Note [Writes that nobody counts]."""
    if start.on_ascend():
        return tuple(parameter._version for parameter in parameters)
    return tuple(_mark(parameter) for parameter in parameters)


def _mark(parameter: Any) -> Any:
    block = local_alias(parameter)
    return parameter._version if is_meta(block) else zlib.crc32(bytes_of(block))


def accumulate(total: Any, gradient: Any, dtype: Any) -> Any:
    with private_api.no_grad():
        given = tensor_type_cast(gradient, dtype)
        if is_meta(given):
            return given if total is None else total
        if total is None:
            return own_copy(given) if given is gradient else given
        if start.on_ascend():
            return total + given
        memory = memory_of(total)
        np.add(memory, memory_of(given), out=memory)
        return total


def scale(tensor: Any, factor: float) -> Any:
    """A Python number would be rounded to float32."""
    if factor == 1 or is_meta(tensor):
        return tensor
    if start.on_ascend():
        with private_api.no_grad():
            return tensor * from_numpy(np.array(factor), tensor.dtype)
    memory = memory_of(tensor)
    np.multiply(memory, np.array(factor, memory.dtype), out=memory)
    return tensor
