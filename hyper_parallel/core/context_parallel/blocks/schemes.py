"""Which scheme attention over a sharded sequence takes, the one that is asked for or the cheapest, and taking it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from hyper_parallel.core.context_parallel.blocks.alone import attend_alone
from hyper_parallel.core.context_parallel.blocks.balance import (
    own_queries,
    swap_back,
    swap_queries,
    swapped_queries,
)
from hyper_parallel.core.context_parallel.blocks.choice import Candidate, Problem, cheapest, described
from hyper_parallel.core.context_parallel.blocks.gathered import attend_gathered
from hyper_parallel.core.context_parallel.blocks.ring import attend_ring
from hyper_parallel.core.context_parallel.blocks.scoring import Scoring
from hyper_parallel.core.context_parallel.blocks.sequence_cut import SequenceCut, inner_and_outer, sequence_cut
from hyper_parallel.core.context_parallel.blocks.ulysses import attend_ulysses
from hyper_parallel.core.context_parallel.blocks.visibility import Visibility
from hyper_parallel.core.dtensor.comm_recorder import note_choice
from hyper_parallel.core.dtensor.layout import Layout, Shape
from hyper_parallel.core.dtensor.redistribution_plan import axis_cost
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.membership import belongs_to_rank

_platform = get_platform()

AUTO = "auto"
SCHEMES = (AUTO, "ring", "ulysses", "gather", "hybrid")


class _Asked(NamedTuple):
    scheme: str = AUTO
    memory_cap: float = math.inf
    balance: bool | None = None


_asked = _Asked()


def _ask(asked: _Asked) -> None:
    global _asked
    _asked = asked


belongs_to_rank(lambda: _asked, _ask)


@contextmanager
def attention_scheme(scheme: str = AUTO, memory_cap: float = math.inf, balance: bool | None = None) -> Iterator[None]:
    """Context: attention over a sharded sequence is computed by this scheme where the call itself names none.

    "auto" (the cheapest), "ring", "ulysses", "gather" or "hybrid"; the same on every rank. ``memory_cap``: "auto" takes
    no scheme that needs more bytes than this on a rank for a layer, besides queries, keys, values, the output and their
    gradients; where all need more, the one that needs least. ``balance``: whether ranks swap halves of their queries in
    a gather or a ring, so that with causal attention all have as much to compute; None: if it pays. Backward needs no
    context.
    """
    before = _asked
    _ask(_Asked(checked_scheme(scheme), memory_cap, balance))
    try:
        yield
    finally:
        _ask(before)


def checked_scheme(scheme: str) -> str:
    """The name of a scheme; an error for any other."""
    if scheme not in SCHEMES:
        raise ValueError(f"there is no attention scheme {scheme!r}: choose one of {', '.join(SCHEMES)}")
    return scheme


def refuse_other_schemes(name: str, layouts: Sequence[Layout], scheme: str | None = None) -> None:
    """An error where a scheme is asked for, but the keys are whole or have a mask: they were gathered before."""
    asked = _asked.scheme if scheme is None else checked_scheme(scheme)
    if asked not in (AUTO, "gather"):
        described = ", ".join(map(str, layouts))
        raise ValueError(
            f"{name}: the scheme {asked!r} needs queries, keys and values of one length that are sharded alike along "
            f"the sequence, and no mask tensor (hyper_parallel.attention takes `visible`); got {described}. "
            f"Shard all three alike, or leave the choice to 'auto'"
        )


def attend_sharded(
    query: Any,
    key: Any,
    value: Any,
    sinks: Any,
    scoring: Scoring,
    layouts: Sequence[Layout],
    shapes: Sequence[Shape],
    scheme: str | None,
) -> Any:
    """This rank's part of the output, for blocks of queries, keys and values that are sharded alike."""
    layout = layouts[0]
    axes = layout.shard_axes[2]
    cut = sequence_cut(layout, shapes[0], 2, axes)
    blocks = (query, key, value)
    chosen = _choose(layout, blocks, scoring.visible, cut, scheme)
    keys = (layouts[1], layouts[2]), (shapes[1], shapes[2])

    def attend() -> Any:
        if chosen.scheme == "ulysses":
            return attend_ulysses(*blocks, sinks, scoring, cut, _alone)
        if chosen.scheme == "hybrid":
            inner, outer = inner_and_outer(layout, axes, cut, chosen.ulysses_size)

            def in_ring(query: Any, key: Any, value: Any, sinks: Any, scoring: Scoring) -> Any:
                return attend_ring(query, key, value, sinks, scoring, outer, own_queries(outer.intervals))

            return attend_ulysses(*blocks, sinks, scoring, inner, in_ring)
        queries = swapped_queries(cut.intervals) if chosen.is_balanced else own_queries(cut.intervals)
        mine = swap_queries(query, cut) if chosen.is_balanced else query
        if chosen.scheme == "ring":
            output = attend_ring(mine, key, value, sinks, scoring, cut, queries)
        else:
            output = attend_gathered(mine, key, value, sinks, scoring, *keys, axes, queries[cut.me])
        return swap_back(output, cut) if chosen.is_balanced else output

    note_choice(chosen.name)
    return attend()


