"""The norm of all gradients as one vector, and clipping by it.

The norm is made in two steps: one number for each tensor from the values this rank holds (``_local_norms``), then all
numbers together (``_combine_norms``). A tensor whose values are spread over ranks needs its number completed between
the two (``block_norms``, ``complete_norms``): that is what ``global_norms`` does, which knows how tensors are spread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel.platform.shared.tensor_arguments import listed_tensors, refuse_stages
from hyper_parallel.platform.torch.base.dtensor_base import DTensorBase, detached
from hyper_parallel.platform.torch.communication import collectives
from hyper_parallel.platform.torch.private_api import foreach_mul_, foreach_norm

__all__ = [
    "block_norms",
    "clip_by_norm_",
    "clip_grad_norm_",
    "complete_norms",
    "finished_norm",
    "get_total_norm",
    "set_global_norms",
    "total_of_norms",
]

Tensors = torch.Tensor | Iterable[torch.Tensor]

_global_norms: Callable[[Sequence[torch.Tensor], float], list[torch.Tensor]]


def set_global_norms(global_norms: Callable[[Sequence[torch.Tensor], float], list[torch.Tensor]]) -> None:
    """Let ``global_norms(tensors, order)`` give the norms of tensors of which some are distributed."""
    global _global_norms
    _global_norms = global_norms


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale the gradients in place so that their total norm is at most ``max_norm``; returns the norm before clipping.

    ``parameters`` is one tensor or any iterable of them, those without gradient do not count. Every gradient is
    multiplied by min(1, max_norm / (norm + 1e-6)), as ``torch.nn.utils.clip_grad_norm_`` does, to the bit. They may be
    distributed, on several meshes, or plain, which are taken to be equal on all ranks.
    """
    max_norm = float(max_norm)
    if not max_norm >= 0:
        raise ValueError(f"clip_grad_norm_: max_norm must be 0 or more, got {max_norm}")
    given = _as_list("clip_grad_norm_", parameters)
    refuse_stages("clip_grad_norm_", given)
    grads = [p.grad for p in given if p.grad is not None]
    total_norm = get_total_norm(grads, norm_type, error_if_nonfinite, foreach)
    clip_by_norm_(grads, total_norm, max_norm, foreach)
    return total_norm


@torch.no_grad()
def clip_by_norm_(
    gradients: Sequence[torch.Tensor], total_norm: torch.Tensor, max_norm: float, foreach: bool | None = None
) -> None:
    """Multiply gradients whose norm, with others perhaps, is ``total_norm`` by min(1, max_norm / (norm + 1e-6))."""
    # Also when nothing is to be clipped: asking whether it is would make the host wait for the device.
    scale = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    blocks = [detached(grad) if isinstance(grad, DTensorBase) else grad for grad in gradients]
    for (device, _), group in _group_by_device_and_dtype(blocks).items():
        scale_here = scale.to(device)
        if _use_foreach(group, device, foreach):
            foreach_mul_(group, scale_here)
        else:
            for grad in group:
                grad.mul_(scale_here)


