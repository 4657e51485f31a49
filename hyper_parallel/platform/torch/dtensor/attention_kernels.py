"""PyTorch's fused attention kernels on some queries and some keys, with what joins their results: log-sum-exp.

Note [What the kernels get wrong, or refuse]
On CPUs: no queries or no keys kill the process (SIGFPE); masks must be added ones of the queries' type; a query that
sees nothing has log-sum-exp 0, as if it saw one key of score 0, and a backward from -inf is NaN; values must be as wide
as keys; tensors that are not (batch, heads, tokens, width) are refused. On GPUs the flash kernel takes 16 bits and no
mask, and widths that are multiples of 8. What no kernel does is computed step by step, exactly.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

aten = torch.ops.aten

_NARROW = (torch.float16, torch.bfloat16)


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(output, log-sum-exp) of the device's kernel; None where it has none for this call."""
    kernel = _kernel_for(query, key, value, mask)
    if kernel is None:
        return None
    if kernel == "flash":
        found = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, False, scale=scale)
        return found[0], found[1]
    width = value.shape[-1]
    query, key, value = _as_wide(query, key, value)
    added = None if mask is None else _added(mask, query, key)
    output, sums = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=added, scale=scale
    )
    if mask is not None:
        sums = sums.masked_fill(mask.any(-1).logical_not(), -math.inf)
    return output[..., :width], sums


def fused_attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    sums: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """The gradients of query, key and value of the device's kernel; None where it has none for this call."""
    kernel = _kernel_for(query, key, value, mask)
    if kernel is None:
        return None
    if kernel == "flash":
        return _flash_backward(gradient, query, key, value, output, sums, is_causal, scale)
    widths = [tensor.shape[-1] for tensor in (query, key, value)]
    query, key, value = _as_wide(query, key, value)
    gradient, output = (_widened(tensor, query.shape[-1]) for tensor in (gradient, output))
    added = None
    if mask is not None:
        added = _added(mask, query, key)
        sums = sums.masked_fill(sums.isinf(), 0)  # its scores are all -inf: no weight comes of them
    gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, output, sums, 0.0, is_causal, attn_mask=added, scale=scale
    )
    return tuple(part[..., :width] for part, width in zip(gradients, widths, strict=True))  # type: ignore[return-value]


def blend(first: torch.Tensor, second: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """``first`` with ``share`` of it replaced by ``second``, in place."""
    return first.lerp_(second, share)


def add_rows(total: torch.Tensor, part: torch.Tensor, start: int) -> torch.Tensor:
    """``total`` with ``part`` added to the rows of dim -2 from ``start``, in place."""
    total.narrow(-2, start, part.shape[-2]).add_(part)
    return total


def _kernel_for(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> str | None:
    if query.ndim != 4 or 0 in (*query.shape, *key.shape, *value.shape) or query.shape[1] % key.shape[1]:
        return None
    if not (query.dtype == key.dtype == value.dtype) or not query.is_floating_point():
        return None
    if any(tensor.stride(-1) != 1 for tensor in (query, key, value)):
        return None
    if query.device.type in ("cpu", "meta"):
        return "cpu"
    is_flat = query.shape[-1] == value.shape[-1] <= 256 and query.shape[-1] % 8 == 0
    if query.device.type == "cuda" and mask is None and is_flat and query.dtype in _NARROW:
        return "flash"
    return None


def _flash_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    sums: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> Any:
    no_lengths = torch.empty(0, dtype=torch.int32, device=query.device)
    no_seed = torch.empty(2, dtype=torch.uint64, device=query.device)  # of a dropout that there is not
    no_offset = torch.empty((), dtype=torch.uint64, device=query.device)
    return aten._scaled_dot_product_flash_attention_backward(
        gradient,
        query,
        key,
        value,
        output,
        sums,
        no_lengths,
        no_lengths,
        query.shape[-2],
        key.shape[-2],
        0.0,
        is_causal,
        no_seed,
        no_offset,
        scale=scale,
    )


def _added(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The mask as numbers to add, of 4 dims, of which the last two are not broadcast."""
    hidden = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(mask.logical_not(), -math.inf)
    return hidden.expand(*mask.shape[:-2], query.shape[-2], key.shape[-2])


def _as_wide(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Zeros behind the narrower ones; they change no score, and their columns of the output are left out."""
    width = max(tensor.shape[-1] for tensor in tensors)
    return [_widened(tensor, width) for tensor in tensors]


def _widened(tensor: torch.Tensor, width: int) -> torch.Tensor:
    return tensor if tensor.shape[-1] == width else functional.pad(tensor, (0, width - tensor.shape[-1]))
