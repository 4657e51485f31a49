"""Experts that take a limited number of rows: choices beyond it are dropped."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.expert_parallel.token_order import TokenOrder
from hyper_parallel.platform import get_platform

__all__ = ["limited"]

_platform = get_platform()


def limited(keys: Any, num_keys: int, capacity: int) -> Any:
    """The keys, with ``num_keys`` in place of each one that ``capacity`` equal ones come before.

    >>> import torch
    >>> limited(torch.tensor([0, 1, 0, 0, 1]), 2, 2)
    tensor([0, 1, 0, 2, 1])
    """
    order = TokenOrder(keys, 1, num_keys)
    counts = order.counts.tensor
    first = _platform.take_rows(counts.cumsum(0) - counts, order.by_key(keys))
    place = order.by_pair(_platform.arange(0, order.num_pairs, dtype=counts.dtype, device=keys.device) - first)
    return _platform.replaced(keys, place >= capacity, num_keys)
