"""What the rules for reductions, softmax, normalisation and losses need from PyTorch besides methods of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def extreme_identity(dtype: torch.dtype, op: str) -> float | int | bool:
    """The value that every other one beats in a maximum (``op`` "max") or a minimum ("min")."""
    if dtype.is_floating_point:
        return -float("inf") if op == "max" else float("inf")
    if dtype == torch.bool:
        return op == "min"
    limits = torch.iinfo(dtype)
    return limits.min if op == "max" else limits.max


def machine_epsilon(dtype: torch.dtype) -> float:
    """The distance from 1 to the next larger number of a floating-point dtype."""
    return torch.finfo(dtype).eps


def vector_norm(tensor: torch.Tensor, p: float, dims: Sequence[int], keepdim: bool) -> torch.Tensor:
    """The p-norm over ``dims``."""
    return torch.linalg.vector_norm(tensor, p, tuple(dims), keepdim)


_RESULT_TYPES = {"max": torch.return_types.max, "min": torch.return_types.min, "aminmax": torch.return_types.aminmax}


def result_like(func: Callable[..., Any], results: Sequence[torch.Tensor]) -> Any:
    """The results in the named tuple that ``func`` gives."""
    return _RESULT_TYPES[func.__name__](results)
