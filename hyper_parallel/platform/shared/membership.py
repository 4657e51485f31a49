"""Who am I: the rank that the current thread is, when that is not the rank of the process.

Note [Members]
--------------
Rank, world and groups are asked of the current *member*, and only where there is none of the process. So one process
can be any rank of any world: silently, where nobody answers and tensors have no memory (the dry run), or together with
the others, each in a thread of its own of which one runs at a time (``testing.threads``). What keeps members apart:

* The member is kept per thread; backward runs in the thread that asks for it.
* A mesh belongs to the member that built it, and says so in its hash. Layouts are made once per mesh and plans hang on
  layouts, so whatever binds a rank is found by one member only.
* What is state of the process and ought to be state of a rank (random generators, checks in flight, observers, filters
  of warnings) is put aside while another member runs. Its owner says how: :func:`belongs_to_rank`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

_generations = itertools.count(2**32)  # above those that a process counts for worlds of its own


class Member:
    """Rank ``rank`` of a world of ``world_size`` ranks; ``make_group(member, ranks)`` makes its groups."""

    __slots__ = ("generation", "groups", "make_group", "rank", "when_asked", "world_group", "world_size")

    def __init__(self, rank: int, world_size: int, make_group: Callable[[Member, tuple[int, ...]], Any]) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"a world of {world_size} ranks has ranks 0 to {world_size - 1}, not {rank}")
        self.rank, self.world_size, self.make_group = rank, world_size, make_group
        self.when_asked: Callable[[], None] | None = None  # told whenever somebody asks
        self.groups: dict[tuple[int, ...], Any] = {}  # what EXISTING_COMM_GROUPS is for a process
        self.generation = next(_generations)  # no other member has it, in this world or another
        self.world_group = make_group(self, tuple(range(world_size)))

    def asked_rank(self) -> int:
        """The rank, for somebody who asks for it: told to ``when_asked``."""
        if self.when_asked is not None:
            self.when_asked()
        return self.rank


Local = TypeVar("Local", bound=threading.local)
_of_threads: list[threading.local] = []


def followed_by_threads(local: Local) -> Local:
    """Declare state of a thread that one which works for it takes over: see :func:`state_of_thread`."""
    _of_threads.append(local)
    return local


def state_of_thread() -> Callable[[], None]:
    """What was declared, as it is in this thread: call the result in a thread that works for this one."""
    saved = [{name: _copied(value) for name, value in vars(local).items()} for local in _of_threads]

    def take_over() -> None:
        for local, values in zip(_of_threads, saved, strict=False):
            vars(local).update({name: _copied(value) for name, value in values.items()})

    return take_over


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


class _Current(threading.local):
    member: Member | None = None


_current = followed_by_threads(_Current())


def current_member() -> Member | None:
    """The member that this thread is; None where it is the rank of the process."""
    return _current.member


@contextmanager
def as_member(member: Member) -> Iterator[Member]:
    """Inside, this thread is ``member``."""
    before, _current.member = _current.member, member
    try:
        yield member
    finally:
        _current.member = before


# ---------------------------------------------------------------- state of the process that belongs to a rank

_states: list[tuple[Callable[[], Any], Callable[[Any], None], Any]] = []  # save, load, what it was when declared


def belongs_to_rank(save: Callable[[], Any], load: Callable[[Any], None]) -> None:
    """Declare state of the process that each rank of a world of threads has for itself.

    ``save()`` gives it, ``load(saved)`` brings it back.
    """
    _states.append((save, load, save()))


def list_belongs_to_rank(values: list[Any]) -> None:
    """Declare that what is in this list is a rank's own."""

    def load(saved: list[Any]) -> None:
        values[:] = saved

    belongs_to_rank(values.copy, load)


def save_state_of_rank() -> list[Any]:
    """All that was declared, as it is now."""
    return [save() for save, _, _ in _states]


def load_state_of_rank(saved: list[Any]) -> None:
    """Back to what :func:`save_state_of_rank` gave; what was declared since then, by a module that a rank imported, to
    what it was when it was declared."""
    for place, (_, load, first) in enumerate(_states):
        load(saved[place] if place < len(saved) else first)
