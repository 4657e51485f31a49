"""Whole parameters in a module's forward and their gradients in backward, on PyTorch.

Note [Shadowing]
Python finds ``module.weight`` in the module's ``__dict__`` before ``nn.Module.__getattr__`` looks into the registered
parameters. So a tensor put there is what forward sees, while state dicts, optimizers and ``named_parameters`` go on to
see the registered parameter. A recurrent layer keeps a list of its weights besides, which is changed with it.
"""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from operator import mul
from typing import Any

import torch
from torch import nn

from hyper_parallel.platform.torch.private_api import (
    NoInterception,
    call_at_end_of_backward,
    hooks_of_leaf,
    is_in_backward,
    is_node_of_backward,
)

__all__ = [
    "accumulate",
    "add_all_to_grad",
    "add_to_grad",
    "addresses_of",
    "adds_to_leaves",
    "after_backward",
    "all_detached",
    "all_seen_as_parameters",
    "before_backward",
    "is_container",
    "is_recording",
    "items_of",
    "leave_gradients_missing",
    "mark_not_differentiable",
    "parameter_at",
    "parameters_at",
    "parts_of",
    "runs_in_backward",
    "scale",
    "shadow",
    "shadow_all",
    "take_grads",
    "unshadow",
    "unshadow_all",
    "which_need_grad",
    "writes_into",
]

_REQUIRES_GRAD: Any = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_GRAD: Any = torch.Tensor.grad
_ADDRESS = torch.Tensor.data_ptr
_VERSION: Any = torch.Tensor._version.__get__  # type: ignore[attr-defined]

# ---------------------------------------------------------------- forward


def is_container(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))


def items_of(module: nn.Module) -> list[nn.Module]:
    return list(module.children())


def parameter_at(module: nn.Module, name: str) -> nn.Parameter | None:
    """The registered parameter, whatever shadows it."""
    return module._parameters.get(name)


def parameters_at(places: Sequence[tuple[nn.Module, str]]) -> list[nn.Parameter | None]:
    return [module._parameters.get(name) for module, name in places]


