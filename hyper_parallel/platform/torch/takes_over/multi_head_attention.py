"""PyTorch's attention function on distributed tensors, with heads that stay cut.

Note [Heads as a dim of their own]
``F.multi_head_attention_forward`` makes one dim of batch and heads. Where heads are cut that dim has no layout: each
rank has some heads of every sequence. So distributed tensors go through the same computation with batch and heads as
two dims, in which the heads stay where they are. It is written for separate weights of query, key and value (PyTorch's
own option); one weight for all three, and the rarely used extra keys, run the body of PyTorch's function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F


def with_heads_apart(packed: Callable[..., Any]) -> Callable[..., Any]:
    """The function for distributed tensors; ``packed`` is PyTorch's own, for what is not done here."""

    def attend(
        query: Any,
        key: Any,
        value: Any,
        embed_dim_to_check: int,
        num_heads: int,
        in_proj_weight: Any,
        in_proj_bias: Any,
        bias_k: Any,
        bias_v: Any,
        add_zero_attn: bool,
        dropout_p: float,
        out_proj_weight: Any,
        out_proj_bias: Any,
        **options: Any,
    ) -> Any:
        extra_keys = bias_k is not None or bias_v is not None or add_zero_attn
        if extra_keys or not options.get("use_separate_proj_weight") or options.get("static_k") is not None:
            arguments = (query, key, value, embed_dim_to_check, num_heads, in_proj_weight, in_proj_bias)
            arguments += (bias_k, bias_v, add_zero_attn, dropout_p, out_proj_weight, out_proj_bias)
            return packed(*arguments, **options)
        is_batched = query.dim() == 3
        padding = options.get("key_padding_mask")
        if not is_batched:
            query, key, value = (one.unsqueeze(1) for one in (query, key, value))
            padding = None if padding is None else padding.unsqueeze(0)
        weights = (options[f"{name}_proj_weight"] for name in "qkv")
        biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
        q, k, v = (
            F.linear(one, weight, bias).unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)
            for one, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )
        need_weights, is_causal = options.get("need_weights", True), options.get("is_causal", False)
        mask = options.get("attn_mask")
        if is_causal and mask is None:
            raise RuntimeError("multi_head_attention_forward: is_causal=True is a hint about attn_mask; give that too")
        is_causal = is_causal and padding is None and not need_weights
        mask = None if is_causal else _joined_masks(mask, padding, q)
        dropout_p = dropout_p if options.get("training", True) else 0.0
        found = None
        if need_weights:
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
            found = (scores if mask is None else scores + mask).softmax(-1)
            found = F.dropout(found, dropout_p) if dropout_p else found
            mixed = found @ v
            found = found.mean(1) if options.get("average_attn_weights", True) else found
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal)
        out = F.linear(mixed.permute(2, 0, 1, 3).flatten(-2), out_proj_weight, out_proj_bias)
        if is_batched:
            return out, found
        return out.squeeze(1), None if found is None else found.squeeze(0)

    return attend


def _joined_masks(mask: Any, padding: Any, like: Any) -> Any:
    """What is added to the scores (batch, heads, queries, keys): from (queries, keys) or (batch * heads, ...) and
    (batch, keys)."""
    if mask is not None:
        mask = _added(mask, like.dtype)
        if mask.dim() == 3:
            mask = mask.unflatten(0, (-1, like.shape[1])) if mask.shape[0] != 1 else mask
    if padding is None:
        return mask
    padding = _added(padding, like.dtype)[:, None, None, :]
    return padding if mask is None else mask + padding


def _added(mask: Any, dtype: torch.dtype) -> Any:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
