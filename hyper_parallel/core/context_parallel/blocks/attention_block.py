"""Attention of one block of queries over one block of keys: the output and log-sum-exp, and the gradients.

The gradients are those of attention over *all* keys, of which these are a part: they take the output and the
log-sum-exp over all of them. By a fused kernel where the device has one for the case, else step by step, exactly, in
tiles: scores of all tokens by all tokens never exist.

Note [Gradients from the whole]
With the log-sum-exp over all keys, a block's weights are exp(scores - sums), the very ones of the whole, so that each
block's gradients are summands of the whole's. What a query loses to the other keys is the same number for all blocks:
the product of its output with the output's gradient.
"""

from __future__ import annotations

import math
from typing import Any

from hyper_parallel.core.context_parallel.blocks import visibility
from hyper_parallel.core.context_parallel.blocks.intervals import cut_interval
from hyper_parallel.core.context_parallel.blocks.merge import merge, nothing_seen, working_precision
from hyper_parallel.core.context_parallel.blocks.scoring import Scoring
from hyper_parallel.core.context_parallel.blocks.visibility import DIAGONAL, SOME, Interval
from hyper_parallel.platform import get_platform

_platform = get_platform()

Pair = tuple[Interval, Interval, str]  # queries, keys, how the ones see the others


def attend_block(query: Any, key: Any, value: Any, scoring: Scoring, pair: Pair) -> tuple[Any, Any]:
    """(output, log-sum-exp); records no gradient."""
    relation = pair[2]
    mask = None
    if scoring.is_plain:
        mask = scoring.mask_of(*pair, query) if relation == SOME else None
        found = _platform.fused_attention(query, key, value, mask, relation == DIAGONAL, scoring.scale)
        if found is not None:
            return found
    tiles = _tiles(scoring, pair)
    if tiles is None:
        return _step_by_step(query, key, value, scoring, pair, mask)
    results = []
    for rows, of_rows in tiles:
        mine = _rows(query, rows, pair[0])
        found = None
        for columns, relation in of_rows:
            keys, its_values = (_rows(tensor, columns, pair[1]) for tensor in (key, value))
            part = _step_by_step(mine, keys, its_values, scoring, (rows, columns, relation), None)
            found = merge(found, part)
        results.append(nothing_seen(mine, value.shape[-1]) if found is None else found)
    outputs, sums = zip(*results, strict=True)
    return _platform.tensor_type_cast(_platform.cat(list(outputs), -2), query.dtype), _platform.cat(list(sums), -1)


def _step_by_step(query: Any, key: Any, value: Any, scoring: Scoring, pair: Pair, mask: Any) -> tuple[Any, Any]:
    if mask is None:
        mask = scoring.mask_of(*pair, query)
    scores = _scores(query, key, scoring)[0]
    scores = _masked(scores, mask)
    highest = scores.amax(dim=-1, keepdim=True)
    highest = highest.masked_fill(highest == -math.inf, 0)
    weights = (scores - highest).exp()
    total = weights.sum(dim=-1, keepdim=True)
    sums = (highest + _platform.logarithm(total)).squeeze(-1)
    kept = scoring.kept(pair[0], pair[1], weights)
    weights = weights / total.masked_fill(total == 0, 1)
    output = _by_groups(weights if kept is None else weights * kept, value)
    return _platform.tensor_type_cast(output, query.dtype), sums


def attend_block_backward(
    gradient: Any, query: Any, key: Any, value: Any, output: Any, sums: Any, scoring: Scoring, pair: Pair
) -> tuple[Any, ...]:
    """The gradients of query, key and value, from the output and the log-sum-exp over all keys."""
    relation = pair[2]
    mask = None
    if scoring.is_plain:
        mask = scoring.mask_of(*pair, query) if relation == SOME else None
        found = _platform.fused_attention_backward(
            gradient, query, key, value, output, sums, mask, relation == DIAGONAL, scoring.scale
        )
        if found is not None:
            return found
    tiles = _tiles(scoring, pair)
    if tiles is None:
        return _backward_step_by_step(gradient, query, key, value, output, sums, scoring, pair, mask)
    of_query = []
    totals = [_platform.zeros(tuple(one.shape), working_precision(one).dtype, one.device) for one in (key, value)]
    for rows, of_rows in tiles:
        mine = [_rows(tensor, rows, pair[0]) for tensor in (gradient, query, output)]
        my_sums = sums.narrow(-1, rows[0] - pair[0][0], rows[1] - rows[0])
        total = _platform.zeros(tuple(mine[1].shape), working_precision(query).dtype, query.device)
        for columns, relation in of_rows:
            keys, its_values = (_rows(tensor, columns, pair[1]) for tensor in (key, value))
            found = _backward_step_by_step(
                mine[0], mine[1], keys, its_values, mine[2], my_sums, scoring, (rows, columns, relation), None
            )
            total = _platform.add_rows(total, found[0], 0)
            for index, part in enumerate(found[1:]):
                totals[index] = _platform.add_rows(totals[index], part, columns[0] - pair[1][0])
        of_query.append(total)
    like = zip((_platform.cat(of_query, -2), *totals), (query, key, value), strict=True)
    return tuple(_platform.tensor_type_cast(part, tensor.dtype) for part, tensor in like)


