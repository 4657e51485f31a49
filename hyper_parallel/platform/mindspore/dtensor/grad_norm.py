"""The norm of all gradients as one vector, and clipping by it.

As on PyTorch (``torch/dtensor/grad_norm.py``): one number for each tensor from the values this rank holds, completed
over the ranks for tensors that are distributed (``global_norms``), then all numbers together. Numbers are made in
float32 at least.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor, ops

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.base.tensors import cat, detached, full, is_meta, tensor_type_cast, zeros
from hyper_parallel.platform.mindspore.communication import collectives
from hyper_parallel.platform.mindspore.mends.in_place import write
from hyper_parallel.platform.mindspore.mends.same_bits import power
from hyper_parallel.platform.shared.tensor_arguments import listed_tensors, refuse_stages

__all__ = [
    "block_norms",
    "clip_by_norm_",
    "clip_grad_norm_",
    "complete_norms",
    "finished_norm",
    "get_total_norm",
    "install_optimizer_steps",
    "set_global_norms",
    "total_of_norms",
]

Tensors = Tensor | Iterable[Tensor]

_global_norms: Callable[[Sequence[Tensor], float], list[Tensor]]


def set_global_norms(global_norms: Callable[[Sequence[Tensor], float], list[Tensor]]) -> None:
    """Let ``global_norms(tensors, order)`` give the norms of tensors of which some are distributed."""
    global _global_norms
    _global_norms = global_norms


def install_optimizer_steps(kind: type) -> None:
    """MindSpore's optimizers have no operators on lists to be let in."""


