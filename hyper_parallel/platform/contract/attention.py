"""What a framework may provide: the fused attention kernels of a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class AttentionKernels(ABC):
    """Attention of some queries over some keys, from which attention over all keys can be put together.

    Without a kernel both give None, and attention is computed step by step (``core/context_parallel/blocks``).
    """

    @staticmethod
    def fused_attention(query: Any, key: Any, value: Any, mask: Any, is_causal: bool, scale: float) -> Any:
        """(output, logarithm of the sum of the exponentials of each query's scores); None where no kernel does it.

        Tensors are (batch, heads, tokens, width), and fewer key heads are shared by equal groups of query heads.
        ``mask``: booleans, True where seen, that broadcast to (batch, heads, queries, keys); ``is_causal``: query i
        sees the keys up to i. A query that sees nothing has an output of zeros and the logarithm -inf. Records no
        gradient.
        """
        del query, key, value, mask, is_causal, scale
        return None

    @staticmethod
    def fused_attention_backward(
        gradient: Any,
        query: Any,
        key: Any,
        value: Any,
        output: Any,
        sums: Any,
        mask: Any,
        is_causal: bool,
        scale: float,
    ) -> Any:
        """The gradients of query, key and value, given the output and the logarithms over *all* keys, of which these
        may be a part; None where no kernel does it."""
        del gradient, query, key, value, output, sums, mask, is_causal, scale
        return None

    @staticmethod
    def blend(first: Any, second: Any, share: Any) -> Any:
        """``first`` with ``share`` of it replaced by ``second``; ``first`` may be written into. Records no gradient."""
        return first + (second - first) * share

    @staticmethod
    @abstractmethod
    def add_rows(total: Any, part: Any, start: int) -> Any:
        """``total`` with ``part`` added to the rows of dim -2 from ``start``; ``total`` may be written into."""