def _backward_step_by_step(
    gradient: Any, query: Any, key: Any, value: Any, output: Any, sums: Any, scoring: Scoring, pair: Pair, mask: Any
) -> tuple[Any, ...]:
    if mask is None:
        mask = scoring.mask_of(*pair, query)
    scores, slope = _scores(query, key, scoring)
    scores = _masked(scores, mask)
    nothing = (sums == -math.inf).unsqueeze(-1)
    weights = (scores - sums.masked_fill(sums == -math.inf, 0).unsqueeze(-1)).exp().masked_fill(nothing, 0)
    gradient, output = working_precision(gradient), working_precision(output)
    lost = (gradient * output).sum(dim=-1, keepdim=True)
    kept = scoring.kept(pair[0], pair[1], weights)
    of_value = _into_groups(weights if kept is None else weights * kept, gradient, value)
    of_weights = _by_groups(gradient, value.transpose(-2, -1))
    of_scores = weights * ((of_weights if kept is None else of_weights * kept) - lost)
    if slope is not None:
        of_scores = of_scores * slope
    of_scores = of_scores * _platform.number_like(scoring.scale, of_scores)
    of_query, of_key = _by_groups(of_scores, key), _into_groups(of_scores, query, key)
    like = zip((of_query, of_key, of_value), (query, key, value), strict=True)
    return tuple(_platform.tensor_type_cast(part, tensor.dtype) for part, tensor in like)


def _tiles(scoring: Scoring, pair: Pair) -> list[tuple[Interval, list[tuple[Interval, str]]]] | None:
    """Stretches of the queries, and of the keys that each of them sees, none longer than the largest mask; None where
    both are short as they are."""
    queries, keys, _ = pair
    largest = visibility.LARGEST_MASK
    if queries[1] - queries[0] <= largest and keys[1] - keys[0] <= largest:
        return None
    return [
        (
            rows,
            [
                (columns, relation)
                for seen, relation in scoring.visible.key_tiles(rows, keys)
                for columns in cut_interval(seen, (), largest)
            ],
        )
        for rows in cut_interval(queries, (), largest)
    ]


def _rows(tensor: Any, part: Interval, whole: Interval) -> Any:
    return tensor.narrow(-2, part[0] - whole[0], part[1] - part[0])


def _scores(query: Any, key: Any, scoring: Scoring) -> tuple[Any, Any]:
    """The scores, and by how much they grow with what is capped; None without a cap."""
    scores = _by_groups(query, key.transpose(-2, -1))
    scores = scores * _platform.number_like(scoring.scale, scores)
    if not scoring.soft_cap:
        return scores, None
    cap = _platform.number_like(scoring.soft_cap, scores)
    share = (scores / cap).tanh()
    return share * cap, 1 - share * share


def _masked(scores: Any, mask: Any) -> Any:
    return scores if mask is None else scores.masked_fill(mask.logical_not(), -math.inf)


def _by_groups(first: Any, second: Any) -> Any:
    """The product of (batch, query heads, m, k) and (batch, key heads, k, n), heads that share keys as rows of one."""
    first, second = working_precision(first), working_precision(second)
    if first.shape[1] == second.shape[1]:
        return first.matmul(second)
    batch, heads, rows = first.shape[:3]
    grouped = first.reshape(batch, second.shape[1], heads // second.shape[1] * rows, first.shape[3])
    return grouped.matmul(second).reshape(batch, heads, rows, second.shape[-1])


def _into_groups(first: Any, second: Any, like: Any) -> Any:
    """The product of first, transposed, and second, (batch, query heads, m, k) and (batch, query heads, m, n), summed
    over the heads that share a key head of ``like``."""
    first, second = working_precision(first), working_precision(second)
    batch, heads, rows = first.shape[:3]
    shared = heads // like.shape[1]
    if shared > 1:
        first = first.reshape(batch, like.shape[1], shared * rows, first.shape[3])
        second = second.reshape(batch, like.shape[1], shared * rows, second.shape[3])
    return first.transpose(-2, -1).matmul(second)
