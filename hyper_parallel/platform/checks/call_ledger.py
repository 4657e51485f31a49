"""Collectives of a group, compared with those of the other ranks on this host before they begin: ``ledger_pages.py``.

Note [The hot path]
    The hash of a call is looked up by what the call is, and its number put in: one word to store, and one to load from
    each other rank of the host. Equal words are the same call; a word with another number is from a rank that has not
    come yet. Both functions are closures, whose variables cost less than attributes.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.platform.checks import ledger_pages
from hyper_parallel.platform.checks.collective_checks import disagreement, disagreement_text, short, spell_call
from hyper_parallel.platform.checks.ledger_pages import EXCHANGES, NUMBERS, RING, Page, Pages, fence

__all__ = ["CallLedger"]

_KNOWN_CALLS = 4096
_ARGUMENTS = {"all_reduce": "op", "reduce_scatter_tensor": "op", "broadcast": "src"}
_SPLITS = "splits"  # the argument of an all-to-all whose numbers of rows are in the exchanges


class CallLedger:
    """``enter`` and ``exchange`` raise if another rank has begun something else than this one is about to."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._size = len(pages.ranks)
        self._known: dict[tuple, int] = {}
        self._numbers = itertools.count(1)
        self.enter, self.exchange = self._make_enter(), self._make_exchange()

    def _make_enter(self) -> Callable[..., None]:
        pages, known, numbers, find_call, compare = self._pages, self._known, self._numbers, self._find, self._compare
        ring, rings, attention = pages.mine.ring, pages.rings, pages.attention
        acquire, release, is_weakly_ordered = ledger_pages.acquire, ledger_pages.release, ledger_pages.is_weakly_ordered

        def enter(function: str, shape: Any = None, dtype: Any = None, argument: Any = None) -> None:
            """This rank is about to begin ``function``; see Note [The hot path]."""
            try:
                call = known[function, shape, dtype, argument]
            except KeyError:
                call = find_call(function, shape, dtype, argument)
            number = next(numbers) & NUMBERS
            entry, at = call | number, number % RING
            ring[at] = entry
            try:
                acquire()
            finally:
                release()
            if is_weakly_ordered:
                fence()
            if attention:
                pages.attend()
            for theirs in rings:
                other = theirs[at]
                if other != entry and other & NUMBERS == number:
                    compare(number)

        return enter

    def _make_exchange(self) -> Callable[..., None]:
        pages, place, size = self._pages, self._pages.place, self._size
        known, numbers, find_call, compare = self._known, self._numbers, self._find, self._compare
        ring, others, attention, table = pages.mine.ring, pages.others, pages.attention, pages.mine.exchanges
        write_rows, table_bytes = struct.Struct(f"={2 * size}Q").pack_into, table.cast("B")
        is_weakly_ordered = ledger_pages.is_weakly_ordered

        def exchange(shape: Sequence[int], dtype: Any, received: Sequence[int], sent: Sequence[int]) -> None:
            """This rank is about to begin an all-to-all with these numbers of rows by rank."""
            key = ("all_to_all_single", shape[1:] if len(shape) > 1 else (), dtype, _SPLITS)
            call = known.get(key) or find_call(*key)
            number = next(numbers) & NUMBERS
            entry, at, slot = call | number, number % RING, number % EXCHANGES * (1 + 2 * size)
            table[slot] = 0
            write_rows(table_bytes, 8 * slot + 8, *sent, *received)
            table[slot] = number
            if is_weakly_ordered:
                fence()
            ring[at] = entry
            fence()
            if attention:
                pages.attend()
            to_me, from_me = slot + 1 + place, slot + 1 + size + place
            for peer, page in others.items():
                other = page.ring[at]
                if other & NUMBERS == number:
                    if is_weakly_ordered:
                        fence()
                    theirs = page.exchanges
                    if other != entry or theirs[to_me] != received[peer] or theirs[from_me] != sent[peer]:
                        compare(number)

        return exchange

    def _find(self, function: str, shape: Sequence[int] | None, dtype: Any, argument: Any) -> int:
        """The hash of a call that this rank has not made yet."""
        call: dict[str, Any] = {"function": function}
        if shape is not None:
            call |= {"shape": list(shape), "dtype": str(dtype)}
        if argument is not None:
            call[_ARGUMENTS.get(function, _SPLITS)] = argument
        if len(self._known) >= _KNOWN_CALLS:
            self._known.clear()
        self._known[function, shape, dtype, argument] = found = self._pages.write(call)
        return found

    def _compare(self, number: int) -> None:
        """Raise unless all who have begun this call fit together, which all-to-alls may though they are not equal."""
        calls = self._calls(number)
        problem = disagreement(calls, self._size)
        if problem is not None:
            ranks = self._pages.ranks
            self._pages.refuse(disagreement_text(problem, {ranks[place]: call for place, call in calls.items()}, ranks))

    def waits_for(self) -> list[str]:
        """In words: collectives that this rank has begun and another of this host has not, or the other way round."""
        pages, found = self._pages, []
        mine = _newest(pages.mine)
        for place, rank in enumerate(pages.ranks):
            page = pages.others.get(place)
            theirs = 0 if page is None else _newest(page)
            if theirs == mine or place == pages.place or place in pages.unreadable:
                continue
            if page is None or (mine - theirs) & NUMBERS <= NUMBERS // 2:
                who, number, begun = f"rank {rank}", (theirs + 1) & NUMBERS, pages.mine
            else:
                who, number, begun = "this rank", (mine + 1) & NUMBERS, page
            call = self._call(begun, number)
            what = "" if call is None else f", {spell_call(call)}"
            found.append(f"{who} has not begun collective {number} of the group {short(pages.ranks)}{what}")
        return found

    def _calls(self, number: int) -> dict[int, dict[str, Any]]:
        """What each rank that is known to have begun this call has begun."""
        pages = {self._pages.place: self._pages.mine, **self._pages.others}
        found = {place: self._call(page, number) for place, page in sorted(pages.items())}
        return {place: call for place, call in found.items() if call is not None}

    def _call(self, page: Page, number: int) -> dict[str, Any] | None:
        entry = page.ring[number % RING]
        if entry & NUMBERS != number:
            return None
        call = page.read_text(entry - number)
        if call.pop(_SPLITS, None) is None:
            return call
        slot, size = number % EXCHANGES * (1 + 2 * self._size), self._size
        rows = page.exchanges[slot : slot + 1 + 2 * size].tolist()
        fence()
        if rows[0] != number or page.exchanges[slot] != number:
            return None  # overwritten: its rank is far ahead
        sent, received = rows[1 : 1 + size], rows[1 + size :]
        row = call["shape"]
        shapes = {"shape": [sum(sent), *row], "output_shape": [sum(received), *row]}
        return call | shapes | {"input_splits": sent, "output_splits": received}


def _newest(page: Page) -> int:
    """The number of the last collective that a rank has begun; 0 if there was none."""
    numbers = [entry & NUMBERS for entry in page.ring.tolist()]
    followers = [*numbers[1:], numbers[0]]
    return next((number for number, next_one in zip(numbers, followers, strict=True) if _ends(number, next_one)), 0)


def _ends(number: int, next_one: int) -> bool:
    return number != 0 and next_one != (number + 1) & NUMBERS
