"""Rows that travel once for each rank that has an expert of theirs, and not once for each expert.

A token with several experts on one rank is sent there once, with its choices and weights; that rank computes its
experts and sends back their weighted sum. For k choices on n ranks (n-1)(1-(1-1/n)^k) rows of a token travel in place
of k (n-1)/n: a third less for k = n = 8. The sum is then one of sums by rank: its last bits depend on their number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hyper_parallel.core.expert_parallel.dispatch import COMBINE, DISPATCH, gathered, travel
from hyper_parallel.core.expert_parallel.expert_places import ExpertPlaces
from hyper_parallel.core.expert_parallel.row_counts import balanced, read_counts
from hyper_parallel.core.expert_parallel.token_order import TokenOrder
from hyper_parallel.platform import get_platform

__all__ = ["once_per_rank"]

_platform = get_platform()


def once_per_rank(
    hidden: Any,
    keys: Any,
    weights: Any,
    places: ExpertPlaces,
    local: Callable[[Any, Any, Any, list[int]], Any],
    beside: Callable[[], Any] | None = None,
) -> Any:
    """The sum over each token's choices. ``local(tokens, keys, weights, counts)`` gives this rank's part of it.

    ``beside()`` is called while the sums travel back.

    forward: all-gather of counts, all-to-all of tokens, keys and weights, all-to-all of the sums; backward: all-to-all
    of the gradients of sums, tokens and weights.
    """
    num_ranks, num_choices = places.num_ranks, int(weights.shape[1])
    ranks = _platform.first_of_row(_ranks_of(keys, places), num_choices, num_ranks)
    order = TokenOrder(ranks, num_choices, num_ranks, drops=True)
    of_experts = _platform.order_by_key(keys, places.num_experts + 1)[1][: places.num_experts]
    found = gathered(_platform.cat([order.counts.tensor, of_experts], 0), places)
    table = read_counts(found, lambda: _assumed(int(hidden.shape[0]), num_choices, places))
    order.counts.know(table[places.position][:num_ranks])
    sent, received = order.counts.numbers(), [row[places.position] for row in table]
    mine = range(num_ranks + places.mine.start, num_ranks + places.mine.stop)
    counts = [sum(row[column] for row in table) for column in mine]

    def there(rows: Any) -> Any:
        return travel(DISPATCH, rows, sent, received, places)

    chosen = order.by_key(keys.reshape(-1, num_choices), of_tokens=True)
    arrived = there(order.ordered(hidden)), there(chosen), there(order.ordered(weights))
    sums = travel(COMBINE, local(*arrived, counts), received, sent, places, beside)
    return order.restored(sums).sum(1)


def _ranks_of(keys: Any, places: ExpertPlaces) -> Any:
    """The rank of each key; behind the last key, that of a choice that was dropped, there is none."""
    table = np.append(np.repeat(np.arange(places.num_ranks), places.sizes), places.num_ranks)
    return _platform.take_rows(_platform.from_numpy(table, keys.dtype, keys.device), keys)


def _assumed(num_tokens: int, num_choices: int, places: ExpertPlaces) -> list[list[int]]:
    """Without memory: every token has experts on as many ranks as it can, all alike."""
    pairs = num_tokens * min(num_choices, places.num_ranks)
    row = [*balanced(pairs, places.num_ranks), *balanced(num_tokens * num_choices, places.num_experts)]
    return [row] * places.num_ranks