def _alone(query: Any, key: Any, value: Any, sinks: Any, scoring: Scoring) -> Any:
    return attend_alone(query, key, value, sinks, scoring)


def _choose(
    layout: Layout, blocks: Sequence[Any], visible: Visibility, cut: SequenceCut, scheme: str | None
) -> Candidate:
    asked = _asked if scheme is None else _asked._replace(scheme=checked_scheme(scheme))
    shapes = tuple(tuple(block.shape[:2]) + (block.shape[3],) for block in blocks)
    item_size = _platform.get_element_size(blocks[0])
    known = (layout, shapes, cut.intervals, item_size, asked)
    found = visible.known.get(known)
    if found is None:
        candidates = _problem(layout, shapes, cut.intervals, item_size).candidates(visible)
        if asked.scheme != AUTO and asked.scheme not in {candidate.scheme for candidate in candidates}:
            raise ValueError(
                f"attention: the scheme {asked.scheme!r} needs a sequence that is sharded by two mesh axes, or by one "
                f"whose number of ranks has a divisor that also divides the {shapes[0][1]} heads of a rank; got "
                f"{layout}. Shard the sequence by two axes, or take 'ring' or 'ulysses'"
            )
        found = visible.known[known] = cheapest(candidates, *asked)
    return found


def _problem(
    layout: Layout, shapes: Sequence[tuple[int, ...]], intervals: tuple[tuple[int, int], ...], item_size: int
) -> Problem:
    """``shapes`` are batch, heads and width of the blocks of queries, keys and values."""
    mesh, axes = layout.mesh, layout.shard_axes[2]
    tokens = intervals[-1][1]
    whole = [(batch, heads, tokens, width) for batch, heads, width in shapes]
    costs = tuple(axis_cost(mesh, axis) for axis in axes)
    sizes = tuple(mesh.shape[axis] for axis in axes)
    return Problem(whole[0], whole[1], whole[2], intervals, sizes, item_size, mesh.device_type, costs)


def explain_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    visible: Visibility | None = None,
    scheme: str = AUTO,
    memory_cap: float = math.inf,
) -> str:
    """What attention of these distributed tensors would do: the cost of every scheme, and the one that is taken.

    ``query``, ``key`` and ``value`` lie alike and their sequence is sharded. Bytes, computation and modelled time are
    of forward and backward on the rank that has most.
    """
    layout = query.layout
    if len(query.shape) != 4 or not layout.shard_axes[2]:
        return f"attention under {layout}: the sequence is not sharded, and nothing is communicated"
    if key.layout.shard_axes[2] != layout.shard_axes[2]:
        return f"attention under {layout}: keys under {key.layout} are made whole before"
    visible = Visibility() if visible is None else visible
    cut = sequence_cut(layout, tuple(query.shape), 2, layout.shard_axes[2])
    local = [tensor.layout.local_shape(tuple(tensor.shape)) for tensor in (query, key, value)]
    offsets, sizes = layout.local_region(tuple(query.shape))
    shapes = [(shape[0], shape[1], shape[3]) for shape in local]
    problem = _problem(layout, shapes, cut.intervals, _platform.get_element_size(query))
    candidates = problem.candidates(visible.of_rows(offsets[0], sizes[0]))
    chosen = cheapest(candidates, checked_scheme(scheme), memory_cap)
    ranks = "*".join(layout.mesh.axis_label(axis) for axis in layout.shard_axes[2])
    title = f"attention of {tuple(query.shape)} over {tuple(key.shape)}, tokens sharded over {ranks}, {visible!r}"
    return f"{title}\n{described(candidates, chosen)}"
