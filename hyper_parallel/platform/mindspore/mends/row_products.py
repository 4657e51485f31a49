"""Products with tensors like (1, 1, n), whose gradient fails or has another shape in MindSpore 2.10::

    def ones(*shape):
        return Tensor(np.ones(shape, np.float32))

    mindspore.grad(lambda row: mint.matmul(row, ones(3, 4)).sum())(ones(1, 1, 3)).shape  # (1, 1, 1, 3)

Local tensors of distributed ones go through matrices then; plain tensors are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.platform.mindspore.mends import ACTIVE

__all__ = ["is_row", "product_by_matrices"]


def is_row(tensor: Any) -> bool:
    """Whether a product with it must go through matrices."""
    return ACTIVE and tensor.ndim > 2 and tensor.numel() == tensor.shape[-1]


def product_by_matrices(matmul: Callable[..., Any], input: Any, other: Any, shape: tuple[int, ...]) -> Any:
    flat = [one.reshape(1, one.shape[-1]) if is_row(one) else one for one in (input, other)]
    return matmul(*flat).reshape(shape)
