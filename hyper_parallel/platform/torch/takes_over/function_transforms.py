"""``torch.func`` on distributed tensors: ``grad``, ``grad_and_value`` and ``vjp`` by plain autograd, clear errors else.

Note [Transforms that wrap tensors]
The transforms of ``torch.func`` wrap their inputs in C++, where a DTensor is its block: without more they would compute
on blocks as if these were whole, with no error. Gradients do not need the wrapping, so these run by plain autograd.
Batches (``vmap``) and forward-mode derivatives cannot pass through collectives. PyTorch has no hook for either; what is
replaced here are the functions of its own modules that do the wrapping.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import eager_transforms, vmap
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from hyper_parallel.platform.torch.base.dtensor_base import DTensorBase

_plain_grad_and_value = eager_transforms.grad_and_value_impl
_plain_vjp = eager_transforms._vjp_with_argnums
_plain_add_batch_dim = vmap._add_batch_dim
_plain_make_dual = forward_ad.make_dual
_plain_linearize = eager_transforms.linearize
_plain_wrap_functional = eager_transforms._maybe_wrap_functional_tensor


def _has_dtensor(*trees: Any) -> bool:
    return any(isinstance(leaf, DTensorBase) for leaf in tree_leaves(trees))


def _start(value: Any) -> Any:
    """A tensor to ask for the gradient of: it has its own place in the graph, behind the caller's."""
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    return value.view_as(value) if value.requires_grad else value.detach().requires_grad_()


def _chosen(args: tuple[Any, ...], argnums: Any) -> Any:
    return args[argnums] if isinstance(argnums, int) else tuple(args[number] for number in argnums)


def _split_aux(name: str, output: Any, has_aux: bool) -> tuple[Any, Any]:
    if not has_aux:
        return output, None
    if not (isinstance(output, tuple) and len(output) == 2):
        raise RuntimeError(f"{name}: with has_aux=True the function must return (output, aux), got {type(output)}")
    return output


def grad_and_value(func: Callable[..., Any], argnums: Any, has_aux: bool, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if not _has_dtensor(args, kwargs):
        return _plain_grad_and_value(func, argnums, has_aux, args, kwargs)
    keeps_graph = any(leaf.requires_grad for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    with torch.enable_grad():
        args = tree_map(_start, args)
        output, aux = _split_aux("torch.func.grad", func(*args, **kwargs), has_aux)
        if not isinstance(output, torch.Tensor) or output.dim() != 0:
            raise RuntimeError(
                "torch.func.grad: the function must return a tensor without dims, got "
                + (f"one of shape {tuple(output.shape)}" if isinstance(output, torch.Tensor) else f"{type(output)}")
            )
        wanted, structure = tree_flatten(_chosen(args, argnums))
        gradients = torch.autograd.grad(output, wanted, create_graph=True, materialize_grads=True)
    if not keeps_graph:
        gradients = tuple(gradient.detach() for gradient in gradients)
        output, aux = tree_map(_detached, (output, aux))
    gradient = tree_unflatten(gradients, structure)
    return (gradient, (output, aux)) if has_aux else (gradient, output)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _vjp(func: Callable[..., Any], *primals: Any, argnums: Any = None, has_aux: bool = False) -> Any:
    if not _has_dtensor(primals):
        return _plain_vjp(func, *primals, argnums=argnums, has_aux=has_aux)
    if argnums is not None:
        raise RuntimeError(
            "torch.func.jacrev computes all rows at once, which cannot pass through collectives: use "
            "torch.autograd.functional.jacobian, which computes row by row"
        )
    keeps_graph = any(leaf.requires_grad for leaf in tree_leaves(primals) if isinstance(leaf, torch.Tensor))
    with torch.enable_grad():
        started = tree_map(_start, primals)
        output, aux = _split_aux("torch.func.vjp", func(*started), has_aux)
    flat_output, output_structure = tree_flatten(output)
    wanted, structure = tree_flatten(started)

    def pull_back(cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None) -> Any:
        given, given_structure = tree_flatten(cotangents)
        if given_structure != output_structure:
            raise RuntimeError(f"torch.func.vjp: cotangents {given_structure} for an output {output_structure}")
        graph = keeps_graph if create_graph is None else create_graph
        gradients = torch.autograd.grad(
            flat_output, wanted, given, retain_graph=retain_graph, create_graph=graph, materialize_grads=True
        )
        return tree_unflatten(gradients, structure)

    if not keeps_graph:
        output, aux = tree_map(_detached, (output, aux))
    return (output, pull_back, aux) if has_aux else (output, pull_back)


def _add_batch_dim(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(tensor, DTensorBase):
        raise RuntimeError(
            f"vmap cannot map over a distributed tensor of shape {tuple(tensor.shape)}: write the function for the "
            "whole batch, or let vmap run on the local tensors inside hyper_parallel.custom_shard. (torch.func.jacfwd "
            "and hessian map too: use torch.autograd.functional.jacobian or hessian)"
        )
    return _plain_add_batch_dim(tensor, *args, **kwargs)


def _make_dual(tensor: Any, tangent: Any, *, level: Any = None) -> Any:
    if isinstance(tensor, DTensorBase) or isinstance(tangent, DTensorBase):
        raise RuntimeError(
            "forward-mode derivatives (make_dual, torch.func.jvp, jacfwd, hessian) of distributed tensors would leave "
            "out what other ranks contribute: use torch.autograd.functional.jvp, jacobian or hvp, which go backward"
        )
    return _plain_make_dual(tensor, tangent, level=level)


def _wrap_functional(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(tensor, DTensorBase):
        raise RuntimeError("torch.func.functionalize cannot trace distributed tensors: call the function as it is")
    return _plain_wrap_functional(tensor, *args, **kwargs)


def _linearize(func: Callable[..., Any], *primals: Any) -> Any:
    if _has_dtensor(primals):
        raise RuntimeError(
            "torch.func.linearize would trace local tensors as if they were the global ones: use "
            "torch.autograd.functional.jvp, which goes backward"
        )
    return _plain_linearize(func, *primals)


def set_transforms() -> None:
    """Put the functions of this file in the place of PyTorch's; plain tensors go on to those."""
    eager_transforms.grad_and_value_impl = grad_and_value
    eager_transforms._vjp_with_argnums = _vjp  # type: ignore[assignment]
    eager_transforms._maybe_wrap_functional_tensor = _wrap_functional
    eager_transforms.linearize = torch.func.linearize = _linearize  # type: ignore[assignment]
    vmap._add_batch_dim = _add_batch_dim
    forward_ad.make_dual = _make_dual