def shadow(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """See Note [Shadowing]."""
    module.__dict__[name] = tensor
    if isinstance(module, nn.RNNBase):
        _replace_flat_weight(module, name, tensor)


def unshadow(module: nn.Module, name: str) -> None:
    module.__dict__.pop(name, None)
    if isinstance(module, nn.RNNBase):
        _replace_flat_weight(module, name, module._parameters[name])


def shadow_all(places: Sequence[tuple[nn.Module, str]], tensors: Sequence[torch.Tensor]) -> None:
    for (module, name), tensor in zip(places, tensors, strict=True):
        own = module.__dict__
        own[name] = tensor
        if "_flat_weights" in own:
            _replace_flat_weight(module, name, tensor)


def unshadow_all(places: Sequence[tuple[nn.Module, str]]) -> None:
    for module, name in places:
        own = module.__dict__
        own.pop(name, None)
        if "_flat_weights" in own:
            _replace_flat_weight(module, name, own["_parameters"][name])


def _replace_flat_weight(module: Any, name: str, tensor: Any) -> None:
    # There is no public name for the list that forward reads; setting an attribute changes it in this way too.
    if name in module._flat_weights_names:
        module._flat_weights[module._flat_weights_names.index(name)] = tensor


def which_need_grad(parameters: Sequence[torch.Tensor]) -> tuple[bool, ...]:
    with NoInterception():
        return tuple([_REQUIRES_GRAD(parameter) for parameter in parameters])


def is_recording() -> bool:
    return torch.is_grad_enabled()


def runs_in_backward() -> bool:
    return is_in_backward()


def mark_not_differentiable(ctx: Any, tensors: Sequence[torch.Tensor]) -> None:
    ctx.mark_non_differentiable(*tensors)


def leave_gradients_missing(ctx: Any) -> None:
    ctx.set_materialize_grads(False)


# ---------------------------------------------------------------- backward


class _Comparing(threading.local):
    is_on = False


_comparing = _Comparing()


@contextmanager
def comparing_gradients() -> Iterator[None]:
    """Inside, gradients of this thread are taken in the middle of a forward, of one module: no backward has begun."""
    before, _comparing.is_on = _comparing.is_on, True
    try:
        yield
    finally:
        _comparing.is_on = before


def before_backward(tensors: Sequence[torch.Tensor], call: Callable[[], None]) -> bool:
    """Hooks on the nodes that made the tensors, and not on the tensors: a tensor that is a view and is written to in
    place gets another node, the node of its base runs in any case.
    """
    nodes: dict[Any, None] = {}
    found = False

    def on_gradients(_: Any) -> None:
        if not _comparing.is_on:
            call()

    with NoInterception():
        for tensor in tensors:
            if not tensor.requires_grad:
                continue
            found = True
            if tensor.grad_fn is None:
                tensor.register_hook(on_gradients)
                continue
            nodes[tensor.grad_fn] = None
            base = tensor._base
            if base is not None and base.grad_fn is not None:
                nodes[base.grad_fn] = None
    for node in nodes:
        node.register_prehook(on_gradients)
    return found


def after_backward(call: Callable[[], None]) -> None:
    call_at_end_of_backward(call)


def adds_to_leaves(ctx: Any) -> bool:
    """Whether this is a ``backward()`` that reaches all leaves behind the node ``ctx``, none of which has hooks."""
    leaves = [node for node, _ in ctx.next_functions if node is not None]
    try:
        if not all(map(is_node_of_backward, leaves)):
            return False  # backward(inputs=...) that asks for others
    except RuntimeError:
        return False  # torch.autograd.grad
    with NoInterception():
        return not any(map(hooks_of_leaf, leaves))


def add_to_grad(parameter: torch.Tensor, block: torch.Tensor) -> None:
    with NoInterception(), _unwarned([parameter]):
        gradient = _GRAD.__get__(parameter)
        if gradient is None:
            _GRAD.__set__(parameter, block)
        else:
            torch.Tensor.add_(gradient, block)


def add_all_to_grad(parameters: Sequence[torch.Tensor], blocks: Sequence[torch.Tensor | None]) -> None:
    with NoInterception():
        for parameter, block in zip(parameters, blocks, strict=True):
            if block is None:
                continue
            gradient = _GRAD.__get__(parameter)
            if gradient is None:
                _GRAD.__set__(parameter, block)
            else:
                torch.Tensor.add_(gradient, block)


def parts_of(vector: torch.Tensor, places: Sequence[tuple[int, tuple[int, ...]]]) -> list[torch.Tensor]:
    start = vector.storage_offset()
    return [vector.as_strided(shape, _row_major(shape), start + offset) for offset, shape in places]


@cache
def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(itertools.accumulate((1, *(max(size, 1) for size in shape[:0:-1])), mul))[::-1] if shape else ()


def all_detached(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    detach = torch.Tensor.detach
    with NoInterception():
        return [detach(parameter) for parameter in parameters]


def all_seen_as_parameters(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    for one in tensors:
        one._is_param = True  # type: ignore[attr-defined]  # what nn.Parameter's instance check looks at
    return tensors


def addresses_of(parameters: Sequence[torch.Tensor]) -> tuple[int, ...]:
    with NoInterception():
        return tuple([_ADDRESS(parameter) for parameter in parameters])


def take_grads(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    with NoInterception(), _unwarned(leaves):
        found = [_GRAD.__get__(leaf) for leaf in leaves]
        for place, (leaf, gradient) in enumerate(zip(leaves, found, strict=True)):
            if gradient is not None:
                _GRAD.__set__(leaf, None)
                found[place] = torch.Tensor.detach(gradient)
    return found


@contextmanager
def _unwarned(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, ``grad`` may be asked of results of the edge too, into which somebody writes."""
    if all(tensor.is_leaf for tensor in tensors):
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        yield


def writes_into(parameters: Sequence[torch.Tensor]) -> tuple[int, ...]:
    with NoInterception():
        return tuple([_VERSION(parameter) for parameter in parameters])


@torch.no_grad()
def accumulate(total: torch.Tensor | None, gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if total is None:
        return gradient.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
    return total.add_(gradient)


@torch.no_grad()
def scale(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor if factor == 1 else tensor.mul_(factor)
