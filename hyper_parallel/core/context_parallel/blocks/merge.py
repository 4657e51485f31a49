"""Joining what the same queries found among different keys, by the log-sum-exp of their scores.

Each result is (output, sums): the weighted mean of the values, (batch, heads, queries, width), and the logarithm of the
sum of the weights before they were divided by it, (batch, heads, queries); -inf where nothing was seen.
"""

from __future__ import annotations

import math
from typing import Any

from hyper_parallel.platform import get_platform

_platform = get_platform()


def working_precision(tensor: Any) -> Any:
    """Values of 16 bits as float32, others as they are."""
    return tensor if _platform.get_element_size(tensor) >= 4 else _platform.tensor_type_cast(tensor, "float32")


def merge(first: tuple[Any, Any] | None, second: tuple[Any, Any]) -> tuple[Any, Any]:
    """Both results as one, in float32 or wider; the first is used up."""
    if first is None:
        return second
    (mine, my_sums), (theirs, their_sums) = first, second
    share, total = _second_share(my_sums, their_sums)
    return _platform.blend(working_precision(mine), working_precision(theirs), share.unsqueeze(-1)), total


def with_sinks(result: tuple[Any, Any], sinks: Any) -> tuple[Any, Any]:
    """The result when every query of head h also sees one key of score ``sinks[h]`` whose value is zero."""
    output, sums = result
    share, total = _second_share(sums, sink_scores(sinks, sums))
    return working_precision(output) * (1 - share).unsqueeze(-1), total


def sink_scores(sinks: Any, sums: Any) -> Any:
    """The score of its head's sink for each query."""
    scores = _platform.tensor_type_cast(sinks, sums.dtype).reshape(1, -1, 1)
    return scores + _platform.zeros(tuple(sums.shape), sums.dtype, sums.device)


def nothing_seen(query: Any, width: int) -> tuple[Any, Any]:
    """The result of queries that see no key."""
    output = _platform.zeros((*query.shape[:-1], width), query.dtype, query.device)
    sums = _platform.zeros(tuple(query.shape[:-1]), working_precision(query).dtype, query.device)
    return output, sums - math.inf


def _second_share(first: Any, second: Any) -> tuple[Any, Any]:
    """How much of the sum of both is the second, and the logarithm of that sum."""
    high = _platform.cat([first.unsqueeze(-1), second.unsqueeze(-1)], -1).amax(dim=-1, keepdim=False)
    gap = (second - first).masked_fill(high == -math.inf, 0)  # neither saw anything
    return 1 / ((-gap).exp() + 1), high + _platform.logarithm((-gap.abs()).exp() + 1)
