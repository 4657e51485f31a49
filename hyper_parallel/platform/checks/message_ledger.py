"""Messages between two ranks of a host, compared before they are sent or received: see ``ledger_pages.py``.

The n-th message with a tag from one rank to another is the n-th that the other receives from it with that tag, in
whatever order tags follow each other. Each rank writes it into a cell that both find by (rank, tag, n): first that the
cell is empty, then what the message is, then which message it is, so that who finds the one finds the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.platform.checks import ledger_pages
from hyper_parallel.platform.checks.collective_checks import first_call, short
from hyper_parallel.platform.checks.ledger_pages import CELLS, NUMBERS, Page, Pages, fence

__all__ = ["MessageLedger"]

_KNOWN = 16384  # channels whose messages are counted, and messages whose hash is remembered
_MOST_LOOKS = 256  # for the page of a rank that does not come, or not through the platform
_LARGEST_PLACE = (1 << 11) - 1


class _Channel:
    """The messages of one direction with one tag between this rank and another."""

    __slots__ = ("count", "here", "looks", "name", "their_name", "theirs", "there")

    def __init__(self, place: int, my_place: int, tag: int) -> None:
        self.count = self.looks = 0
        # Where the first cell is and what all its messages are called, in this rank's page and in the other's.
        self.here, self.name = _first_cell(place, tag)
        self.there, self.their_name = _first_cell(my_place, tag)
        self.theirs: memoryview | None = None  # the table of the other's page, once it is found


def _first_cell(place: int, tag: int) -> tuple[int, int]:
    return place * 61 + tag * 17, 1 << 63 | place << 52 | (tag & 0xFFFFFFFF) << 20


class MessageLedger:
    """``send`` and ``receive`` raise if the other side has begun something else than this one is about to.

    Both take the other's place in the group, the tag, and how many elements of which dtype, or objects without one.
    ``receive`` takes None for any rank.
    """

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._hashes: dict[tuple, int] = {}
        self._channels: tuple[dict[tuple[int, int], _Channel], ...] = ({}, {})  # received, sent
        self.send, self._receive = self._make_note(True), self._make_note(False)
        self._from_any: set[int] = set()  # tags with which this rank received from any rank: who sent is not known

    def receive(self, place: int | None, tag: int, amount: int, dtype: Any = None) -> None:
        if place is None:
            if len(self._pages.ranks) > 2:
                self._from_any.add(tag)
                return
            place = 1 - self._pages.place
        if tag not in self._from_any:
            self._receive(place, tag, amount, dtype)

    def _make_note(self, is_sent: bool) -> Callable[..., None]:
        """As a closure, whose variables cost less than attributes."""
        pages, channels, hashes = self._pages, self._channels[is_sent], self._hashes
        table = pages.mine.sent if is_sent else pages.mine.received
        find_channel, find_hash, compare = self._find_channel, self._find_hash, self._compare
        acquire, release, is_weakly_ordered = ledger_pages.acquire, ledger_pages.release, ledger_pages.is_weakly_ordered

        def note(place: int, tag: int, amount: int, dtype: Any = None) -> None:
            channel = channels.get((place, tag)) or find_channel(is_sent, place, tag)
            if channel is None:
                return
            entry = hashes.get((amount, dtype)) or find_hash(amount, dtype)
            channel.count = count = channel.count + 1
            at = (channel.here + count) % CELLS * 2
            table[at] = 0
            table[at + 1] = entry
            if is_weakly_ordered:
                fence()
            table[at] = channel.name | count & NUMBERS
            try:
                acquire()
            finally:
                release()
            if is_weakly_ordered:
                fence()
            if pages.broken is not None:
                pages.check_whole()
            theirs = channel.theirs
            if theirs is None or theirs[(channel.there + count) % CELLS * 2] == channel.their_name | count & NUMBERS:
                compare(is_sent, place, tag, channel, entry)

        return note

    def _find_channel(self, is_sent: bool, place: int, tag: int) -> _Channel | None:
        """A new one; None where messages are not compared."""
        channels = self._channels[is_sent]
        if len(channels) >= _KNOWN or max(place, self._pages.place) > _LARGEST_PLACE:
            return None
        channels[place, tag] = found = _Channel(place, self._pages.place, tag)
        return found

    def _find_hash(self, amount: int, dtype: Any) -> int:
        call = {"function": "message", "amount": amount} | ({} if dtype is None else {"dtype": str(dtype)})
        if len(self._hashes) >= _KNOWN:
            self._hashes.clear()
        self._hashes[amount, dtype] = found = self._pages.write(call)
        return found

    def _compare(self, is_sent: bool, place: int, tag: int, channel: _Channel, entry: int) -> None:
        """Look for the other side of a message, if it has begun, and raise if that is another message."""
        pages, count = self._pages, channel.count
        if place not in pages.others and place not in pages.unreadable and channel.looks < _MOST_LOOKS:
            channel.looks += 1
            pages.look(place)
        page = pages.others.get(place)
        if page is None:
            return
        channel.theirs = theirs = page.received if is_sent else page.sent
        at, name = (channel.there + count) % CELLS * 2, channel.their_name | count & NUMBERS
        if theirs[at] != name:
            return
        if ledger_pages.is_weakly_ordered:
            fence()
        other = theirs[at + 1]
        if other == entry or theirs[at] != name:
            return
        here, there = pages.ranks[pages.place], pages.ranks[place]
        mine, other_side = _spell(pages.mine, entry), _spell(page, other)
        if is_sent:
            source, sent, target, expected = here, mine, there, other_side
        else:
            source, sent, target, expected = there, other_side, here, mine
        pages.refuse(
            f"the ranks of the group {short(pages.ranks)} disagree: message {count} with tag {tag} from rank {source} "
            f"to rank {target}: rank {source} sends {sent}, rank {target} receives {expected}"
        )

    def waits_for(self) -> list[str]:
        """In words: the last message of each channel that this rank has begun, where the other side has not."""
        pages, found = self._pages, []
        for is_sent, channels in enumerate(self._channels):
            for (place, tag), channel in channels.items():
                page = pages.others.get(place)
                if page is None:
                    continue
                there = (page.received if is_sent else page.sent)[(channel.there + channel.count) % CELLS * 2]
                # Empty, or still an earlier message of this channel; anything else may have come after this was done.
                if there == 0 or channel.their_name < there < channel.their_name | channel.count & NUMBERS:
                    source, target = (pages.place, place) if is_sent else (place, pages.place)
                    found.append(
                        f"rank {pages.ranks[place]} has not begun to {'receive' if is_sent else 'send'} message "
                        f"{channel.count} with tag {tag} from rank {pages.ranks[source]} to rank {pages.ranks[target]}"
                    )
        return found


def _spell(page: Page, entry: int) -> str:
    message = page.read_text(entry)
    amount, dtype = message.get("amount"), message.get("dtype")
    if amount is None:
        return "something else"
    what = f"a list of {amount} object(s)" if dtype is None else f"{amount} element(s) of {dtype}"
    return what + first_call(message)
