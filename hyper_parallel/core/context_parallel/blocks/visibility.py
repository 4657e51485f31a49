"""Which keys a query sees, as a function of the coordinates of tokens: no mask of all tokens by all tokens exists.

A token has an index (its place in the sequence as it lies in memory), a position (its index, unless positions are
given), a document and a mark whether it is valid. From the smallest and the largest coordinates of two intervals of
tokens follows on the host whether queries of the one see no, all, or some keys of the other. Only for the last kind is
a mask made, of these two intervals.

Note [What is read on the host]
Documents, positions and marks are copied to the host once per :class:`Visibility`, which is once per batch if all
layers are given the same one. Given as numpy arrays they are there already. On a device without memory nothing can be
read: then every pair of intervals counts as "some", unless the other coordinates decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hyper_parallel.core.context_parallel.blocks.intervals import Interval as Interval
from hyper_parallel.core.context_parallel.blocks.intervals import cut_interval
from hyper_parallel.platform import get_platform

_platform = get_platform()

NONE, SOME, DIAGONAL, ALL = "none", "some", "diagonal", "all"
"""How queries see keys: not at all; as a mask says; query i the keys up to i; all of them."""

LARGEST_MASK = 1024
"""Masks are at most this many queries by this many keys; longer intervals are cut."""
_MOST_RUNS = 32  # an interval with more stretches of consecutive tokens is not cut between them


@dataclass(frozen=True)
class _Extent:
    """The smallest and largest coordinates of an interval, one entry per row of the batch or one for all."""

    positions: tuple[Any, Any] | None  # None: not known on the host
    documents: tuple[Any, Any] | None
    places: tuple[Any, Any] | None  # document and position as one number, which orders the tokens
    is_consecutive: bool
    any_valid: bool
    all_valid: bool


class Visibility:
    """Who sees whom: query i sees key j if every condition that is given holds.

    ``causal``: position of j <= position of i. ``window``: with a number w, position of i - position of j < w (with
    ``causal`` the last w tokens, the query's own included); with a pair (left, right), position of i - left <= position
    of j <= position of i + right, None for no limit. ``documents``: integers; i and j have the same. ``positions``:
    integers, the index if not given; packed documents may start again at 0. ``valid``: booleans; j is valid, which
    padding is not. ``function(batch, head, query, key)``: any other condition, on index tensors that broadcast to
    (batch, heads, queries, keys), as a tensor of booleans; it costs a mask wherever the other conditions hold in part.
    ``offset``: the index of the first query among the keys, where there are fewer queries than keys (a cache).

    Coordinates have the shape (tokens,) or (batch, tokens) and are whole: plain tensors or numpy arrays that are the
    same on every rank, of all tokens and all rows of the batch in the order in which they lie in the model, or
    distributed tensors of such shape. Let all layers that see alike share one object: what is found out about it is
    remembered in it.

    A query that sees nothing gets zeros.

    >>> Visibility(causal=True).relation((4, 8), (0, 4)), Visibility(causal=True).relation((0, 4), (0, 4))
    ('all', 'diagonal')
    >>> Visibility(causal=True, documents=np.array([0, 0, 0, 1, 1, 1])).relation((3, 6), (0, 3))
    'none'
    """

    def __init__(
        self,
        *,
        causal: bool = False,
        window: int | tuple[int | None, int | None] | None = None,
        documents: Any = None,
        positions: Any = None,
        valid: Any = None,
        function: Callable[[Any, Any, Any, Any], Any] | None = None,
        offset: int = 0,
    ) -> None:
        self.causal = bool(causal)
        self.left, self.right = _window_limits(window)
        if self.causal:
            self.right = 0 if self.right is None else min(self.right, 0)
        self.function, self.offset = function, int(offset)
        given = {"documents": documents, "positions": positions, "valid": valid}
        for name, value in given.items():
            if value is not None and getattr(value, "ndim", 0) not in (1, 2):
                got = tuple(value.shape) if hasattr(value, "shape") else repr(value)
                raise ValueError(f"Visibility: {name} must be of shape (tokens,) or (batch, tokens), got {got}")
        self._given = {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in given.items()
        }
        self._first_row = 0
        self._extents: dict[tuple[Interval, bool], _Extent] = {}
        self._parts: dict[tuple[int, int], Visibility] = {}
        self._on_device: dict[str, Any] = {}
        self.known: dict[Any, Any] = {}  # what was found out, by who asked

    def __repr__(self) -> str:
        said = [name for name in ("causal",) if self.causal]
        if self.left is not None or (self.right is not None and not (self.causal and self.right == 0)):
            said.append(f"window from -{self.left} to {self.right}")
        said += [name for name, value in self._given.items() if value is not None]
        return f"Visibility({', '.join([*said, *(['function'] if self.function else [])]) or 'all'})"

    # ---------------------------------------------------------------- coordinates

    @property
    def num_tokens(self) -> int | None:
        """How many tokens the coordinates are for; None without coordinates."""
        lengths = {int(value.shape[-1]) for value in self._given.values() if value is not None}
        if len(lengths) > 1:
            raise ValueError(f"{self!r}: the coordinates are for different numbers of tokens: {sorted(lengths)}")
        return lengths.pop() if lengths else None

    @property
    def only_index(self) -> bool:
        """Whether who sees whom follows from the indices alone."""
        return self.function is None and all(value is None for value in self._given.values())

    def constant_parts(self) -> list[Any]:
        """All that it depends on; see ``core/lowering/constants.py``."""
        return [self.causal, self.left, self.right, self.offset, self.function, *self._given.values()]

    def of_rows(self, start: int, count: int) -> Visibility:
        """The same for ``count`` rows of the batch from ``start``; remembered."""
        if self.only_index:
            return self
        part = self._parts.get((start, count))
        if part is None:
            part = object.__new__(Visibility)
            part.__dict__.update(self.__dict__)
            part._given = {
                name: value if value is None or value.ndim == 1 or value.shape[0] == 1 else value[start : start + count]
                for name, value in self._given.items()
            }
            part.__dict__.pop("hosted", None)
            part._first_row = self._first_row + start
            part._extents, part._parts, part._on_device, part.known = {}, {}, {}, {}
            self._parts[start, count] = part
        return part

    @cached_property
    def hosted(self) -> dict[str, np.ndarray | None]:
        """The coordinates as numpy arrays of (rows, tokens); those that cannot be read are left out."""
        hosted: dict[str, np.ndarray | None] = {}
        for name, value in self._given.items():
            if value is None:
                hosted[name] = None
            elif isinstance(value, np.ndarray):
                hosted[name] = np.atleast_2d(value)
            elif str(value.device) != str(_platform.meta_device):
                hosted[name] = np.atleast_2d(_platform.tensor_to_numpy(value))
        positions, documents = hosted.get("positions"), hosted.get("documents")
        if positions is not None:
            hosted["positions"] = positions.astype(np.int64)
        if documents is not None:
            documents = hosted["documents"] = documents.astype(np.int64)
            index = np.arange(documents.shape[1])[None] if positions is None else positions.astype(np.int64)
            limits = [limit for limit in (self.left, self.right) if limit is not None]
            stride = int(np.ptp(index)) + max([*map(abs, limits), 0]) + 2 if index.size else 1
            low = documents.min() if documents.size else 0
            hosted["places"] = (documents - low) * stride + index
        return hosted

    def _extent(self, interval: Interval, of_queries: bool) -> _Extent:
        known = self._extents.get((interval, of_queries))
        if known is None:
            known = self._extents[interval, of_queries] = self._find_extent(interval, of_queries)
        return known

    def _find_extent(self, interval: Interval, of_queries: bool) -> _Extent:
        start, stop = interval
        hosted = self.hosted
        positions: tuple[Any, Any] | None = None
        documents = places = None
        is_consecutive = True
        if self._given["positions"] is None:
            shift = self.offset if of_queries else 0
            positions = places = (np.array([start + shift]), np.array([stop - 1 + shift]))
        elif hosted.get("positions") is not None:
            positions = places = _extremes(hosted["positions"], start, stop)
        else:
            is_consecutive = False
        if self._given["documents"] is not None:
            places = None
            if hosted.get("documents") is not None:
                documents = _extremes(hosted["documents"], start, stop)
                if "positions" in hosted:
                    places = _extremes(hosted["places"], start, stop)
        ordered = hosted.get("places") if self._given["documents"] is not None else hosted.get("positions")
        if ordered is not None:
            is_consecutive = is_consecutive and bool((np.diff(ordered[:, start:stop]) == 1).all())
        elif self._given["documents"] is not None:
            is_consecutive = False
        marks = hosted.get("valid")
        is_marked = self._given["valid"] is not None
        any_valid = bool(marks[:, start:stop].any()) if marks is not None else True
        all_valid = bool(marks[:, start:stop].all()) if marks is not None else not is_marked
        return _Extent(positions, documents, places, is_consecutive, any_valid, all_valid)

    # ---------------------------------------------------------------- two intervals

    def relation(self, queries: Interval, keys: Interval) -> str:
        """How the queries of one interval see the keys of another: NONE, SOME, DIAGONAL or ALL.

        NONE, DIAGONAL and ALL are proven; SOME may also be said of intervals that see nothing or everything.
        """
        if queries[0] >= queries[1] or keys[0] >= keys[1]:
            return NONE
        mine, theirs = self._extent(queries, True), self._extent(keys, False)
        if self._see_nothing(mine, theirs):
            return NONE
        if self.function is not None or not theirs.all_valid or not self._share_document(mine, theirs):
            return SOME
        if mine.positions is None or theirs.positions is None:
            return SOME if self.left is not None or self.right is not None else ALL
        first, last = mine.positions
        low, high = theirs.positions
        if self.left is not None and (last - low > self.left).any():
            return SOME
        if self.right is None or (high - first <= self.right).all():
            return ALL
        is_square = queries[1] - queries[0] == keys[1] - keys[0] and mine.is_consecutive and theirs.is_consecutive
        return DIAGONAL if self.right == 0 and is_square and (first == low).all() else SOME

    def _see_nothing(self, mine: _Extent, theirs: _Extent) -> bool:
        if not theirs.any_valid:
            return True
        apart: Any = np.array([False])
        if mine.documents is not None and theirs.documents is not None:
            apart = apart | (mine.documents[1] < theirs.documents[0]) | (mine.documents[0] > theirs.documents[1])
        for here, there in ((mine.places, theirs.places), (mine.positions, theirs.positions)):
            if here is None or there is None:
                continue
            if self.right is not None:
                apart = apart | (there[0] - here[1] > self.right)
            if self.left is not None:
                apart = apart | (here[0] - there[1] > self.left)
        return bool(apart.all())

    def _share_document(self, mine: _Extent, theirs: _Extent) -> bool:
        if self._given["documents"] is None:
            return True
        if mine.documents is None or theirs.documents is None:
            return False
        first, last = mine.documents
        return bool(((first == last) & (first == theirs.documents[0]) & (first == theirs.documents[1])).all())

    def query_tiles(self, intervals: Sequence[Interval]) -> list[Interval]:
        """The intervals of a rank's queries, cut where that saves masks or keeps them small."""
        intervals = [interval for interval in intervals if interval[0] < interval[1]]
        if self.only_index and self.left is None and self.right in (None, 0):
            return intervals
        tiles: list[Interval] = []
        for interval in intervals:
            tiles += cut_interval(interval, self._runs(interval, True), LARGEST_MASK)
        return tiles

    def key_tiles(self, queries: Interval, keys: Interval) -> list[tuple[Interval, str]]:
        """The intervals of ``keys`` that ``queries`` see, and how."""
        relation = self.relation(queries, keys)
        if relation != SOME:
            return [] if relation == NONE else [(keys, relation)]
        points = self._runs(keys, False)
        if self._given["positions"] is None:
            points = [*points, queries[0] + self.offset, queries[1] + self.offset]
        tiles: list[tuple[Interval, str]] = []
        for tile in cut_interval(keys, points, LARGEST_MASK):
            relation = self.relation(queries, tile)
            if relation == NONE:
                continue
            if tiles and tiles[-1][0][1] == tile[0] and tiles[-1][1] == relation:
                joined = (tiles[-1][0][0], tile[1])
                if relation == ALL or (relation == SOME and joined[1] - joined[0] <= LARGEST_MASK):
                    tiles[-1] = (joined, relation)
                    continue
            tiles.append((tile, relation))
        return tiles

    def who_sees_whom(
        self, queries: tuple[tuple[Interval, ...], ...], keys: tuple[Interval, ...]
    ) -> tuple[tuple[bool, ...], ...]:
        """For each rank's queries whether they may see each rank's keys; remembered."""
        asked = (queries, keys)
        if asked not in self.known:
            self.known[asked] = tuple(
                tuple(any(self.relation(mine, theirs) != NONE for mine in of_rank) for theirs in keys)
                for of_rank in queries
            )
        return self.known[asked]

    def _runs(self, interval: Interval, of_queries: bool) -> list[int]:
        """The indices at which stretches of consecutive tokens begin, if there are not too many."""
        if self._extent(interval, of_queries).is_consecutive:
            return []
        name = "places" if self._given["documents"] is not None else "positions"
        ordered = self.hosted.get(name)
        if ordered is None:
            return []
        starts = np.flatnonzero((np.diff(ordered[:, interval[0] : interval[1]]) != 1).any(0)) + 1 + interval[0]
        return starts.tolist() if len(starts) < _MOST_RUNS else []

    # ---------------------------------------------------------------- masks

    def mask(self, queries: Interval, keys: Interval, like: Any, first_head: int = 0) -> Any:
        """Booleans that broadcast to (batch, heads, queries, keys), True where a query sees a key, on the device of
        ``like``, a block of (batch, heads, ...) whose first head is ``first_head``."""
        device = like.device
        rows, columns = self._positions_of(queries, True, device), self._positions_of(keys, False, device)
        rows, columns = rows.unsqueeze(-1), columns.unsqueeze(-2)
        conditions = []
        if self.right is not None:
            conditions.append(columns <= rows + self.right if self.right else columns <= rows)
        if self.left is not None:
            conditions.append(rows - columns <= self.left)
        if self._given["documents"] is not None:
            mine, theirs = (self._part("documents", part, device) for part in (queries, keys))
            conditions.append(mine.unsqueeze(-1) == theirs.unsqueeze(-2))
        if self._given["valid"] is not None:
            marks = self._part("valid", keys, device).unsqueeze(-2)
            conditions.append(marks if marks.dtype == _platform.str_to_dtype("bool") else marks != 0)
        seen = None
        for condition in conditions:
            condition = condition.unsqueeze(1)  # the heads
            seen = condition if seen is None else seen.logical_and(condition)
        if self.function is not None:
            found = self._asked(queries, keys, like, first_head)
            seen = found if seen is None else seen.logical_and(found)
        if seen is None:
            seen = (rows == rows).unsqueeze(1)
        return seen

    def _asked(self, queries: Interval, keys: Interval, like: Any, first_head: int) -> Any:
        assert self.function is not None

        def indices(start: int, count: int, dim: int) -> Any:
            shape = [1, 1, 1, 1]
            shape[dim] = count
            return _platform.arange(start, start + count, device=like.device).reshape(shape)

        return self.function(
            indices(self._first_row, like.shape[0], 0),
            indices(first_head, like.shape[1], 1),
            indices(queries[0] + self.offset, queries[1] - queries[0], 2),
            indices(keys[0], keys[1] - keys[0], 3),
        )

    def _positions_of(self, interval: Interval, of_queries: bool, device: Any) -> Any:
        if self._given["positions"] is not None:
            return self._part("positions", interval, device)
        shift = self.offset if of_queries else 0
        return _platform.arange(interval[0] + shift, interval[1] + shift, device=device).unsqueeze(0)

    def _part(self, name: str, interval: Interval, device: Any) -> Any:
        """(rows, tokens of the interval) of a coordinate, on a device."""
        key = f"{name} {device}"
        value = self._on_device.get(key)
        if value is None:
            value = self._given[name]
            if isinstance(value, np.ndarray):
                value = _platform.from_numpy(value, _platform.str_to_dtype(str(value.dtype)), device)
            elif str(value.device) != str(device):
                value = value.to(device)
            value = value.unsqueeze(0) if value.ndim == 1 else value
            self._on_device[key] = value
        return value[:, interval[0] : interval[1]]


def _window_limits(window: Any) -> tuple[int | None, int | None]:
    """How far back and ahead a query sees, its own position not counted."""
    if window is None:
        return None, None
    if isinstance(window, (tuple, list)):
        left, right = window
        if any(limit is not None and int(limit) < 0 for limit in (left, right)):
            raise ValueError(f"Visibility: a window's limits count tokens to the left and to the right, got {window}")
        return (None if left is None else int(left)), (None if right is None else int(right))
    if int(window) < 1:
        raise ValueError(f"Visibility: a window has at least the query's own token, 1, got {window}")
    return int(window) - 1, None


def _extremes(values: Any, start: int, stop: int) -> tuple[Any, Any]:
    part = values[:, start:stop]
    return part.min(1), part.max(1)
