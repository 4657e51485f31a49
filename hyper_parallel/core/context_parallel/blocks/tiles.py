"""A rank's queries, in tiles, over blocks of keys that it meets one after the other; and the gradients, likewise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.context_parallel.blocks.attention_block import attend_block, attend_block_backward
from hyper_parallel.core.context_parallel.blocks.merge import merge, nothing_seen, with_sinks, working_precision
from hyper_parallel.core.context_parallel.blocks.scoring import Scoring
from hyper_parallel.core.context_parallel.blocks.visibility import Interval
from hyper_parallel.platform import get_platform

_platform = get_platform()


class QueryTiles:
    """Where the tiles of the queries begin in the block that this rank holds, one interval after the other."""

    def __init__(self, scoring: Scoring, intervals: Sequence[Interval]) -> None:
        self.scoring = scoring
        self.intervals = scoring.visible.query_tiles(intervals)
        self.starts = []
        start = 0
        for low, high in self.intervals:
            self.starts.append(start)
            start += high - low

    def part(self, tensor: Any, tile: int, dim: int = -2) -> Any:
        """A tile's part of a block of all queries."""
        start, stop = self.intervals[tile]
        if stop - start == tensor.shape[dim]:
            return tensor
        return tensor.narrow(dim, self.starts[tile], stop - start)

    def pairs(self, tile: int, keys: Interval) -> list[tuple[Interval, str]]:
        """The parts of ``keys`` that a tile sees, and how."""
        return self.scoring.visible.key_tiles(self.intervals[tile], keys)


class Found:
    """What the queries have found so far."""

    def __init__(self, tiles: QueryTiles, query: Any, width: int) -> None:
        self._tiles = tiles
        self._query = query
        self._width = width
        self._results: list[tuple[Any, Any] | None] = [None] * len(tiles.intervals)

    def add(self, key: Any, value: Any, interval: Interval) -> None:
        """Let the queries look at a block of keys, whose indices ``interval`` has."""
        tiles = self._tiles
        for tile, queries in enumerate(tiles.intervals):
            for (start, stop), relation in tiles.pairs(tile, interval):
                keys, its_values = (_rows(tensor, start - interval[0], stop - start) for tensor in (key, value))
                pair = (queries, (start, stop), relation)
                found = attend_block(tiles.part(self._query, tile), keys, its_values, tiles.scoring, pair)
                self._results[tile] = merge(self._results[tile], found)

    def result(self, sinks: Any) -> tuple[Any, Any]:
        """(output in the type of the queries, log-sum-exp with the sinks) of all queries."""
        outputs, sums = [], []
        for tile, found in enumerate(self._results):
            query = self._tiles.part(self._query, tile)
            found = nothing_seen(query, self._width) if found is None else found
            output, total = found if sinks is None else with_sinks(found, sinks)
            outputs.append(_platform.tensor_type_cast(output, query.dtype))
            sums.append(total)
        if not outputs:
            return nothing_seen(self._query, self._width)
        return (outputs[0], sums[0]) if len(outputs) == 1 else (_platform.cat(outputs, -2), _platform.cat(sums, -1))


class Gradients:
    """The gradients of a rank's queries, and of the blocks of keys that they have seen."""

    def __init__(self, tiles: QueryTiles, gradient: Any, query: Any, output: Any, sums: Any) -> None:
        self._tiles = tiles
        self._saved = (gradient, query, output, sums)
        self._of_query: list[Any] = [None] * len(tiles.intervals)

    def of_block(self, key: Any, value: Any, interval: Interval) -> tuple[Any, Any]:
        """The gradients of a block of keys and values from this rank's queries; None for both if none saw them."""
        tiles = self._tiles
        totals: list[Any] = [None, None]
        gradient, query, output, sums = self._saved
        for tile, queries in enumerate(tiles.intervals):
            pairs = tiles.pairs(tile, interval)
            if not pairs:
                continue
            mine = [tiles.part(tensor, tile) for tensor in (gradient, query, output)]
            my_sums = tiles.part(sums, tile, -1)
            for (start, stop), relation in pairs:
                keys, its_values = (_rows(tensor, start - interval[0], stop - start) for tensor in (key, value))
                pair = (queries, (start, stop), relation)
                found = attend_block_backward(mine[0], mine[1], keys, its_values, mine[2], my_sums, tiles.scoring, pair)
                self._of_query[tile] = added(self._of_query[tile], found[0])
                for index, (whole, part) in enumerate(zip((key, value), found[1:], strict=True)):
                    totals[index] = _added_rows(totals[index], part, start - interval[0], whole)
        return totals[0], totals[1]

    def of_query(self) -> Any:
        """The gradient of all queries, in their type."""
        query = self._saved[1]
        parts = []
        for tile, part in enumerate(self._of_query):
            like = self._tiles.part(query, tile)
            parts.append(zeros_like(like) if part is None else _platform.tensor_type_cast(part, query.dtype))
        if not parts:
            return zeros_like(query)
        return parts[0] if len(parts) == 1 else _platform.cat(parts, -2)

    def of_sinks(self, sinks: Any) -> Any:
        """The gradient of the sinks: they took their share from what each query found."""
        gradient, _, output, sums = self._saved
        heads = _platform.tensor_type_cast(sinks, sums.dtype).reshape(1, -1, 1)
        share = (heads - sums).exp()
        lost = (working_precision(gradient) * working_precision(output)).sum(dim=-1, keepdim=False)
        return _platform.tensor_type_cast((share * lost).sum(dim=(0, 2), keepdim=False) * -1, sinks.dtype)


def zeros_like(tensor: Any) -> Any:
    """Zeros of the shape and type of ``tensor``."""
    return _platform.zeros(tuple(tensor.shape), tensor.dtype, tensor.device)


def _rows(tensor: Any, start: int, count: int) -> Any:
    return tensor if count == tensor.shape[-2] else tensor.narrow(-2, start, count)


def added(total: Any, part: Any) -> Any:
    """The sum of both, in float32 or wider, or ``part`` if there is nothing to add it to; ``total`` is used up."""
    return part if total is None else _platform.add_rows(working_precision(total), part, 0)


def _added_rows(total: Any, part: Any, start: int, whole: Any) -> Any:
    """``total``, or zeros like ``whole``, with ``part`` added from row ``start``; a sum is in float32 or wider."""
    if total is None and part.shape[-2] == whole.shape[-2]:
        return part
    if total is None:
        total = zeros_like(working_precision(whole))
    return _platform.add_rows(working_precision(total), part, start)
