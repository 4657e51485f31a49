"""Tensors of the framework under test, for tests whose subject keeps them: parameters, graphs, distributed tensors.

``ours`` takes PyTorch's tensors over, ``theirs`` brings results back; ``equal`` and ``assert_close`` compare tensors of
either kind. ``backward`` and ``grad_of`` are the library's own. On PyTorch nothing is converted.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import hyper_parallel
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.trees import map_leaves

on_mindspore = os.environ.get("HYPER_PARALLEL_PLATFORM", "torch").lower() == "mindspore"
needs_second_gradients = pytest.mark.skipif(
    on_mindspore, reason="MindSpore on a CPU refuses them: tests/platform/test_mindspore_second_gradients.py"
)

if on_mindspore:
    import mindspore

    from tests.frameworks import bridge


def ours(value: Any) -> Any:
    """PyTorch's tensors and dtypes, also in containers, as those of the framework; leaves stay leaves, others lose
    their graph."""
    return map_leaves(_over, value) if on_mindspore else value


def _over(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return bridge.dtype_to(value)
    if not isinstance(value, torch.Tensor):
        return value
    made = bridge.to_mindspore(value)
    if isinstance(value, torch.nn.Parameter):
        return mindspore.Parameter(made, requires_grad=value.requires_grad)
    if value.requires_grad:
        made.requires_grad_()
    return made


def theirs(value: Any) -> Any:
    """The framework's plain tensors and dtypes, also in containers, as PyTorch's, without graph."""
    return map_leaves(_back, value)


def _back(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if on_mindspore and isinstance(value, mindspore.Type):
        return bridge.dtype_from(value)
    if on_mindspore and isinstance(value, mindspore.Tensor):
        if hasattr(value, "to_local"):
            raise TypeError("a distributed tensor is compared by its block or whole: call to_local() or full_tensor()")
        return bridge.to_torch(value)
    return value


def leaf(tensor: torch.Tensor) -> Any:
    """A leaf with these values that asks for a gradient."""
    return ours(tensor.detach().clone().requires_grad_())


def parameter(tensor: torch.Tensor, requires_grad: bool = True) -> Any:
    """A parameter with these values."""
    return ours(torch.nn.Parameter(tensor.detach().clone(), requires_grad))


def equal(first: Any, second: Any) -> bool:
    """Whether two plain tensors have equal values, shapes and dtypes."""
    return torch.equal(theirs(first), theirs(second))


def same_bits(first: Any, second: Any) -> bool:
    """Bit for bit, also for dtypes that have no comparison."""
    first, second = theirs(first), theirs(second)
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.equal(*(one.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for one in (first, second)))


def assert_close(first: Any, second: Any, **options: Any) -> None:
    torch.testing.assert_close(theirs(first), theirs(second), **options)


def dtype_of(tensor: Any) -> torch.dtype:
    return theirs(tensor.dtype)


def backward(tensor: Any, gradient: Any = None, retain_graph: bool = False, create_graph: bool = False) -> None:
    hyper_parallel.backward(tensor, ours(gradient), retain_graph, create_graph)


def grad_of(tensor: Any) -> Any:
    return hyper_parallel.grad_of(tensor)


def zero_grad(*tensors: Any) -> None:
    hyper_parallel.zero_grad(tensors)


def grad(outputs: Any, inputs: Any, gradients: Any = None, **options: Any) -> tuple[Any, ...]:
    """The gradients with respect to ``inputs``, as ``torch.autograd.grad`` gives them."""
    if on_mindspore:
        return get_platform().grad(outputs, inputs, ours(gradients), **options)
    return torch.autograd.grad(outputs, inputs, gradients, **options)


def requires_grad(tensor: Any) -> bool:
    return get_platform().requires_grad(tensor)


def is_leaf(tensor: Any) -> bool:
    return get_platform().is_leaf(tensor)


def write(tensor: Any, values: Any) -> None:
    """Give a plain tensor other values, in place and outside of any graph."""
    get_platform().load_into_param(tensor, ours(torch.as_tensor(values)).expand(tuple(tensor.shape)))


def distribute_tensor(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    return hyper_parallel.distribute_tensor(ours(tensor), *args, **kwargs)


def from_local(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    return hyper_parallel.DTensor.from_local(ours(tensor), *args, **kwargs)


def named(dtype: torch.dtype) -> str:
    """What messages about the framework's tensors call a dtype."""
    return get_platform().dtype_name(ours(dtype)) if on_mindspore else str(dtype)


def known_names(dtypes: Sequence[str]) -> list[str]:
    """The dtypes of these names that the framework has on a CPU."""
    return [name for name in dtypes if not on_mindspore or bridge.dtype_to(getattr(torch, name)) is not None]
