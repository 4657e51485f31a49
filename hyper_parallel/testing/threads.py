"""A world whose ranks are threads of this process, one running at a time: for tests, and to debug all ranks at once.

Collectives, messages, meshes, distributed tensors and every parallelism work as on processes; the values are those of
the same program. What differs: a program runs in the same order every time, a debugger stops all ranks, ranks that wait
for each other are a :class:`Deadlock` at once, and there is nothing to start.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import hyper_parallel.platform.pretend.process_state  # noqa: F401 - declares it
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.pretend.meeting import MeetingPlace
from hyper_parallel.platform.pretend.turns import Turns
from hyper_parallel.platform.shared.membership import Member, as_member, current_member


def threads(num_ranks: int, *, timeout: float | None = None) -> Threads:
    """A world of ``num_ranks`` ranks in this process; PyTorch on CPUs.

    ``threads(4).run(function, *args)`` gives the results of the function by rank; ``@threads(4)`` makes a function one
    that runs on every rank. The first rank that raises ends the others, and its error is raised here. ``timeout``, in
    seconds, is for a rank that does not come back by itself; ranks that wait for each other are found without it.

    >>> from hyper_parallel import get_platform
    >>> def program():
    ...     platform = get_platform()
    ...     ranks = [None] * platform.get_world_size()
    ...     platform.all_gather_object(ranks, platform.get_rank())
    ...     return ranks
    >>> threads(3).run(program)
    [[0, 1, 2], [0, 1, 2], [0, 1, 2]]
    """
    return Threads(num_ranks, timeout)


class Threads:
    """See :func:`threads`. The world stays for the next run, with its groups, unless a run has failed."""

    def __init__(self, num_ranks: int, timeout: float | None = None) -> None:
        if not isinstance(num_ranks, int) or num_ranks < 1:
            raise ValueError(f"threads({num_ranks!r}): a world has one rank or more, as in threads(2)")
        self.num_ranks, self.timeout = num_ranks, timeout
        self._meeting = MeetingPlace()
        self._members: list[Member] = []

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """The results of ``function(*args, **kwargs)`` by rank; all ranks get the same arguments."""
        if current_member() is not None:
            raise RuntimeError("threads: this is a rank of such a world already; call it outside of the ranks")
        members = self._members or self._make_members()
        self._members = []
        turns = self._meeting.turns = Turns(self.num_ranks)

        def be(rank: int) -> Any:
            with as_member(members[rank]):
                return function(*args, **kwargs)

        try:
            results = turns.run(be, self.timeout)
        except BaseException as error:
            if turns.failed_rank is not None and hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"on rank {turns.failed_rank} of {self.num_ranks}")
            raise
        left = self._meeting.begun_by_some()
        if left:
            raise RuntimeError("the ranks have ended, but some never took part in what others began:\n" + left)
        self._members = members
        return results

    def __call__(self, function: Callable[..., Any]) -> Callable[..., list[Any]]:
        """As a decorator: the function on every rank, with the results by rank."""

        @functools.wraps(function)
        def on_ranks(*args: Any, **kwargs: Any) -> list[Any]:
            return self.run(function, *args, **kwargs)

        return on_ranks

    def _make_members(self) -> list[Member]:
        self._meeting = MeetingPlace()
        make_maker = get_platform().meeting_group_maker
        return [Member(rank, self.num_ranks, make_maker(self._meeting)) for rank in range(self.num_ranks)]
