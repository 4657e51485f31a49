"""Tokens ordered by expert, and back.

A token that chose k experts is k rows. Rows are ordered by expert, those of one expert by token: the order depends on
nothing but the routing. Back in their own order, the k rows of a token are neighbours and are summed in the order of
its choices, so the same routing gives the same bits in both passes: no device adds them up in an order of its own.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.expert_parallel.row_counts import RowCounts
from hyper_parallel.platform import get_platform

__all__ = ["TokenOrder"]

_platform = get_platform()


class TokenOrder:
    """The order of the (token, choice) pairs by the key of each, a whole number below ``num_keys``.

    With ``drops`` the key ``num_keys`` is allowed too: no row is made of such a choice, and zeros come back for it. How
    many are left is a look at values.
    """

    def __init__(self, keys: Any, num_choices: int, num_keys: int, drops: bool = False) -> None:
        self.num_choices = num_choices
        self.order, counts = _platform.order_by_key(keys, num_keys + drops)
        self.inverse = _platform.inverse_order(self.order)
        self.num_pairs = int(self.order.shape[0])
        self.counts = RowCounts(counts[:num_keys] if drops else counts, self.num_pairs)
        self._drops = drops

    @property
    def num_rows(self) -> int:
        return sum(self.counts.numbers()) if self._drops else self.num_pairs

    def ordered(self, tokens: Any) -> Any:
        """A row for each choice of each token, by key. forward: rows copied; backward: sums over a token's choices."""
        return _Ordered.apply(tokens, self)

    def restored(self, rows: Any) -> Any:
        """(tokens, choices, features) out of ordered rows. forward and backward: rows moved."""
        rows = _Restored.apply(rows, self)
        return rows.reshape(self.num_pairs // self.num_choices, self.num_choices, rows.shape[-1])

    def moved(self, rows: Any) -> Any:
        """Rows, one for each choice already, by key. forward and backward: rows moved."""
        return _Moved.apply(rows, self)

    def by_key(self, rows: Any, of_tokens: bool = False) -> Any:
        """:meth:`moved`, or with ``of_tokens`` :meth:`ordered`, of plain values without a gradient."""
        order = self.order[: self.num_rows] if self._drops else self.order
        return _platform.take_rows(rows, order // self.num_choices if of_tokens and self.num_choices > 1 else order)

    def by_pair(self, rows: Any) -> Any:
        """Rows by key in the order of the pairs, zeros where a choice was dropped; without a gradient."""
        missing = self.num_pairs - int(rows.shape[0])
        if missing:
            rows = _platform.cat([rows, _platform.zeros((missing, *rows.shape[1:]), rows.dtype, rows.device)], 0)
        return _platform.take_rows(rows, self.inverse)


class _Ordered(_platform.Function):  # type: ignore[name-defined]
    """forward: a row of each pair's token, by key; backward: the gradients of a token's rows, added in order."""

    @staticmethod
    def forward(ctx: Any, tokens: Any, order: TokenOrder) -> Any:
        ctx.order = order
        return order.by_key(tokens, of_tokens=True)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        rows = ctx.order.by_pair(gradient)
        if ctx.order.num_choices > 1:
            rows = rows.reshape(-1, ctx.order.num_choices, rows.shape[-1]).sum(1)
        return rows, None


class _Moved(_platform.Function):  # type: ignore[name-defined]
    """forward: rows of pairs by key; backward: gradients by pair."""

    @staticmethod
    def forward(ctx: Any, rows: Any, order: TokenOrder) -> Any:
        ctx.order = order
        return order.by_key(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return ctx.order.by_pair(gradient), None


class _Restored(_platform.Function):  # type: ignore[name-defined]
    """forward: rows by pair; backward: gradients by key."""

    @staticmethod
    def forward(ctx: Any, rows: Any, order: TokenOrder) -> Any:
        ctx.order = order
        return order.by_pair(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return ctx.order.by_key(gradient), None
