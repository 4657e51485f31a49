"""Functions of tensors under one name, for programs that a test runs twice: on PyTorch's tensors, for what it expects,
and on those of the framework under test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tests.frameworks.values import on_mindspore

if on_mindspore:
    import mindspore.mint.nn.functional as MF
    from mindspore import mint, ops


def _is_torch(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor)


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    return (F if _is_torch(x) else MF).linear(x, weight, bias)


def relu(x: Any) -> Any:
    return torch.relu(x) if _is_torch(x) else ops.relu(x)


def gelu(x: Any) -> Any:
    return F.gelu(x) if _is_torch(x) else ops.gelu(x)


def softmax(x: Any, dim: int) -> Any:
    return torch.softmax(x, dim) if _is_torch(x) else ops.softmax(x, dim)


def log_softmax(x: Any, dim: int) -> Any:
    return torch.log_softmax(x, dim) if _is_torch(x) else ops.log_softmax(x, dim)


def logsumexp(x: Any, dim: int) -> Any:
    return torch.logsumexp(x, dim) if _is_torch(x) else ops.logsumexp(x, dim)


def cross_entropy(x: Any, target: Any, **options: Any) -> Any:
    """A target that is a class is of int32 on MindSpore."""
    return (F if _is_torch(x) else ops).cross_entropy(x, target, **options)


def layer_norm(x: Any, weight: Any, bias: Any, eps: float = 1e-5) -> Any:
    """Over the last dim."""
    if _is_torch(x):
        return F.layer_norm(x, tuple(weight.shape), weight, bias, eps)
    return ops.LayerNorm(-1, -1, eps)(x, weight, bias)[0]


def embedding(ids: Any, table: Any) -> Any:
    return F.embedding(ids, table) if _is_torch(table) else ops.gather(table, ids, 0)


def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    return torch.cat(list(tensors), dim) if _is_torch(tensors[0]) else mint.cat(list(tensors), dim)


def where(condition: Any, x: Any, y: Any) -> Any:
    return torch.where(condition, x, y) if _is_torch(condition) else ops.where(condition, x, y)


def cumsum(x: Any, dim: int) -> Any:
    return torch.cumsum(x, dim) if _is_torch(x) else ops.cumsum(x, dim)


def amax(x: Any, dim: int) -> Any:
    return torch.amax(x, dim) if _is_torch(x) else ops.amax(x, dim)


def variance(x: Any, dim: int) -> Any:
    """Divided by the number of elements."""
    return torch.var(x, dim, correction=0) if _is_torch(x) else ops.var(x, dim, 0)


def vector_norm(x: Any, dim: int) -> Any:
    return torch.linalg.vector_norm(x, dim=dim) if _is_torch(x) else ops.norm(x, dim=dim)


def flipped(x: Any, dim: int) -> Any:
    return torch.flip(x, (dim,)) if _is_torch(x) else ops.flip(x, (dim,))


def dropout(x: Any, p: float) -> Any:
    return F.dropout(x, p) if _is_torch(x) else ops.dropout(x, p)
