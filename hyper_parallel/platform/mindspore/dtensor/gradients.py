"""Gradients on MindSpore's tape: backward, gradients by name, and what is read from and written to ``grad``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import Tensor

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.base.tensors import full_like
from hyper_parallel.platform.mindspore.mends.leaf_gradients import copy_hooks
from hyper_parallel.platform.mindspore.mends.second_gradients import check_create_graph

__all__ = ["backward", "get_grad", "grad", "needs_grad", "requires_grad", "set_grad"]


needs_grad, requires_grad = private_api.needs_grad, private_api.requires_grad


def get_grad(tensor: Tensor) -> Tensor | None:
    """The gradient that backward has added up in the leaf so far; None before."""
    return private_api.get_grad(tensor)


def set_grad(tensor: Tensor, gradient: Tensor | None) -> None:
    """Replace the gradient; None forgets it."""
    private_api.set_grad(tensor, gradient)


def backward(
    tensors: Tensor | Sequence[Tensor],
    gradients: Tensor | Sequence[Tensor | None] | None = None,
    retain_graph: bool = False,
    create_graph: bool = False,
    inputs: Sequence[Tensor] = (),
) -> None:
    """Add the gradients of ``tensors`` to the leaves they were computed from; without ``gradients`` of scalars."""
    check_create_graph(create_graph)
    roots, seeds = _roots_and_seeds("backward", tensors, gradients)
    _run(roots, seeds, retain_graph or create_graph, create_graph, tuple(inputs), True)


def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool = False,
) -> tuple[Tensor | None, ...]:
    """The gradients of ``outputs`` with respect to ``inputs``; nothing is added to any ``grad``."""
    check_create_graph(create_graph)
    roots, seeds = _roots_and_seeds("grad", outputs, grad_outputs)
    inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    keep = create_graph if retain_graph is None else retain_graph
    found = _run(roots, seeds, keep, create_graph, inputs, False)
    if not allow_unused and any(gradient is None for gradient in found):
        unused = [place for place, gradient in enumerate(found) if gradient is None]
        raise RuntimeError(
            f"grad: the outputs were not computed from the input(s) at position(s) {unused}; pass allow_unused=True to "
            "get None for them"
        )
    return tuple(found)


def _roots_and_seeds(
    function: str, tensors: Any, gradients: Any
) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    given = (gradients,) if isinstance(gradients, Tensor) else tuple(gradients or (None,) * len(roots))
    if len(given) != len(roots):
        raise ValueError(f"{function}: {len(roots)} tensors but {len(given)} gradients; give one for each, or None")
    seeds = []
    for root, seed in zip(roots, given, strict=True):
        if not isinstance(root, Tensor):
            raise TypeError(f"{function} takes tensors, got {type(root).__name__}")
        if not private_api.requires_grad(root):
            if not private_api.has_started_recording():
                private_api.start_recording()
                raise RuntimeError(
                    f"{function}: the tensor of shape {tuple(root.shape)} was not recorded: MindSpore stops recording "
                    "when an operator fails, and at the end of mindspore.value_and_grad. It records again now; compute "
                    "the tensor anew"
                )
            raise RuntimeError(
                f"{function}: the tensor of shape {tuple(root.shape)} was computed without recording, or from nothing "
                "that requires a gradient; call hyper_parallel.get_platform() at the start of the program, "
                "requires_grad_() on a leaf, and compute it outside of no_grad()"
            )
        if seed is None and root.numel() != 1:
            raise RuntimeError(
                f"{function}: only a tensor with one element has a gradient by itself, this one has shape "
                f"{tuple(root.shape)}; give the gradient too"
            )
        if seed is not None and tuple(seed.shape) != tuple(root.shape):
            raise ValueError(
                f"{function}: the gradient of shape {tuple(seed.shape)} does not fit the tensor of shape "
                f"{tuple(root.shape)}"
            )
        seeds.append(full_like(root, 1) if seed is None else seed)
    return roots, tuple(seeds)


def _run(
    roots: tuple[Tensor, ...],
    seeds: tuple[Tensor | None, ...],
    retain_graph: bool,
    create_graph: bool,
    inputs: tuple[Tensor, ...],
    accumulates: bool,
) -> Any:
    hooks = copy_hooks(roots)
    try:
        if accumulates:
            return private_api.run_backward(roots, seeds, retain_graph, create_graph, inputs)
        return private_api.run_backward(roots, seeds, retain_graph, create_graph, inputs, True, accumulate_grad=False)
    finally:
        for hook in hooks:
            hook.remove()
