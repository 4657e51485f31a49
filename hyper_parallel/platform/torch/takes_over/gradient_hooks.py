"""Hooks on gradients of distributed tensors, and of modules that are given them: they get DTensors laid out by the law.

Note [Hooks on nodes]
The engine knows blocks only. A hook of a tensor gets them labelled, as does the backward hook of a module, which
PyTorch hangs on a node of the graph; there is no hook to put labels on there, so the function that finds the node is
replaced. With ``create_graph=True`` what a hook computes is differentiated: the gradient of a pending sum is whole
inside of the hook, and varies again behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import BackwardHook

from hyper_parallel.platform.shared.lawful_gradients import LawfulGradients
from hyper_parallel.platform.torch.base.dtensor_base import DTensorBase
from hyper_parallel.platform.torch.dtensor.dtensor_gradients import given_block, labelled
from hyper_parallel.platform.torch.private_api import NoInterception

_plain_apply_on_tensors = BackwardHook._apply_on_tensors


class _Label(LawfulGradients):
    """What is known of a tensor when its gradient comes."""

    def __init__(self, tensor: Any) -> None:
        self.kind, self._layout, self._global_shape = type(tensor), tensor._layout, tensor._global_shape

    def distributed(self, block: torch.Tensor) -> Any:
        return labelled(block, self.kind, self._layout, self._global_shape)

    def block(self, gradient: Any) -> torch.Tensor:
        return given_block(self, gradient)


def register_hook(tensor: Any, hook: Callable[[Any], Any]) -> Any:
    """As for a plain tensor; ``hook`` gets the gradient as a DTensor."""
    label = _Label(tensor)
    lawful = label.lawful_hook(hook, label.distributed)

    def on_block(gradient: torch.Tensor) -> Any:
        changed = lawful(gradient)
        return None if changed is None else label.block(changed)

    with NoInterception():
        return torch.Tensor.register_hook(tensor, on_block)


class _Node:
    """A node of the graph whose hooks get DTensors."""

    def __init__(self, node: Any, tensors: list[torch.Tensor]) -> None:
        self._node = node
        self._labels = [_Label(tensor) if isinstance(tensor, DTensorBase) else None for tensor in tensors]

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        def on_blocks(*gradients: tuple[Any, ...]) -> Any:
            changed = hook(*map(self._distributed, gradients))
            if changed is None:
                return None
            return tuple(
                one if label is None or one is None else label.block(one)
                for one, label in zip(changed, self._labels, strict=True)
            )

        return self._node.register_hook(on_blocks)

    def _distributed(self, blocks: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            block if label is None or block is None else label.distributed(block)
            for block, label in zip(blocks, self._labels, strict=True)
        )


def _apply_on_tensors(self: Any, fn: Callable[[Any], None], args: Any) -> Any:
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if not any(isinstance(tensor, DTensorBase) for tensor in tensors):
        return _plain_apply_on_tensors(self, fn, args)
    return _plain_apply_on_tensors(self, lambda node: fn(_Node(node, tensors)), args)


def set_module_hooks() -> None:
    """Let the backward hooks of modules see DTensors."""
    BackwardHook._apply_on_tensors = _apply_on_tensors  # type: ignore[method-assign]
