"""The norm of all gradients as one vector, and clipping by it.

The norm is made in two steps: one number for each tensor from the values this rank holds (``_local_norms``), then all
numbers together (``_combine_norms``). A tensor whose values are spread over ranks needs its number completed between
the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

__all__ = ["clip_grad_norm_", "get_total_norm"]

Tensors = torch.Tensor | Iterable[torch.Tensor]


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
    multiplied by min(1, max_norm / (norm + 1e-6)), as ``torch.nn.utils.clip_grad_norm_`` does, to the bit.
    """
    max_norm = float(max_norm)
    if not max_norm >= 0:
        raise ValueError(f"clip_grad_norm_: max_norm must be 0 or more, got {max_norm}")
    grads = [p.grad for p in _as_list("clip_grad_norm_", parameters) if p.grad is not None]
    total_norm = get_total_norm(grads, norm_type, error_if_nonfinite, foreach)
    # Also when nothing is to be clipped: asking whether it is would make the host wait for the device.
    scale = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    for (device, _), group in _group_by_device_and_dtype(grads).items():
        scale_here = scale.to(device)
        if _use_foreach(group, device, foreach):
            torch._foreach_mul_(group, scale_here)
        else:
            for grad in group:
                grad.mul_(scale_here)
    return total_norm


@torch.no_grad()
def get_total_norm(
    tensors: Tensors,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """The ``norm_type`` norm (``inf`` included) of all tensors as one vector, on the first one's device; 0 for none."""
    tensors = _as_list("get_total_norm", tensors)
    norm_type = float(norm_type)
    if math.isnan(norm_type):
        raise ValueError("get_total_norm: norm_type is nan; give the order of the norm, 2.0 or inf for instance")
    if not tensors:
        return torch.tensor(0.0)
    total_norm = _combine_norms(_local_norms(tensors, norm_type, foreach), norm_type, tensors[0].device)
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
            norms.extend(torch._foreach_norm(group, norm_type))
        else:
            norms.extend(torch.linalg.vector_norm(tensor, norm_type) for tensor in group)
    return norms


def _combine_norms(norms: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), norm_type)


def _as_list(function: str, tensors: Tensors) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    tensors = list(tensors)
    for position, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            hint = "; give model.parameters(), not model.named_parameters()" if isinstance(tensor, (tuple, str)) else ""
            raise TypeError(f"{function} takes tensors, got {type(tensor).__name__} at position {position}{hint}")
    return tensors


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