def clip_grad_norm_(
    parameters: Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale the gradients in place so that their total norm is at most ``max_norm``; returns the norm before clipping.

    ``parameters`` is one tensor or any iterable of them, those without gradient do not count. Every gradient is
    multiplied by min(1, max_norm / (norm + 1e-6)). They may be distributed, on several meshes, or plain, which are
    taken to be equal on all ranks.
    """
    max_norm = float(max_norm)
    if not max_norm >= 0:
        raise ValueError(f"clip_grad_norm_: max_norm must be 0 or more, got {max_norm}")
    given = _as_list("clip_grad_norm_", parameters)
    refuse_stages("clip_grad_norm_", given)
    gradients = [_grad_of(parameter) for parameter in given]
    gradients = [gradient for gradient in gradients if gradient is not None]
    total_norm = get_total_norm(gradients, norm_type, error_if_nonfinite, foreach)
    clip_by_norm_(gradients, total_norm, max_norm, foreach)
    return total_norm


def clip_by_norm_(
    gradients: Sequence[Tensor], total_norm: Tensor, max_norm: float, foreach: bool | None = None
) -> None:
    """Multiply gradients whose norm, with others perhaps, is ``total_norm`` by min(1, max_norm / (norm + 1e-6))."""
    del foreach
    with private_api.no_grad():
        limit, little, one = (full((), number, total_norm.dtype) for number in (max_norm, 1e-6, 1.0))
        scale = ops.minimum(limit / (total_norm + little), one)
        for gradient in gradients:
            block = detached(_block(gradient))
            if block.numel():
                write(block, block * tensor_type_cast(scale, block.dtype))


def get_total_norm(
    tensors: Tensors,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """The ``norm_type`` norm (``inf`` included) of all tensors as one vector; 0 for none.

    A plain tensor without dims, equal on all ranks, also when tensors are distributed: one reduction for all that are
    spread over the same ranks, whose parts count once.
    """
    tensors = _as_list("get_total_norm", tensors)
    norm_type = float(norm_type)
    if math.isnan(norm_type):
        raise ValueError("get_total_norm: norm_type is nan; give the order of the norm, 2.0 or inf for instance")
    if not tensors:
        return zeros((), ms.float32)
    for position, tensor in enumerate(tensors):
        if is_meta(_block(tensor)):
            raise ValueError(
                f"get_total_norm: the tensor of shape {tuple(tensor.shape)} at position {position} is on the meta "
                "device and has no values"
            )
    with private_api.no_grad():
        if any(hasattr(tensor, "to_local") for tensor in tensors):
            norms = _global_norms(tensors, norm_type)
        else:
            norms = [_norm(detached(tensor), norm_type) for tensor in tensors]
        norms = [finished_norm(norm, tensor) for norm, tensor in zip(norms, tensors, strict=True)]
        total_norm = total_of_norms(norms, norm_type)
    if error_if_nonfinite and not math.isfinite(float(total_norm.asnumpy())):
        raise RuntimeError(
            f"the total norm of order {norm_type} of {len(tensors)} gradients is {float(total_norm.asnumpy())}, so "
            "they cannot be clipped; pass error_if_nonfinite=False to scale them by it anyway"
        )
    return total_norm


def total_of_norms(norms: Sequence[Tensor], norm_type: float) -> Tensor:
    """What :func:`get_total_norm` makes of tensors with these norms, to the bit; 0 for none."""
    if not norms:
        return zeros((), ms.float32)
    with private_api.no_grad():
        widest = max((norm.dtype for norm in norms), key=lambda dtype: (dtype == ms.float64, dtype == ms.float32))
        stacked = cat([tensor_type_cast(norm, widest).reshape(1) for norm in norms])
        return tensor_type_cast(_norm(stacked, norm_type), widest)


def block_norms(blocks: list[Tensor], norm_type: float, dtype: Any = None) -> list[Tensor]:
    """One norm for each block, in their order and in the precision in which they are to be added up over ranks.

    A block without elements has the norm that changes nothing: 0, or infinity where the least counts.
    """
    return [_norm(detached(block), norm_type, dtype) for block in blocks]


def complete_norms(norms: list[Tensor], norm_type: float, group: Any) -> list[Tensor]:
    """The norms of tensors from those of their parts on the group's ranks. forward: one all-reduce; backward: none."""
    wide = ms.float64 if any(norm.dtype == ms.float64 for norm in norms) else ms.float32
    with private_api.no_grad():
        parts = cat([tensor_type_cast(norm, wide).reshape(1) for norm in norms]) * 1
        if math.isinf(norm_type):
            complete = collectives.all_reduce(parts, group, op="max" if norm_type > 0 else "min")
        elif norm_type == 0:
            complete = collectives.all_reduce(parts, group, op="sum")
        else:
            complete = power(collectives.all_reduce(power(parts, norm_type), group, op="sum"), 1.0 / norm_type)
        return [tensor_type_cast(complete[place], norm.dtype) for place, norm in enumerate(norms)]


def finished_norm(norm: Tensor, block: Tensor, dtype: Any = None) -> Tensor:
    """The norm in the dtype that values like the block's give."""
    return tensor_type_cast(norm, _REAL.get(dtype or block.dtype, dtype or block.dtype))


_REAL = {ms.complex64: ms.float32, ms.complex128: ms.float64}


def _norm(tensor: Tensor, norm_type: float, dtype: Any = None) -> Tensor:
    """The norm of one tensor, in float32 or float64."""
    real = _REAL.get(dtype or tensor.dtype, dtype or tensor.dtype)
    real = ms.float64 if real == ms.float64 else ms.float32
    if tensor.numel() == 0:
        return full((), math.inf if norm_type == -math.inf else 0.0, real)
    sizes = ops.abs(tensor) if tensor.is_complex() else ops.abs(tensor_type_cast(tensor, real))
    sizes = tensor_type_cast(sizes, real).reshape(-1)
    if math.isinf(norm_type):
        # A maximum on a CPU may lose a NaN; a sum does not.
        found = sizes.max() if norm_type > 0 else sizes.min()
        return ops.where(ops.isnan(sizes.sum()), full((), math.nan, real), found)
    if norm_type == 0:
        return tensor_type_cast(sizes != 0, real).sum()
    if norm_type == 2:
        return ops.sqrt((sizes * sizes).sum())
    return power(power(sizes, norm_type).sum(), 1.0 / norm_type)


def _grad_of(parameter: Any) -> Tensor | None:
    return parameter.grad if hasattr(parameter, "to_local") else private_api.get_grad(parameter)


def _block(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _as_list(function: str, tensors: Tensors) -> list[Tensor]:
    return listed_tensors(Tensor, function, tensors, "model.get_parameters()")
