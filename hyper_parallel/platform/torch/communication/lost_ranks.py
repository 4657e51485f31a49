"""Who is missing when communication fails: a backend names an address at most, and users know ranks.

Every rank leaves its process's identity in the store of the world. When communication fails, a rank looks which of the
processes on its host have ended, and leaves a note before it raises, so that the ranks that fail because it has ended
name the first one that did.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hyper_parallel.platform.host.shared_segment import ProcessIdentity
from hyper_parallel.platform.torch.private_api import default_store

_SECONDS_TO_ANSWER = 5.0
_SECONDS_TO_END = 1.0  # a killed process closes its connections a moment before it is gone
_introduced: set[weakref.ref] = set()  # the world in which this process has left its identity
# Each gives why communication failed, if that is known for sure, and what else is known (``ledgers.py``).
explanations: list[Callable[[], tuple[list[str], list[str]]]] = []


class CommunicationError(RuntimeError):
    """Communication failed; the message says which ranks are gone."""


def completed(work: Any) -> None:
    """Wait for ``work``; what fails is raised with the ranks that are gone."""
    try:
        work.wait()
    except CommunicationError:
        raise
    except RuntimeError as error:
        raise named(error) from error


@contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """What fails inside is raised with the ranks that are gone."""
    try:
        yield
    except RuntimeError as error:
        raise named(error) from error


class Handle:
    """A work of the backend; what fails is raised with the ranks that are gone, or how they disagree."""

    __slots__ = ("_work",)

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            self._work.wait() if timeout is None else self._work.wait(timeout)
        except CommunicationError:
            raise
        except RuntimeError as error:
            raise named(error) from error
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def world_store() -> dist.Store:
    """Where the ranks of this world leave each other notes."""
    return default_store()


def introduce() -> None:
    """Leave this process's identity for the others, once in a world."""
    world = weakref.ref(dist.group.WORLD)
    if world not in _introduced:
        world_store().set(_card(dist.get_rank()), json.dumps(astuple(ProcessIdentity.current())))
        _introduced.clear()
        _introduced.add(world)


def named(error: RuntimeError) -> CommunicationError:
    """``error`` of a failed communication, with the ranks that are gone in its message."""
    if not dist.is_initialized():
        return CommunicationError(str(error))
    rank = dist.get_rank()
    known: list[str] = []
    if not _store_answers():
        gone = "the host of the world's store, that of rank 0, does not answer: it is down, or the network to it is"
        return CommunicationError(f"communication failed on rank {rank}: {gone}: {error}")
    try:
        for explain in explanations:
            reasons, known = explain()
            if reasons:
                return CommunicationError(f"communication failed on rank {rank}: {'; '.join(reasons)}\n({error})")
        gone = _find_gone(rank, may_be_ending="imed out" not in str(error))
        world_store().set(_note(rank), "")
    except RuntimeError:  # the store has gone with the rank that holds it
        gone = ["rank 0, or whichever process holds the store of the world, has ended"]
    if not gone:
        gone = [
            "no process of this host has ended; another rank may have raised an error, left the group, be slow, or "
            "have called something else (HYPER_PARALLEL_CHECK_COLLECTIVES=1 compares)"
        ]
    return CommunicationError("\n".join([f"communication failed on rank {rank}: {', '.join(gone)}: {error}", *known]))


def _store_answers() -> bool:
    """Whether the store says anything in time; over a network that is down a question to it would wait for ever."""
    asking = threading.Thread(target=_ask_store, daemon=True)
    asking.start()
    asking.join(_SECONDS_TO_ANSWER)
    return not asking.is_alive()


def _ask_store() -> None:
    with suppress(RuntimeError):  # That it has gone is an answer.
        world_store().check([_card(0)])


def _find_gone(rank: int, may_be_ending: bool) -> list[str]:
    """The ranks whose processes have ended; of these, those that had not failed in communication before."""
    store, me = world_store(), ProcessIdentity.current()
    others = [other for other in range(dist.get_world_size()) if other != rank and store.check([_card(other)])]
    cards = {other: ProcessIdentity(*json.loads(store.get(_card(other)))) for other in others}
    here = {other: card for other, card in cards.items() if card.host_key == me.host_key}
    end = time.monotonic() + (_SECONDS_TO_END if may_be_ending else 0.0)
    while True:
        ended = [other for other, card in here.items() if not card.is_alive()]
        first = [other for other in ended if not store.check([_note(other)])]
        if first or time.monotonic() > end:
            return [f"rank {other} (process {here[other].pid}) has ended" for other in first or ended]
        time.sleep(0.05)


def _card(rank: int) -> str:
    return f"hyper_parallel_process/{rank}"


def _note(rank: int) -> str:
    return f"hyper_parallel_failed/{rank}"
