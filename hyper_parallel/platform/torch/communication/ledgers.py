"""Ranks over gloo that disagree about a collective or a message are told so, instead of being aborted.

Gloo checks sizes in a thread of its own: a message that is longer than the memory for it ends the process with SIGABRT,
a shorter one is taken without a word. So each group that uses gloo has a ledger (``checks/ledger_pages.py``) in which
the ranks of one host compare what they are about to do. Between hosts ``HYPER_PARALLEL_CHECK_COLLECTIVES=1`` compares.
Both sides of a message and all ranks of a collective must come through the platform: what ``torch.distributed`` is told
to do on such a group is not counted.

Note [What ends the others]
    The rank that finds a disagreement sends nothing, but the others may have begun and wait for it. It leaves a note in
    the store of the world and closes its connections in this group, by a receive with a time limit of a millisecond,
    after which gloo closes the connection. Whoever waits for it fails at once, finds the note, closes its own
    connections in turn (not everybody waits for the first rank), and raises the same text. From then on every
    collective and message of the group raises it again; other groups are not touched.

Note [Where pages are found]
    In the store of the world. A rank adds its page to the list of its host, then counts itself among the members that
    have come; who has looked after all of them were counted need not look again. For a message, where the other members
    may never come, each page can also be found by its place in the group.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.platform.checks.call_ledger import CallLedger
from hyper_parallel.platform.checks.ledger_pages import Pages
from hyper_parallel.platform.checks.message_ledger import MessageLedger
from hyper_parallel.platform.torch.communication import lost_ranks

__all__ = ["Ledger", "open_ledger"]

_HANG_UP_TAG = 2**31 - 2
_HANG_UP_TIME = timedelta(milliseconds=1)
_MOST_LINES = 8
_ledgers: weakref.WeakSet[Ledger] = weakref.WeakSet()


def open_ledger(group: dist.ProcessGroup, ranks: list[int]) -> Ledger | None:
    """The ledger of a group that has just been used for the first time; None where there is no memory for one."""
    register = _Register(f"hyper_parallel_calls/{group.group_name}", len(ranks))
    try:
        return Ledger(group, ranks, register)
    except (OSError, RuntimeError):
        with contextlib.suppress(RuntimeError):
            register.count_in()
        return None


class Ledger:
    """What the collectives and messages of one group tell before they begin; holds no reference to the group."""

    def __init__(self, group: dist.ProcessGroup, ranks: list[int], register: _Register) -> None:
        self._group = weakref.ref(group)
        self._note = f"{register.name}/disagreement"
        self._pages = Pages(ranks, group.rank(), register.newcomers, self.refuse)
        calls, messages = CallLedger(self._pages), MessageLedger(self._pages)
        self.enter, self.exchange = calls.enter, calls.exchange
        self.send, self.receive = messages.send, messages.receive
        self._waits = calls.waits_for, messages.waits_for
        register.enter(self._pages.address())
        _ledgers.add(self)

    def close(self) -> None:
        """The group is left."""
        self._pages.close()
        _ledgers.discard(self)

    def disagreement(self) -> tuple[str | None, bool]:
        """What a rank has found, if one has, and whether this rank knew; see Note [What ends the others]."""
        was_known = self._pages.broken is not None
        if not was_known:
            store = lost_ranks.world_store()
            if store.check([self._note]):
                self._break(store.get(self._note).decode(errors="replace"))
        return self._pages.broken, was_known

    def waits_for(self) -> list[str]:
        """What this rank has begun and others of its host have not, or the other way round."""
        self._pages.look_for_all()
        return [line for waits_for in self._waits for line in waits_for()]

    def refuse(self, why: str) -> None:
        """Raise, here and on the ranks that wait for this one; see Note [What ends the others]."""
        with contextlib.suppress(RuntimeError):  # The store may have gone with the rank that holds it.
            lost_ranks.world_store().compare_set(self._note, "", why)
        self._break(why)
        raise RuntimeError(why)

    def _break(self, why: str) -> None:
        self._pages.mark_broken(why)
        group = self._group()
        if group is None:
            return
        for peer in range(group.size()):
            if peer != group.rank():
                with contextlib.suppress(RuntimeError):  # The time is over, or the connection closed already.
                    group.recv([torch.empty(1, dtype=torch.uint8)], peer, _HANG_UP_TAG).wait(_HANG_UP_TIME)


class _Register:
    """The pages of a group that have been made known; see Note [Where pages are found]."""

    def __init__(self, name: str, size: int) -> None:
        self._store, self.name, self._size = lost_ranks.world_store(), name, size
        self._host = ""
        self._seen: set[int] = set()

    def enter(self, address: dict[str, Any]) -> None:
        """Make this rank's page known."""
        store, text = self._store, json.dumps(address)
        self._host = f"{self.name}/{address['host']}"
        store.set(f"{self.name}/{address['place']}", text)
        store.set(f"{self._host}/{store.add(self._host, 1)}", text)
        self.count_in()

    def count_in(self) -> None:
        """This rank has come, with a page or without."""
        self._store.add(f"{self.name}/come", 1)

    def newcomers(self, place: int | None) -> tuple[list[dict[str, Any]], bool]:
        """The pages of this host that were not given yet and whether these are all; or the page of one rank."""
        store = self._store
        try:
            if place is not None:
                key = f"{self.name}/{place}"
                return ([json.loads(store.get(key))] if store.check([key]) else []), False
            are_all = store.add(f"{self.name}/come", 0) >= self._size
            found = []
            for number in range(1, store.add(self._host, 0) + 1):
                key = f"{self._host}/{number}"
                if number not in self._seen and store.check([key]):
                    self._seen.add(number)
                    found.append(json.loads(store.get(key)))
            return found, are_all
        except (RuntimeError, ValueError):  # The store has gone with the rank that holds it.
            return [], True


def _explain() -> tuple[list[str], list[str]]:
    """How ranks disagree, where this rank did not know; and what else is known: that, or who has not begun what."""
    news, known, waits = [], [], []
    for ledger in list(_ledgers):
        why, was_known = ledger.disagreement()
        if why is None:
            waits += ledger.waits_for()
        else:
            (known if was_known else news).append(why)
    return news, [*known, *waits[:_MOST_LINES]]


lost_ranks.explanations.append(_explain)
