"""Attention without memory is the kernel of the device that the run is about.

Note [Whose attention]
----------------------
``scaled_dot_product_attention`` chooses a kernel by the device. For tensors without memory that is the definition, step
by step, which keeps all scores: 39 % more memory in a small model. So while a run is counted, calls on such tensors
come here, and take the kernel that the target would take: on CPUs and GPUs by PyTorch's own conditions, on Ascend
devices the fused one. Heads that share keys are not copied out for kernels that need no copies.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from hyper_parallel.platform.torch.private_api import remove_library

aten = torch.ops.aten

_NARROW = (torch.float16, torch.bfloat16)


@contextlib.contextmanager
def attention_of(device: str) -> Iterator[None]:
    """Inside, attention on tensors without memory is that of ``device``: "cpu", "cuda" or "npu"."""

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        kernel = _choose(device, query, key, value, attn_mask, dropout_p, enable_gqa)
        if kernel == "definition":
            return aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )[0]
        if attn_mask is not None and attn_mask.dtype == torch.bool:  # as PyTorch does before it calls these kernels
            hidden = torch.scalar_tensor(-math.inf, dtype=query.dtype, device=attn_mask.device)
            attn_mask = torch.where(attn_mask, 0.0, hidden)
        if kernel == "cpu flash":
            return aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )[0]
        if kernel == "flash":
            return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        keeps_sums = any(tensor.requires_grad for tensor in (query, key, value))
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, keeps_sums, dropout_p, is_causal, scale=scale
        )[0]

    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", attend, "AutogradMeta")
    try:
        yield
    finally:
        remove_library(library)


def _choose(
    device: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    shares_heads: bool,
) -> str:
    alike = query.ndim == key.ndim == value.ndim == 4 and query.shape[-1] == key.shape[-1] == value.shape[-1]
    packed = all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    if 0 in (*query.shape, *key.shape) or not alike or not packed:
        return "definition"
    if device == "cpu":
        may_mask = mask is None or (not mask.requires_grad and mask.ndim in (2, 4))
        return "cpu flash" if dropout == 0.0 and may_mask else "definition"
    if device == "npu":
        return "flash"
    if query.dtype in _NARROW and mask is None and query.shape[-1] <= 256:
        return "flash"
    return "definition" if shares_heads and query.shape[1] != key.shape[1] else "efficient"


# ---------------------------------------------------------------- what the kernels give


def _cpu_flash(query: torch.Tensor, *rest: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """As the kernel allocates them: the output lies as the query does."""
    batch, heads, length, _ = query.shape
    sums = torch.float32 if query.dtype in _NARROW else query.dtype
    return torch.empty_like(query), query.new_empty((batch, length, heads), dtype=sums).transpose(1, 2)


def _cpu_flash_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any
) -> tuple[torch.Tensor, ...]:
    def like(tensor: torch.Tensor) -> torch.Tensor:
        batch, heads, length, width = tensor.shape
        return tensor.new_empty((batch, length, heads, width)).transpose(1, 2)

    return like(query), like(key), like(value)


def _grouped_mm(first: torch.Tensor, second: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    """Without memory it knows one dtype only; on CPUs it takes all."""
    narrow = aten._grouped_mm.default(first.to(torch.bfloat16), second.to(torch.bfloat16), *rest, **named)
    return torch.empty_strided(narrow.shape, narrow.stride(), dtype=first.dtype, device="meta")


# Where PyTorch's own answer for tensors without memory is not what the kernel does.
RESULTS_OF = {
    aten._grouped_mm.default: _grouped_mm,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _cpu_flash,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _cpu_flash_backward,
}


# ---------------------------------------------------------------- what they compute


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any) -> int:
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[-2] * (width + value.shape[-1])


def _attention_backward_flops(
    gradient: torch.Tensor, query: Any, key: Any, value: Any, *rest: Any, **named: Any
) -> int:
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[-2] * (3 * width + 2 * value.shape[-1])


def _grouped_mm_flops(first: torch.Tensor, second: torch.Tensor, *rest: Any, **named: Any) -> int:
    rows = first.shape[-2] * (first.shape[0] if first.ndim == 3 and second.ndim == 3 else 1)
    return 2 * rows * first.shape[-1] * second.shape[-1]


# Operators that torch.utils.flop_counter has no formula for.
FLOPS_OF = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    aten._grouped_mm: _grouped_mm_flops,
}
