"""Rows that travel to the ranks of their experts and back: a variable all-to-all each way.

Bytes of a rank in a layer, for R rows whose expert is elsewhere: 2 R features in forward and as many in backward, and
once the counts, 8 bytes for each pair of a rank and an expert.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hyper_parallel.core.dtensor.comm_recorder import attributed
from hyper_parallel.core.expert_parallel.expert_places import ExpertPlaces
from hyper_parallel.core.expert_parallel.expert_weights import ExpertWeights
from hyper_parallel.core.expert_parallel.in_flight import depart
from hyper_parallel.core.expert_parallel.row_counts import RowCounts, balanced, read_counts
from hyper_parallel.core.expert_parallel.token_order import TokenOrder
from hyper_parallel.core.modules.meeting_point import coordinator_in_force
from hyper_parallel.platform import get_platform

__all__ = ["COMBINE", "DISPATCH", "Exchange", "gathered", "on_their_ranks", "travel"]

_platform = get_platform()

DISPATCH, COMBINE = "dispatch to experts", "combine from experts"
_HOOKS = {DISPATCH: "AB", COMBINE: "CD"}  # where two micro-batches meet that run at once


class Exchange:
    """How many rows go where in one layer, known to all ranks of the group.

    forward: all-gather of the counts, and one look at them on the host; no backward.
    """

    def __init__(self, places: ExpertPlaces, order: TokenOrder) -> None:
        self.places, self.order = places, order
        counts, num_pairs = order.counts, order.num_pairs
        #: (ranks, experts by key): the rows that each rank has for each expert.
        self.counts = gathered(counts.tensor, places)
        table = read_counts(self.counts, lambda: [balanced(num_pairs, places.num_experts)] * places.num_ranks)
        ends = [sum(places.sizes[:rank]) for rank in range(places.num_ranks + 1)]
        mine = table[places.position]
        counts.know(mine)
        self.sent = [sum(mine[begin:end]) for begin, end in itertools.pairwise(ends)]
        begin, end = ends[places.position], ends[places.position + 1]
        self._table = [row[begin:end] for row in table]
        self.received = [sum(row) for row in self._table]

    @property
    def num_received(self) -> int:
        return sum(self.received)

    def there(self, rows: Any) -> Any:
        """Rows by expert to the ranks of the experts. forward: all-to-all; backward: the all-to-all back."""
        return travel(DISPATCH, rows, self.sent, self.received, self.places)

    def back(self, rows: Any, beside: Callable[[], Any] | None = None) -> Any:
        """Results to where the rows came from. forward: all-to-all; backward: the all-to-all there."""
        return travel(COMBINE, rows, self.received, self.sent, self.places, beside)

    def received_order(self) -> tuple[TokenOrder, RowCounts]:
        """What is received comes by rank and then by expert: its order by expert, and the rows of each."""
        mine = self.places.mine
        counts = self.counts[:, mine.start : mine.stop]
        numbers = [sum(row[expert] for row in self._table) for expert in range(len(mine))]
        keys = _platform.group_of_rows(counts.reshape(-1), self.num_received) % max(1, len(mine))
        order = TokenOrder(keys, 1, len(mine))
        return order, RowCounts(counts.sum(0), self.num_received, numbers)


def gathered(counts: Any, places: ExpertPlaces) -> Any:
    """The counts of all ranks of the group, a row each. forward: all-gather; no backward."""
    with _naming("counts of the experts' rows", places):
        return attributed(
            "counts of the experts' rows", _platform.all_gather_into_tensor, counts.reshape(1, -1), places.group
        )


def travel(
    what: str,
    rows: Any,
    sent: list[int],
    received: list[int],
    places: ExpertPlaces,
    beside: Callable[[], Any] | None = None,
) -> Any:
    """``sent[r]`` rows to rank r of the group. forward: all-to-all; backward: the all-to-all back.

    ``beside()`` is called while they are on their way, and its backward runs while their gradients are; not where
    another micro-batch computes then.
    """
    coordinator = coordinator_in_force()
    with _naming(what, places):
        if coordinator is None and beside is None:
            return attributed(what, _platform.differentiable_all_to_all_single, rows, sent, received, places.group)
        arrive = attributed(what, depart, rows, sent, received, places.group, coordinator, _HOOKS[what])
    if coordinator is None and beside is not None:
        beside()
    with _naming(what, places):
        return arrive()


@contextmanager
def _naming(what: str, places: ExpertPlaces) -> Iterator[None]:
    """Errors of communication say which one it was, and between whom."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"experts, {what} over {places}: {error}") from error


def on_their_ranks(rows: Any, exchange: Exchange, of: ExpertWeights, beside: Callable[[], Any] | None = None) -> Any:
    """What the experts, of which this rank has a block, give for rows that are ordered by key.

    ``beside()`` is called while results travel back.

    forward and backward: all-to-all there and back.
    """
    arrived = exchange.there(rows)
    by_expert, counts = exchange.received_order()
    results = of(by_expert.moved(arrived), counts)
    results = by_expert.restored(results).reshape(exchange.num_received, results.shape[-1])
    return exchange.back(results, beside)
