"""What each rank of a group is about to communicate, in memory that the other ranks of its host read.

A rank writes a call down before it begins it and then looks at what the others have written for theirs: whoever of two
ranks comes later sees the earlier one's entry, and raises before it sends anything. Nobody waits, no message is sent.
Ranks on other hosts are not seen here. No framework is imported.

This file is about the memory: each rank has one page per group, which it alone writes. ``call_ledger.py`` and
``message_ledger.py`` compare. A page has

- the *ring*: an entry for each collective, by its number in the group. An entry is a hash of the call and the number
  in one word, so one comparison says whether two ranks do the same;
- the *exchanges*: how many rows an all-to-all sends to and expects from each rank;
- the *messages*, sent and received: the n-th message with a tag between two ranks, and a hash of what it is;
- the *texts*: by the hash, the call in words, written when a rank makes it for the first time.

Note [Whoever comes later sees the earlier one]
    A rank stores its entry and then loads those of the others. Words are aligned and 64 bits wide, so neither is torn.
    But a processor may load before its own store is seen by others, and two ranks that come at the same moment could
    miss each other. So between the two there is a full fence: taking and releasing a lock, each of which is an atomic
    read-modify-write, and that is a full fence on x86-64. Elsewhere (aarch64) it is done twice: the store comes before
    the first release, this before the second acquire, and that before the loads. So of two entries at least one is seen
    by the other's writer. Pages are found through a store that all ranks share; a rank makes its page known there
    before it writes the first entry and looks for the others after it wrote its own, so the same holds for ranks that
    have not met yet.

    Not seen are an entry that its rank has overwritten since, being more than 512 collectives ahead (only those in
    flight can be), a message that was overwritten by later ones, and a receive from any rank in a group of more than
    two, whose sender is not known. These are not compared.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import platform
import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.platform.checks.call_site import call_site
from hyper_parallel.platform.host.shared_segment import ProcessIdentity, SegmentAddress, SharedSegment

__all__ = ["CELLS", "EXCHANGES", "NUMBERS", "RING", "Page", "Pages", "acquire", "fence", "is_weakly_ordered", "release"]

NUMBERS = (1 << 20) - 1  # the part of an entry that is the call's number; the rest is the call's hash
RING = 512
EXCHANGES = 32
CELLS = 256  # of messages, for each direction
_TEXTS, _TEXT_BYTES = 256, 256
_MOST_LOOKS = 1024  # for pages that are not there: a rank that does not come through the platform has none

is_weakly_ordered = platform.machine().lower() not in ("x86_64", "amd64")
_lock = threading.Lock()
acquire, release = _lock.acquire, _lock.release


def fence() -> None:
    """See Note [Whoever comes later sees the earlier one]."""
    try:  # Not a with-block, which takes twice as long.
        acquire()
    finally:
        release()
    if is_weakly_ordered:
        try:
            acquire()
        finally:
            release()


class Page:
    """What one rank of a group of ``size`` ranks has written."""

    def __init__(self, segment: SharedSegment, size: int) -> None:
        every_byte = memoryview(segment.array(0, self.num_bytes(size)))  # type: ignore[arg-type]
        words = every_byte.cast("Q")
        bounds = itertools.accumulate((1, RING, EXCHANGES * (1 + 2 * size), 2 * CELLS, 2 * CELLS), initial=0)
        parts = [words[start:end] for start, end in itertools.pairwise(bounds)]
        self.token, self.ring, self.exchanges, self.sent, self.received = parts
        self._texts = every_byte[8 * sum(map(len, parts)) :]

    @staticmethod
    def num_bytes(size: int) -> int:
        return 8 * (1 + RING + EXCHANGES * (1 + 2 * size) + 4 * CELLS) + _TEXTS * _TEXT_BYTES

    def write_text(self, call: int, text: bytes) -> None:
        places = self._text_places(call)
        start = next((start for start in places if self._call_at(start) in (0, call)), places[0])
        self._texts[start : start + 8] = bytes(8)
        self._texts[start + 8 : start + _TEXT_BYTES] = text.ljust(_TEXT_BYTES - 8)
        fence()
        self._texts[start : start + 8] = call.to_bytes(8, "little")

    def read_text(self, call: int) -> dict[str, Any]:
        """The call with this hash in words, as far as they are still there."""
        for start in self._text_places(call):
            if self._call_at(start) == call:
                try:
                    found = json.loads(bytes(self._texts[start + 8 : start + _TEXT_BYTES]))
                except ValueError:
                    found = None
                if isinstance(found, dict) and isinstance(found.get("function"), str):
                    return found
        return {"function": "another call"}

    def _text_places(self, call: int) -> list[int]:
        return [((call >> 20) + step) % _TEXTS * _TEXT_BYTES for step in range(8)]

    def _call_at(self, start: int) -> int:
        return int.from_bytes(self._texts[start : start + 8], "little")


class Pages:
    """The pages of one group as its rank ``place`` sees them; ``ranks`` are the world ranks of the group.

    ``newcomers(None)`` gives the addresses of pages on this host that it has not given yet, and whether no more will
    come; ``newcomers(place)`` that of one rank, on whatever host. ``refuse(text)`` raises.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        place: int,
        newcomers: Callable[[int | None], tuple[list[dict[str, Any]], bool]],
        refuse: Callable[[str], Any],
    ) -> None:
        self.ranks, self.place, self.refuse = list(ranks), place, refuse
        self.broken: str | None = None  # how the ranks disagreed first: nothing is begun after that
        self.attention = [True]  # not empty: some pages have not been looked for yet, or the group is broken
        self.others: dict[int, Page] = {}
        self.rings: list[memoryview] = []  # of the others
        self.unreadable: set[int] = set()  # ranks whose pages are not on this host, or not ours to read
        self._newcomers, self._looks = newcomers, 0
        self._segment = SharedSegment.create(Page.num_bytes(len(ranks)), "calls of a group")
        weakref.finalize(self, self._segment.stop_sharing).atexit = False
        self.mine = Page(self._segment, len(ranks))
        self.mine.token[0] = self._token = secrets.randbits(63)
        process = ProcessIdentity.current()
        self._host = f"{process.host_key}/{process.pid_namespace}"

    def address(self) -> dict[str, Any]:
        """Where the other ranks of this host find this rank's page."""
        return {"place": self.place, "host": self._host, "path": self._segment.address.path, "token": self._token}

    def close(self) -> None:
        """From now on nobody finds this page; those who have it can still read it."""
        self._segment.stop_sharing()

    def mark_broken(self, why: str) -> None:
        """Let every later call on this rank raise with this reason."""
        self.broken = why
        self.attention[:] = [True]

    def attend(self) -> None:
        """Raise if the group is broken, and look for ranks that have not been seen yet."""
        self.check_whole()
        self._looks += 1
        if self.look() or self._looks >= _MOST_LOOKS:
            self.attention.clear()

    def check_whole(self) -> None:
        if self.broken is not None:
            raise RuntimeError(f"the group {self.ranks} cannot be used any more: {self.broken}")

    def look(self, place: int | None = None) -> bool:
        """Open the pages that have been made known; whether no more will come."""
        found, are_all = self._newcomers(place)
        for address in found:
            peer = address.get("place")
            if isinstance(peer, int) and peer != self.place and peer not in self.others:
                page = self._open(address)
                if page is None:
                    self.unreadable.add(peer)
                else:
                    self.others[peer] = page
                    self.rings.append(page.ring)
        return are_all

    def look_for_all(self) -> None:
        """Find out about every rank of the group, on whatever host, whether it has come."""
        for place in range(len(self.ranks)):
            if place not in (self.place, *self.others, *self.unreadable):
                self.look(place)

    def _open(self, address: dict[str, Any]) -> Page | None:
        if address.get("host") != self._host:
            return None
        size = len(self.ranks)
        try:
            where = SegmentAddress(address.get("path", ""), Page.num_bytes(size))
            page = Page(SharedSegment.open(where, writable=False), size)
        except (OSError, ValueError, TypeError):  # Its process has ended or is another user's.
            return None
        return page if page.token[0] == address.get("token") else None

    def write(self, call: dict[str, Any]) -> int:
        """Write down a call in words; its hash, in the bits that are not the number."""
        plain = json.dumps(call)
        digest = int.from_bytes(hashlib.blake2b(plain.encode(), digest_size=5).digest(), "little") << 20
        texts = [json.dumps(call | {"first_at": call_site()}), plain, json.dumps({"function": call["function"]})]
        if self.broken is None:
            self.mine.write_text(digest, next(text for text in map(str.encode, texts) if len(text) <= _TEXT_BYTES - 8))
        return digest
