"""PyTorch's tensors to MindSpore's and back, for tests: values, dtypes, strides, writes in place, gradients."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import mindspore as ms
import numpy as np
import torch

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.base import memory
from hyper_parallel.platform.mindspore.base.tensors import full_like, str_to_dtype
from hyper_parallel.platform.mindspore.dtensor import gradients
from hyper_parallel.platform.shared.trees import map_leaves

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def known_dtypes(dtypes: Iterable[torch.dtype]) -> list[torch.dtype]:
    """Those that MindSpore has on a CPU."""
    return [dtype for dtype in dtypes if dtype_to(dtype) is not None]


def dtype_to(dtype: torch.dtype) -> Any:
    try:
        found = str_to_dtype(str(dtype))
        memory.numpy_type(found)
    except (ValueError, TypeError):
        return None
    return found


def dtype_from(dtype: Any) -> torch.dtype:
    return getattr(torch, "bool" if dtype == ms.bool_ else str(dtype).removeprefix("mindspore.").lower())


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy()


def to_mindspore(tensor: torch.Tensor) -> ms.Tensor:
    """The same values with the same strides."""
    if tensor.is_meta:
        return ms.mint.empty(tuple(tensor.shape), dtype=dtype_to(tensor.dtype), device="meta")
    dtype, shape = dtype_to(tensor.dtype), tuple(tensor.shape)
    values = np.frombuffer(bytearray(_bytes_of(tensor)), memory.numpy_type(dtype)).reshape(shape)
    if tensor.is_contiguous():
        return memory.from_array(values)
    made = _with_strides(shape, tensor.stride(), dtype)
    if tensor.numel():
        memory.memory_of(made)[...] = values
    return made


def _with_strides(shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> ms.Tensor:
    if 0 in shape or not shape:
        return memory.from_array(np.zeros(shape, memory.numpy_type(dtype)))
    dims = [dim for dim in range(len(shape)) if shape[dim] > 1 and strides[dim] > 0]
    dims.sort(key=lambda dim: -strides[dim])
    if not dims:
        made = memory.from_array(np.zeros((1,) * len(shape), memory.numpy_type(dtype)))
    else:
        steps = [strides[dim] for dim in dims] + [1]
        widths = [shape[dims[0]], *(a // b for a, b in itertools.pairwise(steps))]
        base = memory.from_array(np.zeros(widths, memory.numpy_type(dtype)))
        view = base[(*(slice(0, shape[dim]) for dim in dims), 0)]
        order = sorted(range(len(dims)), key=lambda place: dims[place])
        view = view.permute(tuple(order)) if len(dims) > 1 else view
        made = view
        for dim in range(len(shape)):
            if dim not in dims:
                made = made.unsqueeze(dim)
    return made if tuple(made.shape) == shape else made.expand(shape)


def to_torch(tensor: ms.Tensor) -> torch.Tensor:
    """A copy."""
    dtype = dtype_from(tensor.dtype)
    if 0 in tensor.shape:
        return torch.empty(tuple(tensor.shape), dtype=dtype)
    array = memory.bytes_of(tensor).copy()
    return torch.from_numpy(array).view(dtype).reshape(tuple(tensor.shape))


class _Crossing:
    """The tensors of one call: which came from where."""

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.Tensor, ms.Tensor]] = []

    def over(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            made = to_mindspore(value)
            self._pairs.append((value, made))
            return made
        return value

    def write_back(self) -> None:
        """Let what was written to a tensor over there be written here."""
        for here, there in self._pairs:
            if here.numel() and not here.is_meta and _bytes_of(here).tobytes() != memory.bytes_of(there).tobytes():
                here.detach().copy_(to_torch(there))

    def back(self, value: Any) -> Any:
        if isinstance(value, ms.Tensor):
            for here, there in self._pairs:
                if value is there:
                    return here
            return to_torch(value)
        return value


class _Handle:
    """A handle whose result is filled in on both sides."""

    def __init__(self, handle: Any, crossing: _Crossing, results: list[tuple[torch.Tensor, ms.Tensor]]) -> None:
        self._handle, self._crossing, self._results = handle, crossing, results

    def wait(self, timeout: Any = None) -> bool:
        answer = self._handle.wait()
        self._crossing.write_back()
        for here, there in self._results:
            if here.numel():
                here.copy_(to_torch(there))
        return answer

    def is_completed(self) -> bool:
        return self._handle.is_completed()


def over_the_bridge(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called with PyTorch's tensors: without gradients."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        crossing = _Crossing()
        over_args = [_over(crossing, value) for value in args]
        over_kwargs = {name: _over(crossing, value) for name, value in kwargs.items()}
        result = function(*over_args, **over_kwargs)
        crossing.write_back()
        if isinstance(result, tuple) and len(result) == 2 and hasattr(result[1], "wait"):
            value = crossing.back(result[0])
            return value, _Handle(result[1], crossing, [(value, result[0])])
        if hasattr(result, "wait"):
            return _Handle(result, crossing, [])
        return map_leaves(crossing.back, result)

    return call


def _over(crossing: _Crossing, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return crossing.over(value)
    if isinstance(value, torch.dtype):
        return dtype_to(value)
    return tuple(value) if isinstance(value, torch.Size) else value


# ---------------------------------------------------------------- gradients


class _Bridge(torch.autograd.Function):
    """A function of MindSpore as a node of PyTorch's graph; its backward is another one."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        ctx.function = function
        ctx.save_for_backward(*tensors)
        made = [_recorded(tensor) for tensor in tensors]
        outputs = function(*made)
        several = isinstance(outputs, tuple)
        given = tuple(to_torch(output).clone() for output in (outputs if several else (outputs,)))
        return given if several else given[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        tensors, function = ctx.saved_tensors, ctx.function
        num_inputs = len(tensors)
        wanted = [place for place in range(num_inputs) if ctx.needs_input_grad[place + 1]]
        is_recorded = torch.is_grad_enabled()  # so under create_graph

        def derivative(*values: ms.Tensor) -> Any:
            inputs, seeds = values[:num_inputs], values[num_inputs:]
            outputs = function(*inputs)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            targets = [inputs[place] for place in wanted]
            found = gradients.grad(outputs, targets, seeds, create_graph=is_recorded, allow_unused=True)
            return tuple(
                full_like(target, 0) if gradient is None else gradient
                for target, gradient in zip(targets, found, strict=True)
            )

        results = iter(_Bridge.apply(derivative, *tensors, *grads))
        by_input = [next(results) if place in wanted else None for place in range(num_inputs)]
        return None, *by_input


def _recorded(tensor: torch.Tensor) -> ms.Tensor:
    made = to_mindspore(tensor)
    if tensor.is_floating_point() or tensor.is_complex():
        made.requires_grad_()
        made = made * 1 if made.dtype != ms.bfloat16 else made
    return made


def differentiably_over_the_bridge(function: Callable[..., Any], gives_aliases: bool = False) -> Callable[..., Any]:
    """The function, called with PyTorch's tensors: gradients cross too.

    A result in the memory of an input is that input, unless the function gives aliases with a gradient of their own.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        results: list[Any] = []

        def inner(*made: ms.Tensor) -> Any:
            given = iter(made)

            def swap(value: Any) -> Any:
                if isinstance(value, torch.Tensor):
                    return next(given)
                return tuple(value) if isinstance(value, torch.Size) else value

            swapped = [swap(value) for value in args]
            result = function(*swapped, **{name: swap(value) for name, value in kwargs.items()})
            if gives_aliases:
                results.append(any(result is value for value in made))
            else:
                results.append(any(result.numel() and result.data_ptr() == value.data_ptr() for value in made))
            return result

        if not any(tensor.requires_grad for tensor in tensors) or not torch.is_grad_enabled():
            crossing = _Crossing()
            made = [_over(crossing, value) for value in args]
            with private_api.no_grad():
                result = function(*made, **{name: _over(crossing, value) for name, value in kwargs.items()})
            return crossing.back(result)
        output = _Bridge.apply(inner, *tensors)
        if results[0]:  # The input itself was given back.
            return tensors[0].reshape(output.shape)
        return output

    return call