@torch.no_grad()
def get_total_norm(
    tensors: Tensors,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """The ``norm_type`` norm (``inf`` included) of all tensors as one vector, on the first one's device; 0 for none.

    A plain tensor without dims, equal on all ranks, also when tensors are distributed: one reduction for all that are
    spread over the same ranks, whose parts count once.
    """
    tensors = _as_list("get_total_norm", tensors)
    norm_type = float(norm_type)
    if math.isnan(norm_type):
        raise ValueError("get_total_norm: norm_type is nan; give the order of the norm, 2.0 or inf for instance")
    if not tensors:
        return torch.tensor(0.0)
    if any(isinstance(tensor, DTensorBase) for tensor in tensors):
        norms = _global_norms(tensors, norm_type)
    else:
        norms = _local_norms(tensors, norm_type, foreach)
    total_norm = _combine_norms(norms, norm_type, tensors[0].device)
    if error_if_nonfinite and not torch.isfinite(total_norm):
        raise RuntimeError(
            f"the total norm of order {norm_type} of {len(tensors)} gradients is {total_norm.item()}, so they cannot "
            "be clipped; pass error_if_nonfinite=False to scale them by it anyway"
        )
    return total_norm


def _local_norms(tensors: list[torch.Tensor], norm_type: float, foreach: bool | None) -> list[torch.Tensor]:
    """One 0-dim norm for each tensor, grouped by device and dtype (their order does not matter to the total)."""
    norms: list[torch.Tensor] = []
    if norm_type == math.inf:
        # The maximum over an empty tensor, a rank's part of an uneven one for instance, is 0; torch refuses to say so.
        norms.extend(torch.linalg.vector_norm(tensor, 2.0) for tensor in tensors if tensor.numel() == 0)
        tensors = [tensor for tensor in tensors if tensor.numel() > 0]
    for (device, _), group in _group_by_device_and_dtype(tensors).items():
        if _use_foreach(group, device, foreach):
            norms.extend(foreach_norm(group, norm_type))
        else:
            norms.extend(torch.linalg.vector_norm(tensor, norm_type) for tensor in group)
    return norms


def block_norms(blocks: list[torch.Tensor], norm_type: float, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """One norm for each block, in their order and in the precision in which they are to be added up over ranks.

    A block without elements has the norm that changes nothing: 0, or infinity where the least counts.
    """
    norms: dict[int, torch.Tensor] = {}
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for position, block in enumerate(blocks):
        if block.numel() == 0:
            nothing = math.inf if norm_type == -math.inf else 0.0
            norms[position] = torch.full((), nothing, dtype=_norm_dtype(block, dtype), device=block.device)
        else:
            groups.setdefault((block.device, block.dtype), []).append(position)
    for (device, _), positions in groups.items():
        group = [blocks[position] for position in positions]
        group = [block.abs() if block.is_complex() else block for block in group]
        wanted = _norm_dtype(group[0], dtype)
        if device.type in _DEVICES_WITHOUT_FOREACH:
            made = [torch.linalg.vector_norm(block, norm_type, dtype=wanted) for block in group]
        else:
            made = foreach_norm(group, norm_type, dtype=wanted)
        norms.update(zip(positions, made, strict=True))
    return [norms[position] for position in range(len(blocks))]


def _norm_dtype(block: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """That of the values, complex ones' parts, but at least float32."""
    wanted = dtype or block.dtype
    wanted = wanted.to_real() if wanted.is_complex else wanted
    return torch.float32 if wanted.itemsize < 4 else wanted


def finished_norm(norm: torch.Tensor, block: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The norm in the dtype that the framework gives it for values like the block's."""
    wanted = dtype or block.dtype
    return norm.to(wanted.to_real() if wanted.is_complex else wanted)


def complete_norms(norms: list[torch.Tensor], norm_type: float, group: Any) -> list[torch.Tensor]:
    """The norms of tensors from those of their parts on the group's ranks. forward: one all-reduce; backward: none."""
    dtypes = [norm.dtype for norm in norms]
    parts = torch.stack([norm.to(torch.promote_types(norm.dtype, dtypes[0])) for norm in norms])
    if math.isinf(norm_type):
        # A reduction by max or min may lose a NaN, so it travels beside the numbers.
        is_nan = parts.isnan()
        sign = 1.0 if norm_type > 0 else -1.0
        numbers = parts.masked_fill(is_nan, 0.0) * sign
        both = collectives.all_reduce(torch.stack((numbers, is_nan.to(parts.dtype))), group, op="max")
        whole = (both[0] * sign).masked_fill(both[1] > 0, math.nan)
    elif norm_type == 0:
        whole = collectives.all_reduce(parts, group, op="sum")
    else:
        whole = collectives.all_reduce(parts.pow(norm_type), group, op="sum").pow(1.0 / norm_type)
    return list(whole.unbind())


@torch.no_grad()
def total_of_norms(norms: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """What :func:`get_total_norm` makes of tensors with these norms, to the bit; 0 for none."""
    if not norms:
        return torch.tensor(0.0)
    groups = _group_by_device_and_dtype(list(norms))
    return _combine_norms([norm for group in groups.values() for norm in group], norm_type, norms[0].device)


def _combine_norms(norms: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), norm_type)


def _as_list(function: str, tensors: Tensors) -> list[torch.Tensor]:
    return listed_tensors(torch.Tensor, function, tensors, "model.parameters(), not model.named_parameters()")


def _group_by_device_and_dtype(
    tensors: list[torch.Tensor],
) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups


# The _foreach functions have no public spelling; one call for a whole group of tensors is what makes clipping cheap.
_DEVICES_WITHOUT_FOREACH = {"meta", "mps"}


def _use_foreach(group: list[torch.Tensor], device: torch.device, foreach: bool | None) -> bool:
    if foreach and device.type in _DEVICES_WITHOUT_FOREACH:
        raise RuntimeError(f"foreach=True cannot be used for tensors on {device.type}; pass foreach=None or False")
    if foreach is None:
        return device.type not in _DEVICES_WITHOUT_FOREACH and all(type(t) is torch.Tensor for t in group)
    return foreach
