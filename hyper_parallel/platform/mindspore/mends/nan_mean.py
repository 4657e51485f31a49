"""The mean of the elements that are numbers, which MindSpore 2.10 cannot compute while gradients are recorded.

With a tensor ``x`` that needs a gradient ``ops.nanmean(x)`` ends in "The pointer[top_cell_] is null." Plain tensors are
mended too.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import mint

from hyper_parallel.platform.mindspore.mends.empty_blocks import sum_along

__all__ = ["nanmean"]


def nanmean(input: Any, axis: Any = None, keepdims: bool = False, *, dtype: Any = None) -> Any:
    if input.dtype not in (ms.float16, ms.bfloat16, ms.float32, ms.float64):
        raise TypeError(f"For 'nanmean', input should be floating point dtype, but got {input.dtype}.")
    are_none = mint.isnan(input)
    total = sum_along(input.masked_fill(are_none, 0), axis, keepdims, dtype)
    return total / sum_along(mint.logical_not(are_none), axis, keepdims).to(total.dtype)
